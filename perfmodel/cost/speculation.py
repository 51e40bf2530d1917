"""`SpeculationTimer`: how long a step takes in which sequences draft tokens and the model verifies them.

    round = verification + drafting,   verification = step with q = 1 + n tokens per sequence, + rejection sampling
                                       drafting     = sum over passes of the drafter (+ its share of the prompts)

Pipelined, the drafter works on the next round while the model verifies, on the same device. Then nothing is gained
where both want the same resource, and everything where they do not:

    round = max( verification, drafting, for each resource the time that both together need of it )

A resource is what bounds an operator: compute, memory, communication; what is left of an operator's time (launches, the
host) runs beside the other's. What comes of a round in which a draft was wrong (the next one has none to verify) is the
engine's business (`perfmodel.engine.speculation`).

All durations are whole picoseconds, exact to the operators as in `StepTimer`.
"""

__all__ = ["SpeculationTimer"]

from collections.abc import Sequence

from perfmodel.cost.drafts import DraftTables, ngram_seconds, passes_of
from perfmodel.cost.draws import Draw
from perfmodel.cost.step_tables import PS_PER_S, DrawnTables, StepTables
from perfmodel.cost.step_timer import StepTimer
from perfmodel.cost.usage import Usage
from perfmodel.ops.graphs.drafting import rejection

_RESOURCES = ("compute", "memory", "communication")
Prefills = tuple[tuple[int, int], ...]
Shares = tuple[tuple[float, ...], tuple[float, ...]]


class SpeculationTimer:
    """Durations of steps in picoseconds: `tables` are of the model's own steps, `drafts` of drafting and verifying.

    draw: factors on what the calibration says, for ensembles
    """

    def __init__(self, tables: StepTables, drafts: DraftTables, draw: Draw | None = None) -> None:
        self._target, self.drafts, self._draw = StepTimer(tables, draw), drafts, draw
        self.tables = self._target.tables
        self._passes = StepTimer(drafts.passes, draw) if drafts.passes is not None else None
        self._first = StepTimer(drafts.first, draw) if drafts.first is not None else None
        self._rest = StepTimer(drafts.rest, draw) if drafts.rest is not None else None
        self._spans = tables.graph.model.attention_spans
        self._rejections: dict[int, int] = {}
        self._rejected: dict[int, int] = {}  # how often so many tokens were judged
        self._shares: dict[tuple[int, ...], Shares] = {}
        self._ngram_wait = 0
        self._overlapped = 0  # picoseconds that pipelining has saved
        self._plain: dict[tuple[int, int, int], int] = {}
        self._scratch: SpeculationTimer | None = None

    @property
    def host_wait(self) -> int:
        """Picoseconds in which the device waited for the host."""
        timers = (self._target, self._passes, self._first, self._rest)
        return self._ngram_wait + sum(timer.host_wait for timer in timers if timer is not None)

    def fresh(self) -> "SpeculationTimer":
        """A timer of the same steps that has counted nothing; without the draw."""
        return SpeculationTimer(self._target_tables, self.drafts)

    # ---------------------------------------------------------------- durations

    def step(
        self,
        num_chunk_tokens: int,
        num_chunk_samples: int,
        prefills: Prefills,
        num_decodes: int,
        decode_context: int,
        decode_windowed: tuple[int, ...] = (),
        group_tokens: int = 0,
        drafting: Sequence[int] = (),
        num_draft_tokens: int = 0,
    ) -> int:
        """Picoseconds of one step.

        num_chunk_tokens, num_chunk_samples: tokens and samples of `prefills`
        decode_context, decode_windowed: sums over the decodes, their newest token included, drafted ones not
        drafting:         how many of them draft 1, 2 ... deep or deeper (pipelined: for the next round)
        num_draft_tokens: drafted tokens that are verified
        """
        verification = self._verify(
            num_chunk_tokens,
            num_chunk_samples,
            prefills,
            num_decodes,
            decode_context,
            decode_windowed,
            group_tokens,
            num_draft_tokens,
        )
        drafts = self._draft(num_chunk_tokens, prefills, num_decodes, decode_context, drafting)
        if not (self.drafts.config.pipelined and drafting):
            return verification + drafts
        verified, drafted = self._shares_of(num_decodes, num_draft_tokens, decode_context, len(drafting))
        together = max(a * verification + b * drafts for a, b in zip(verified, drafted, strict=True))
        duration = max(verification, drafts, round(together))
        self._overlapped += verification + drafts - duration
        return duration

    def expected_time(self, num_decodes: int, depth: int, context: int) -> int:
        """Picoseconds of a step in which `num_decodes` sequences of `context` tokens each draft `depth` deep.

        Nothing is counted as used: t(B, k), for whoever chooses k.
        """
        key = (num_decodes, depth, context)
        known = self._plain.get(key)
        if known is None:
            if self._scratch is None:
                self._scratch = SpeculationTimer(self._target_tables, self.drafts, self._draw)
            windowed = tuple(num_decodes * min(context, span) for span in self._spans)
            nodes = self.drafts.config.nodes_by_depth[depth]
            ahead = self.drafts.config.pipelined and depth > 0  # the drafter guesses the model's own token, too
            drafting = (num_decodes,) * (depth + ahead)
            known = self._plain[key] = self._scratch.step(
                0, 0, (), num_decodes, num_decodes * context, windowed, 0, drafting, num_decodes * nodes
            )
        return known

    @property
    def _target_tables(self) -> StepTables:
        tables = self.tables
        return tables.drawn_from if isinstance(tables, DrawnTables) else tables

    def _verify(
        self,
        num_chunk_tokens: int,
        num_chunk_samples: int,
        prefills: Prefills,
        num_decodes: int,
        context: int,
        windowed: tuple[int, ...],
        group_tokens: int,
        drafted: int,
    ) -> int:
        """The model's own step, and the judging of `drafted` tokens."""
        samples = num_decodes + num_chunk_samples
        if not drafted:
            tokens = num_decodes + num_chunk_tokens
            return self._target.step(tokens, samples, prefills, num_decodes, context, windowed, group_tokens)
        queries = num_decodes + drafted
        more = tuple(min(seen + drafted, num_decodes * span) for seen, span in zip(windowed, self._spans, strict=True))
        timer, duration = self._target, self._rejection(drafted)
        if self._first is not None and self._rest is not None:  # drafted tokens have passed the first layers
            timer, tokens = self._rest, num_decodes + num_chunk_tokens
            group = group_tokens * tokens // (tokens + drafted)
            duration += self._first.step(tokens, 0, prefills, num_decodes, context + drafted, more, group)
        return duration + timer.step(
            queries + num_chunk_tokens,
            samples + drafted,
            prefills,
            num_decodes,
            context + drafted,
            more,
            group_tokens,
            queries,
        )

    def _draft(
        self, num_chunk_tokens: int, prefills: Prefills, num_decodes: int, context: int, drafting: Sequence[int]
    ) -> int:
        """All passes of a round, and the prompts through the drafter."""
        if self.drafts.config.method == "ngram" and drafting:
            wait = round(ngram_seconds(drafting[0], context) * PS_PER_S)
            self._ngram_wait += wait
            return wait
        drafter, timer = self.drafts.drafter, self._passes
        if drafter is None or timer is None:
            return 0
        if not drafter.computes_prompts:
            num_chunk_tokens, prefills = 0, ()
        passes = passes_of(self.drafts.config, drafter, drafting, num_decodes, context)
        if not passes:
            return timer.step(num_chunk_tokens, 0, prefills, 0, 0) if prefills else 0
        spans, duration = drafter.graph.model.attention_spans, 0
        for each in passes:
            count, tokens = each.num_seqs, each.num_seqs * each.queries
            windowed = tuple(min(each.context, count * span) for span in spans)
            duration += timer.step(
                tokens + num_chunk_tokens, each.rows, prefills, count, each.context, windowed, 0, tokens
            )
            num_chunk_tokens, prefills = 0, ()
        return duration

    def _rejection(self, drafted: int) -> int:
        self._rejected[drafted] = self._rejected.get(drafted, 0) + 1
        known = self._rejections.get(drafted)
        if known is None:
            work = rejection(
                drafted, self.tables.graph.model.vocab_size, self.drafts.method, self.drafts.has_distribution
            )
            known = self._rejections[drafted] = round(self.tables.time(work).duration_s * PS_PER_S)
        return known

    # ---------------------------------------------------------------- pipelined

    def _shares_of(self, num_decodes: int, drafted: int, context: int, depth: int) -> Shares:
        """The shares of verification and of drafting that each resource is needed for; contexts to a power of two."""
        key = (num_decodes, drafted, context.bit_length(), depth)
        known = self._shares.get(key)
        if known is None:
            fresh = SpeculationTimer(self._target_tables, self.drafts, self._draw)
            windowed = tuple(min(context, num_decodes * span) for span in self._spans)
            verification = fresh._verify(0, 0, (), num_decodes, context, windowed, 0, drafted)
            verified = _shares(fresh.usage(), verification)
            fresh = SpeculationTimer(self._target_tables, self.drafts, self._draw)
            drafts = fresh._draft(0, (), num_decodes, context, (num_decodes,) * depth)
            known = self._shares[key] = verified, _shares(fresh.usage(), drafts)
        return known

    # ---------------------------------------------------------------- what it all amounted to

    def usage(self) -> Usage:
        """Totals over all steps so far, per device; time that pipelining has saved is taken off the overhead."""
        total = Usage()
        for timer in (self._target, self._passes, self._first, self._rest):
            if timer is not None:
                total.add(timer.usage(), 1)
        vocab, device = self.tables.graph.model.vocab_size, self.tables.timer.device
        for drafted, times in self._rejected.items():
            work = rejection(drafted, vocab, self.drafts.method, self.drafts.has_distribution)
            total.flops += times * work.flops
            total.peak_compute_s += times * work.flops / device.peak(work.rate)
            total.hbm_bytes += times * work.hbm_bytes
            total.bound_s["memory"] += times * self._rejections[drafted] / PS_PER_S
        total.bound_s["overhead"] += self._ngram_wait / PS_PER_S
        _take_off(total, self._overlapped / PS_PER_S)
        return total


def _shares(usage: Usage, duration: int) -> tuple[float, ...]:
    seconds = max(duration / PS_PER_S, 1e-30)
    return tuple(min(usage.bound_s[resource] / seconds, 1.0) for resource in _RESOURCES)


def _take_off(usage: Usage, seconds: float) -> None:
    """Of time counted twice: from overhead first, then from what there is most of."""
    bound_s = usage.bound_s
    for bound in ("overhead", *sorted(_RESOURCES, key=lambda each: -bound_s[each])):
        taken = min(seconds, bound_s[bound])
        bound_s[bound] -= taken
        seconds -= taken
