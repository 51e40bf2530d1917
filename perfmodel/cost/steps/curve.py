"""Decode steps over growing contexts: attention time as a curve tabulated at knots, and runs of steps along it.

Knots are an eighth of an octave apart, linear in between: exact for lines, within about 0.1 % for curves. So a run of
growing decode steps is an arithmetic series. Times are whole picoseconds: sums do not depend on order."""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import repeat

from perfmodel.cost.steps.tables import DrawnTables, StepCost, StepTables, Usage


def _knots() -> list[int]:
    knots, x = [0], 1.0
    while x < 2**44:
        if round(x) > knots[-1]:
            knots.append(round(x))
        x *= 2**0.125
    return knots


_KNOTS = _knots()


class Used:
    """A cost and its number of uses."""

    __slots__ = ("duration", "usage", "uses")

    def __init__(self, cost: StepCost) -> None:
        self.duration, self.usage = cost.duration, cost.usage
        self.uses = 0


class Segment:
    """A line over context from `start` up to `end`: `base + slope * (x - start)`.

    at_start, at_end: the costs there"""

    __slots__ = ("_ends", "base", "end", "slope", "start", "sum_offset", "uses")

    def __init__(self, start: int, end: int, at_start: StepCost, at_end: StepCost) -> None:
        self.start, self.end, self.base = start, end, at_start.duration
        self.slope = round((at_end.duration - at_start.duration) / (end - start))
        self._ends = at_start.usage, at_end.usage
        self.uses = 0
        self.sum_offset = 0

    def add_to(self, total: Usage) -> None:
        if self.uses:
            self._add(total, self.uses, self.sum_offset)

    def add_one_to(self, total: Usage, context: int) -> None:
        """Add one use at `context`."""
        self._add(total, 1, context - self.start)

    def _add(self, total: Usage, uses: int, sum_offset: int) -> None:
        share = sum_offset / (self.end - self.start)
        total.add(self._ends[0], uses - share)
        total.add(self._ends[1], share)


class Curve:
    """Duration of some decode operators at one batch size over one summed context.

    tables: of costs; axis: which context; queries: tokens of the batch; 0: one per sequence"""

    __slots__ = ("_tables", "axis", "batch", "queries", "segments")

    def __init__(self, tables: StepTables | DrawnTables, batch: int, axis: int, queries: int = 0) -> None:
        self._tables, self.batch, self.axis, self.queries = tables, batch, axis, queries
        self.segments: dict[int, Segment] = {}

    def segment(self, context: int) -> Segment:
        index = bisect_right(_KNOTS, context) - 1
        result = self.segments.get(index)
        if result is None:
            start, end = _KNOTS[index], _KNOTS[index + 1]
            costs = (self._tables.decodes(self.axis, self.batch, knot, self.queries) for knot in (start, end))
            result = self.segments[index] = Segment(start, end, *costs)
        return result


# (steps, first duration, delta, [(segment, first offset, growth) ...], host wait per step)
Piece = tuple[int, int, int, list[tuple[Segment, int, int]], int]


class HostWait:
    """Picoseconds that the device waited for the host."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0


class DecodeRun:
    """Consecutive decode steps of one batch, as pieces in which each step takes `delta` longer than the one before.

    `apply_leap` says how many took place. used: costs beside attention; waited: counts the device's waits for the host
    """

    __slots__ = ("_pieces", "_used", "_waited")

    def __init__(self, pieces: list[Piece], used: list[Used], waited: HostWait) -> None:
        self._pieces, self._used, self._waited = pieces, used, waited

    @property
    def first_duration(self) -> int:
        return self._pieces[0][1]

    def duration(self, num_steps: int) -> int:
        """Picoseconds of the first `num_steps`."""
        total = 0
        for steps, first, delta, _, _ in self._pieces:
            n = min(steps, num_steps)
            total += n * first + delta * (n * (n - 1) // 2)
            num_steps -= n
            if not num_steps:
                break
        return total

    def step_durations(self, num_steps: int) -> Iterator[int]:
        """Picoseconds of each of the first `num_steps`."""
        for steps, first, delta, _, _ in self._pieces:
            n = min(steps, num_steps)
            yield from range(first, first + n * delta, delta) if delta else repeat(first, n)
            num_steps -= n
            if not num_steps:
                break

    def steps_to_reach(self, elapsed: int) -> int:
        """The fewest steps that take at least `elapsed`; all of them if they take less."""
        done = 0
        for steps, first, delta, _, _ in self._pieces:
            whole = steps * first + delta * (steps * (steps - 1) // 2)
            if whole < elapsed:
                elapsed -= whole
                done += steps
                continue
            low, high = 0, steps  # the piece's first `low` steps take less than elapsed, its first `high` do not
            while high - low > 1:
                n = (low + high) // 2
                if n * first + delta * (n * (n - 1) // 2) < elapsed:
                    low = n
                else:
                    high = n
            return done + high
        return done

    def apply_leap(self, num_steps: int) -> None:
        """Count the first `num_steps` as taken."""
        for item in self._used:
            item.uses += num_steps
        waited = 0
        for steps, _, _, segments, host_wait in self._pieces:
            n = min(steps, num_steps)
            for segment, offset, growth in segments:
                segment.uses += n
                segment.sum_offset += n * offset + growth * (n * (n - 1) // 2)
            waited += n * host_wait
            num_steps -= n
            if not num_steps:
                break
        self._waited.total += waited
