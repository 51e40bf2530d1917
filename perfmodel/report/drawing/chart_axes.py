"""Axes of the charts: where a value is drawn, which ticks it gets."""

__all__ = ["Scale", "scale_over", "ticks_at"]

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

_MOST_TICKS, _FEWEST_TICKS = 7, 3


@dataclass(frozen=True)
class Scale:
    """Map from values between `low` and `high` to pixels between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, at = log10(low), log10(high), log10(at)
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """A few round values on the axis."""
        return _log_ticks(self.low, self.high) if self.is_log else _linear_ticks(self.low, self.high)


def scale_over(values: Iterable[float], start: float, end: float, is_log: bool, from_zero: bool = False) -> Scale:
    """A scale on which all of `values` have their place, with a little room at the ends.

    start, end: pixels of the axis; is_log: logarithmic; from_zero: a linear one begins at 0 at the latest
    """
    there = [value for value in values if not is_log or value > 0]
    low, high = (min(there), max(there)) if there else (1.0, 10.0)
    if is_log:
        return Scale(low / 1.15, high * 1.15 if high > low else high * 2, start, end, True)
    low = min(0.0, low) if from_zero else low
    room = (high - low) * 0.06 or abs(high) * 0.5 or 1.0
    return Scale(low if from_zero and low == 0 else low - room, high + room, start, end)


def ticks_at(values: Sequence[float], scale: Scale, room: float) -> list[float]:
    """Ticks of an axis: those of `values` whose labels do not run into each other, at least `room` pixels apart."""
    kept: list[float] = []
    for value in values:
        if not kept or abs(scale(value) - scale(kept[-1])) >= room:
            kept.append(value)
    last = values[-1]
    if kept[-1] != last:
        if len(kept) > 1:
            kept.pop()
        kept.append(last)
    return kept


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    for steps in ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        found = [step * 10.0**decade for decade in decades for step in steps]
        found = [value for value in found if low <= value <= high]
        if len(found) <= _MOST_TICKS:
            break
    if len(found) < _FEWEST_TICKS:  # within a factor of two or three: few of 1, 2, 3 and 5 lie there
        found = [value for value in _linear_ticks(low, high) if value > 0]
    return found[:: ceil(len(found) / _MOST_TICKS)] if found else [low, high]


def _linear_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / (_MOST_TICKS - 1)
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return [round(index * step, 12) for index in range(ceil(low / step), floor(high / step) + 1)]
