"""NCCL within a node, as fitted to nccl-tests (formula: `collective`), and between nodes.

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

from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.cost.kernel_models.messages.links import TwoLevel, ways_of
from perfmodel.files.base import Spec
from perfmodel.files.units import PositiveFloat, PositiveInt
from perfmodel.ops.messages import Message, Spread
from perfmodel.ops.problem_sizes import Values
from perfmodel.specs.networks import Link

# (steps per k - 1, fixed steps, wire per payload and (k - 1) / k, fixed wire per payload)
_SHAPES = {
    "all_reduce": (2, 0, 2, 0),
    "all_gather": (1, 0, 1, 0),
    "reduce_scatter": (1, 0, 1, 0),
    "all_to_all": (0, 1, 1, 0),
    "send_recv": (0, 1, 0, 1),
}
# What a protocol reaches of a card's line rate. Simple: nccl-tests between DGX H100 with eight 400 Gbit/s cards report
# 370 to 390 GB/s for large messages; DeepEP's kernels 45 to 47 GB/s of 50. LL sends a flag with every 4 bytes.
_SIMPLE = 0.95
_LOW_LATENCY = 0.5 * _SIMPLE
# NCCL, src/graph/tuning.cc, hops over the network in us: LL trees 5.0, rings 2.7, simple 14. A network's declared
# latency is the first. Rings of one rank a node have the trees' latency.
_RING_HOP, _SIMPLE_HOP = 2.7 / 5.0, 14.0 / 5.0
_POST_S = 1e-6  # same file: no hop of a group on several nodes takes less, since the network's requests are posted


class CollectiveFit(Spec):
    """NCCL for one kind of collective. Times in seconds; fractions of the declared link bandwidth.

    link_latency_s: the declared latency of the link it was fitted on; None: hops are not scaled
    """

    form: Literal["collective"] = "collective"
    launch_s: float = Field(default=6e-6, ge=1e-6, le=5e-5)
    hop_s: float = Field(default=1e-6, ge=1e-8, le=1e-5)  # one step of the low-latency protocol
    first_channel: float = Field(default=0.02, ge=0.003, le=0.3)  # fraction of the link while channels are few
    ramp_s: float = Field(default=2e-6, ge=1e-8, le=1e-5)  # until all channels run
    low_latency_fraction: float = Field(default=0.35, ge=0.05, le=0.8)
    simple_start_s: float = Field(default=2e-5, ge=1e-8, le=1e-4)
    simple_fraction: float = Field(default=0.85, ge=0.5, le=1.0)
    memory_touches: float = Field(default=2.5, ge=1.0, le=5.0)  # of local memory, per payload byte
    switch_ranks: PositiveInt | None = None  # from so many ranks on a switch adds, on a link that has one
    switch_bytes: PositiveFloat = 3e7  # payload from which it does
    link_latency_s: PositiveFloat | None = None
    residuals: Residuals = Residuals()


class CollectiveSizes(NamedTuple):
    """One message between `ranks` devices, or many as arrays.

    payload: bytes as nccl-tests counts them; steps, wire: see the module; switched: 1 where a switch could add
    """

    payload: Values
    ranks: Values
    steps: Values
    wire: Values
    switched: Values

    @classmethod
    def of(cls, kind: str, payload: Values, ranks: Values, switched: Values = 1.0) -> "CollectiveSizes":
        """Messages of one `kind`, of `payload` bytes as in nccl-tests; `switched`: in a number format that a switch can
        add; ranks: of the group
        """
        per_rank, fixed, share, whole = _SHAPES[kind]
        others = ranks - 1
        wire = payload * (share * others / ranks + whole)
        return cls(payload, ranks, per_rank * others + fixed, wire, switched * (kind == "all_reduce"))


class CollectiveParts(NamedTuple):
    """Seconds in all, and those in which bytes are on the wire."""

    duration: Values
    wire: Values


def collective_seconds(
    sizes: CollectiveSizes, fit: CollectiveFit, device: DeviceFacts, link: Link, xp: Any = np
) -> CollectiveParts:
    """NCCL's time; 0 for one rank.

    sizes: numbers or columns; fit: of NCCL; device, link: the ranks', and theirs; xp: numpy, or scalar functions
    """
    rate = link.bandwidth_bytes_per_s
    fixed = fit.launch_s + fit.hop_s * latency_ratio(fit.link_latency_s, link) * sizes.steps
    fixed = fixed + fit.memory_touches * sizes.payload / device.bandwidth
    low_latency = sizes.wire / (fit.low_latency_fraction * rate)
    ramp = xp.minimum(sizes.wire / (fit.first_channel * rate), fit.ramp_s)
    wire = sizes.wire
    if fit.switch_ranks is not None and link.has_switch:
        adds = (sizes.switched > 0) & (sizes.ranks >= fit.switch_ranks) & (sizes.payload > fit.switch_bytes)
        wire = xp.where(adds, xp.minimum(wire, sizes.payload * (1 + 1 / sizes.ranks)), wire)
    simple = wire / (fit.simple_fraction * rate)
    duration = fixed + xp.minimum(ramp + low_latency, fit.simple_start_s + simple)
    return CollectiveParts(xp.where(sizes.ranks > 1, duration, 0.0), xp.minimum(low_latency, simple))


def latency_ratio(fitted: float | None, link: Link) -> float:
    """Hop latency relative to the fitted link."""
    return link.latency_s / fitted if fitted and link.latency_s else 1.0


def nccl_between_nodes(
    message: Message, spread: Spread, fit: CollectiveFit, hop_s: float, device: DeviceFacts
) -> float:
    """Seconds of a collective whose group is on several nodes.

    message: the payload; spread: of its group; fit: of NCCL within a node; device: of each rank; hop_s: per low-latency
    hop in a node
    """
    hop_s = max(hop_s, _POST_S)
    return min(_nccl(message.bytes_, item, spread, fit, hop_s, device) for item in ways_of(message, spread))


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
    """Seconds of a dispatch or combine whose ranks are on several nodes.

    message: the payload; spread: of its group; start_s: until bytes move; link_fraction: of the exchange within a node;
    device: of each rank
    """
    rate, network = link_fraction * device.link.bandwidth_bytes_per_s, device.network
    network_rate, latency = _SIMPLE * network.bandwidth_bytes_per_s, start_s
    return min(
        latency
        + (item.hops_between - 1) * network.latency_s
        + message.bytes_ * max(item.within / rate, item.between / network_rate)
        for item in ways_of(message, spread)
    )
