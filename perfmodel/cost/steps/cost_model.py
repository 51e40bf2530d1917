"""Step times by batch shape: `StepCostModel`, and `GraphCostModel` for one graph on one device.

Durations are whole picoseconds, so sums do not depend on order or grouping: steps advanced together take exactly as
long as one by one. A cost model counts uses of each cost; `usage` multiplies out FLOPs, bytes and bounds."""

from collections.abc import Hashable
from typing import Protocol

from perfmodel.cost.calibrations.draws import Draw
from perfmodel.cost.steps.curve import Curve, DecodeRun, HostWait, Piece, Used
from perfmodel.cost.steps.explain import StepEstimate, explain
from perfmodel.cost.steps.host import Host, step_ticks
from perfmodel.cost.steps.tables import PS_PER_S, DrawnTables, OperatorGroup, StepTables, Usage, to_ps
from perfmodel.ops.work import BatchShape, Depends, Work

_MAX_KNOWN = 20_000  # costs of one group, or batches, each with its count
_BESIDE_BATCH = (Depends.GROUP, Depends.ADAPTERS)  # what a step's other ranks, and its requests' adapters, cost
_OF_BATCH = (Depends.TOKENS, Depends.ROWS, Depends.SAMPLES)  # what `_Batch` sums up


class StepCostModel(Protocol):
    """Times steps. `GraphCostModel` is the plain one; those of pipelines and speculation wrap it.

    has_runs: whether `run` answers; else plans overlap or drafts are drawn, and steps are priced one by one"""

    has_runs: bool

    def duration_ps(self, shape: BatchShape) -> int:
        """Picoseconds of a step; counts it as taken."""
        ...

    def run(self, shape: BatchShape, growth: tuple[int, ...], num_steps: int) -> DecodeRun | None:
        """`num_steps` decode steps from `shape` on, one token per sequence each; `apply_leap` counts those taken.

        growth: per step, of `shape.decode_windowed`"""
        ...

    def explain(self, shape: BatchShape) -> StepEstimate:
        """The step operator by operator, in seconds."""
        ...

    def usage(self) -> Usage:
        """Totals over all steps so far, per device."""
        ...

    def fresh(self) -> "StepCostModel":
        """A cost model of the same steps with zero counts."""
        ...


class _Memo:
    """Costs in use of one group, by the group's part of a shape."""

    __slots__ = ("_folded", "_group", "_is_varied", "_tables", "by_token", "key", "known")

    def __init__(self, tables: StepTables | DrawnTables, group: OperatorGroup) -> None:
        self._tables, self._group = tables, group
        self.key, self.by_token = group.key, group.by_token
        self._is_varied = group.depends in (Depends.PREFILL, Depends.IMAGES, Depends.ADAPTERS)
        self.known: dict[Hashable, Used] = {}
        self._folded = Usage()  # of costs dropped to bound memory

    def add(self, key: Hashable) -> Used:
        """Compute the cost of a new `key`."""
        if len(self.known) >= _MAX_KNOWN and self._is_varied:  # the others are as many as the token budget
            for known in self.known.values():
                self._folded.add(known.usage, known.uses)
            self.known.clear()
        used = self.known[key] = Used(self._tables.cost(self._group, key))
        return used

    def at(self, shape: BatchShape) -> Used:
        """The cost for `shape`; not counted."""
        key = self.key(shape)
        return self.known.get(key) or self.add(key)

    def use(self, shape: BatchShape) -> int:
        """Picoseconds for `shape`; counted."""
        used = self.at(shape)
        used.uses += 1
        return used.duration

    def add_to(self, total: Usage) -> None:
        total.add(self._folded, 1)
        for used in self.known.values():
            total.add(used.usage, used.uses)


class _Batch:
    """Costs of steps with given tokens, samples, decodes and prompts at any context, and uses; `curves`: attention."""

    __slots__ = ("curves", "duration", "hidden", "serial", "used", "uses")

    def __init__(self, used: list[Used], curves: list[Curve], host: tuple[int, int]) -> None:
        self.used, self.curves = used, curves
        self.duration = sum([item.duration for item in used])
        self.serial, self.hidden = host
        self.uses = 0

    def finalize(self) -> None:
        """Add the count to the groups' costs."""
        for used in self.used:
            used.uses += self.uses
        self.uses = 0


class GraphCostModel:
    """Prices steps from the costs in `tables`, which may be shared. draw: error factors, for ensembles; host_share: of
    the host's time"""

    def __init__(self, tables: StepTables, draw: Draw | None = None, host_share: float = 1.0) -> None:
        self.has_runs = True
        self.tables = tables
        self._draw = draw
        self._costs = tables if draw is None else DrawnTables(tables, draw)
        self.host = Host(tables.graph, tables.timer, draw, host_share)
        self._waited = HostWait()
        self._memos = {group.depends: _Memo(self._costs, group) for group in tables.groups}
        self._of_batch = [memo for depends, memo in self._memos.items() if depends in _OF_BATCH]
        self._shared = tuple(memo for depends, memo in self._memos.items() if depends in _BESIDE_BATCH)
        self._prompts = self._memos.get(Depends.PREFILL)
        self._images = self._memos.get(Depends.IMAGES)
        self._batches: dict[tuple[int, int, int, int, int], _Batch] = {}
        self._curves: dict[tuple[int, int], list[Curve]] = {}
        self._mixed = tables.graph.mixed if tables.timer.mixes_attention else ()
        self._mixed_usage = Usage()

    @property
    def host_wait(self) -> int:
        """Picoseconds that the device waited for the host."""
        return self._waited.total

    def fresh(self) -> "GraphCostModel":
        return GraphCostModel(self.tables, self._draw)

    # ---------------------------------------------------------------- durations

    def duration_ps(self, shape: BatchShape) -> int:
        batch = self._batch_of(shape)
        batch.uses += 1
        device = batch.duration
        for curve in batch.curves:
            context = shape.decode_windowed[curve.axis - 1] if curve.axis else shape.decode_context
            segment = curve.segment(context)
            offset = context - segment.start
            segment.uses += 1
            segment.sum_offset += offset
            device += segment.base + segment.slope * offset
        for memo in self._shared:
            device += memo.use(shape)
        if shape.prefills:
            device += self._prompts.use(shape) if self._prompts is not None else 0
            if self._draw is not None:
                device += self._drawn_prompts(shape, self._draw)
            if self._mixed and shape.num_decodes:
                device += self._mixed_extra(shape)
        hidden = batch.hidden
        if shape.images and self._images is not None:
            device += self._images.use(shape)
            hidden += self.host.encoder
        if self.host.mask:
            hidden += self.host.masks(shape)
        serial = batch.serial
        if self.host.cores is not None:
            serial, hidden = self.host.cores.step(serial, hidden, shape.num_samples)
        duration = step_ticks(serial, hidden, device)
        self._waited.total += duration - device
        return duration

    def bound_seconds(self, shape: BatchShape) -> dict[str, float]:
        """Seconds of one step's operators by what bounds them; not counted as taken."""
        total = Usage()
        for memo in self._memos.values():
            total.add(memo.at(shape).usage, 1)
        for curve in self._batch_of(shape).curves:
            context = shape.decode_windowed[curve.axis - 1] if curve.axis else shape.decode_context
            curve.segment(context).add_one_to(total, context)
        return total.bound_s

    def _batch_of(self, shape: BatchShape) -> _Batch:
        num_decodes, queries = shape.num_decodes, shape.decode_tokens
        key = (shape.num_tokens, shape.num_samples, num_decodes, queries, len(shape.prefills))
        batch = self._batches.get(key)
        if batch is None:
            if len(self._batches) >= _MAX_KNOWN:
                self._settle()
                self._batches.clear()
            curves = self._curves_of(num_decodes, queries if queries > num_decodes else 0) if num_decodes else []
            batch = _Batch([memo.at(shape) for memo in self._of_batch], curves, self.host.ticks(shape))
            self._batches[key] = batch
        return batch

    def _curves_of(self, num_decodes: int, queries: int) -> list[Curve]:
        key = (num_decodes, queries)
        curves = self._curves.get(key)
        if curves is None:
            curves = [Curve(self._costs, num_decodes, axis, queries) for axis in self.tables.axes]
            self._curves[key] = curves
        return curves

    def run(self, shape: BatchShape, growth: tuple[int, ...], num_steps: int) -> DecodeRun:
        """See `StepCostModel.run`."""
        batch = self._batch_of(shape)
        fixed, serial, hidden, used = batch.duration, batch.serial, batch.hidden, batch.used
        num_decodes, windowed = shape.num_decodes, shape.decode_windowed
        if self.host.mask:
            hidden += self.host.masks(shape)
        for memo in self._shared:
            item = memo.at(shape)
            fixed += item.duration
            used = [*used, item]
        tracks = [
            (curve, windowed[curve.axis - 1], growth[curve.axis - 1])
            if curve.axis
            else (curve, shape.decode_context, num_decodes)
            for curve in batch.curves
        ]
        pieces: list[Piece] = []
        while True:
            n, device, delta, segments = num_steps, fixed, 0, []
            for curve, x, g in tracks:
                segment = curve.segment(x)
                offset = x - segment.start
                if g and x + (n - 1) * g >= segment.end:
                    n = (segment.end - x + g - 1) // g
                device += segment.base + segment.slope * offset
                delta += segment.slope * g
                segments.append((segment, offset, g))
            if device < hidden:  # the host is the longer one, as long as the device's work has not grown past it
                if delta > 0:
                    n = min(n, -((device - hidden) // delta))
                mean_wait = serial + hidden - device - delta * (n - 1) // 2
                pieces.append((n, serial + hidden, 0, segments, mean_wait))
            else:
                n = n if delta >= 0 else 1
                pieces.append((n, serial + device, delta, segments, serial))
            num_steps -= n
            if not num_steps:
                return DecodeRun(pieces, used, self._waited)
            tracks = [(curve, x + n * g, g) for curve, x, g in tracks]

    def _drawn_prompts(self, shape: BatchShape, draw: Draw) -> int:
        """Picoseconds that the draw's prompt factor adds: to operators of prompts and tokens beyond what decodes, or
        one token, take in every step, beside other ranks' tokens."""
        count = max(shape.num_decodes, 1)
        everyone = shape.group_tokens or self.tables.graph.shard.dp * shape.num_tokens
        alone = BatchShape(count, 0, (), count, group_tokens=everyone - shape.num_tokens + count)
        added = self._prompts.at(shape).duration if self._prompts is not None else 0
        for memo in self._memos.values():
            if memo.by_token:
                added += memo.at(shape).duration - memo.at(alone).duration
        return round(added * (draw.prompt - 1.0))

    def _mixed_extra(self, shape: BatchShape) -> int:
        """Extra picoseconds of one mixed kernel over one each for prompts and decodes."""
        extra, time = 0.0, self._costs.time
        for node, parts in self._mixed:
            together = time(node.work(shape))
            apart = sum(time(part.work(shape)).duration_s for part in parts)
            longer = node.count * (together.duration_s - apart)
            self._mixed_usage.bound_s[together.bound] += longer
            extra += longer
        return to_ps(extra)

    def time_s(self, work: Work) -> float:
        """Seconds of one run of an operator outside all groups."""
        return self._costs.time(work).duration_s

    def explain(self, shape: BatchShape) -> StepEstimate:
        """The step operator by operator, in seconds; without the draw."""
        return explain(self.tables.graph, self.tables.timer, shape)

    # ---------------------------------------------------------------- what it all amounted to

    def usage(self) -> Usage:
        total = Usage()
        total.add(self._mixed_usage, 1)
        self._settle()
        for memo in self._memos.values():
            memo.add_to(total)
        for curves in self._curves.values():
            for curve in curves:
                for segment in curve.segments.values():
                    segment.add_to(total)
        total.bound_s["overhead"] += self.host_wait / PS_PER_S
        return total

    def _settle(self) -> None:
        for batch in self._batches.values():
            batch.finalize()
