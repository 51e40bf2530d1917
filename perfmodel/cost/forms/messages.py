"""Messages between devices: which link one goes over, collectives within a node and between nodes, NCCL's and the
engines' own, and the exchange of expert parallelism.
"""

from functools import lru_cache
from math import ceil, inf, log2
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import Field

from perfmodel.cost.forms.device import DEFAULT_LINK, DeviceFacts, OperatorTime
from perfmodel.cost.forms.fits import SCALARS, Residuals
from perfmodel.cost.forms.overheads import OverPcieFit, load_overheads
from perfmodel.files.base import Spec
from perfmodel.files.units import PositiveFloat, PositiveInt
from perfmodel.ops.extents import Values
from perfmodel.ops.messages import Message, RankGroup, Spread, distinct_nodes, spread_over
from perfmodel.ops.work import Work
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.networks import Link

# Least seconds per step of an algorithm: a flag seen and answered, not just a packet on the wire. One NVLink hop of
# NCCL's low-latency protocol takes 0.8-1.0 us on A100 and H100 (fits to nccl-tests) [assumed of other links].
_DEFAULT_HOP_S = 1e-6
_MOST_RANKS_OVER_PCIE = 2  # vLLM's custom_all_reduce.py: kernels of its own serve more only where NVLink connects all


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


def alpha_beta_time(message: Message, link: Link, bandwidth_fraction: float = 1.0) -> float:
    """Seconds on the wire for a message of S bytes between k ranks, hop latency a, one-way bandwidth W per rank.

        all_reduce      min( ring 2 (k-1) (a + S / (k W)),  one-shot a + (k-1) S / W )
        all_gather, reduce_scatter, all_to_all   min( (k-1) (a + S / (k W)),  a + (k-1) S / (k W) )
        send_recv       a + S / W

    One-shot: every rank reads all others' buffers at once, which kernels of the engine's own do where they may
    (`most_ranks_of_own_kernels`). The launch is not included.
    Source: Thakur et al. 2005 (ring, alpha-beta); vLLM's and TensorRT-LLM's custom all-reduce (one-shot).
    """
    k, payload = message.num_ranks, message.bytes_
    if k <= 1:
        return 0.0
    hop = _hop_s(link)
    wire = payload / (link.bandwidth_bytes_per_s * bandwidth_fraction)
    if message.kind == "all_reduce":
        ring = 2 * (k - 1) * (hop + wire / k)
        return min(ring, hop + (k - 1) * wire) if k <= most_ranks_of_own_kernels(link) else ring
    if message.kind == "send_recv":
        return hop + wire
    return hop + (k - 1) * wire / k


def network_time(message: Message, spread: Spread, link: Link, network: Link, bandwidth_fraction: float = 1.0) -> float:
    """Seconds on the wires where the group is on several nodes, by the fastest of its algorithms (`ways_of`):

    hops within a + hops between b + max( bytes within / W, bytes between / V )

    a, b: hop latencies; W, V: one-way bandwidths of the scale-up link and of a device's share of the network. The two
    move bytes at the same time. Of a pipeline's sends, those that stay on a node cost what they do there.

    message, spread: the payload, and how its group is spread; bandwidth_fraction: reached of both bandwidths
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
    return spread.crossing * times[0] + (1 - spread.crossing) * alpha_beta_time(message, link, bandwidth_fraction)


def most_ranks_of_own_kernels(link: Link) -> float:
    """Between how many devices an engine's own kernels exchange over `link`: they read their peers' memory."""
    if link.name != "pcie":
        return inf
    return 1 if link.peer_to_peer is False else _MOST_RANKS_OVER_PCIE


def _hop_s(link: Link) -> float:
    if link.name != "pcie":
        return max(link.latency_s, _DEFAULT_HOP_S)
    pcie = load_overheads().over_pcie
    return max(link.latency_s, pcie.hop_through_host_s if link.peer_to_peer is False else pcie.hop_s)


class TwoLevel(NamedTuple):
    """One algorithm: steps one after another, and bytes per payload byte."""

    name: str  # ring | tree | direct | send | to_experts | to_nodes
    hops_within: int
    hops_between: int
    within: float
    between: float


@lru_cache(maxsize=4096)
def two_level(kind: str, spread: Spread) -> tuple[TwoLevel, ...]:
    """The algorithms that a library chooses among for messages of `kind` in a group on several nodes."""
    k, num_nodes, most, least = spread.num_ranks, spread.num_nodes, spread.most, spread.least
    if kind == "send_recv":
        return (TwoLevel("send", 0, 1, 0.0, 1.0),)
    if kind == "all_to_all":
        return (TwoLevel("direct", int(most > 1), 1, (most - 1) / k, (k - least) / k),)
    passes = 2 if kind == "all_reduce" else 1
    wire = passes * (k - 1) / k
    ring = TwoLevel("ring", passes * (k - num_nodes), passes * (num_nodes - 1), wire, wire / least)
    if kind != "all_reduce":
        return (ring,)
    crossings = (1 if num_nodes == 2 else 2) / least
    tree = TwoLevel("tree", 2 * (most - 1), 2 * ceil(log2(num_nodes)), 2 * (most - 1) / most, crossings)
    return ring, tree


def ways_of(message: Message, spread: Spread) -> tuple[TwoLevel, ...]:
    """The algorithms for `message`, whose group is on several nodes: of an exchange by its route, else any."""
    exchange = message.exchange
    direct = two_level(message.kind, spread)
    if exchange is None or exchange.route == "rank" or not message.bytes_:
        return direct
    one, k, num_nodes = exchange.copy_bytes / message.bytes_, spread.num_ranks, spread.num_nodes
    found = []
    if exchange.route in (None, "expert"):
        each = one * exchange.ffn.top_k
        found.append(TwoLevel("to_experts", 1, 1, each * direct[0].within, each * direct[0].between))
    if exchange.route in (None, "node"):
        once = min(one * distinct_nodes(exchange.ffn, num_nodes), 1.0) * (num_nodes - 1) / num_nodes
        found.append(TwoLevel("to_nodes", 1, 2, (k - 1) / k, once))
    return tuple(found)


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
        """Messages of one kind; `switched`: in a number format that a switch can add.

        payload: bytes as nccl-tests counts them, between so many ranks
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
    """NCCL's time; one rank alone takes none.

    sizes: of one message, or columns of many; fit: of NCCL; device, link: of the ranks, and between them
    xp: functions of numbers or of columns
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
    """How much longer a hop takes than on the link that the fit was made for."""
    return link.latency_s / fitted if fitted and link.latency_s else 1.0


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

    start_s: seconds until bytes move; link_fraction: what the exchange within a node reaches of the link
    message, spread: the payload, and how its group is spread; device: of each rank
    """
    rate, network = link_fraction * device.link.bandwidth_bytes_per_s, device.network
    network_rate, latency = _SIMPLE * network.bandwidth_bytes_per_s, start_s
    return min(
        latency
        + (each.hops_between - 1) * network.latency_s
        + message.bytes_ * max(each.within / rate, each.between / network_rate)
        for each in ways_of(message, spread)
    )


Fit = TypeVar("Fit")


_ANY_RANKS = 1 << 16


class CustomAllReduceFit(Spec):
    """An engine's own all-reduce for messages up to `most_bytes` between up to `most_ranks`, and NCCL's beyond.

    eager_floor_s: host time of launching eagerly, below which no measurement falls; serving replays CUDA graphs
    """

    form: Literal["custom_all_reduce"] = "custom_all_reduce"
    most_bytes: PositiveFloat = 8.3e6
    most_ranks: PositiveInt = _ANY_RANKS
    launch_s: float = Field(default=4e-6, ge=5e-7, le=5e-5)
    peer_s: float = Field(default=1e-7, ge=1e-9, le=5e-6)
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
    """The engine's kernels for small messages, NCCL for large ones.

    sizes: of one message, or columns of many; fit: of the kernels; device, link: of the ranks, and between them
    xp: functions of numbers or of columns
    """
    rate, others = link.bandwidth_bytes_per_s, sizes.ranks - 1
    one_shot = others * sizes.payload / (fit.one_shot_fraction * rate)
    two_shot = sizes.wire / (fit.two_shot_fraction * rate)
    is_two = (sizes.ranks > 2) & (fit.sync_s + two_shot < one_shot)
    peers_s = fit.peer_s * latency_ratio(fit.link_latency_s, link) * others
    fixed = fit.launch_s + peers_s + xp.where(is_two, fit.sync_s, 0.0)
    wire = xp.where(is_two, two_shot, one_shot)
    beyond = collective_seconds(sizes, fit.beyond, device, link, xp)
    is_small = (sizes.payload <= fit.most_bytes) & (sizes.ranks <= fit.most_ranks)
    duration = xp.maximum(xp.where(is_small, fixed + wire, beyond.duration), fit.eager_floor_s or 0.0)
    return CollectiveParts(xp.where(sizes.ranks > 1, duration, 0.0), xp.where(is_small, wire, beyond.wire))


def over_link(fit: Fit, source: Link, target: Link) -> Fit:
    """`fit`, made over `source`, for messages over `target`.

    Between NVLinks fractions of the declared bandwidth stay; over PCIe they are PCIe's own, and how well they are known
    is no longer what the fit's residuals say. Devices that do not see each other's memory exchange through the host's.
    """
    if target.name != "pcie" or source.name == "pcie":
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
    """What a fit of NCCL is over `link`; each byte is touched once, hops are not scaled, and no switch adds."""
    is_direct = link.peer_to_peer is not False
    return {
        "hop_s": pcie.hop_s if is_direct else pcie.hop_through_host_s,
        "link_latency_s": None,
        "low_latency_fraction": pcie.low_latency_fraction,
        "simple_fraction": pcie.simple_fraction if is_direct else pcie.through_host_fraction,
        "simple_start_s": pcie.simple_start_s,
        "memory_touches": 1.0,
        "switch_ranks": None,
        "residuals": Residuals(),
    }


def collective_time(work: Work, fit: CollectiveFit, device: DeviceFacts) -> OperatorTime:
    """How long the message of `work` takes."""
    if work.message is None or not work.num_kernels:
        return OperatorTime(0.0, 0.0, 0.0, 0.0, 0.0, "overhead")
    return _operator_time(_nccl_seconds(work.message, fit, device))


def custom_time(work: Work, fit: CustomAllReduceFit, device: DeviceFacts) -> OperatorTime:
    """How long the all-reduce of `work` takes; other collectives are NCCL's."""
    if work.message is None or not work.num_kernels:
        return OperatorTime(0.0, 0.0, 0.0, 0.0, 0.0, "overhead")
    if work.message.kind != "all_reduce" or device.spread(work.message).num_nodes > 1:
        return _operator_time(_nccl_seconds(work.message, fit.beyond, device))
    parts = custom_seconds(_sizes(work.message), fit, device, device.link, SCALARS)
    return _operator_time(parts.duration)


def _nccl_seconds(message: Message, fit: CollectiveFit, device: DeviceFacts) -> float:
    """NCCL's time within a node or between nodes; of a pipeline's sends, some of which stay, the mean."""
    spread, link = device.spread(message), device.link
    leaving = float(spread.num_nodes > 1) if message.kind != "send_recv" else spread.crossing
    seconds = 0.0
    if leaving:
        hop_s = fit.hop_s * latency_ratio(fit.link_latency_s, link)
        seconds = leaving * nccl_between_nodes(message, spread, fit, hop_s, device)
    if leaving < 1.0:
        on_node = collective_seconds(_sizes(message), fit, device, link, SCALARS)
        seconds += (1.0 - leaving) * float(on_node.duration)
    return seconds


def _sizes(message: Message) -> CollectiveSizes:
    return CollectiveSizes.of(message.kind, message.bytes_, message.num_ranks)


def _operator_time(duration_s: float) -> OperatorTime:
    """Latency counts as communication as well: it is what a message costs, whatever its size."""
    return OperatorTime(duration_s, 0.0, 0.0, duration_s, 0.0, "communication")


class ExchangeFit(Spec):
    """One direction. Times in seconds; fraction of the declared link bandwidth.

    between_nodes_s: the least start of an exchange that leaves a node
    """

    form: Literal["expert_exchange"] = "expert_exchange"
    floor_s: float = Field(ge=1e-6, le=1e-3)
    start_s: float = Field(ge=1e-7, le=1e-3)
    link_fraction: float = Field(ge=0.05, le=1.0)
    between_nodes_s: float = Field(default=0.0, ge=0, le=1e-3)
    beyond: CollectiveFit = CollectiveFit()
    residuals: Residuals = Residuals()


def exchange_time(work: Work, fit: ExchangeFit, device: DeviceFacts) -> OperatorTime:
    """How long the exchange of `work` takes; latency counts as communication."""
    if work.message is None or not work.num_kernels:
        return OperatorTime(0.0, 0.0, 0.0, 0.0, 0.0, "overhead")
    ranks, link, spread = work.message.num_ranks, device.link, device.spread(work.message)
    if spread.num_nodes > 1:
        start_s = max(fit.start_s, fit.between_nodes_s)
        duration = exchange_between_nodes(work.message, spread, start_s, fit.link_fraction, device)
        return OperatorTime(duration, 0.0, 0.0, duration, 0.0, "communication")
    if not link.has_switch:
        return collective_time(work, fit.beyond, device)
    wire = work.message.bytes_ * (ranks - 1) / ranks
    duration = max(fit.floor_s, fit.start_s + wire / (fit.link_fraction * link.bandwidth_bytes_per_s))
    return OperatorTime(duration, 0.0, 0.0, duration, 0.0, "communication")
