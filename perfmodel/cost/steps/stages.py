"""Pipeline stages: how a step is split into plans, their times, and the time of a round.

p stages work on up to p plans at once. With h seconds of the host before a plan starts (`serial`), g beside it
(`hidden`) and d_s in stage s, plan n passes a flow line, in which the host is the first server:

    begin_s(n) = max( end_{s-1}(n), end_s(n-1) ),    end_s(n) = begin_s(n) + d_s

and its sequences may decode again once it is through, and the host's work beside it is done. Plans n that go round and
round in this order then take, each of them once,

    round = max( over n: h(n) + max(g(n), sum over s of d_s(n)),   over s: sum over n of d_s(n),   sum of h(n) + g(n) )

the longest circuits of a timed event graph, per plan on them (Baccelli et al. 1992, theorem 2.28): exact for equal
plans; otherwise circuits that mix plans may be a little longer. Idle stage time is bubbles: of m plans on p equal
stages m / p of the round is work. m equal plans that pass once take sum of d_s + (m - 1) max(d_s), with bubbles of
(p - 1) / (m + p - 1) where stages are equal (GPipe, Huang et al. 2019). Stage costs come from each stage's graph;
`perfmodel.sim.replica.pipeline` asks `StagedCostModel` for the plans' times.

Layer splits: layers on several devices of one machine that work one after another. A step of n pieces (micro-batches of
`ubatch_size`) passes g devices like a flow line with room for `pieces_under_way`; with T the time on one device,

    t = T (n + g - 1) / (n g)        g = min(devices, pieces_under_way)

One piece, as in decode-only steps, gains nothing. Source: GPipe (Huang et al. 2019); llama.cpp's
`llama_context::decode`, which hands over all pieces of a batch before it waits for the first."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from perfmodel.cost.calibrations.draws import Draw
from perfmodel.cost.operator_timer import OperatorTimer
from perfmodel.cost.steps.cost_model import GraphCostModel, StepCostModel
from perfmodel.cost.steps.curve import DecodeRun
from perfmodel.cost.steps.explain import OperatorEstimate, PipelineEstimate, StepEstimate, bound_share, explain, summed
from perfmodel.cost.steps.ffn_devices import FfnDevicesCostModel
from perfmodel.cost.steps.host import Host, step_seconds, step_ticks
from perfmodel.cost.steps.overlap import OverlapCostModel
from perfmodel.cost.steps.tables import StepTables, Usage, to_ps
from perfmodel.ops.attention.layer import split_prompts
from perfmodel.ops.graphs.step import StepGraph
from perfmodel.ops.work import BatchShape
from perfmodel.specs.engine.spec import EngineSpec


class StageTicks(NamedTuple):
    """Picoseconds of one plan: host before it starts, host beside it, then each stage."""

    serial: int
    hidden: int
    stages: tuple[int, ...]

    @property
    def latency(self) -> int:
        """Picoseconds of a lone plan."""
        return step_ticks(self.serial, self.hidden, sum(self.stages))


class StageTimes(NamedTuple):
    """Times of one plan, in any unit: host before it starts, host beside it, then each stage."""

    serial: float
    hidden: float
    stages: tuple[float, ...]

    @property
    def latency(self) -> float:
        """Time of a lone plan."""
        return step_seconds(self.serial, self.hidden, sum(self.stages))


def round_time(plans: Mapping[StageTimes, int]) -> float:
    """The time in which all `plans` (with their counts) pass all stages once more."""
    by_stage: Iterable[tuple[float, ...]] = zip(*(times.stages for times in plans), strict=True)
    busy = [sum(count * item for count, item in zip(plans.values(), stage, strict=True)) for stage in by_stage]
    host = sum(count * (times.serial + times.hidden) for times, count in plans.items())
    return max(*busy, host, *(times.latency for times in plans))


def plans_of_round(shape: BatchShape, num_stages: int) -> dict[BatchShape, int]:
    """The plans of a step of `shape`, with their counts: one per stage, if there are as many sequences.

    Decodes are split evenly, prompts go whole to one plan after another, and images to the plans with prompts."""
    count = max(1, min(num_stages, shape.num_decodes + len(shape.prefills)))
    if count == 1:
        return {shape: 1}
    sizes = sorted(shape.prefills, reverse=True)
    with_prompts = max(min(count, len(sizes)), 1)
    plans: dict[BatchShape, int] = {}
    for index in range(count):
        images = shape.images[index::with_prompts] if index < with_prompts else ()
        plan = _plan(shape, tuple(sizes[index::count]), count)._replace(images=images)
        plans[plan] = plans.get(plan, 0) + 1
    return plans


def _plan(shape: BatchShape, prefills: tuple[tuple[int, int], ...], count: int) -> BatchShape:
    num_decoded = max(shape.num_tokens - sum(new for new, _ in shape.prefills), 0)
    tokens = ceil(num_decoded / count) + sum(new for new, _ in prefills)
    sampled = (shape.num_samples - shape.num_decodes) / max(len(shape.prefills), 1)
    return BatchShape(
        num_tokens=tokens,
        num_samples=ceil(shape.num_decodes / count) + ceil(sampled * len(prefills)),
        prefills=prefills,
        num_decodes=ceil(shape.num_decodes / count),
        decode_context=ceil(shape.decode_context / count),
        decode_windowed=tuple(ceil(context / count) for context in shape.decode_windowed),
        group_tokens=ceil(shape.group_tokens * tokens / max(shape.num_tokens, 1)),
    )


class StagedCostModel:
    """Prices plans that pass several stages; `tables` are of a graph with stages. draw: error factors, for ensembles"""

    def __init__(self, tables: StepTables, draw: Draw | None = None) -> None:
        self.has_runs = False
        self.tables = tables
        self._draw = draw
        distinct = list(dict.fromkeys(tables.stages))
        self._cost_models = [GraphCostModel(stage, draw) for stage in distinct]
        self._order = [distinct.index(stage) for stage in tables.stages]
        self._host = Host(tables.graph, tables.timer, draw)

    @property
    def num_stages(self) -> int:
        return len(self._order)

    def fresh(self) -> "StagedCostModel":
        return StagedCostModel(self.tables, self._draw)

    def pass_through(self, shape: BatchShape) -> StageTicks:
        """Times of one plan of `shape`; counts it as taken."""
        times = [cost_model.duration_ps(shape) for cost_model in self._cost_models]
        serial, hidden = self._host.seconds(shape)
        return StageTicks(to_ps(serial), to_ps(hidden), tuple([times[index] for index in self._order]))

    def duration_ps(self, shape: BatchShape) -> int:
        """Picoseconds of a step in steady state: the round of its plans."""
        result: dict[StageTimes, int] = {}
        for plan, count in plans_of_round(shape, self.num_stages).items():
            times = StageTimes(*self.pass_through(plan))
            result[times] = result.get(times, 0) + count
        return round(round_time(result))

    def run(self, shape: BatchShape, growth: tuple[int, ...], num_steps: int) -> DecodeRun | None:
        """None: plans overlap."""
        return None

    def explain(self, shape: BatchShape) -> StepEstimate:
        """A step in steady state, operator by operator; without the draw."""
        return _explain_round(self.tables.graph, self.tables.timer, shape)

    def usage(self) -> Usage:
        """Totals over all plans so far, for the mean device of the stages."""
        total = Usage()
        for index, cost_model in enumerate(self._cost_models):
            total.add(cost_model.usage(), self._order.count(index) / self.num_stages)
        return total


def step_cost_model(tables: StepTables, draw: Draw | None = None) -> StepCostModel:
    """The cost model of `tables`, in one stage or several, or in two halves."""
    if tables.graph.overlap_from is not None:
        return OverlapCostModel(tables, draw)
    if tables.graph.ffn is not None:
        return FfnDevicesCostModel(tables, draw)
    if tables.graph.shard.pcp > 1:
        return PromptSplitCostModel(tables, draw)
    return StagedCostModel(tables, draw) if tables.stages else GraphCostModel(tables, draw)


def estimate_step(graph: StepGraph, timer: OperatorTimer, shape: BatchShape) -> StepEstimate:
    """The estimate of a step of `shape` on `timer`'s device, in one stage or several, or in two halves."""
    if graph.overlap_from is not None or graph.ffn is not None or graph.shard.pcp > 1:
        return step_cost_model(StepTables(graph, timer)).explain(shape)
    return _explain_round(graph, timer, shape) if graph.stages else explain(graph, timer, shape)


def _explain_round(graph: StepGraph, timer: OperatorTimer, shape: BatchShape) -> StepEstimate:
    num_stages = len(graph.stages)
    rows: list[OperatorEstimate] = []
    plans: dict[StageTimes, int] = {}
    busy = 0.0
    for plan, count in plans_of_round(shape, num_stages).items():
        once = explain(graph, timer, plan)
        stage_s = tuple(explain(stage, timer, plan).duration_s for stage in graph.stages)
        times, share = StageTimes(once.serial_host_s, once.hidden_host_s, stage_s), count / num_stages
        plans[times] = plans.get(times, 0) + count
        rows += [replace(row, count=share * row.count) for row in once.rows]  # of a device on the average
        busy += share * sum(stage_s)
    duration, longest = round_time(plans), max(plans, key=lambda times: times.latency)
    whole = summed(rows, duration, (longest.serial, longest.hidden), timer)
    return replace(
        whole,
        bound_share=bound_share(rows, busy, whole.device_s),
        pipeline=PipelineEstimate(
            num_plans=sum(plans.values()),
            stage_s=longest.stages,
            latency_s=longest.latency,
            bubble_share=1.0 - busy / duration if duration else 0.0,
        ),
    )


def rank_shape(shape: BatchShape, pcp: int) -> BatchShape:
    """The tokens of `shape` that a rank of prefill context parallelism computes: all decodes, and its part of prompts;
    `shape.prefills` stay whole, as operators on them know what is a rank's."""
    if not shape.prefills:
        return shape
    tokens = sum(new for new, _ in split_prompts(shape.prefills, pcp)) - sum(new for new, _ in shape.prefills)
    return shape._replace(num_tokens=shape.num_tokens + tokens, group_tokens=0)


class PromptSplitCostModel:
    """Prices steps whose prompts' tokens `pcp` ranks share out, by a rank's operators in `tables`."""

    def __init__(self, tables: StepTables, draw: Draw | None = None) -> None:
        self._rank, self._pcp, self._draw = GraphCostModel(tables, draw), tables.graph.shard.pcp, draw
        self.has_runs, self.host = True, self._rank.host

    def duration_ps(self, shape: BatchShape) -> int:
        return self._rank.duration_ps(rank_shape(shape, self._pcp))

    def run(self, shape: BatchShape, growth: tuple[int, ...], num_steps: int) -> DecodeRun:
        """See `StepCostModel.run`."""
        return self._rank.run(shape, growth, num_steps)

    def explain(self, shape: BatchShape) -> StepEstimate:
        """A rank's part of the step, operator by operator, in seconds."""
        return self._rank.explain(rank_shape(shape, self._pcp))

    def usage(self) -> Usage:
        """Totals over all steps so far, per device."""
        return self._rank.usage()

    def fresh(self) -> "PromptSplitCostModel":
        return PromptSplitCostModel(self._rank.tables, self._draw)


class LayerSplit(NamedTuple):
    """lanes: pieces computed at the same time; piece: tokens of each; 0: steps are computed whole"""

    lanes: int
    piece: int

    def share(self, num_tokens: int) -> float:
        """A step's time relative to one device."""
        pieces = ceil(num_tokens / self.piece) if self.piece else 1
        return (pieces + self.lanes - 1) / (pieces * self.lanes)


def layer_split_of(engine: EngineSpec) -> LayerSplit | None:
    """The engine's layer split; None on one device."""
    if engine.layer_split == 1:
        return None
    return LayerSplit(min(engine.layer_split, engine.described.facts.pieces_under_way or 1), engine.ubatch_size)


class SplitCostModel:
    """Prices the steps of `whole`, on one device, for layers split over several."""

    def __init__(self, whole: StepCostModel, split: LayerSplit) -> None:
        self.has_runs = False
        self._whole, self._split = whole, split

    def duration_ps(self, shape: BatchShape) -> int:
        return round(self._whole.duration_ps(shape) * self._split.share(shape.num_tokens))

    def run(self, shape: BatchShape, growth: tuple[int, ...], num_steps: int) -> DecodeRun | None:
        """None: steps are priced one by one."""
        return None

    def explain(self, shape: BatchShape) -> StepEstimate:
        """The step operator by operator, in seconds, without overlap."""
        return self._whole.explain(shape)

    def usage(self) -> Usage:
        """Totals over all steps so far, all devices."""
        return self._whole.usage()

    def fresh(self) -> "SplitCostModel":
        return SplitCostModel(self._whole.fresh(), self._split)
