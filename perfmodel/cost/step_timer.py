"""`StepTimer`: the cost model as the simulator calls it, millions of times: exact to the step graph, in integers.

Durations are whole picoseconds, so sums do not depend on the order or the grouping of the terms, and steps that are
advanced together take exactly as long as one by one.

The step graph's operators fall into groups by what they depend on. Groups of tokens, samples and prefills are memoised
by their key (`StepTables`). Decode attention depends on the batch and on summed contexts; for a given batch it is
tabulated over each such context at knots an eighth of an octave apart and linear in between (lines are reproduced
exactly, a curve to about 0.1 %), so the cost of a run of growing decode steps is an arithmetic series.

The timer also counts how often each entry is used; `usage` multiplies out FLOPs, bytes and what bounded them.
"""

__all__ = ["StepTimer"]

from collections.abc import Mapping
from typing import Any

from perfmodel.cost.decode_curve import Curve, DecodeRun, Piece
from perfmodel.cost.draws import Draw
from perfmodel.cost.estimate import host_fit
from perfmodel.cost.step_tables import PS_PER_S, DrawnTables, StepCost, StepTables
from perfmodel.cost.usage import Usage
from perfmodel.ops.work import BatchShape, Depends

_MAX_PREFILL_ENTRIES = 20_000


class _Entry:
    """A known cost and how often it was used."""

    __slots__ = ("duration", "usage", "uses")

    def __init__(self, cost: StepCost) -> None:
        self.duration, self.usage = cost.duration, cost.usage
        self.uses = 0


class StepTimer:
    """Durations of steps in picoseconds, from the costs in `tables`, which other timers may share.

    draw: factors on what the calibration says, for ensembles
    """

    def __init__(self, tables: StepTables, draw: Draw | None = None) -> None:
        self.tables = tables if draw is None else DrawnTables(tables, draw)
        self._draw = draw
        self.host_wait = 0  # picoseconds in which the device waited for the host
        self._tokens: dict[int, _Entry] = {}
        self._rows: dict[tuple[int, int], _Entry] = {}
        self._group: dict[int, _Entry] = {}
        self._samples: dict[int, _Entry] = {}
        self._prefills: dict[tuple[tuple[int, int], ...], _Entry] = {}
        self._curves: dict[int, list[Curve]] = {}
        self._verifying: dict[tuple[int, int], list[Curve]] = {}  # curves of decodes with more than one token each
        self._folded = Usage()  # of prefill entries dropped to bound memory
        graph, timer = tables.graph, tables.timer
        self._mixed = graph.mixed if timer.mixes_attention else ()
        self._mixed_usage = Usage()
        self._has_rows = bool(graph.by_depends[Depends.ROWS])
        self._num_sharing = graph.shard.dp if graph.has_group else 0  # ranks that share operators
        self._host = host_fit(graph, timer)
        step, prompt = (draw.step, draw.step * draw.prompt) if draw is not None else (1.0, 1.0)
        self._host_factor = step
        self._prompt = _ps(prompt * self._host.prompt_s(graph.num_layers, graph.num_moe_layers))
        self._hidden_prompt = _ps(prompt * self._host.hidden_prompt_layer_s * graph.num_layers)
        self._host_times: list[tuple[int, int]] = []  # serial and hidden picoseconds by the number of sequences

    def fresh(self) -> "StepTimer":
        """A timer of the same steps that has counted nothing; without the draw."""
        tables = self.tables
        return StepTimer(tables.drawn_from if isinstance(tables, DrawnTables) else tables)

    # ---------------------------------------------------------------- durations

    def step(
        self,
        num_tokens: int,
        num_samples: int,
        prefills: tuple[tuple[int, int], ...],
        num_decodes: int,
        decode_context: int,
        decode_windowed: tuple[int, ...] = (),
        group_tokens: int = 0,
        decode_tokens: int = 0,
    ) -> int:
        """Picoseconds of one step (the arguments are the fields of a BatchShape)."""
        entry = self._tokens.get(num_tokens) or self._tokens_entry(num_tokens)
        entry.uses += 1
        device = for_tokens = entry.duration
        if self._has_rows:
            entry = self._rows_entry(num_tokens, num_decodes)
            entry.uses += 1
            device += entry.duration
            for_tokens += entry.duration
        entry = self._samples.get(num_samples) or self._samples_entry(num_samples)
        entry.uses += 1
        device += entry.duration
        everyone = 0
        if self._num_sharing:
            everyone = group_tokens or self._num_sharing * num_tokens
            entry = self._group_entry(everyone)
            entry.uses += 1
            device += entry.duration
            for_tokens += entry.duration
        if prefills:
            entry = self._prefills.get(prefills) or self._prefills_entry(prefills)
            entry.uses += 1
            device += entry.duration
            if self._draw is not None:
                device += self._drawn_prompts(entry.duration + for_tokens, num_decodes, everyone - num_tokens)
        if num_decodes:
            if decode_tokens > num_decodes:
                curves = self._verifying_curves(num_decodes, decode_tokens)
            else:
                curves = self._curves.get(num_decodes) or self._curves_of(num_decodes)
            context = decode_context
            for curve in curves:
                if curve.axis:
                    context = decode_windowed[curve.axis - 1]
                segment = curve.segment(context)
                offset = context - segment.start
                segment.uses += 1
                segment.sum_offset += offset
                device += segment.base + segment.slope * offset
            if prefills and self._mixed:
                device += self._mixed_extra(prefills, num_decodes, decode_context, decode_tokens)
        serial, hidden = self._host_time(num_decodes + len(prefills))
        if prefills and num_tokens > self._host.captured_tokens:
            serial += self._prompt
            hidden += self._hidden_prompt
        wait = serial + (hidden - device if hidden > device else 0)
        self.host_wait += wait
        return device + wait

    def decode_run(
        self,
        num_decodes: int,
        context: int,
        windowed: tuple[int, ...],
        growth: tuple[int, ...],
        num_steps: int,
        group_tokens: int = 0,
    ) -> DecodeRun:
        """`num_steps` decode steps of `num_decodes` sequences; each adds a token to each of them.

        context, windowed: sums at the first step, as in a BatchShape; growth: what each step adds to `windowed`
        """
        fixed = (self._tokens.get(num_decodes) or self._tokens_entry(num_decodes)).duration
        fixed += (self._samples.get(num_decodes) or self._samples_entry(num_decodes)).duration
        if self._has_rows:
            fixed += self._rows_entry(num_decodes, num_decodes).duration
        if self._num_sharing:
            fixed += self._group_entry(group_tokens or self._num_sharing * num_decodes).duration
        serial, hidden = self._host_time(num_decodes)
        curves = self._curves.get(num_decodes) or self._curves_of(num_decodes)
        contexts = [windowed[c.axis - 1] if c.axis else context for c in curves]
        growths = [growth[c.axis - 1] if c.axis else num_decodes for c in curves]
        pieces: list[Piece] = []
        while num_steps:
            n, device, delta, segments = num_steps, fixed, 0, []
            for curve, x, g in zip(curves, contexts, growths, strict=True):
                segment = curve.segment(x)
                if g:
                    n = min(n, -((x - segment.end) // g))
                device += segment.base + segment.slope * (x - segment.start)
                delta += segment.slope * g
                segments.append((segment, x - segment.start, g))
            if device < hidden:  # the host is the longer one, as long as the device's work has not grown past it
                if delta > 0:
                    n = min(n, -((device - hidden) // delta))
                mean_wait = serial + hidden - device - delta * (n - 1) // 2
                pieces.append((n, serial + hidden, 0, tuple(segments), mean_wait))
            else:
                n = n if delta >= 0 else 1
                pieces.append((n, serial + device, delta, tuple(segments), serial))
            contexts = [x + n * g for x, g in zip(contexts, growths, strict=True)]
            num_steps -= n
        return DecodeRun(pieces)

    def commit(self, run: DecodeRun, num_decodes: int, num_steps: int, group_tokens: int = 0) -> None:
        """Count the first `num_steps` of `run` as having run."""
        self.host_wait += run.commit(num_steps)
        self._tokens[num_decodes].uses += num_steps
        self._samples[num_decodes].uses += num_steps
        if self._has_rows:
            self._rows_entry(num_decodes, num_decodes).uses += num_steps
        if self._num_sharing:
            self._group_entry(group_tokens or self._num_sharing * num_decodes).uses += num_steps

    def _host_time(self, num_sequences: int) -> tuple[int, int]:
        """Picoseconds of the host that always show, and that show only beyond the device's."""
        known, host = self._host_times, self._host
        while len(known) <= num_sequences:
            serial, hidden = host.serial_s(len(known)), host.hidden_s(len(known))
            known.append((_ps(self._host_factor * serial), _ps(self._host_factor * hidden)))
        return known[num_sequences]

    def _drawn_prompts(self, with_prompts: int, num_decodes: int, num_of_others: int) -> int:
        """Picoseconds that the draw's factor on prompts adds to a step whose operators of prompts and tokens take
        `with_prompts`: to what they take beyond those of its decodes, or of one token, which every step takes, beside
        `num_of_others` tokens of other ranks."""
        assert self._draw is not None
        count = max(num_decodes, 1)
        without = (self._tokens.get(count) or self._tokens_entry(count)).duration
        if self._has_rows:
            without += self._rows_entry(count, count).duration
        if self._num_sharing:
            without += self._group_entry(num_of_others + count).duration
        return round((with_prompts - without) * (self._draw.prompt - 1.0))

    def _mixed_extra(
        self, prefills: tuple[tuple[int, int], ...], num_decodes: int, context: int, decode_tokens: int
    ) -> int:
        """Picoseconds by which one kernel for prompts and decodes takes longer than one for each."""
        shape = BatchShape(0, 0, prefills, num_decodes, context, decode_tokens=decode_tokens)
        extra, time = 0.0, self.tables.time
        for node, parts in self._mixed:
            together = time(node.work(shape))
            apart = sum(time(part.work(shape)).duration_s for part in parts)
            longer = node.count * (together.duration_s - apart)
            self._mixed_usage.bound_s[together.bound] += longer
            extra += longer
        return _ps(extra)

    # ---------------------------------------------------------------- entries, made on first use

    def _tokens_entry(self, num_tokens: int) -> _Entry:
        entry = self._tokens[num_tokens] = _Entry(self.tables.tokens(num_tokens))
        return entry

    def _rows_entry(self, num_tokens: int, num_decodes: int) -> _Entry:
        key = (num_tokens, num_decodes)
        entry = self._rows.get(key)
        if entry is None:
            entry = self._rows[key] = _Entry(self.tables.rows(num_tokens, num_decodes))
        return entry

    def _group_entry(self, group_tokens: int) -> _Entry:
        entry = self._group.get(group_tokens)
        if entry is None:
            entry = self._group[group_tokens] = _Entry(self.tables.group(group_tokens))
        return entry

    def _samples_entry(self, num_samples: int) -> _Entry:
        entry = self._samples[num_samples] = _Entry(self.tables.samples(num_samples))
        return entry

    def _prefills_entry(self, prefills: tuple[tuple[int, int], ...]) -> _Entry:
        if len(self._prefills) >= _MAX_PREFILL_ENTRIES:
            _add_entries(self._folded, self._prefills)
            self._prefills.clear()
        entry = self._prefills[prefills] = _Entry(self.tables.prefills(prefills))
        return entry

    def _curves_of(self, batch: int) -> list[Curve]:
        curves = self._curves[batch] = [Curve(self.tables, batch, axis) for axis in self.tables.axes]
        return curves

    def _verifying_curves(self, batch: int, queries: int) -> list[Curve]:
        curves = self._verifying.get((batch, queries))
        if curves is None:
            curves = [Curve(self.tables, batch, axis, queries) for axis in self.tables.axes]
            self._verifying[batch, queries] = curves
        return curves

    # ---------------------------------------------------------------- what it all amounted to

    def usage(self) -> Usage:
        """Totals over all steps so far, per device."""
        total = Usage()
        total.add(self._folded, 1)
        total.add(self._mixed_usage, 1)
        for entries in (self._tokens, self._rows, self._group, self._samples, self._prefills):
            _add_entries(total, entries)
        for curves in (*self._curves.values(), *self._verifying.values()):
            for curve in curves:
                for segment in curve.segments.values():
                    segment.add_to(total)
        total.bound_s["overhead"] += self.host_wait / PS_PER_S
        return total


def _add_entries(total: Usage, entries: Mapping[Any, _Entry]) -> None:
    for entry in entries.values():
        total.add(entry.usage, entry.uses)


def _ps(seconds: float) -> int:
    return round(seconds * PS_PER_S)
