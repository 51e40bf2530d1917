"""`SpeculativeCostModel`: steps in which sequences draft tokens and the model verifies them.

    round = verification + drafting,   verification = step with q = 1 + n tokens per sequence, + rejection sampling
                                       drafting     = sum over passes of the drafter (+ its share of the prompts)

Pipelined, the drafter works on the next round while the model verifies on the same device; only work bound by
different resources overlaps:

    round = max( verification, drafting, for each resource the time that both together need of it )

A resource is what bounds an operator: compute, memory, communication; the rest of its time (launches, host) overlaps.
A drafter on its own devices shares none: round = max(verification, drafting). Rounds after a wrong draft (the next has
none to verify) are up to `perfmodel.engine.config`.

`DraftTables`: costs of drafting and verifying, shared by a scenario's cost models. Drafter passes run back to back on
the model's devices, launched ahead by the host: a pass takes the longer of its operators and its launches."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

from perfmodel.cost.calibrations.calibration import EAGER_LAUNCH_S, Calibration, HostFit
from perfmodel.cost.calibrations.draws import Draw
from perfmodel.cost.calibrations.host_work import load_host_work
from perfmodel.cost.operator_timer import OperatorTimer
from perfmodel.cost.steps.cost_model import GraphCostModel
from perfmodel.cost.steps.curve import DecodeRun
from perfmodel.cost.steps.explain import OperatorEstimate, StepEstimate, summed
from perfmodel.cost.steps.tables import PS_PER_S, StepTables, Usage, to_ps
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.graphs.drafting import Drafter, drafter_of, rejection, skipping_parts
from perfmodel.ops.graphs.step import StepGraph, build_graph
from perfmodel.ops.routing import Routing, slowest_uniform_routing
from perfmodel.ops.work import BatchShape, Work, windowed_contexts
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.engine.speculation import SpeculativeConfig
from perfmodel.specs.hardware import HardwareSpec

# Launches between two passes that no CUDA graph holds: the chosen token, positions, cache slots, lengths [assumed].
_LAUNCHES_BETWEEN = 8
# Looking up n-grams on the host, compiled: a scan of each sequence's tokens, and its bookkeeping [assumed].
_LOOKUP_PER_TOKEN_S = 1e-9
_LOOKUP_S = 2e-6


@dataclass(frozen=True)
class DraftTables:
    """Costs of drafting and verifying, beside the model's own steps.

    drafter, passes: the drafter and the cost of a pass; None if no device drafts
    first, rest:     the two parts of LayerSkip's verification; else None
    method:          the model's sampling"""

    config: SpeculativeConfig
    method: str
    drafter: Drafter | None
    passes: StepTables | None
    first: StepTables | None
    rest: StepTables | None

    @property
    def has_distribution(self) -> bool:
        return self.drafter is not None and self.drafter.has_distribution

    def with_drafts(self, shape: BatchShape, depth: int) -> BatchShape:
        """The step of `shape` in which each decode drafts `depth` tokens deep and verifies as many."""
        if not depth:
            return shape
        drafted = shape.num_decodes * self.config.nodes_by_depth[depth]
        # Pipelined, the drafter guesses the model's own token, too.
        return shape._replace(
            group_tokens=shape.group_tokens + drafted if shape.group_tokens else 0,
            drafting=(shape.num_decodes,) * (depth + self.config.pipelined),
            num_draft_tokens=drafted,
        )


class Pass(NamedTuple):
    """A drafter pass over `num_seqs` sequences of `queries` tokens each, with `rows` rows of logits and `context`
    tokens in all."""

    num_seqs: int
    queries: int
    rows: int
    context: int

    def shape(self, prefills: tuple[tuple[int, int], ...], spans: tuple[int, ...]) -> BatchShape:
        """The batch of the pass and its prompts; `spans`: of the drafter's attention."""
        tokens = self.num_seqs * self.queries
        return BatchShape(
            num_tokens=tokens + sum([new for new, _ in prefills]),
            num_samples=self.rows,
            prefills=prefills,
            num_decodes=self.num_seqs,
            decode_context=self.context,
            decode_windowed=windowed_contexts(self.num_seqs, self.context, spans),
            decode_tokens=tokens if self.queries > 1 else 0,
        )


def draft_tables(
    model: ModelSpec,
    engine: EngineSpec,
    hardware: HardwareSpec,
    calibration: Calibration,
    graph: StepGraph,
    *,
    sampling: str = "default",
    bytes_per_logit: float | None = None,
    routing: Routing = slowest_uniform_routing,
) -> DraftTables | None:
    """The tables for `engine.speculative_config`; None without one.

    graph: the model's own steps, with their calibration, sampling and bytes_per_logit; hardware, routing: also of the
    drafter. Raises SpecError for a model that this method cannot draft for."""
    config = engine.speculative_config
    if config is None:
        return None
    method = graph.model.sampling if sampling == "default" else sampling
    drafter = drafter_of(model, engine, method, routing, hardware)
    launching = OperatorTimer(hardware, calibration.model_copy(update={"host": _launches(hardware, calibration.host)}))
    passes = StepTables(drafter.graph, launching) if drafter is not None else None
    first = rest = None
    if config.method == "self_skip":
        silent = OperatorTimer(hardware, calibration.model_copy(update={"host": HostFit()}))
        build = partial(
            build_graph, sampling=sampling, bytes_per_logit=bytes_per_logit, routing=routing, hardware=hardware
        )
        parts = [build(model, engine, part=part) for part in skipping_parts(model, engine)]
        first = StepTables(parts[0], silent)
        rest = StepTables(parts[1], OperatorTimer(hardware, calibration))
    return DraftTables(config, method, drafter, passes, first, rest)


def _launches(hardware: HardwareSpec, host: HostFit) -> HostFit:
    """Host time of a pass: launches behind the device (all kernels without CUDA graphs); prompts as the model's."""
    is_gpu = hardware.kind == "gpu"
    return HostFit(
        hidden_step_s=_LAUNCHES_BETWEEN * EAGER_LAUNCH_S if is_gpu else 0.0,
        replays_graphs=is_gpu,
        captured_tokens=host.captured_tokens,
        hidden_prompt_layer_s=host.hidden_prompt_layer_s,
    )


def passes_of(config: SpeculativeConfig, drafter: Drafter, shape: BatchShape) -> list[Pass]:
    """The passes of the round of a step of `shape`; one for its prompts if no sequence drafts.

    Each pass reads the nodes drafted by the last (one of a chain, several of a tree) and drafts their children."""
    drafting = shape.drafting
    if not drafting:
        return [Pass(0, 1, 0, 0)] if shape.prefills and drafter.computes_prompts else []
    if drafter.has_one_pass:
        return [Pass(drafting[0], 1, drafting[0], shape.decode_context)]
    nodes, mean = config.nodes_by_depth, shape.decode_context / shape.num_decodes
    passes = []
    for i, count in enumerate(drafting):
        width = nodes[i] - nodes[i - 1] if i else 1
        queries = width if i else drafter.first_tokens
        passes.append(Pass(count, queries, count * width, round((mean + nodes[i]) * count)))
    return passes


_RESOURCES = ("compute", "memory", "communication")
Shares = tuple[tuple[float, ...], tuple[float, ...]]


class _Part(NamedTuple):
    """`times` passes over some operators; `label` prefixes their names."""

    cost_model: GraphCostModel
    shape: BatchShape
    label: str = ""
    times: int = 1


class SpeculativeCostModel:
    """Prices rounds: `tables` for the model's steps, `drafts` for drafting and verifying. draw: as of GraphCostModel"""

    def __init__(self, tables: StepTables, drafts: DraftTables, draw: Draw | None = None) -> None:
        self.has_runs = False
        self.tables, self.drafts, self._draw = tables, drafts, draw
        self._target = GraphCostModel(tables, draw)
        self._passes, self._first, self._rest = (
            GraphCostModel(item, draw) if item is not None else None
            for item in (drafts.passes, drafts.first, drafts.rest)
        )
        self._judged: dict[int, tuple[Work, int]] = {}  # by drafted tokens: judging them, and its picoseconds
        self._num_judged: dict[int, int] = {}  # how often so many tokens were judged
        self._shares: dict[tuple[int, ...], Shares] = {}
        self._lookup_wait = 0
        self._overlapped = 0  # picoseconds that pipelining has saved
        self._expected: dict[tuple[int, int, int], int] = {}
        self._scratch: SpeculativeCostModel | None = None  # prices what is not taken

    @property
    def host_wait(self) -> int:
        return self._lookup_wait + sum([cost_model.host_wait for cost_model in self._cost_models()])

    def _cost_models(self) -> list[GraphCostModel]:
        every = (self._target, self._passes, self._first, self._rest)
        return [cost_model for cost_model in every if cost_model is not None]

    def fresh(self) -> "SpeculativeCostModel":
        return SpeculativeCostModel(self.tables, self.drafts, self._draw)

    # ---------------------------------------------------------------- durations

    def duration_ps(self, shape: BatchShape) -> int:
        verification, drafting, config = self._verify(shape), self._draft(shape), self.drafts.config
        duration = max(verification, drafting)
        if not config.has_own_device:
            if not (config.pipelined and shape.drafting):
                return verification + drafting
            verified, drafted = self._shares_of(shape)
            together = max([a * verification + b * drafting for a, b in zip(verified, drafted, strict=True)])
            duration = max(duration, round(together))
        self._overlapped += verification + drafting - duration
        return duration

    def run(self, shape: BatchShape, growth: tuple[int, ...], num_steps: int) -> DecodeRun | None:
        """None: the tokens per step are drawn."""
        return None

    def drafting_step(self, num_decodes: int, depth: int, context: int) -> BatchShape:
        """A step in which `num_decodes` sequences of `context` tokens each draft `depth` deep."""
        total, spans = num_decodes * context, self.tables.graph.model.attention_spans
        windowed = windowed_contexts(num_decodes, total, spans)
        return self.drafts.with_drafts(BatchShape(num_decodes, num_decodes, (), num_decodes, total, windowed), depth)

    def expected_time(self, num_decodes: int, depth: int, context: int) -> int:
        """Picoseconds t(B, k) of a `drafting_step`, not counted, for choosing the depth k."""
        key = (num_decodes, depth, context)
        known = self._expected.get(key)
        if known is None:
            self._scratch = self._scratch or self.fresh()
            known = self._expected[key] = self._scratch.duration_ps(self.drafting_step(num_decodes, depth, context))
        return known

    def _verify(self, shape: BatchShape) -> int:
        duration = sum([part.cost_model.duration_ps(part.shape) for part in self._verification(shape)])
        drafted = shape.num_draft_tokens
        if drafted:
            duration += self._judging(drafted)[1]
            self._num_judged[drafted] = self._num_judged.get(drafted, 0) + 1
        return duration

    def _draft(self, shape: BatchShape) -> int:
        wait = to_ps(self._lookup_s(shape))
        self._lookup_wait += wait
        return wait + sum([part.cost_model.duration_ps(part.shape) for part in self._drafting(shape)])

    def _verification(self, shape: BatchShape) -> Iterator[_Part]:
        """All layers; for LayerSkip the first layers for the newest token only, then the rest."""
        drafted = shape.num_draft_tokens
        if not drafted:
            yield _Part(self._target, shape)
            return
        verified = shape.verified(self.tables.graph.model.attention_spans)
        if self._first is None or self._rest is None:
            yield _Part(self._target, verified)
            return
        tokens = shape.num_tokens
        group = shape.group_tokens * tokens // (tokens + drafted)
        newest = verified._replace(num_tokens=tokens, num_samples=0, group_tokens=group, decode_tokens=0)
        yield _Part(self._first, newest, "first layers: ")
        yield _Part(self._rest, verified)

    def _drafting(self, shape: BatchShape, are_merged: bool = False) -> Iterator[_Part]:
        """The drafter's passes; prompts ride in the first. are_merged: equal passes are one part"""
        drafter, cost_model = self.drafts.drafter, self._passes
        if drafter is None or cost_model is None:
            return
        spans = drafter.graph.model.attention_spans
        prefills = shape.prefills if drafter.computes_prompts else ()
        passes = passes_of(self.drafts.config, drafter, shape)
        merged = _alike(passes) if are_merged else [(1, entry) for entry in passes]
        for number, (times, item) in enumerate(merged):
            label = "draft: " if number or len(merged) == 1 else "draft, first pass: "
            yield _Part(cost_model, item.shape(prefills, spans), label, times)
            prefills = ()

    def _lookup_s(self, shape: BatchShape) -> float:
        """Host seconds of looking drafts up: n-grams, or a match in suffix trees of all that decode."""
        if self.drafts.config.method == "suffix":
            return shape.num_decodes * load_host_work().suffix.step_s if shape.drafting else 0.0
        if self.drafts.config.method != "ngram" or not shape.drafting:
            return 0.0
        return shape.drafting[0] * _LOOKUP_S + shape.decode_context * _LOOKUP_PER_TOKEN_S

    def _judging(self, drafted: int) -> tuple[Work, int]:
        known = self._judged.get(drafted)
        if known is None:
            drafts, vocab = self.drafts, self.tables.graph.model.vocab_size
            work = rejection(drafted, vocab, drafts.method, drafts.has_distribution)
            known = self._judged[drafted] = work, to_ps(self._target.time_s(work))
        return known

    # ---------------------------------------------------------------- pipelined

    def _shares_of(self, shape: BatchShape) -> Shares:
        """Resource shares of verification and drafting; contexts rounded to powers of two."""
        count, context, depth = shape.num_decodes, shape.decode_context, len(shape.drafting)
        key = (count, shape.num_draft_tokens, context.bit_length(), depth)
        known = self._shares.get(key)
        if known is None:
            windowed = windowed_contexts(count, context, self.tables.graph.model.attention_spans)
            decodes = BatchShape(count, count, (), count, context, windowed, num_draft_tokens=shape.num_draft_tokens)
            verifying, drafting = self.fresh(), self.fresh()
            verification = verifying._verify(decodes)
            drafted = drafting._draft(decodes._replace(drafting=(count,) * depth))
            known = _shares(verifying.usage(), verification), _shares(drafting.usage(), drafted)
            self._shares[key] = known
        return known

    # ---------------------------------------------------------------- operator by operator

    def explain(self, shape: BatchShape) -> StepEstimate:
        """The step operator by operator, in seconds, without the draw; equal passes are one row at mean context."""
        timer, rows, duration = self.tables.timer, list[OperatorEstimate](), self._lookup_s(shape)
        host = (0.0, 0.0)
        for part in self._verification(shape):
            result = part.cost_model.explain(part.shape)
            rows += _labelled(part, result)
            duration += result.duration_s
            host = result.serial_host_s, result.hidden_host_s
        if shape.num_draft_tokens:
            work, _ = self._judging(shape.num_draft_tokens)
            rows.append(OperatorEstimate(work.name, 1, work, timer.time(work)))
            duration += rows[-1].duration_s
        for part in self._drafting(shape, are_merged=True):
            result = part.cost_model.explain(part.shape)
            rows += _labelled(part, result)
            duration += part.times * result.duration_s
        if self.drafts.config.has_own_device or (self.drafts.config.pipelined and shape.drafting):
            duration = SpeculativeCostModel(self.tables, self.drafts).duration_ps(shape) / PS_PER_S
        return summed(rows, duration, host, timer)

    # ---------------------------------------------------------------- what it all amounted to

    def usage(self) -> Usage:
        """Totals over all steps so far, per device; time saved by pipelining is taken off overhead and bounds."""
        total = Usage()
        for cost_model in self._cost_models():
            total.add(cost_model.usage(), 1)
        for drafted, times in self._num_judged.items():
            work, duration = self._judging(drafted)
            total.flops += times * work.flops
            total.peak_compute_s += times * work.flops / self.tables.timer.device.peak(work.rate)
            total.hbm_bytes += times * work.hbm_bytes
            total.bound_s["memory"] += times * duration / PS_PER_S
        total.bound_s["overhead"] += self._lookup_wait / PS_PER_S
        saved, bound_s = self._overlapped / PS_PER_S, total.bound_s
        for bound in ("overhead", *sorted(_RESOURCES, key=lambda item: -bound_s[item])):
            taken = min(saved, bound_s[bound])
            bound_s[bound] -= taken
            saved -= taken
        return total


def _labelled(part: _Part, estimate: StepEstimate) -> Iterator[OperatorEstimate]:
    for row in estimate.rows:
        yield replace(row, name=part.label + row.name, count=part.times * row.count)


def _alike(passes: list[Pass]) -> list[tuple[int, Pass]]:
    """(count, pass with mean context) of consecutive passes of equal size."""
    alike = []
    for _, group in groupby(passes, key=lambda item: item[:3]):
        same = list(group)
        alike.append((len(same), same[0]._replace(context=round(sum([item.context for item in same]) / len(same)))))
    return alike


def _shares(usage: Usage, duration: int) -> tuple[float, ...]:
    seconds = max(duration / PS_PER_S, 1e-30)
    return tuple(min(usage.bound_s[resource] / seconds, 1.0) for resource in _RESOURCES)
