"""Collectives: NCCL's two protocols, engines' custom all-reduce for small messages, and the exchange of tokens for
their experts; within a node and between nodes.

    NCCL    t = launch + hop steps + memory_touches S / W + min( min(wire / (first_channel L), ramp) + wire / (ll L),
                                                                 start + wire / (simple L) )
    custom  t = launch + peer (k - 1) + min( (k - 1) S / (one_shot L),  sync + 2 (k - 1) / k S / (two_shot L) )
            up to `most_bytes`, NCCL beyond; two ranks have no use for two shots

    steps = 2 (k - 1) for an all-reduce over k ranks, 1 for an all-to-all or a send, else k - 1
    wire  = 2 S (k - 1) / k for an all-reduce, S for a send, else S (k - 1) / k; a switch that adds (NVLS) takes
            S (1 + 1 / k) of large all-reduces in floating point between `switch_ranks` ranks and more

S is the payload as in nccl-tests, L the link's declared one-way bandwidth, W the memory's. The low-latency protocol
(LL, LL128) sends flags with the data over few channels first, then many; the simple one starts later and reaches the
link's rate. Each byte is touched a few times in local memory. Hops scale with the link's declared latency; PCIe has its
own hops and fractions, and others where cards lack peer access: `over_link`, from `kernel_models.overheads`.

Between nodes:

    NCCL      t = launch + h hop + min( n net + max(touches + ramp + within / (ll L), between / (LL V)),
                                        start + n slow net + max(touches + within / (simple L), between / (SIMPLE V)) )

h, n: hops within nodes and between them, `within` and `between` the bytes of an algorithm (`two_level`; the fastest
counts, as NCCL's tuner would have it), V a device's share of the network, touches the time of the payload's way through
memory. What concerns a node is as fitted on one (`CollectiveFit`). Kernels of the
engines' own for small messages do not leave a node (vLLM custom_all_reduce.py: "disabled because this process group
spans across nodes"), so NCCL serves all sizes.

The exchange of expert parallelism: tokens to the ranks of their experts (dispatch), and results back (combine).

    t = max( floor, start + double log2 N
                    + max( within / (fraction L), between / (network V), (within + forward between) / (units u) ) )

`within` and `between` are the bytes that leave a rank over its link and over its network card, on N nodes; u what one
compute unit copies, of the `units` that the kernels of `deepep_high_throughput` run on, which hand on what comes from
other nodes. Unlike NCCL's all-to-all, these
kernels write to (or read from) peer memory and wait for all peers, with a routing table to fill. Decode steps pay the
floor, three times a small NCCL message. On a node without a switch the time is that of the all-to-all in `beyond`. A
token takes one of three routes to its experts (`Exchange`): once to each node, where NVLink brings it to the ranks of
its experts; once to each rank; or once to each expert. Between nodes `start` is at least `between_nodes_s`, and one hop
more where tokens are handed on.
The parameters are in `hardware_specs/calibrations/exchange.yaml`: those within a node from dispatch and combine on
GB200 NVL72, 8 to 64 ranks, 1 to 2,048 tokens of DeepSeek-V3's size, in NVIDIA's "Optimizing MoE Communication with
One-Sided AlltoAll Over NVLink" (TensorRT-LLM technical blog 18), of whose 48 figures each 80 % lie within -7 and +11 %
of this formula; their start between nodes from DeepEP's README: 40 us more than the bytes between nodes take. DeepEP's
own kernels (routes to nodes and to experts) from tables of up to 8 nodes (`perfmodel.evidence.fit.collectives`).
Source: NCCL's tuning model (src/graph/tuning.cc); vLLM csrc/custom_all_reduce.cuh; TensorRT-LLM allReduceKernels."""

from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import Field

from perfmodel.cost.kernel_models.device import NO_TIME, DeviceFacts, OperatorTime
from perfmodel.cost.kernel_models.fits import SCALARS, Residuals
from perfmodel.cost.kernel_models.messages.links import TwoLevel, most_ranks_of_own_kernels, ways_of
from perfmodel.cost.kernel_models.overheads import OverPcieFit, load_overheads
from perfmodel.files.base import Spec
from perfmodel.files.units import PositiveFloat, PositiveInt
from perfmodel.ops.messages import NORMAL_UNITS, Message, Spread
from perfmodel.ops.problem_sizes import Values
from perfmodel.ops.work import Work
from perfmodel.specs.networks import Link

Fit = TypeVar("Fit")
_ANY_RANKS = 1 << 16
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

    link_latency_s: the declared latency of the link it was fitted on; None: hops are not scaled"""

    form: Literal["collective"] = "collective"
    launch_s: float = Field(default=6e-6, ge=1e-6, le=5e-5)
    hop_s: float = Field(default=1e-6, ge=1e-8, le=1e-5)  # one step of the low-latency protocol
    first_channel: float = Field(default=0.02, ge=0.003, le=0.3)  # fraction of the link while channels are few
    ramp_s: float = Field(default=2e-6, ge=1e-8, le=1e-5)  # until all channels run
    low_latency_fraction: float = Field(default=0.35, ge=0.05, le=0.8)
    simple_start_s: float = Field(default=2e-5, ge=1e-8, le=1e-4)
    simple_fraction: float = Field(default=0.85, ge=0.2, le=1.0)
    left_per_doubling: float = Field(default=1.0, ge=0.1, le=1.0)  # of the rate, beyond two ranks: shared paths
    memory_touches: float = Field(default=2.5, ge=1.0, le=5.0)  # of local memory, per payload byte
    switch_ranks: PositiveInt | None = None  # from so many ranks on a switch adds, on a link that has one
    switch_bytes: PositiveFloat = 3e7  # payload from which it does
    link_latency_s: PositiveFloat | None = None
    residuals: Residuals = Residuals()


class CollectiveSizes(NamedTuple):
    """One message between `ranks` devices, or many as arrays. payload: bytes as nccl-tests counts them; steps, wire:
    see the module; switched: 1 where a switch could add"""

    payload: Values
    ranks: Values
    steps: Values
    wire: Values
    switched: Values

    @classmethod
    def of(cls, kind: str, payload: Values, ranks: Values, switched: Values = 1.0) -> "CollectiveSizes":
        """Messages of one `kind`, of `payload` bytes as in nccl-tests; `switched`: in a number format that a switch can
        add; ranks: of the group"""
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
    """NCCL's time; 0 for one rank. sizes: numbers or columns; fit: of NCCL; device, link: the ranks', and theirs; xp:
    numpy, or scalar functions"""
    rate = link.bandwidth_bytes_per_s * _left(fit.left_per_doubling, sizes.ranks, xp)
    fixed = fit.launch_s + fit.hop_s * _latency_ratio(fit.link_latency_s, link) * sizes.steps
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


def _left(per_doubling: float, ranks: Values, xp: Any) -> Values:
    """The share of a link's rate that so many ranks on shared paths have each."""
    return per_doubling ** xp.log2(xp.maximum(ranks / 2, 1.0)) if per_doubling < 1.0 else 1.0


def _latency_ratio(fitted: float | None, link: Link) -> float:
    """Hop latency relative to the fitted link."""
    return link.latency_s / fitted if fitted and link.latency_s else 1.0


def _way_seconds(
    payload: float, way: TwoLevel, spread: Spread, fit: CollectiveFit, hop_s: float, device: DeviceFacts
) -> float:
    network = device.network
    rate = device.link.bandwidth_bytes_per_s * _left(fit.left_per_doubling, float(spread.most), SCALARS)
    within, between = payload * way.within, payload * way.between / network.bandwidth_bytes_per_s
    touches = fit.memory_touches * payload / device.bandwidth
    ramp = min(within / (fit.first_channel * rate), fit.ramp_s)
    hops_s = way.hops_between * network.latency_s
    fast = (_RING_HOP if way.name == "ring" and spread.most > 1 else 1.0) * hops_s
    fast += max(touches + ramp + within / (fit.low_latency_fraction * rate), between / _LOW_LATENCY)
    simple = fit.simple_start_s + _SIMPLE_HOP * hops_s
    simple += max(touches + within / (fit.simple_fraction * rate), between / _SIMPLE)
    return float(fit.launch_s + way.hops_within * hop_s + min(fast, simple))


class CustomAllReduceFit(Spec):
    """An engine's own all-reduce for messages up to `most_bytes` between up to `most_ranks`, and NCCL's beyond.

    eager_floor_s: host time of launching eagerly, below which no measurement falls; serving replays CUDA graphs"""

    form: Literal["custom_all_reduce"] = "custom_all_reduce"
    most_bytes: PositiveFloat = 8.3e6
    most_ranks: PositiveInt = _ANY_RANKS
    launch_s: float = Field(default=4e-6, ge=5e-7, le=5e-5)
    peer_s: float = Field(default=1e-7, ge=1e-9, le=5e-6)
    left_per_doubling: float = Field(default=1.0, ge=0.1, le=1.0)  # see `CollectiveFit`
    one_shot_fraction: float = Field(default=0.5, ge=0.05, le=1.0)
    two_shot_fraction: float = Field(default=0.6, ge=0.05, le=1.0)
    sync_s: float = Field(default=3e-6, ge=1e-8, le=2e-5)
    beyond: CollectiveFit = CollectiveFit()
    eager_floor_s: float | None = Field(default=None, ge=1e-6, le=1e-3)
    link_latency_s: PositiveFloat | None = None
    residuals: Residuals = Residuals()


def custom_seconds(
    sizes: CollectiveSizes, fit: CustomAllReduceFit, device: DeviceFacts, link: Link, xp: Any = np
) -> CollectiveParts:
    """The engine's kernels for small messages, NCCL for large ones. sizes: numbers or columns; fit: of the kernels;
    device, link: the ranks', and theirs; xp: numpy, or scalar functions"""
    rate = link.bandwidth_bytes_per_s * _left(fit.left_per_doubling, sizes.ranks, xp)
    others = sizes.ranks - 1
    one_shot = others * sizes.payload / (fit.one_shot_fraction * rate)
    two_shot = sizes.wire / (fit.two_shot_fraction * rate)
    is_two = (sizes.ranks > 2) & (fit.sync_s + two_shot < one_shot)
    peers_s = fit.peer_s * _latency_ratio(fit.link_latency_s, link) * others
    fixed = fit.launch_s + peers_s + xp.where(is_two, fit.sync_s, 0.0)
    wire = xp.where(is_two, two_shot, one_shot)
    beyond = collective_seconds(sizes, fit.beyond, device, link, xp)
    is_small = (sizes.payload <= fit.most_bytes) & (sizes.ranks <= fit.most_ranks)
    duration = xp.maximum(xp.where(is_small, fixed + wire, beyond.duration), fit.eager_floor_s or 0.0)
    return CollectiveParts(xp.where(sizes.ranks > 1, duration, 0.0), xp.where(is_small, wire, beyond.wire))


def over_link(fit: Fit, source: Link, target: Link) -> Fit:
    """`fit`, made over `source`, for messages over `target`. Between NVLinks fractions stay; PCIe has its own, whose
    errors the fit's residuals do not cover. Devices without peer access exchange through host memory."""
    sees = (source.peer_to_peer is not False, target.peer_to_peer is not False)
    if target.name != "pcie" or (source.name == "pcie" and sees[0] == sees[1]):
        return fit
    if isinstance(fit, CollectiveFit):
        return fit.model_copy(update=_nccl_over_pcie(load_overheads().over_pcie, target))
    if isinstance(fit, CustomAllReduceFit):
        fraction = load_overheads().over_pcie.kernels_fraction
        kernels = {"one_shot_fraction": fraction, "two_shot_fraction": fraction}
        most_ranks = most_ranks_of_own_kernels(target)
        others = {"beyond": over_link(fit.beyond, source, target), "most_ranks": most_ranks, "residuals": Residuals()}
        return fit.model_copy(update=kernels | others)
    return fit


def _nccl_over_pcie(pcie: OverPcieFit, link: Link) -> dict[str, Any]:
    """NCCL's fit over PCIe: each byte touched once, unscaled hops, no switch reduction."""
    is_direct = link.peer_to_peer is not False
    return {
        "hop_s": pcie.hop_s if is_direct else pcie.hop_through_host_s,
        "link_latency_s": None,
        "low_latency_fraction": pcie.low_latency_fraction,
        "simple_fraction": pcie.simple_fraction if is_direct else pcie.through_host_fraction,
        "simple_start_s": pcie.simple_start_s,
        "memory_touches": 1.0,
        "left_per_doubling": 1.0,
        "switch_ranks": None,
        "residuals": Residuals(),
    }


def collective_time(work: Work, fit: CollectiveFit, device: DeviceFacts) -> OperatorTime:
    if work.message is None:
        return NO_TIME
    return OperatorTime.on_the_wire(_nccl_seconds(work.message, fit, device))


def custom_time(work: Work, fit: CustomAllReduceFit, device: DeviceFacts) -> OperatorTime:
    """The time of the all-reduce of `work`; NCCL's for other collectives."""
    if work.message is None:
        return NO_TIME
    if work.message.kind != "all_reduce" or device.spread(work.message).num_nodes > 1:
        return OperatorTime.on_the_wire(_nccl_seconds(work.message, fit.beyond, device))
    return OperatorTime.on_the_wire(custom_seconds(_sizes(work.message), fit, device, device.link, SCALARS).duration)


def _nccl_seconds(message: Message, fit: CollectiveFit, device: DeviceFacts) -> float:
    """NCCL's time within or between nodes; the mean over a pipeline's sends, some of which stay on a node."""
    spread, link = device.spread(message), device.link
    leaving = float(spread.num_nodes > 1) if message.kind != "send_recv" else spread.crossing
    seconds = 0.0
    if leaving:
        hop_s = max(fit.hop_s * _latency_ratio(fit.link_latency_s, link), _POST_S)
        ways = (_way_seconds(message.bytes_, way, spread, fit, hop_s, device) for way in ways_of(message, spread))
        seconds = leaving * min(ways)
    if leaving < 1.0:
        on_node = collective_seconds(_sizes(message), fit, device, link, SCALARS)
        seconds += (1.0 - leaving) * float(on_node.duration)
    return seconds


def _sizes(message: Message) -> CollectiveSizes:
    return CollectiveSizes.of(message.kind, message.bytes_, message.num_ranks)


class ExchangeFit(Spec):
    """One direction. Times in seconds; fractions of the declared bandwidths.

    between_nodes_s: the least start of an exchange that leaves a node
    doubling_s: more with each doubling of nodes; None: 0
    unit_bytes_per_s: of one compute unit; None: units do not limit
    forward: copies of a byte that crosses nodes"""

    form: Literal["expert_exchange"] = "expert_exchange"
    floor_s: float = Field(default=1e-6, ge=1e-6, le=1e-3)
    start_s: float = Field(ge=1e-7, le=1e-3)
    doubling_s: float | None = Field(default=None, ge=1e-8, le=1e-3)
    link_fraction: float = Field(ge=0.05, le=1.0)
    network_fraction: float = Field(default=_SIMPLE, ge=0.05, le=1.0)
    unit_bytes_per_s: float | None = Field(default=None, ge=1e8, le=1e12)
    forward: float = Field(default=1.0, ge=0.1, le=10.0)
    between_nodes_s: float = Field(default=0.0, ge=0, le=1e-3)
    beyond: CollectiveFit = CollectiveFit()
    residuals: Residuals = Residuals()


class ExchangeSizes(NamedTuple):
    """One dispatch or combine, or many as arrays: bytes that leave a rank over its link and over its card, nodes, hops
    between them, compute units of the kernel"""

    within: Values
    between: Values
    nodes: Values
    hops: Values
    units: Values

    @classmethod
    def of(cls, message: Message, spread: Spread, units: float = NORMAL_UNITS) -> tuple["ExchangeSizes", ...]:
        """One for each way that `message` may take."""
        size, nodes = message.bytes_, spread.num_nodes
        ways = ways_of(message, spread)
        return tuple(cls(size * way.within, size * way.between, nodes, way.hops_between, units) for way in ways)

    @property
    def payload(self) -> Values:
        return self.within + self.between


def exchange_seconds(sizes: ExchangeSizes, fit: ExchangeFit, device: DeviceFacts, xp: Any = np) -> CollectiveParts:
    """The kernels' time. sizes: numbers or columns; fit: of the kernels; device: the ranks'; xp: numpy, or scalar
    functions"""
    rate, network = fit.link_fraction * device.link.bandwidth_bytes_per_s, device.network
    network_rate = fit.network_fraction * network.bandwidth_bytes_per_s
    start_s = (fit.doubling_s or 0.0) * xp.log2(sizes.nodes)
    leaving_s = max(fit.start_s, fit.between_nodes_s) + (sizes.hops - 1) * network.latency_s
    start_s = start_s + xp.where(sizes.nodes > 1, leaving_s, fit.start_s)
    wire = xp.maximum(sizes.within / rate, sizes.between / network_rate)
    if fit.unit_bytes_per_s is not None:
        copied = sizes.within + fit.forward * sizes.between
        wire = xp.maximum(wire, copied / (sizes.units * fit.unit_bytes_per_s))
    return CollectiveParts(xp.maximum(fit.floor_s, start_s + wire), wire)


def exchange_time(work: Work, fit: ExchangeFit, device: DeviceFacts) -> OperatorTime:
    """The time of the exchange of `work`; latency counts as communication."""
    if work.message is None:
        return NO_TIME
    spread = device.spread(work.message)
    if spread.num_nodes == 1 and not device.link.has_switch:
        return collective_time(work, fit.beyond, device)
    ways = ExchangeSizes.of(work.message, spread)
    return OperatorTime.on_the_wire(min(float(exchange_seconds(way, fit, device, SCALARS).duration) for way in ways))
