"""Findings over variants: the best by region, crossovers, gains along a ladder, Pareto fronts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log

Values = Sequence[float | None]

TIE = 0.02  # relative; variants whose values differ by less are a tie: below what is worth choosing by


@dataclass(frozen=True, slots=True)
class Stretch:
    """A range of axis values with the same best variants (several if within TIE of each other). begins: interpolated
    crossover if both sides have one winner; else the first value of the range"""

    winners: tuple[str, ...]
    first: float
    last: float
    begins: float


def better_by(value: float, other: float, is_better_low: bool) -> float:
    """Factor by which `value` is better than `other`; below 1 if worse."""
    above, below = (other, value) if is_better_low else (value, other)
    return (1.0 if above == 0 else float("inf")) if below == 0 else above / below


def best_at(values: Mapping[str, float | None], is_better_low: bool) -> tuple[str, ...]:
    """The best variant and those within TIE; empty without values."""
    there = {name: value for name, value in values.items() if value is not None}
    if not there:
        return ()
    best = (min if is_better_low else max)(there.values())
    return tuple(name for name, value in there.items() if better_by(best, value, is_better_low) <= 1 + TIE)


def stretches(xs: Sequence[float], lines: Mapping[str, Values], is_better_low: bool) -> list[Stretch]:
    """Ranges of the axis `xs` with the same winners among `lines`, in order; those without any value are skipped."""
    result: list[Stretch] = []
    for index, x in enumerate(xs):
        winners = best_at({name: line[index] for name, line in lines.items()}, is_better_low)
        if not winners:
            continue
        last = result[-1] if result else None
        if last is not None and last.winners == winners:
            result[-1] = replace(last, last=x)
            continue
        begins = x
        if last is not None and len(winners) == len(last.winners) == 1 and last.last == xs[index - 1]:
            near = slice(index - 1, index + 1)
            begins = next(iter(crossings(xs[near], lines[last.winners[0]][near], lines[winners[0]][near])), x)
        result.append(Stretch(winners, x, x, begins))
    return result


def crossings(xs: Sequence[float], one: Values, other: Values) -> list[float]:
    """Axis positions where the line `one` crosses `other`, interpolated between neighbours. Interpolation is log-log
    for positive values (exact for power laws), else linear. A position with equal values counts if the order differs on
    its two sides."""
    points = [(x, a, b) for x, a, b in zip(xs, one, other, strict=False) if a is not None and b is not None]
    result: list[float] = []
    side = 0
    for index, (x, a, b) in enumerate(points):
        here = (a > b) - (a < b)
        if here and side and here != side:
            x0, a0, b0 = points[index - 1]
            is_log = min(x0, x, a0, a, b0, b) > 0
            start, end = (log(x0), log(x)) if is_log else (x0, x)
            gap0, gap = (log(a0 / b0), log(a / b)) if is_log else (a0 - b0, a - b)
            at = start + (end - start) * gap0 / (gap0 - gap)
            result.append(x0 if a0 == b0 else exp(at) if is_log else at)
        side = here or side
    return result


def ladder_gains(values: Values, is_better_low: bool) -> list[float | None]:
    """Improvement of each rung over the last lower one with a value; 1 for the first. Their product is the total."""
    gains: list[float | None] = []
    below: float | None = None
    for value in values:
        if value is None:
            gains.append(None)
            continue
        gains.append(1.0 if below is None else better_by(value, below, is_better_low))
        below = value
    return gains


def pareto_front(points: Mapping[str, Sequence[float | None]], is_better_low: Sequence[bool]) -> tuple[str, ...]:
    """Names that no other dominates; those with missing values are left out. A dominates B if it is better by more than
    TIE in one value and not worse by more than TIE in the others."""
    known = {name: [value for value in values if value is not None] for name, values in points.items()}
    whole = {name: values for name, values in known.items() if len(values) == len(is_better_low)}

    def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
        gains = [better_by(*pair) for pair in zip(one, other, is_better_low, strict=True)]
        return max(gains) > 1 + TIE and min(gains) >= 1 / (1 + TIE)

    return tuple(name for name, item in whole.items() if not any(dominates(entry, item) for entry in whole.values()))
