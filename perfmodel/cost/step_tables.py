"""`StepTables`: what the operators of a step graph cost, by what they depend on. Worked out once for all timers.

Nothing here knows which steps were taken, so that simulations of one model on one device can share a table. Costs are
kept apart by the fit that they come from, so that a draw of other factors (`DrawnTables`) only multiplies.
"""

__all__ = ["PS_PER_S", "DrawnTables", "StepCost", "StepTables"]

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from perfmodel.cost.draws import Draw
from perfmodel.cost.forms.fits import Residuals
from perfmodel.cost.forms.registry import FormFit
from perfmodel.cost.power_cap import flop_energy
from perfmodel.cost.roofline import OperatorTime, OperatorTimer
from perfmodel.cost.usage import Usage
from perfmodel.ops.graphs.step import StepGraph
from perfmodel.ops.messages import Spread
from perfmodel.ops.node import OperatorNode
from perfmodel.ops.work import BatchShape, Depends, Work

PS_PER_S = 10**12
_MOST_PREFILLS = 20_000
_ONE_TOKEN = BatchShape(1, 1)


class StepCost(NamedTuple):
    """Picoseconds that some operators take once, and what the device does in them.

    parts: (number of a fit in `StepTables.fits`, seconds timed by it)
    """

    duration: int
    usage: Usage
    parts: tuple[tuple[int, float], ...] = ()


class StepTables:
    """Costs of the operators of `graph`, on the hardware and with the fits of `timer`."""

    def __init__(self, graph: StepGraph, timer: OperatorTimer) -> None:
        self.graph = graph
        self.timer = timer
        self.num_spans = len(graph.model.attention_spans)
        self._decode_nodes = self._nodes_by_axis()
        self.axes = tuple(self._decode_nodes)
        self._tokens: dict[int, StepCost] = {}
        self._rows: dict[tuple[int, int], StepCost] = {}
        self._group: dict[int, StepCost] = {}
        self._samples: dict[int, StepCost] = {}
        self._prefills: dict[tuple[tuple[int, int], ...], StepCost] = {}
        self._decodes: dict[tuple[int, int, int, int], StepCost] = {}
        self.stages = _tables_of_stages(graph, timer)
        self.fits: list[tuple[str, Residuals]] = []  # family, and what its fit left unexplained
        self._fit_numbers: dict[tuple[str, int], int] = {}

    def tokens(self, num_tokens: int) -> StepCost:
        """Of what depends on the number of tokens alone."""
        cost = self._tokens.get(num_tokens)
        if cost is None:
            cost = self._tokens[num_tokens] = self._cost(Depends.TOKENS, BatchShape(num_tokens, 0))
        return cost

    def rows(self, num_tokens: int, num_decodes: int) -> StepCost:
        """Of what depends on how many of the tokens are decoded, too."""
        key = (num_tokens, num_decodes)
        cost = self._rows.get(key)
        if cost is None:
            shape = BatchShape(num_tokens, 0, num_decodes=num_decodes)
            cost = self._rows[key] = self._cost(Depends.ROWS, shape)
        return cost

    def group(self, group_tokens: int) -> StepCost:
        """Of what depends on the tokens of all data-parallel ranks together."""
        cost = self._group.get(group_tokens)
        if cost is None:
            cost = self._group[group_tokens] = self._cost(Depends.GROUP, BatchShape(0, 0, group_tokens=group_tokens))
        return cost

    def samples(self, num_samples: int) -> StepCost:
        """Of what depends on the number of samples alone; nothing for none."""
        cost = self._samples.get(num_samples)
        if cost is None:
            shape = BatchShape(0, num_samples)
            cost = self._cost(Depends.SAMPLES, shape) if num_samples else StepCost(0, Usage())
            self._samples[num_samples] = cost
        return cost

    def prefills(self, prefills: tuple[tuple[int, int], ...]) -> StepCost:
        """Of the attention of prompts."""
        cost = self._prefills.get(prefills)
        if cost is None:
            if len(self._prefills) >= _MOST_PREFILLS:
                self._prefills.clear()
            cost = self._prefills[prefills] = self._cost(Depends.PREFILL, BatchShape(0, 0, prefills))
        return cost

    def decodes(self, axis: int, batch: int, context: int, queries: int = 0) -> StepCost:
        """Of the decode operators that look at `axis`: 0 is the summed context, i that under the i-th span.

        queries: tokens of all decodes together; 0: one each
        """
        key = (axis, batch, context, queries)
        cost = self._decodes.get(key)
        if cost is None:
            spans = [0] * self.num_spans
            if axis:
                spans[axis - 1] = context
            shape = BatchShape(batch, batch, (), batch, 0 if axis else context, tuple(spans), decode_tokens=queries)
            cost = self._decodes[key] = self.cost(self._decode_nodes[axis], shape)
        return cost

    def cost(self, nodes: Iterable[OperatorNode], shape: BatchShape) -> StepCost:
        """Of `nodes` for `shape`."""
        usage, peak = Usage(), self.timer.device.peak
        bound_s = usage.bound_s
        parts: dict[int, float] = {}
        seconds = 0.0
        works = [(node.expected_runs(shape), node.work(shape)) for node in nodes]
        runs = [(count, work, self.timer.fit(work)) for count, work in works]
        for (count, work, fit), time in zip(runs, self.timer.times(runs), strict=True):
            seconds += count * time.duration_s
            number = self._number_of(work.family, fit)
            parts[number] = parts.get(number, 0.0) + count * time.duration_s
            usage.flops += count * work.flops
            peak_compute_s = count * work.flops / peak(work.rate)
            usage.peak_compute_s += peak_compute_s
            usage.unspent_compute_s += peak_compute_s * (1.0 - flop_energy(time.clock))
            usage.hbm_bytes += count * work.hbm_bytes
            bound_s["overhead"] += count * time.overhead_s
            bound_s[time.bound] += count * (time.duration_s - time.overhead_s)
        return StepCost(round(seconds * PS_PER_S), usage, tuple(parts.items()))

    def time(self, work: Work) -> OperatorTime:
        """How long one run of `work` takes."""
        return self.timer.time(work)

    def fit_number(self, work: Work) -> int:
        """The place in `fits` of what times `work`."""
        return self._number_of(work.family, self.timer.fit(work))

    def _number_of(self, family: str, fit: FormFit | None) -> int:
        key = (family, id(fit))  # the calibration keeps its fits alive
        number = self._fit_numbers.get(key)
        if number is None:
            number = self._fit_numbers[key] = len(self.fits)
            self.fits.append((family, fit.residuals if fit is not None else Residuals()))
        return number

    def _cost(self, depends: Depends, shape: BatchShape) -> StepCost:
        return self.cost(self.graph.by_depends[depends], shape)

    def _nodes_by_axis(self) -> dict[int, list[OperatorNode]]:
        """Decode operators by the context they look at."""
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


def _tables_of_stages(graph: StepGraph, timer: OperatorTimer) -> tuple[StepTables, ...]:
    """Of each pipeline stage; of stages that cost the same, the same object."""
    found, known = [], dict[tuple[int, Spread | None], StepTables]()
    for stage in graph.stages:
        sends = [message for node in stage.nodes if (message := node.work(_ONE_TOKEN).message) is not None]
        hop = next((timer.device.spread(message) for message in sends if message.kind == "send_recv"), None)
        key = stage.stage_kind, hop
        if key not in known:
            known[key] = StepTables(stage, timer)
        found.append(known[key])
    return tuple(found)


class DrawnTables:
    """The costs of `tables` under a draw: the same work, other times."""

    def __init__(self, tables: StepTables, draw: Draw) -> None:
        self.drawn_from = self._tables = tables
        self._draw = draw
        self.graph, self.timer, self.axes = tables.graph, tables.timer, tables.axes
        self._factors: list[float] = []  # of the tables' fits, as far as they were needed

    def tokens(self, num_tokens: int) -> StepCost:
        return self._drawn(self._tables.tokens(num_tokens))

    def rows(self, num_tokens: int, num_decodes: int) -> StepCost:
        return self._drawn(self._tables.rows(num_tokens, num_decodes))

    def group(self, group_tokens: int) -> StepCost:
        return self._drawn(self._tables.group(group_tokens))

    def samples(self, num_samples: int) -> StepCost:
        return self._drawn(self._tables.samples(num_samples))

    def prefills(self, prefills: tuple[tuple[int, int], ...]) -> StepCost:
        return self._drawn(self._tables.prefills(prefills))

    def decodes(self, axis: int, batch: int, context: int, queries: int = 0) -> StepCost:
        return self._drawn(self._tables.decodes(axis, batch, context, queries))

    def time(self, work: Work) -> OperatorTime:
        time = self._tables.time(work)
        return replace(time, duration_s=time.duration_s * self._factor(self._tables.fit_number(work)))

    def _drawn(self, cost: StepCost) -> StepCost:
        seconds = sum(self._factor(number) * part for number, part in cost.parts)
        return StepCost(round(seconds * PS_PER_S), cost.usage)

    def _factor(self, number: int) -> float:
        factors = self._factors
        while len(factors) <= number:
            factors.append(self._draw.step * self._draw.kernel(*self._tables.fits[len(factors)]))
        return factors[number]
