"""`StepTimer`: the cost model as the simulator calls it, millions of times: exact to the step graph, in integers.

Durations are whole picoseconds, so sums do not depend on the order or the grouping of the terms, and steps that are
advanced together take exactly as long as one by one.

The step graph's operators fall into groups by what they depend on. Groups of tokens, samples and prefills are memoised
by their key. Decode attention depends on the batch and on summed contexts; for a given batch it is tabulated over each
such context at knots an eighth of an octave apart and linear in between (lines are reproduced exactly, a curve to about
0.1 %), so the cost of a run of growing decode steps is an arithmetic series.

The timer also counts how often each entry is used; `usage` multiplies out FLOPs, bytes and what bounded them.
"""

__all__ = ["PS_PER_S", "StepTimer"]

from collections.abc import Iterable

from perfmodel.cost.decode_curve import Curve, DecodeRun, Piece, Segment
from perfmodel.cost.estimate import host_fit
from perfmodel.cost.roofline import OperatorTimer
from perfmodel.cost.usage import Usage
from perfmodel.ops.graph import StepGraph
from perfmodel.ops.node import OperatorNode
from perfmodel.ops.work import BatchShape, Depends

PS_PER_S = 10**12
_MAX_PREFILL_ENTRIES = 20_000


class _Entry:
    """A memoised duration and how often it was used."""

    __slots__ = ("duration", "uses")

    def __init__(self, duration: int) -> None:
        self.duration = duration
        self.uses = 0


class StepTimer:
    """Durations of steps of `graph` in picoseconds, on the hardware and with the fits of `timer`."""

    def __init__(self, graph: StepGraph, timer: OperatorTimer) -> None:
        self.graph = graph
        self.timer = timer
        self.num_spans = len(graph.model.attention_spans)
        self.host_wait = 0  # picoseconds in which the device waited for the host
        self._tokens: dict[int, _Entry] = {}
        self._samples: dict[int, _Entry] = {}
        self._prefills: dict[tuple[tuple[int, int], ...], _Entry] = {}
        self._curves: dict[int, list[Curve]] = {}
        self._folded = Usage()  # of prefill entries dropped to bound memory
        self._nodes = graph.by_depends
        self._decode_nodes = self._nodes_by_axis()
        self._mixed = graph.mixed if timer.mixes_attention else ()
        self._mixed_usage = Usage()
        self._host = host_fit(graph, timer.calibration)
        self._prompt = _ps(self._host.prompt_s(graph.model.num_layers, graph.num_moe_layers))
        self._host_times: list[tuple[int, int]] = []  # serial and hidden picoseconds by the number of sequences

    # ---------------------------------------------------------------- durations

    def step(
        self,
        num_tokens: int,
        num_samples: int,
        prefills: tuple[tuple[int, int], ...],
        num_decodes: int,
        decode_context: int,
        decode_windowed: tuple[int, ...] = (),
    ) -> int:
        """Picoseconds of one step (the arguments are the fields of a BatchShape)."""
        entry = self._tokens.get(num_tokens) or self._tokens_entry(num_tokens)
        entry.uses += 1
        device = entry.duration
        entry = self._samples.get(num_samples) or self._samples_entry(num_samples)
        entry.uses += 1
        device += entry.duration
        if prefills:
            entry = self._prefills.get(prefills) or self._prefills_entry(prefills)
            entry.uses += 1
            device += entry.duration
        if num_decodes:
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
                device += self._mixed_extra(prefills, num_decodes, decode_context)
        serial, hidden = self._host_time(num_decodes + len(prefills))
        if prefills:
            serial += self._prompt
        wait = serial + (hidden - device if hidden > device else 0)
        self.host_wait += wait
        return device + wait

    def decode_run(
        self, num_decodes: int, context: int, windowed: tuple[int, ...], growth: tuple[int, ...], num_steps: int
    ) -> DecodeRun:
        """`num_steps` decode steps of `num_decodes` sequences; each adds a token to each of them.

        context, windowed: sums at the first step, as in a BatchShape; growth: what each step adds to `windowed`
        """
        fixed = (self._tokens.get(num_decodes) or self._tokens_entry(num_decodes)).duration
        fixed += (self._samples.get(num_decodes) or self._samples_entry(num_decodes)).duration
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

    def commit(self, run: DecodeRun, num_decodes: int, num_steps: int) -> None:
        """Count the first `num_steps` of `run` as having run."""
        self.host_wait += run.commit(num_steps)
        self._tokens[num_decodes].uses += num_steps
        self._samples[num_decodes].uses += num_steps

    def time_nodes(self, nodes: Iterable[OperatorNode], shape: BatchShape) -> int:
        """Picoseconds of `nodes` for `shape`."""
        seconds = 0.0
        for node in nodes:
            seconds += node.count * self.timer.time(node.work(shape)).duration_s
        return _ps(seconds)

    def _host_time(self, num_sequences: int) -> tuple[int, int]:
        """Picoseconds of the host that always show, and that show only beyond the device's."""
        known, host = self._host_times, self._host
        while len(known) <= num_sequences:
            known.append((_ps(host.serial_s(len(known))), _ps(host.hidden_s(len(known)))))
        return known[num_sequences]

    def _mixed_extra(self, prefills: tuple[tuple[int, int], ...], num_decodes: int, context: int) -> int:
        """Picoseconds by which one kernel for prompts and decodes takes longer than one for each."""
        shape = BatchShape(0, 0, prefills, num_decodes, context)
        extra = 0.0
        for node, parts in self._mixed:
            together = self.timer.time(node.work(shape))
            apart = sum(self.timer.time(part.work(shape)).duration_s for part in parts)
            longer = node.count * (together.duration_s - apart)
            self._mixed_usage.bound_s[together.bound] += longer
            extra += longer
        return _ps(extra)

    # ---------------------------------------------------------------- entries, made on first use

    def _tokens_entry(self, num_tokens: int) -> _Entry:
        shape = BatchShape(num_tokens, 0)
        entry = self._tokens[num_tokens] = _Entry(self.time_nodes(self._nodes[Depends.TOKENS], shape))
        return entry

    def _samples_entry(self, num_samples: int) -> _Entry:
        nodes = self._nodes[Depends.SAMPLES] if num_samples else ()
        entry = self._samples[num_samples] = _Entry(self.time_nodes(nodes, BatchShape(0, num_samples)))
        return entry

    def _prefills_entry(self, prefills: tuple[tuple[int, int], ...]) -> _Entry:
        if len(self._prefills) >= _MAX_PREFILL_ENTRIES:
            self._fold_prefills()
        nodes = self._nodes[Depends.PREFILL]
        entry = self._prefills[prefills] = _Entry(self.time_nodes(nodes, BatchShape(0, 0, prefills)))
        return entry

    def _curves_of(self, batch: int) -> list[Curve]:
        curves = [
            Curve(self.time_nodes, nodes, batch, axis, self.num_spans) for axis, nodes in self._decode_nodes.items()
        ]
        self._curves[batch] = curves
        return curves

    def _nodes_by_axis(self) -> dict[int, list[OperatorNode]]:
        """Decode operators by the context they look at: axis 0 is the full one, axis i the i-th span."""
        by_axis: dict[int, list[OperatorNode]] = {0: []}
        base = (64, 64, (), 64, 64 * 1000, (64 * 100,) * self.num_spans)
        for node in self._nodes[Depends.DECODE]:
            reference = node.work(BatchShape(*base))
            axis = 0
            for i in range(self.num_spans):
                spans = tuple(6400 + 640 * (i == j) for j in range(self.num_spans))
                if node.work(BatchShape(*base[:5], spans)) != reference:
                    axis = i + 1
            by_axis.setdefault(axis, []).append(node)
        return by_axis

    # ---------------------------------------------------------------- what it all amounted to

    def usage(self) -> Usage:
        """Totals over all steps so far, per device."""
        total = Usage()
        total.add(self._folded, 1)
        total.add(self._mixed_usage, 1)
        for count, entry in self._tokens.items():
            total.add(self._usage_of(Depends.TOKENS, BatchShape(count, 0)), entry.uses)
        for count, entry in self._samples.items():
            if count:
                total.add(self._usage_of(Depends.SAMPLES, BatchShape(0, count)), entry.uses)
        for prefills, entry in self._prefills.items():
            total.add(self._usage_of(Depends.PREFILL, BatchShape(0, 0, prefills)), entry.uses)
        for curves in self._curves.values():
            for curve in curves:
                for segment in curve.segments.values():
                    self._add_segment(total, curve, segment)
        total.bound_s["overhead"] += self.host_wait / PS_PER_S
        return total

    def _add_segment(self, total: Usage, curve: Curve, segment: Segment) -> None:
        if not segment.uses:
            return
        share = segment.sum_offset / (segment.end - segment.start)
        total.add(self._usage_of_nodes(curve.nodes, curve.shape(segment.start)), segment.uses - share)
        total.add(self._usage_of_nodes(curve.nodes, curve.shape(segment.end)), share)

    def _fold_prefills(self) -> None:
        for prefills, entry in self._prefills.items():
            self._folded.add(self._usage_of(Depends.PREFILL, BatchShape(0, 0, prefills)), entry.uses)
        self._prefills.clear()

    def _usage_of(self, depends: Depends, shape: BatchShape) -> Usage:
        return self._usage_of_nodes(self._nodes[depends], shape)

    def _usage_of_nodes(self, nodes: Iterable[OperatorNode], shape: BatchShape) -> Usage:
        usage = Usage()
        for node in nodes:
            work = node.work(shape)
            time = self.timer.time(work)
            usage.flops += node.count * work.flops
            usage.peak_compute_s += node.count * work.flops / self.timer.device.peak(work.rate)
            usage.hbm_bytes += node.count * work.hbm_bytes
            usage.bound_s["overhead"] += node.count * time.overhead_s
            usage.bound_s[time.bound] += node.count * (time.duration_s - time.overhead_s)
        return usage


def _ps(seconds: float) -> int:
    return round(seconds * PS_PER_S)
