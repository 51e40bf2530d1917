"""Messages between nodes: NCCL on two levels, and the exchange of experts over a network.

    NCCL      t = launch + h hop + min( n net + max(touches + ramp + within / (ll L), between / (LL V)),
                                        start + n slow net + max(touches + within / (simple L), between / (SIMPLE V)) )
    exchange  t = start + max( within / (fraction L), between / (SIMPLE V) )

h, n: hops within nodes and between them, `within` and `between` the bytes of an algorithm (`two_level`; the
fastest counts, as NCCL's tuner would have it), L the scale-up link, V a device's share of the network, touches the
time of the payload's way through memory. What concerns a node is as fitted on one (`CollectiveFit`). Kernels of the
engines' own for small messages do not leave a node (vLLM custom_all_reduce.py: "disabled because this process group
spans across nodes"), so NCCL serves all sizes.

The exchange sends a token to its experts by one of three routes (`Exchange`): once to each node, where NVLink brings
it to the ranks of its experts; once to each rank; or once to each expert. `start` is that of the exchange within a node
and at least that between nodes, and one hop more where tokens are handed on.
"""

__all__ = ["exchange_between_nodes", "nccl_between_nodes"]

from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.cost.forms.messages.links import TwoLevel, ways_of
from perfmodel.cost.forms.messages.nccl import CollectiveFit
from perfmodel.ops.messages import Message, Spread

# What a protocol reaches of a card's line rate. Simple: nccl-tests between DGX H100 with eight 400 Gbit/s cards report
# 370 to 390 GB/s for large messages; DeepEP's kernels 45 to 47 GB/s of 50. LL sends a flag with every 4 bytes.
_SIMPLE = 0.95
_LOW_LATENCY = 0.5 * _SIMPLE
# NCCL, src/graph/tuning.cc, hops over the network in us: LL trees 5.0, rings 2.7, simple 14. A network's declared
# latency is the first. Rings of one rank a node have the trees' latency.
_RING_HOP, _SIMPLE_HOP = 2.7 / 5.0, 14.0 / 5.0
_POST_S = 1e-6  # same file: no hop of a group on several nodes takes less, since the network's requests are posted
# DeepEP README, low-latency kernels (128 tokens of 7168, 8 experts, FP8 out, BF16 back, H800 with 400 Gbit/s cards):
# dispatch 118, 155, 173, 192, 194 us and combine 195, 273, 314, 369, 360 us on 16, 32, 64, 128, 256 ranks, which is
# 40 us more than the bytes between nodes take.
_EXCHANGE_START_S = 40e-6


def nccl_between_nodes(
    message: Message, spread: Spread, fit: CollectiveFit, hop_s: float, device: DeviceFacts
) -> float:
    """Seconds of a collective whose group is on several nodes.

    message, spread: the payload, and how its group is spread; fit: of NCCL within a node; device: of each rank
    hop_s: of a hop of the low-latency protocol in a node
    """
    hop_s = max(hop_s, _POST_S)
    return min(_nccl(message.bytes_, each, spread, fit, hop_s, device) for each in ways_of(message, spread))


def _nccl(
    payload: float, way: TwoLevel, spread: Spread, fit: CollectiveFit, hop_s: float, device: DeviceFacts
) -> float:
    network, rate = device.network, device.link.bandwidth_bytes_per_s
    within, between = payload * way.within, payload * way.between / network.bandwidth_bytes_per_s
    touches = fit.memory_touches * payload / device.bandwidth
    ramp = min(within / (fit.first_channel * rate), fit.ramp_s)
    hops_s = way.hops_between * network.latency_s
    fast = (_RING_HOP if way.name == "ring" and spread.most > 1 else 1.0) * hops_s
    fast += max(touches + ramp + within / (fit.low_latency_fraction * rate), between / _LOW_LATENCY)
    simple = fit.simple_start_s + _SIMPLE_HOP * hops_s
    simple += max(touches + within / (fit.simple_fraction * rate), between / _SIMPLE)
    return fit.launch_s + way.hops_within * hop_s + min(fast, simple)


def exchange_between_nodes(
    message: Message, spread: Spread, start_s: float, link_fraction: float, device: DeviceFacts
) -> float:
    """Seconds of a dispatch or a combine whose ranks are on several nodes.

    start_s, link_fraction: of the exchange within a node

    message, spread: the payload, and how its group is spread; device: of each rank
    """
    rate, network = link_fraction * device.link.bandwidth_bytes_per_s, device.network
    network_rate, latency = _SIMPLE * network.bandwidth_bytes_per_s, max(start_s, _EXCHANGE_START_S)
    return min(
        latency
        + (each.hops_between - 1) * network.latency_s
        + message.bytes_ * max(each.within / rate, each.between / network_rate)
        for each in ways_of(message, spread)
    )
