"""What numbers by variant say: who is best where, where lines cross, what rungs of a ladder gain, Pareto fronts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log

Values = Sequence[float | None]

TIE = 0.02  # relative; variants whose values differ by less are a tie: below what is worth choosing by


@dataclass(frozen=True, slots=True)
class Stretch:
    """The variants that are best (several: within TIE of each other) from one value of an axis to another.

    begins: where the first of them becomes the best: between two values of the axis, interpolated, if both sides have
            one winner; else the first value at which it is so
    """

    winners: tuple[str, ...]
    first: float
    last: float
    begins: float


def better_by(value: float, other: float, is_better_low: bool) -> float:
    """How many times better `value` is than `other`; below 1 where it is worse."""
    above, below = (other, value) if is_better_low else (value, other)
    if below == 0:
        return 1.0 if above == 0 else float("inf")
    return above / below


def best_at(values: Mapping[str, float | None], is_better_low: bool, tie: float = TIE) -> tuple[str, ...]:
    """The best variant and those within `tie` of it; none where nothing has a value."""
    there = {name: value for name, value in values.items() if value is not None}
    if not there:
        return ()
    best = (min if is_better_low else max)(there.values())
    return tuple(name for name, value in there.items() if better_by(best, value, is_better_low) <= 1 + tie)


def stretches(xs: Sequence[float], lines: Mapping[str, Values], is_better_low: bool, tie: float = TIE) -> list[Stretch]:
    """The axis `xs` cut into stretches with the same winners of `lines`, in order; values without any are left out.

    is_better_low: whether less is better; tie: relative difference below which two are equal
    """
    found: list[Stretch] = []
    for index, x in enumerate(xs):
        winners = best_at({name: line[index] for name, line in lines.items()}, is_better_low, tie)
        if not winners:
            continue
        last = found[-1] if found else None
        if last is not None and last.winners == winners:
            found[-1] = replace(last, last=x)
            continue
        begins = x
        if last is not None and len(winners) == len(last.winners) == 1 and last.last == xs[index - 1]:
            near = slice(index - 1, index + 1)
            begins = next(iter(crossings(xs[near], lines[last.winners[0]][near], lines[winners[0]][near])), x)
        found.append(Stretch(winners, x, x, begins))
    return found


def crossings(xs: Sequence[float], one: Values, other: Values) -> list[float]:
    """Where the line `one` passes the line `other`, interpolated between neighbouring values of the axis. On
    logarithmic axes (straight between the logarithms, where power laws are exact) for what is positive, else on linear
    ones. A value at which they are equal counts if they are in another order on its two sides."""
    points = [(x, a, b) for x, a, b in zip(xs, one, other, strict=False) if a is not None and b is not None]
    found: list[float] = []
    side = 0
    for index, (x, a, b) in enumerate(points):
        here = (a > b) - (a < b)
        if here and side and here != side:
            x0, a0, b0 = points[index - 1]
            is_log = min(x0, x, a0, a, b0, b) > 0
            start, end = (log(x0), log(x)) if is_log else (x0, x)
            gap0, gap = (log(a0 / b0), log(a / b)) if is_log else (a0 - b0, a - b)
            at = start + (end - start) * gap0 / (gap0 - gap)
            found.append(x0 if a0 == b0 else exp(at) if is_log else at)
        side = here or side
    return found


def ladder_gains(values: Values, is_better_low: bool) -> list[float | None]:
    """How many times better each rung is than the last one below it that has a value; the first rung's is 1. The
    product of all is how many times better the last rung is than the first."""
    gains: list[float | None] = []
    below: float | None = None
    for value in values:
        if value is None:
            gains.append(None)
            continue
        gains.append(1.0 if below is None else better_by(value, below, is_better_low))
        below = value
    return gains


def pareto_front(
    points: Mapping[str, Sequence[float | None]], is_better_low: Sequence[bool], tie: float = TIE
) -> tuple[str, ...]:
    """The names that no other dominates: none is better in one value and, but for `tie`, as good in all others. Without
    all values, none. Better means by more than `tie`."""
    whole: dict[str, list[float]] = {}
    for name, values in points.items():
        there = [value for value in values if value is not None]
        if len(there) == len(is_better_low):
            whole[name] = there

    def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
        gains = [better_by(*pair) for pair in zip(one, other, is_better_low, strict=True)]
        return max(gains) > 1 + tie and min(gains) >= 1 / (1 + tie)

    return tuple(name for name, mine in whole.items() if not any(dominates(each, mine) for each in whole.values()))
