"""`SpeculativePricer`: what a step takes in which sequences draft tokens and the model verifies them.

    round = verification + drafting,   verification = step with q = 1 + n tokens per sequence, + rejection sampling
                                       drafting     = sum over passes of the drafter (+ its share of the prompts)

Pipelined, the drafter works on the next round while the model verifies, on the same device. Then nothing is gained
where both want the same resource, and everything where they do not:

    round = max( verification, drafting, for each resource the time that both together need of it )

A resource is what bounds an operator: compute, memory, communication; what is left of an operator's time (launches, the
host) runs beside the other's. A drafter on devices of its own shares none of them: round = max(verification, drafting).
What comes of a round in which a draft was wrong (the next one has none to verify) is the engine's business
(`perfmodel.engine.config`).
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from perfmodel.cost.calibrations.draws import Draw
from perfmodel.cost.steps.curve import DecodeRun
from perfmodel.cost.steps.drafts import DraftTables, Pass, ngram_seconds, passes_of
from perfmodel.cost.steps.explain import OperatorEstimate, StepEstimate, summed
from perfmodel.cost.steps.pricer import GraphPricer
from perfmodel.cost.steps.tables import PS_PER_S, StepTables, Usage, to_ps
from perfmodel.ops.graphs.drafting import rejection
from perfmodel.ops.work import BatchShape, Work, windowed_contexts

_RESOURCES = ("compute", "memory", "communication")
Shares = tuple[tuple[float, ...], tuple[float, ...]]


class _Part(NamedTuple):
    """A pass over some operators, `times` times in a row; `label` is put before their names."""

    pricer: GraphPricer
    shape: BatchShape
    label: str = ""
    times: int = 1


class SpeculativePricer:
    """Prices rounds: `tables` are of the model's own steps, `drafts` of drafting and verifying.

    draw: factors on what the calibration says, for ensembles
    """

    def __init__(self, tables: StepTables, drafts: DraftTables, draw: Draw | None = None) -> None:
        self.has_runs = False
        self.tables, self.drafts, self._draw = tables, drafts, draw
        self._target = GraphPricer(tables, draw)
        self._passes, self._first, self._rest = (
            GraphPricer(each, draw) if each is not None else None for each in (drafts.passes, drafts.first, drafts.rest)
        )
        self._judged: dict[int, tuple[Work, int]] = {}  # by drafted tokens: judging them, and its picoseconds
        self._num_judged: dict[int, int] = {}  # how often so many tokens were judged
        self._shares: dict[tuple[int, ...], Shares] = {}
        self._lookup_wait = 0
        self._overlapped = 0  # picoseconds that pipelining has saved
        self._expected: dict[tuple[int, int, int], int] = {}
        self._scratch: SpeculativePricer | None = None  # prices what is not taken

    @property
    def host_wait(self) -> int:
        """Picoseconds in which the device waited for the host."""
        return self._lookup_wait + sum([pricer.host_wait for pricer in self._pricers()])

    def _pricers(self) -> list[GraphPricer]:
        every = (self._target, self._passes, self._first, self._rest)
        return [pricer for pricer in every if pricer is not None]

    def fresh(self) -> "SpeculativePricer":
        """A pricer of the same steps that has counted nothing."""
        return SpeculativePricer(self.tables, self.drafts, self._draw)

    # ---------------------------------------------------------------- durations

    def price(self, shape: BatchShape) -> int:
        """Picoseconds of a step, which is counted as taken."""
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
        """None: how many tokens a step brings is drawn."""
        return None

    def drafting_step(self, num_decodes: int, depth: int, context: int) -> BatchShape:
        """The shape of a step in which `num_decodes` sequences of `context` tokens each draft `depth` deep."""
        total, spans = num_decodes * context, self.tables.graph.model.attention_spans
        windowed = windowed_contexts(num_decodes, total, spans)
        return self.drafts.with_drafts(BatchShape(num_decodes, num_decodes, (), num_decodes, total, windowed), depth)

    def expected_time(self, num_decodes: int, depth: int, context: int) -> int:
        """Picoseconds of a `drafting_step`, which is not counted as taken: t(B, k), for whoever chooses k."""
        key = (num_decodes, depth, context)
        known = self._expected.get(key)
        if known is None:
            self._scratch = self._scratch or self.fresh()
            known = self._expected[key] = self._scratch.price(self.drafting_step(num_decodes, depth, context))
        return known

    def _verify(self, shape: BatchShape) -> int:
        """The model's own step, and the judging of drafted tokens."""
        duration = sum([part.pricer.price(part.shape) for part in self._verification(shape)])
        drafted = shape.num_draft_tokens
        if drafted:
            duration += self._judging(drafted)[1]
            self._num_judged[drafted] = self._num_judged.get(drafted, 0) + 1
        return duration

    def _draft(self, shape: BatchShape) -> int:
        """All passes of a round, and the prompts through the drafter."""
        wait = to_ps(self._lookup_s(shape))
        self._lookup_wait += wait
        return wait + sum([part.pricer.price(part.shape) for part in self._drafting(shape)])

    def _verification(self, shape: BatchShape) -> Iterator[_Part]:
        """All layers; or, where drafted tokens have passed the first ones, those for the newest alone, and the rest."""
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
        """The passes of the drafter; prompts ride in the first. are_merged: those of equal sizes are one part."""
        drafter, pricer = self.drafts.drafter, self._passes
        if drafter is None or pricer is None:
            return
        spans = drafter.graph.model.attention_spans
        prefills = shape.prefills if drafter.computes_prompts else ()
        passes = passes_of(self.drafts.config, drafter, shape)
        merged = _alike(passes) if are_merged else [(1, each) for each in passes]
        for number, (times, each) in enumerate(merged):
            label = "draft: " if number or len(merged) == 1 else "draft, first pass: "
            yield _Part(pricer, each.shape(prefills, spans), label, times)
            prefills = ()

    def _lookup_s(self, shape: BatchShape) -> float:
        """Seconds in which the host looks up n-grams."""
        if self.drafts.config.method != "ngram" or not shape.drafting:
            return 0.0
        return ngram_seconds(shape.drafting[0], shape.decode_context)

    def _judging(self, drafted: int) -> tuple[Work, int]:
        known = self._judged.get(drafted)
        if known is None:
            drafts, vocab = self.drafts, self.tables.graph.model.vocab_size
            work = rejection(drafted, vocab, drafts.method, drafts.has_distribution)
            known = self._judged[drafted] = work, to_ps(self._target.time_s(work))
        return known

    # ---------------------------------------------------------------- pipelined

    def _shares_of(self, shape: BatchShape) -> Shares:
        """The shares of verification and of drafting that each resource is needed for; contexts to a power of two."""
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
        """The step operator by operator, in seconds; without the draw.

        Passes of equal sizes are one row an operator, at their mean context.
        """
        timer, rows, duration = self.tables.timer, list[OperatorEstimate](), self._lookup_s(shape)
        host = (0.0, 0.0)
        for part in self._verification(shape):
            found = part.pricer.explain(part.shape)
            rows += _labelled(part, found)
            duration += found.duration_s
            host = found.serial_host_s, found.hidden_host_s
        if shape.num_draft_tokens:
            work, _ = self._judging(shape.num_draft_tokens)
            rows.append(OperatorEstimate(work.name, 1, work, timer.time(work)))
            duration += rows[-1].duration_s
        for part in self._drafting(shape, are_merged=True):
            found = part.pricer.explain(part.shape)
            rows += _labelled(part, found)
            duration += part.times * found.duration_s
        if self.drafts.config.has_own_device or (self.drafts.config.pipelined and shape.drafting):
            duration = SpeculativePricer(self.tables, self.drafts).price(shape) / PS_PER_S
        return summed(rows, duration, host, timer)

    # ---------------------------------------------------------------- what it all amounted to

    def usage(self) -> Usage:
        """Totals over all steps so far, per device; time that pipelining has saved is taken off the overhead."""
        total = Usage()
        for pricer in self._pricers():
            total.add(pricer.usage(), 1)
        for drafted, times in self._num_judged.items():
            work, duration = self._judging(drafted)
            total.flops += times * work.flops
            total.peak_compute_s += times * work.flops / self.tables.timer.device.peak(work.rate)
            total.hbm_bytes += times * work.hbm_bytes
            total.bound_s["memory"] += times * duration / PS_PER_S
        total.bound_s["overhead"] += self._lookup_wait / PS_PER_S
        _take_off(total, self._overlapped / PS_PER_S)
        return total


def _labelled(part: _Part, estimate: StepEstimate) -> Iterator[OperatorEstimate]:
    for row in estimate.rows:
        yield replace(row, name=part.label + row.name, count=part.times * row.count)


def _alike(passes: list[Pass]) -> list[tuple[int, Pass]]:
    """Consecutive passes of equal sizes: how many, and one of them with their mean context."""
    found = []
    for _, group in groupby(passes, key=lambda each: each[:3]):
        same = list(group)
        found.append((len(same), same[0]._replace(context=round(sum([each.context for each in same]) / len(same)))))
    return found


def _shares(usage: Usage, duration: int) -> tuple[float, ...]:
    seconds = max(duration / PS_PER_S, 1e-30)
    return tuple(min(usage.bound_s[resource] / seconds, 1.0) for resource in _RESOURCES)


def _take_off(usage: Usage, seconds: float) -> None:
    """Take time that was counted twice off the overhead first, then off what there is most of."""
    bound_s = usage.bound_s
    for bound in ("overhead", *sorted(_RESOURCES, key=lambda each: -bound_s[each])):
        taken = min(seconds, bound_s[bound])
        bound_s[bound] -= taken
        seconds -= taken
