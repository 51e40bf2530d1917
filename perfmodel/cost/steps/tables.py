"""`StepTables`: costs of a step graph's operators by what they depend on, computed once for all cost models.

Each group of operators depends on one part of a batch's shape (`OperatorGroup`); decode attention depends on batch and
summed contexts, by axis. Tables know no steps taken, so simulations share them. Costs are kept by fit, so that a draw
(`DrawnTables`) only multiplies."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from perfmodel.cost.calibrations.draws import Draw
from perfmodel.cost.kernel_models.device import OperatorTime
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.cost.kernel_models.registry import KernelFit
from perfmodel.cost.operator_timer import OperatorTimer
from perfmodel.cost.power import flop_energy
from perfmodel.ops.graphs.step import StepGraph
from perfmodel.ops.messages import Spread
from perfmodel.ops.node import OperatorNode
from perfmodel.ops.work import BatchShape, Depends, Work

PS_PER_S = 10**12
_MAX_KNOWN = 40_000  # costs kept; prompts of a long trace are mostly unlike
_ONE_TOKEN = BatchShape(1, 1)


@dataclass(slots=True)
class Usage:
    """Device totals over a run, and seconds by what bounded each operator."""

    flops: float = 0.0
    peak_compute_s: float = 0.0  # what the FLOPs take at the declared peak rates
    hbm_bytes: float = 0.0
    unspent_compute_s: float = 0.0  # of `peak_compute_s`, by how much less energy a FLOP took at a lower clock
    bound_s: dict[str, float] = field(
        default_factory=lambda: {"compute": 0.0, "memory": 0.0, "communication": 0.0, "overhead": 0.0}
    )

    @property
    def busy_s(self) -> float:
        return sum(self.bound_s.values())

    def add(self, other: "Usage", times: float) -> None:
        self.flops += times * other.flops
        self.peak_compute_s += times * other.peak_compute_s
        self.hbm_bytes += times * other.hbm_bytes
        self.unspent_compute_s += times * other.unspent_compute_s
        for bound, seconds in other.bound_s.items():
            self.bound_s[bound] += times * seconds


def to_ps(seconds: float) -> int:
    """Seconds as whole picoseconds."""
    return round(seconds * PS_PER_S)


@dataclass(frozen=True, slots=True)
class OperatorGroup:
    """Operators that depend on one part of a batch's shape.

    key:      that part; 0 or empty: no work
    shape:    a batch with that part only
    by_token: whether work depends on the step's tokens, whoever's they are"""

    depends: Depends
    key: Callable[[BatchShape], Any]
    shape: Callable[[Any], BatchShape]
    by_token: bool


def _groups_of(graph: StepGraph) -> tuple[OperatorGroup, ...]:
    """Groups with operators in `graph`, decode attention apart."""
    num_ranks = graph.shard.dp
    every: tuple[OperatorGroup, ...] = (
        OperatorGroup(Depends.TOKENS, attrgetter("num_tokens"), lambda tokens: BatchShape(tokens, 0), True),
        OperatorGroup(
            Depends.ROWS,
            attrgetter("num_tokens", "num_decodes"),
            lambda key: BatchShape(key[0], 0, num_decodes=key[1]),
            True,
        ),
        OperatorGroup(
            Depends.GROUP,
            lambda shape: shape.group_tokens or num_ranks * shape.num_tokens,
            lambda tokens: BatchShape(0, 0, group_tokens=tokens),
            True,
        ),
        OperatorGroup(Depends.SAMPLES, attrgetter("num_samples"), lambda samples: BatchShape(0, samples), False),
        OperatorGroup(Depends.IMAGES, attrgetter("images"), lambda images: BatchShape(0, 0, images=images), False),
        OperatorGroup(Depends.PREFILL, attrgetter("prefills"), lambda prefills: BatchShape(0, 0, prefills), False),
    )
    if graph.adapters is not None:
        of_key = lambda key: BatchShape(key[2], key[3], num_adapters=key[0], adapter_tokens=key[1])  # noqa: E731
        every += (OperatorGroup(Depends.ADAPTERS, graph.adapters.key, of_key, True),)
    return tuple(group for group in every if graph.by_depends[group.depends])


class StepCost(NamedTuple):
    """Picoseconds of one run of some operators, and their usage.

    parts: (index in `StepTables.fits`, seconds timed by it)"""

    duration: int
    usage: Usage
    parts: tuple[tuple[int, float], ...] = ()


_NOTHING = StepCost(0, Usage())


class StepTables:
    """Operator costs of `graph` with the fits of `timer`.

    like: tables of a graph that differs only in context spread, under an equal timer; all but decode costs are reused
    """

    def __init__(self, graph: StepGraph, timer: OperatorTimer, like: "StepTables | None" = None) -> None:
        self.graph = graph
        self.timer: OperatorTimer = timer if like is None else like.timer  # whose fits are numbered
        self.num_spans = len(graph.model.attention_spans)
        self._decode_nodes = self._nodes_by_axis()
        self.axes = tuple(self._decode_nodes)
        self.groups = _groups_of(graph)
        self._known: dict[tuple[Depends, Hashable], StepCost] = like._known if like is not None else {}
        self._known_decodes: dict[tuple[Depends, Hashable], StepCost] = {}
        self.stages = _tables_of_stages(graph, self.timer, like)
        # Family, and what its fit left unexplained.
        self.fits: list[tuple[str, Residuals]] = like.fits if like is not None else []
        self._fit_numbers: dict[tuple[str, int], int] = like._fit_numbers if like is not None else {}

    def cost(self, group: OperatorGroup, key: Hashable) -> StepCost:
        """The cost of `group` for part `key` of a batch."""
        if not key:
            return _NOTHING
        entry = (group.depends, key)
        result = self._known.get(entry)
        if result is None:
            result = self.cost_of(self.graph.by_depends[group.depends], group.shape(key))
            _keep(self._known, entry, result)
        return result

    def decodes(self, axis: int, batch: int, context: int, queries: int = 0) -> StepCost:
        """The cost of decode operators on `axis`: 0 is the summed context, i that under the i-th span.

        batch: sequences; context: their summed tokens on the axis; queries: tokens of all decodes; 0: one each"""
        entry = (Depends.DECODE, (axis, batch, context, queries))
        known = self._known_decodes.get(entry)
        if known is not None:
            return known
        spans = [0] * self.num_spans
        if axis:
            spans[axis - 1] = context
        shape = BatchShape(batch, batch, (), batch, 0 if axis else context, tuple(spans), decode_tokens=queries)
        cost = self.cost_of(self._decode_nodes[axis], shape)
        _keep(self._known_decodes, entry, cost)
        return cost

    def cost_of(self, nodes: Iterable[OperatorNode], shape: BatchShape) -> StepCost:
        """The cost of `nodes` in a batch of `shape`."""
        usage, at_peak_s, fit_of = Usage(), self.timer.at_peak_s, self.timer.fit
        bound_s = usage.bound_s
        parts: dict[int, float] = {}
        seconds = 0.0
        runs = [(node.expected_runs(shape), work := node.work(shape), fit_of(work)) for node in nodes]
        for (count, work, fit), time in zip(runs, self.timer.times(runs), strict=True):
            duration_s = count * time.duration_s
            seconds += duration_s
            number = self.fit_number(work.family, fit)
            parts[number] = parts.get(number, 0.0) + duration_s
            usage.flops += count * work.flops
            peak_compute_s = count * at_peak_s(work, fit)
            usage.peak_compute_s += peak_compute_s
            usage.unspent_compute_s += peak_compute_s * (1.0 - flop_energy(time.clock))
            usage.hbm_bytes += count * work.hbm_bytes
            bound_s["overhead"] += count * time.overhead_s
            bound_s[time.bound] += count * (time.duration_s - time.overhead_s)
        return StepCost(to_ps(seconds), usage, tuple(parts.items()))

    def time(self, work: Work) -> OperatorTime:
        """The time of one run of `work`."""
        return self.timer.time(work)

    def fit_number(self, family: str, fit: KernelFit | None) -> int:
        """The index in `fits` of a fit for works of `family`."""
        key = (family, id(fit))  # the calibration keeps its fits alive
        number = self._fit_numbers.get(key)
        if number is None:
            number = self._fit_numbers[key] = len(self.fits)
            self.fits.append((family, fit.residuals if fit is not None else Residuals()))
        return number

    def _nodes_by_axis(self) -> dict[int, list[OperatorNode]]:
        by_axis: dict[int, list[OperatorNode]] = {0: []}
        base = (64, 64, (), 64, 64 * 1000, (64 * 100,) * self.num_spans)
        for node in self.graph.by_depends[Depends.DECODE]:
            reference = node.work(BatchShape(*base))
            axis = 0
            for i in range(self.num_spans):
                spans = tuple(6400 + 640 * (i == j) for j in range(self.num_spans))
                if node.work(BatchShape(*base[:5], spans)) != reference:
                    axis = i + 1
            by_axis.setdefault(axis, []).append(node)
        return by_axis


def _keep(known: dict[tuple[Depends, Hashable], StepCost], entry: tuple[Depends, Hashable], cost: StepCost) -> None:
    if len(known) >= _MAX_KNOWN:
        known.clear()
    known[entry] = cost


def _tables_of_stages(graph: StepGraph, timer: OperatorTimer, like: StepTables | None) -> tuple[StepTables, ...]:
    """Tables of each pipeline stage; equal stages share one. like: as of `StepTables`"""
    tables, known = [], dict[tuple[int, Spread | None], StepTables]()
    for number, stage in enumerate(graph.stages):
        sends = [message for node in stage.nodes if (message := node.work(_ONE_TOKEN).message) is not None]
        hop = next((timer.device.spread(message) for message in sends if message.kind == "send_recv"), None)
        key = stage.stage_kind, hop
        if key not in known:
            known[key] = StepTables(stage, timer, None if like is None else like.stages[number])
        tables.append(known[key])
    return tuple(tables)


class DrawnTables:
    """The costs of `tables` under a draw: same work, other times."""

    def __init__(self, tables: StepTables, draw: Draw) -> None:
        self._tables = tables
        self._draw = draw
        self._factors: list[float] = []  # of the tables' fits, as far as those are numbered

    def cost(self, group: OperatorGroup, key: Hashable) -> StepCost:
        """See `StepTables.cost`."""
        return self._drawn(self._tables.cost(group, key))

    def decodes(self, axis: int, batch: int, context: int, queries: int = 0) -> StepCost:
        """See `StepTables.decodes`."""
        return self._drawn(self._tables.decodes(axis, batch, context, queries))

    def time(self, work: Work) -> OperatorTime:
        """See `StepTables.time`."""
        tables = self._tables
        time, number = tables.time(work), tables.fit_number(work.family, tables.timer.fit(work))
        return time._replace(duration_s=time.duration_s * self._all_factors()[number])

    def _drawn(self, cost: StepCost) -> StepCost:
        factors = self._all_factors()
        return StepCost(to_ps(sum([factors[number] * part for number, part in cost.parts])), cost.usage)

    def _all_factors(self) -> list[float]:
        factors, fits = self._factors, self._tables.fits
        while len(factors) < len(fits):
            factors.append(self._draw.step * self._draw.kernel(*fits[len(factors)]))
        return factors
