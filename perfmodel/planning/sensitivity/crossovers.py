"""Where an answer turns: the bound of a step along an axis, and where an alternative begins to pay.

Both are bracketed until nothing is between, not interpolated between the values of the axis: the first on the cost
model alone, the second by simulating both sides with the same requests (common random numbers), for several seeds.
"""

__all__ = ["BoundChange", "Payoff", "bound_changes", "payoffs"]

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import log

from perfmodel.cores import num_processes
from perfmodel.cost import step_costs
from perfmodel.cost.steps.explain import StepEstimate
from perfmodel.planning.metrics import study_metric
from perfmodel.planning.sensitivity.vary import Axis
from perfmodel.planning.sensitivity.whatif import WhatIf, WhatIfAnswers
from perfmodel.planning.sweeps.findings import crossings
from perfmodel.planning.sweeps.metrics import batch_shape
from perfmodel.planning.sweeps.points import Point, evaluate, load_point, step_of
from perfmodel.planning.sweeps.typical_step import engine_of_step
from perfmodel.planning.sweeps.workers import Progress, spread

_EXACT = 1e-6  # of bounds: the cost model has no noise
_PRECISION = 0.02  # of simulated crossings
_SEEDS = 5  # the median lies between the lowest and the highest of five with 94 %


@dataclass(frozen=True, slots=True)
class BoundChange:
    """A change of bound along the axis: from `at` on, something is bound by `after` and no longer by `before`.

    what: an operator, or "step": what bounds the largest share of its time
    """

    path: str
    what: str
    before: str
    after: str
    at: float
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Payoff:
    """A point of an axis where the alternative becomes better by a metric, or stops being so.

    begins:    whether it is better above `at`
    low, high: the lowest and highest crossing of `num_seeds` draws of the traffic
    """

    path: str
    metric: str
    at: float
    low: float
    high: float
    begins: bool
    num_seeds: int
    unit: str = ""


def bound_changes(base: Point, axis: Axis, with_operators: bool = False) -> list[BoundChange]:
    """Where the bound of the point's step (and, `with_operators`, of each of its operators) changes along the axis.

    The axis needs numbers; a value at which the scenario cannot be loaded or timed raises what that raises.
    """
    estimate = _estimates(base, axis)
    ends = sorted(axis.xs)
    if len(ends) < 2:
        return []
    found = list(_changes(axis, "step", lambda x: estimate(x).bound, ends))
    if with_operators:
        for name in dict.fromkeys(row.name for row in estimate(ends[0]).rows):
            found += _changes(axis, name, lambda x, name=name: _bound_of(estimate(x), name), ends)  # type: ignore[misc]
    return found


def payoffs(
    answers: WhatIfAnswers,
    metrics: Sequence[str],
    progress: Progress | None = None,
    workers: int | None = None,
    engine: str = "local",
    seeds: int = _SEEDS,
) -> list[Payoff]:
    """Crossovers: where the alternative of `answers` becomes better by each of `metrics`, or stops being so, along each
    axis.

    progress:        called with (crossings found, crossings to be looked for)
    workers, engine: as for `perfmodel.planning.sweeps.sweep`
    seeds:           draws of the traffic for the interval
    """
    tasks = [task for metric in metrics for task in _between(answers, metric)]
    asked = [
        _Crossing(answers.question, axis, metric, low, high, answers.scenario.seed + number)
        for metric, axis, low, high in tasks
        for number in range(seeds)
    ]
    # Each is a chain of simulations, and all chains can run at once: starting processes pays for a few of them.
    places = spread(_place, asked, lambda *_: None, progress, workers or num_processes(len(asked)), engine)
    found = []
    for number, (metric, axis, _, _) in enumerate(tasks):
        mine = [each for each in places[number * seeds : (number + 1) * seeds] if each is not None]
        if mine:
            ats = sorted(at for at, _ in mine)
            begins = sum(begins for _, begins in mine) * 2 >= len(mine)
            found.append(Payoff(axis.path, metric, ats[len(ats) // 2], ats[0], ats[-1], begins, len(mine), axis.unit))
    return found


def _between(answers: WhatIfAnswers, metric: str) -> Iterator[tuple[str, Axis, float, float]]:
    """The neighbouring values of each axis between which the alternative becomes better or worse: (metric, axis, low,
    high)."""
    for axis in answers.question.axes:
        ones = [record.values.get(metric) for record in answers.by_axis[axis.path]]
        others = [record.values.get(metric) for record in answers.others.get(axis.path, ())]
        for at in crossings(axis.xs, others, ones) if axis.xs else ():
            low = max(x for x in axis.xs if x <= at)
            high = min((x for x in axis.xs if x >= at and x > low), default=low)
            yield metric, axis, low, high


@dataclass(frozen=True, slots=True)
class _Crossing:
    """One crossing between two values of an axis, to be found for one seed."""

    question: WhatIf
    axis: Axis
    metric: str
    low: float
    high: float
    seed: int


def _place(asked: _Crossing) -> tuple[float, bool] | None:
    """(where the alternative and the base are equal, whether it is better above); None where it is not between.

    Where this seed's crossing is not between the two values, it is looked for between others of the axis.
    """
    axis = asked.axis

    @cache
    def gain(x: float) -> float | None:
        return _gain(asked, x)

    low, high = asked.low, asked.high
    sides = gain(low), gain(high)
    if sides[0] is None or sides[1] is None or (sides[0] > 0) == (sides[1] > 0):
        inner = [(x, there) for x in axis.xs if (there := gain(x)) is not None]
        pairs = [(a, b) for (a, one), (b, other) in itertools.pairwise(inner) if (one > 0) != (other > 0)]
        if not pairs:
            return None
        low, high = min(pairs, key=lambda pair: abs(pair[0] - asked.low))
    begins = (gain(high) or 0.0) > 0
    low, high = _narrowed(axis, gain, low, high)
    return (high if axis.is_whole else (low + high) / 2), begins


def _narrowed(axis: Axis, gain: Callable[[float], float | None], low: float, high: float) -> tuple[float, float]:
    """Neighbouring places, `_PRECISION` apart, between which the gain changes its sign.

    Halved twice; then where a straight line (over the axis' logarithm) through the ends has its zero, a little above it
    and a little below, so that both ends close in; and so on. On smooth lines five or six looks instead of eight.
    """
    above = (gain(high) or 0.0) > 0
    beyond, turn = 1.0, itertools.cycle((True, True, False, False))
    while high - low > _PRECISION * abs(low):
        is_middle = next(turn) or axis.is_whole or low <= 0
        x = axis.middle(low, high) if is_middle else _zero(gain, low, high, beyond)
        there = None if x is None else gain(x)
        if x is None or there is None:
            break
        is_low = (there > 0) != above
        low, high = (x, high) if is_low else (low, x)
        beyond = 1.0 if is_low else -1.0
    return low, high


def _zero(gain: Callable[[float], float | None], low: float, high: float, beyond: float) -> float:
    """Where the gain is zero by a straight line, a little (`beyond`: 1 or -1) above or below, within the two."""
    one, other = gain(low) or 0.0, gain(high) or 0.0
    share = one / (one - other) if one != other else 0.5
    at = low * float((high / low) ** share) * (1 + 0.45 * beyond * _PRECISION)
    return min(max(at, low * (1 + 0.1 * _PRECISION)), high * (1 - 0.1 * _PRECISION))


def _gain(asked: _Crossing, x: float) -> float | None:
    """The logarithm of how many times better the alternative is at `x`."""
    text = (asked.axis.override(x), f"seed={asked.seed}")
    values = []
    for alternative in (False, True):
        point = replace(asked.question.point(*text, alternative=alternative), metrics=(asked.metric,), intervals=False)
        values.append(evaluate(point).values.get(asked.metric))
    base, other = values
    if base is None or other is None:
        return None
    if base <= 0 or other <= 0:  # nothing to divide: only which is larger
        ratio = float((base > other) - (base < other))
    else:
        ratio = log(base / other)
    return ratio if study_metric(asked.metric).is_better_low else -ratio


def _estimates(base: Point, axis: Axis) -> Callable[[float], StepEstimate]:
    """The estimate of the point's step at each value of the axis."""
    if axis.path.startswith("step."):
        scenario, of_base = load_point(base)
        scenario = engine_of_step(scenario, is_prompt=of_base is not None and not of_base.batch)
        costs = step_costs(scenario)

        def of_step(x: float) -> StepEstimate:
            step = step_of(replace(base, overrides=(*base.overrides, axis.override(x))))
            assert step is not None  # the axis makes one
            return costs.estimate(batch_shape(step, scenario))

        return lru_cache(maxsize=4096)(of_step)

    def of_scenario(x: float) -> StepEstimate:
        scenario, step = load_point(replace(base, overrides=(*base.overrides, axis.override(x))))
        assert step is not None  # bounds are asked for of points with a step
        scenario = engine_of_step(scenario, is_prompt=not step.batch)
        return step_costs(scenario).estimate(batch_shape(step, scenario))

    return lru_cache(maxsize=4096)(of_scenario)


def _bound_of(estimate: StepEstimate, name: str) -> str:
    return next((row.bound for row in estimate.rows if row.name == name), "")


def _changes(axis: Axis, what: str, bound: Callable[[float], str], xs: Sequence[float]) -> Iterator[BoundChange]:
    for low, high in itertools.pairwise(xs):
        start = low
        while bound(start) != bound(high):
            below, above = start, high
            while above - below > _EXACT * abs(below):
                middle = axis.middle(below, above)
                if middle is None:
                    break
                below, above = (middle, above) if bound(middle) == bound(start) else (below, middle)
            yield BoundChange(axis.path, what, bound(start), bound(above), above, axis.unit)
            start = above
