"""What a step takes, by its shape: `StepPricer`, and `GraphPricer`, which prices the steps of one graph on one device.

The simulator asks millions of times, so durations are whole picoseconds: sums do not depend on the order or the
grouping of the terms, and steps that are advanced together take exactly as long as one by one.

A pricer also counts how often each cost is used; `usage` multiplies out FLOPs, bytes and what bounded them.
"""

__all__ = ["GraphPricer", "StepPricer"]

from collections.abc import Hashable
from typing import Protocol

from perfmodel.cost.draws import Draw
from perfmodel.cost.steps.curve import Curve, DecodeRun, Piece, Used
from perfmodel.cost.steps.explain import StepEstimate, explain
from perfmodel.cost.steps.host import Host, step_ticks
from perfmodel.cost.steps.tables import PS_PER_S, DrawnTables, OperatorGroup, StepTables, to_ps
from perfmodel.cost.steps.usage import Usage
from perfmodel.ops.work import BatchShape, Depends, Work

_MOST_KNOWN = 20_000  # costs of one group, each with its count


class StepPricer(Protocol):
    """Says what steps take. `GraphPricer` is the plain one, which those of pipelines and of speculation wrap.

    has_runs: whether `run` answers; else steps are priced one by one, as plans overlap or drafts are drawn
    """

    has_runs: bool

    def price(self, shape: BatchShape) -> int:
        """Picoseconds of a step, which is counted as taken."""
        ...

    def run(self, shape: BatchShape, growth: tuple[int, ...], num_steps: int) -> DecodeRun | None:
        """`num_steps` decode steps from `shape` on, each of which adds a token to each sequence.

        growth: what each step adds to `shape.decode_windowed`
        """
        ...

    def commit(self, run: DecodeRun, num_steps: int) -> None:
        """Count the first `num_steps` of `run` as taken."""
        ...

    def explain(self, shape: BatchShape) -> StepEstimate:
        """The step operator by operator, in seconds."""
        ...

    def usage(self) -> Usage:
        """Totals over all steps so far, per device."""
        ...

    def fresh(self) -> "StepPricer":
        """A pricer of the same steps that has counted nothing."""
        ...


class _Memo:
    """The costs of one group that are in use, by the group's part of a shape."""

    __slots__ = ("_folded", "_group", "_tables", "by_token", "key", "known")

    def __init__(self, tables: StepTables | DrawnTables, group: OperatorGroup) -> None:
        self._tables, self._group = tables, group
        self.key, self.by_token = group.key, group.by_token
        self.known: dict[Hashable, Used] = {}
        self._folded = Usage()  # of costs dropped to bound memory

    def add(self, key: Hashable) -> Used:
        """Work out what `key`, not known yet, costs."""
        if len(self.known) >= _MOST_KNOWN and not self.by_token:  # those are as many as the token budget
            self._fold()
        used = self.known[key] = Used(self._tables.cost(self._group, key))
        return used

    def at(self, shape: BatchShape) -> Used:
        """The cost for `shape`, which is not counted as used."""
        key = self.key(shape)
        return self.known.get(key) or self.add(key)

    def _fold(self) -> None:
        for used in self.known.values():
            self._folded.add(used.usage, used.uses)
        self.known.clear()

    def add_to(self, total: Usage) -> None:
        """Add what its uses amount to."""
        total.add(self._folded, 1)
        for used in self.known.values():
            total.add(used.usage, used.uses)


class GraphPricer:
    """Prices steps from the costs in `tables`, which other pricers may share.

    draw: factors on what the calibration says, for ensembles
    """

    def __init__(self, tables: StepTables, draw: Draw | None = None) -> None:
        self.has_runs = True
        self.tables = tables
        self._draw = draw
        self._costs = tables if draw is None else DrawnTables(tables, draw)
        self.host = Host(tables.graph, tables.timer, draw)
        self.host_wait = 0  # picoseconds in which the device waited for the host
        self._memos, self._prompts = list[_Memo](), list[_Memo]()
        for group in tables.groups:
            (self._prompts if group.depends is Depends.PREFILL else self._memos).append(_Memo(self._costs, group))
        self._curves: dict[int, list[Curve]] = {}
        self._verifying: dict[tuple[int, int], list[Curve]] = {}  # curves of decodes with more than one token each
        self._mixed = tables.graph.mixed if tables.timer.mixes_attention else ()
        self._mixed_usage = Usage()

    def fresh(self) -> "GraphPricer":
        """A pricer of the same steps that has counted nothing."""
        return GraphPricer(self.tables, self._draw)

    # ---------------------------------------------------------------- durations

    def price(self, shape: BatchShape) -> int:
        """Picoseconds of a step, which is counted as taken."""
        device = 0
        for memo in self._memos:
            key = memo.key(shape)
            used = memo.known.get(key) or memo.add(key)
            used.uses += 1
            device += used.duration
        if shape.num_decodes:
            device += self._attend(shape)
        if shape.prefills:
            for memo in self._prompts:
                used = memo.at(shape)
                used.uses += 1
                device += used.duration
            if self._draw is not None:
                device += self._drawn_prompts(shape, self._draw)
            if self._mixed and shape.num_decodes:
                device += self._mixed_extra(shape)
        serial, hidden = self.host.ticks(shape)
        duration = step_ticks(serial, hidden, device)
        self.host_wait += duration - device
        return duration

    def _attend(self, shape: BatchShape) -> int:
        """Picoseconds of the attention of the decodes."""
        duration, windowed = 0, shape.decode_windowed
        for curve in self._curves_of(shape):
            context = windowed[curve.axis - 1] if curve.axis else shape.decode_context
            segment = curve.segment(context)
            offset = context - segment.start
            segment.uses += 1
            segment.sum_offset += offset
            duration += segment.base + segment.slope * offset
        return duration

    def run(self, shape: BatchShape, growth: tuple[int, ...], num_steps: int) -> DecodeRun:
        """`num_steps` decode steps from `shape` on, each of which adds a token to each sequence.

        growth: what each step adds to `shape.decode_windowed`
        """
        used = [memo.at(shape) for memo in self._memos]
        fixed = sum([each.duration for each in used])
        serial, hidden = self.host.ticks(shape)
        curves, windowed = self._curves_of(shape), shape.decode_windowed
        contexts = [windowed[c.axis - 1] if c.axis else shape.decode_context for c in curves]
        growths = [growth[c.axis - 1] if c.axis else shape.num_decodes for c in curves]
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
                pieces.append((n, serial + hidden, 0, segments, mean_wait))
            else:
                n = n if delta >= 0 else 1
                pieces.append((n, serial + device, delta, segments, serial))
            num_steps -= n
            if num_steps:
                contexts = [x + n * g for x, g in zip(contexts, growths, strict=True)]
        return DecodeRun(pieces, used)

    def commit(self, run: DecodeRun, num_steps: int) -> None:
        """Count the first `num_steps` of `run` as taken."""
        self.host_wait += run.commit(num_steps)

    def _curves_of(self, shape: BatchShape) -> list[Curve]:
        batch, queries = shape.num_decodes, shape.decode_tokens
        if queries > batch:
            curves = self._verifying.get((batch, queries))
            if curves is None:
                curves = [Curve(self._costs, batch, axis, queries) for axis in self.tables.axes]
                self._verifying[batch, queries] = curves
            return curves
        curves = self._curves.get(batch)
        if curves is None:
            curves = self._curves[batch] = [Curve(self._costs, batch, axis) for axis in self.tables.axes]
        return curves

    def _drawn_prompts(self, shape: BatchShape, draw: Draw) -> int:
        """Picoseconds that the draw's factor on prompts adds: to what the operators of prompts and tokens take beyond
        those of the decodes, or of one token, which every step takes, beside the tokens of other ranks."""
        count = max(shape.num_decodes, 1)
        everyone = shape.group_tokens or self.tables.graph.shard.dp * shape.num_tokens
        alone = BatchShape(count, 0, (), count, group_tokens=everyone - shape.num_tokens + count)
        added = sum([memo.at(shape).duration for memo in self._prompts])
        for memo in self._memos:
            if memo.by_token:
                added += memo.at(shape).duration - memo.at(alone).duration
        return round(added * (draw.prompt - 1.0))

    def _mixed_extra(self, shape: BatchShape) -> int:
        """Picoseconds by which one kernel for prompts and decodes takes longer than one for each."""
        extra, time = 0.0, self._costs.time
        for node, parts in self._mixed:
            together = time(node.work(shape))
            apart = sum(time(part.work(shape)).duration_s for part in parts)
            longer = node.count * (together.duration_s - apart)
            self._mixed_usage.bound_s[together.bound] += longer
            extra += longer
        return to_ps(extra)

    def time_s(self, work: Work) -> float:
        """Seconds of one run of an operator that is in no group."""
        return self._costs.time(work).duration_s

    def explain(self, shape: BatchShape) -> StepEstimate:
        """The step operator by operator, in seconds; without the draw."""
        return explain(self.tables.graph, self.tables.timer, shape)

    # ---------------------------------------------------------------- what it all amounted to

    def usage(self) -> Usage:
        """Totals over all steps so far, per device."""
        total = Usage()
        total.add(self._mixed_usage, 1)
        for memo in (*self._memos, *self._prompts):
            memo.add_to(total)
        for curves in (*self._curves.values(), *self._verifying.values()):
            for curve in curves:
                for segment in curve.segments.values():
                    segment.add_to(total)
        total.bound_s["overhead"] += self.host_wait / PS_PER_S
        return total
