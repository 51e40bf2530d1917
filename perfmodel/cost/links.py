"""How long a message takes on the declared links: the alpha-beta model of each collective's algorithms."""

__all__ = ["DEFAULT_LINK", "collective_time", "link_for"]

from perfmodel.ops.work import Message
from perfmodel.specs.hardware import HardwareSpec, Link

# Least seconds per step of an algorithm: a flag seen and answered, not just a packet on the wire. Assumptions: one
# NVLink hop of NCCL's low-latency protocol is 0.8-1.0 us on A100 and H100 (fits to nccl-tests); through PCIe and host
# memory some 5 us.
_HOP_S = {"pcie": 5e-6, "scale_out": 5e-6}
_DEFAULT_HOP_S = 1e-6
DEFAULT_LINK = Link(name="pcie", bandwidth_bytes_per_s=31.5e9)  # PCIe 4.0 x16, where a file declares no link at all


def link_for(hardware: HardwareSpec, num_ranks: int) -> Link:
    """The link that a group of `num_ranks` devices talks over.

    The scale-up link within `max_devices`; beyond it the link named `scale_out`, else the slowest declared one.
    """
    declared = hardware.declared
    if not declared.links:
        return DEFAULT_LINK
    if num_ranks > declared.max_devices:
        slowest = min(declared.links, key=lambda link: link.bandwidth_bytes_per_s)
        return hardware.link("scale_out") or slowest
    return hardware.scale_up_link or DEFAULT_LINK


def collective_time(message: Message, link: Link, bandwidth_fraction: float = 1.0) -> float:
    """Seconds on the wire for a message of S bytes between k ranks, hop latency a, one-way bandwidth W per rank.

        all_reduce      min( ring 2 (k-1) (a + S / (k W)),  one-shot a + (k-1) S / W )
        all_gather, reduce_scatter, all_to_all   min( (k-1) (a + S / (k W)),  a + (k-1) S / (k W) )
        send_recv       a + S / W

    One-shot: every rank reads all others' buffers at once, which a switch allows. The launch is not included.
    Source: Thakur et al. 2005 (ring, alpha-beta); vLLM's and TensorRT-LLM's custom all-reduce (one-shot).
    """
    k, payload = message.num_ranks, message.bytes_
    if k <= 1:
        return 0.0
    hop = max(link.latency_s, _HOP_S.get(link.name, _DEFAULT_HOP_S))
    wire = payload / (link.bandwidth_bytes_per_s * bandwidth_fraction)
    if message.kind == "all_reduce":
        return min(2 * (k - 1) * (hop + wire / k), hop + (k - 1) * wire)
    if message.kind == "send_recv":
        return hop + wire
    return hop + (k - 1) * wire / k
