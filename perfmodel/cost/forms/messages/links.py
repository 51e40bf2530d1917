"""Which link a message goes over, and how long it takes: the alpha-beta model of each collective's algorithms."""

__all__ = ["DEFAULT_LINK", "collective_time", "link_for", "network_time", "path_of"]

from perfmodel.cost.forms.messages.two_level import ways_of
from perfmodel.ops.messages import Message, RankGroup, Spread, spread_over
from perfmodel.specs.hardware import HardwareSpec, Link

# Least seconds per step of an algorithm: a flag seen and answered, not just a packet on the wire. Assumptions: one
# NVLink hop of NCCL's low-latency protocol is 0.8-1.0 us on A100 and H100 (fits to nccl-tests); through PCIe and host
# memory some 5 us.
_HOP_S = {"pcie": 5e-6}
_DEFAULT_HOP_S = 1e-6
DEFAULT_LINK = Link(name="pcie", bandwidth_bytes_per_s=31.5e9)  # PCIe 4.0 x16, where a file declares no link at all


def link_for(hardware: HardwareSpec, group: int | RankGroup) -> Link:
    """The slowest link that the messages of a group, or of so many neighbours, go over: within a node its scale-up
    link, else the network between nodes."""
    if path_of(hardware, group).num_nodes > 1:
        return hardware.network_link
    return hardware.scale_up_link or DEFAULT_LINK


def path_of(hardware: HardwareSpec, group: int | RankGroup) -> Spread:
    """How a group, or so many neighbours, are spread over nodes of `hardware`."""
    ranks = RankGroup("tensor", group) if isinstance(group, int) else group
    return spread_over(ranks, hardware.devices_per_node)


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
    hop = _hop_s(link)
    wire = payload / (link.bandwidth_bytes_per_s * bandwidth_fraction)
    if message.kind == "all_reduce":
        return min(2 * (k - 1) * (hop + wire / k), hop + (k - 1) * wire)
    if message.kind == "send_recv":
        return hop + wire
    return hop + (k - 1) * wire / k


def network_time(message: Message, spread: Spread, link: Link, network: Link, bandwidth_fraction: float = 1.0) -> float:
    """Seconds on the wires where the group is on several nodes, by the fastest of its algorithms (`ways_of`):

    hops within a + hops between b + max( bytes within / W, bytes between / V )

    a, b: hop latencies; W, V: one-way bandwidths of the scale-up link and of a device's share of the network. The two
    move bytes at the same time. Of a pipeline's sends, those that stay on a node cost what they do there.
    """
    rate, network_rate = link.bandwidth_bytes_per_s * bandwidth_fraction, network.bandwidth_bytes_per_s
    network_rate *= bandwidth_fraction
    times = [
        each.hops_within * _hop_s(link)
        + each.hops_between * network.latency_s
        + message.bytes_ * max(each.within / rate, each.between / network_rate)
        for each in ways_of(message, spread)
    ]
    if message.kind != "send_recv":
        return min(times)
    return spread.crossing * times[0] + (1 - spread.crossing) * collective_time(message, link, bandwidth_fraction)


def _hop_s(link: Link) -> float:
    return max(link.latency_s, _HOP_S.get(link.name, _DEFAULT_HOP_S))
