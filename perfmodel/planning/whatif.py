"""What-ifs: what a metric does when one thing is varied at a time, or two together, and where an alternative pays.

All points see the same requests (equal seeds), so that differences are the change's and not the draw's.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache
from itertools import product
from math import exp, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel import sim
from perfmodel.cores import num_processes
from perfmodel.cost import plan_memory, step_costs
from perfmodel.cost.calibrations.provenance import provenance_of, resolved
from perfmodel.cost.steps.explain import StepEstimate
from perfmodel.errors import DoesNotFitError, PerfmodelError, SpecError, UnsupportedError
from perfmodel.planning.axes import Axis, axis_of, suspects
from perfmodel.planning.findings import crossings
from perfmodel.planning.metrics import study_metric
from perfmodel.planning.points import Point, Record, at_rate, batch_shape, evaluate, load_point, narrowed, step_of
from perfmodel.planning.sweep import sweep
from perfmodel.planning.typical_step import StepSpec, choose_step, engine_of_step
from perfmodel.planning.workers import Progress, spread
from perfmodel.printable import Printable
from perfmodel.sim.records.latencies import meets_slo
from perfmodel.specs.scenario import Scenario
from perfmodel.trust import trust_of

NEAR = 1.1  # how far from the present value elasticities are taken, up and down: beyond a simulation's granularity


@dataclass(frozen=True)
class WhatIf:
    """The question.

    base:    the scenario with the metrics and the step that they are of
    axes:    what is varied, one at a time; with `is_grid`, the two of them together
    against: overrides of an alternative, to be compared along each axis
    """

    base: Point
    axes: tuple[Axis, ...]
    is_grid: bool = False
    against: tuple[str, ...] = ()

    def point(self, *overrides: str, alternative: bool = False) -> Point:
        """The base with more overrides; those of an axis come on top of the alternative's."""
        more = (*(self.against if alternative else ()), *overrides)
        return replace(self.base, overrides=(*self.base.overrides, *more))


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """One metric along one axis.

    elasticity: d ln metric / d ln value at the present value; None where either is not a number above 0
    """

    axis: Axis
    metric: str
    base: float | None
    values: tuple[float | None, ...]
    elasticity: float | None

    @property
    def low(self) -> float | None:
        return self.values[0]

    @property
    def high(self) -> float | None:
        return self.values[-1]

    @property
    def swing(self) -> float:
        """The largest of the values over the smallest, the base's included, as a logarithm."""
        there = [value for value in (self.base, *self.values) if value is not None and value > 0]
        return log(max(there) / min(there)) if there else 0.0


@dataclass(frozen=True)
class WhatIfAnswers:
    """Records of all points.

    by_axis:    axis -> a record for each of its values; `others`: the alternative's
    grid:       (value of the first axis, of the second) -> record
    """

    question: WhatIf
    scenario: Scenario
    base: Record
    sensitivities: tuple[Sensitivity, ...]
    by_axis: Mapping[str, Sequence[Record]]
    other: Record | None = None
    others: Mapping[str, Sequence[Record]] = field(default_factory=dict)
    grid: Mapping[tuple[str, str], Record] = field(default_factory=dict)

    def of_metric(self, metric: str) -> list[Sensitivity]:
        """What moves the metric, the most moving first."""
        found = [each for each in self.sensitivities if each.metric == metric]
        return sorted(found, key=lambda each: -each.swing)

    @property
    def problems(self) -> list[str]:
        """Why points have no values, once each."""
        named = [(axis.overrides, self.by_axis.get(axis.path, ())) for axis in self.question.axes]
        found = [f"{text}: {r.problem}" for texts, rs in named for text, r in zip(texts, rs, strict=False) if r.problem]
        found += [f"{a}, {b}: {record.problem}" for (a, b), record in self.grid.items() if record.problem]
        return ([self.base.problem] if self.base.problem else []) + found


def default_metrics(scenario: Scenario, compares_devices: bool = False) -> tuple[str, ...]:
    """What is asked of a scenario that is asked nothing in particular: latencies and throughput; of devices, costs."""
    found = ["mean_ttft_ms", "mean_tpot_ms", "output_throughput"]
    if scenario.slo.is_given:
        found.append("request_goodput")
    if compares_devices:
        found.append("usd_per_million_output_tokens")
    return tuple(found)


def answer(
    question: WhatIf, progress: Progress | None = None, workers: int | None = None, engine: str = "local"
) -> WhatIfAnswers:
    """Evaluate all points of a question, with `workers` and `engine` as for `perfmodel.planning.sweep`.

    Raises SpecError for a grid of other than two axes, or a wrong override.
    """
    for metric in question.base.metrics:
        try:
            study_metric(metric)
        except ValueError as error:
            raise SpecError(f"--metric {metric}: {error}") from None
    if question.is_grid and len(question.axes) != 2:
        raise SpecError(f"--grid: found {len(question.axes)} varied values; a grid has two, give --vary twice.")
    scenario, _ = load_point(question.base)
    points = _points(question)
    found = dict(zip(points, sweep(list(points.values()), progress, workers, engine), strict=True))
    by_axis = {axis.path: [found[axis.path, text] for text in axis.overrides] for axis in question.axes}
    others: dict[str, list[Record]] = {}
    if question.against:
        others = {axis.path: [found["against " + axis.path, text] for text in axis.overrides] for axis in question.axes}
    base = found["base", ""]
    return WhatIfAnswers(
        question,
        scenario,
        base,
        tuple(
            Sensitivity(axis, metric, base.values.get(metric), _values(by_axis[axis.path], metric), elasticity)
            for axis in question.axes
            for metric in question.base.metrics
            for elasticity in [_elasticity(axis, metric, found)]
        ),
        by_axis,
        found.get(("against", "")),
        others,
        {key[1:]: record for key, record in found.items() if key[0] == "grid" and len(key) == 3},
    )


def _points(question: WhatIf) -> dict[tuple[str, ...], Point]:
    points: dict[tuple[str, ...], Point] = {("base", ""): question.point()}
    if question.against:
        points["against", ""] = question.point(alternative=True)
    for axis in question.axes:
        for text in axis.overrides:
            points[axis.path, text] = question.point(text)
            if question.against:
                points["against " + axis.path, text] = question.point(text, alternative=True)
        for text, _ in axis.nearby(NEAR) or ():
            points[axis.path, text] = replace(question.point(text), intervals=False)
    if question.is_grid:
        first, second = question.axes
        for one, other in product(first.overrides, second.overrides):
            points["grid", one, other] = question.point(one, other)
    return points


def _values(records: Sequence[Record], metric: str) -> tuple[float | None, ...]:
    return tuple(record.values.get(metric) for record in records)


def _elasticity(axis: Axis, metric: str, found: Mapping[tuple[str, ...], Record]) -> float | None:
    near = axis.nearby(NEAR)
    if near is None:
        return None
    (low_text, low), (high_text, high) = near
    below, above = (found[axis.path, text].values.get(metric) for text in (low_text, high_text))
    if below is None or above is None or below <= 0 or above <= 0:
        return None
    return log(above / below) / log(high / low)


RATE = "traffic.arrivals.rate"
_LATENCIES = ("ttft", "tpot", "e2el")
_GROWING = ("poisson", "constant", "poisson_fixed_count", "gamma")  # processes whose rate is what arrives


@dataclass(frozen=True, slots=True)
class KeptLoad:
    """The largest rate of the axis within the SLO. None of `max_rate`: not even the lowest; is_all: all of the axis is

    users: as of `OfferedLoad`; requests_per_user_per_minute: what each of them asks; mean latencies are of that rate
    """

    max_rate: float | None
    is_all: bool = False
    users: float | None = None
    requests_per_user_per_minute: float | None = None
    mean_ttft_ms: float | None = None
    mean_e2el_ms: float | None = None


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """rate: of the scenario; rates: of the axis, in requests/s

    users:        at each of them, where their latency is known; each pauses `think_time_s` after an answer
    limits_ms:    of the SLO for single requests, by latency; attainment: the share of them that is to meet all
    knee:         a rate; None where it is not within the axis
    within_slo:   None without an SLO
    """

    rate: float | None
    rates: tuple[float, ...]
    think_time_s: float
    users: tuple[float | None, ...]
    limits_ms: Mapping[str, float]
    attainment: float
    knee: float | None
    within_slo: KeptLoad | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def load_of(answers: WhatIfAnswers) -> OfferedLoad | None:
    """What the axis of rates says; None where there is none, or arrivals do not follow it."""
    arrivals = answers.scenario.traffic.arrivals
    axis = next((candidate for candidate in answers.question.axes if candidate.path == RATE and candidate.xs), None)
    if axis is None or arrivals.process not in _GROWING or arrivals.stages:
        return None
    scale = axis.present if axis.is_multiple and axis.present else 1.0
    rates = tuple(x * scale for x in axis.xs)
    records = answers.by_axis[RATE]
    pause = arrivals.think_time_s
    users = tuple(_users(rate, pause, r.values.get("mean_e2el_ms")) for rate, r in zip(rates, records, strict=True))
    kept = _kept(answers.scenario, rates, records) if answers.scenario.slo.is_given else None
    served, latencies = ([r.values.get(name) for r in records] for name in ("request_throughput", "mean_e2el_ms"))
    knee = knee_of(rates, served, latencies)
    limits = {name: limit for name in _LATENCIES if (limit := answers.scenario.slo.limit_ms(name)) is not None}
    return OfferedLoad(arrivals.rate, rates, pause, users, limits, answers.scenario.attainment, knee, kept)


def _users(rate: float, pause_s: float, mean_e2el_ms: float | None) -> float | None:
    return None if mean_e2el_ms is None else rate * (pause_s + mean_e2el_ms / 1e3)


def knee_of(rates: Sequence[float], served: Sequence[float | None], latencies: Sequence[float | None]) -> float | None:
    """The rate at which what is served over its latency is largest: of a parabola through the logarithms of the largest
    of those given and of its neighbours. None at either end."""
    rows = zip(rates, served, latencies, strict=True)
    found = sorted(
        (log(rate), log(throughput / latency)) for rate, throughput, latency in rows if throughput and latency
    )
    best = max(range(len(found)), key=lambda number: found[number][1], default=0)
    if not 0 < best < len(found) - 1:
        return None
    (x0, y0), (x1, y1), (x2, y2) = found[best - 1 : best + 2]
    below, above = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    return exp((x0 + x1) / 2 + (x2 - x0) / 2 * below / (below - above)) if below > above else exp(x1)


def _kept(scenario: Scenario, rates: Sequence[float], records: Sequence[Record]) -> KeptLoad:
    """By bisection, first among the rates of the axis: what is kept at one rate is taken to be kept at all lower."""
    record_at = dict(zip(rates, records, strict=True))
    ordered = sorted(record_at)

    @cache
    def summary(rate: float) -> dict[str, Any] | None:
        try:
            return dict(sim.simulate(at_rate(scenario, rate), keep_steps=False).summary)
        except PerfmodelError:  # the points say so
            return None

    def is_kept(rate: float) -> bool:
        values = record_at[rate].values if rate in record_at and not scenario.slo.statistics else {}
        figures = values if values.get("slo_attainment") is not None else summary(rate)
        return figures is not None and meets_slo(scenario, figures)

    low, high = _bracket(ordered, is_kept)
    if low is None:
        return KeptLoad(None)
    if high is not None:
        low = narrowed(is_kept, low, high)
    found = summary(low) or {}
    pause, latency = scenario.traffic.arrivals.think_time_s, found.get("mean_e2el_ms")
    users = _users(low, pause, latency)
    return KeptLoad(low, high is None, users, 60 * low / users if users else None, found.get("mean_ttft_ms"), latency)


def _bracket(ordered: Sequence[float], is_kept: Callable[[float], bool]) -> tuple[float | None, float | None]:
    """Neighbouring rates: the largest that is kept, None if none is; the smallest that is not, None if all are."""
    first, last = -1, len(ordered)
    while last - first > 1:
        middle = (first + last) // 2
        first, last = (middle, last) if is_kept(ordered[middle]) else (first, middle)
    return (ordered[first] if first >= 0 else None), (ordered[last] if last < len(ordered) else None)


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
    workers, engine: as for `perfmodel.planning.sweep`
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


@dataclass(frozen=True, repr=False)
class WhatIfResult(Printable):
    """Answers, and where they turn.

    step:   the decode step that bounds are of (and metrics of steps); `step_label` as text
    bounds: along the varied values, and along the batch
    largest_batch: of such sequences that an engine can have, and what limits it; 0 where they do not decode
    assumed: sentences on what nobody said of the scenario
    load:    of an axis of arrival rates
    """

    answers: WhatIfAnswers
    step: StepSpec
    step_label: str
    step_bound: str
    bounds: tuple[BoundChange, ...] = ()
    payoffs: tuple[Payoff, ...] = ()
    largest_batch: int = 0
    largest_by: str = ""
    assumed: tuple[str, ...] = ()
    load: OfferedLoad | None = None

    def columns(self) -> dict[str, NDArray[Any]]:
        """Sensitivities as arrays, a row for each path and metric; nan where there is no number."""
        rows = self.answers.sensitivities

        def numbers(values: Sequence[float | None]) -> NDArray[Any]:
            return np.array([np.nan if value is None else value for value in values], dtype=np.float64)

        return {
            "path": np.array([each.axis.path for each in rows]),
            "metric": np.array([each.metric for each in rows]),
            "low_value": np.array([each.axis.texts[0] for each in rows]),
            "high_value": np.array([each.axis.texts[-1] for each in rows]),
            "low": numbers([each.low for each in rows]),
            "base": numbers([each.base for each in rows]),
            "high": numbers([each.high for each in rows]),
            "elasticity": numbers([each.elasticity for each in rows]),
        }

    def to_json(self) -> dict[str, Any]:
        """Every point with its values, sensitivities, changes of bounds and crossovers."""
        answers, question, step = self.answers, self.answers.question, self.step
        return {
            "scenario": answers.scenario.name,
            "metrics": list(question.base.metrics),
            "base": _record(answers.base),
            "sensitivities": [
                {
                    "path": each.axis.path,
                    "metric": each.metric,
                    "low": {"value": each.axis.texts[0], "metric": each.low},
                    "base": {"value": each.axis.present_x, "metric": each.base},
                    "high": {"value": each.axis.texts[-1], "metric": each.high},
                    "elasticity": each.elasticity,
                }
                for each in answers.sensitivities
            ],
            "points": _points_json(question.axes, answers.by_axis),
            "grid": [{"set": list(key), **_record(record)} for key, record in answers.grid.items()],
            "against": {
                "set": list(question.against),
                "base": _record(answers.other) if answers.other is not None else None,
                "ratio": _ratios(answers.base, answers.other),
                "points": _points_json(question.axes, answers.others),
            }
            if question.against
            else None,
            "step": {
                "label": self.step_label,
                "bound": self.step_bound,
                "batch": step.batch,
                "context": step.context,
                "prefill": step.prefill,
            },
            "bound_changes": [asdict(change) for change in self.bounds],
            "crossovers": [asdict(each) for each in self.payoffs],
            **({} if self.load is None else {"load": self.load.to_json()}),
            "trust": trust_of(self.answers.scenario).to_json(),
            "provenance": self._provenance(),
        }

    def _provenance(self) -> dict[str, Any]:
        question, scenario = self.answers.question, self.answers.scenario
        inputs = {
            "scenario": resolved(scenario),
            "metrics": list(question.base.metrics),
            "varied": {axis.path: list(axis.texts) for axis in question.axes},
            "against": list(question.against),
        }
        return provenance_of([scenario]).to_json("what-if", inputs)


def _points_json(axes: Sequence[Axis], records: Mapping[str, Sequence[Record]]) -> list[dict[str, Any]]:
    return [
        {"set": text, **_record(record)}
        for axis in axes
        for text, record in zip(axis.overrides, records.get(axis.path, ()), strict=False)
    ]


def _ratios(base: Record, other: Record | None) -> dict[str, float]:
    """What the alternative makes of each metric, as a multiple."""
    found = {} if other is None else other.values
    pairs = {name: (value, base.values.get(name)) for name, value in found.items()}
    return {name: one / before for name, (one, before) in pairs.items() if one is not None and before}


def _record(record: Record) -> dict[str, Any]:
    return {
        "values": dict(record.values),
        **({"interval": {name: list(ends) for name, ends in record.intervals.items()}} if record.intervals else {}),
        **({"problem": record.problem} if record.problem else {}),
    }


_LARGEST_BATCH = 8192  # up to which the batch is looked for at which the bound of a decode step changes
_STEP = "step."
_TELLING = 0.01  # share of the step from which on an operator's bound is reported
Watch = Callable[[str], AbstractContextManager[Progress | None]]  # a progress bar for what is under way


def ask_whatif(
    scenario: str,
    vary: Sequence[str] = (),
    overrides: Sequence[str] = (),
    metrics: Sequence[str] = (),
    grid: bool = False,
    against: Sequence[str] = (),
    workers: int | None = None,
    engine: str = "local",
    watch: Watch = lambda what: nullcontext(None),
    intervals: bool = False,
) -> WhatIfResult:
    """Vary a scenario, by its name or path, one value at a time.

    vary:      `PATH=lo..hi[:n]` or `PATH=a,b,c`; by default the resources that could be bought, and the load
    overrides: as `--set` takes them; `step.batch=8` gives the step that metrics of steps are of, else the typical one
    metrics:   of runs, steps and memory; by default latencies and throughput
    grid:      two varied values in all their combinations
    against:   overrides of an alternative: where along each axis does it begin to pay?
    workers, engine: as for `perfmodel.planning.sweep`
    watch:     a stage's name -> what shows its progress
    intervals: also the 80 % intervals of means, for which each point is simulated several times

    Raises SpecError for what cannot be read.
    """
    base = Point(scenario, tuple(metrics), tuple(overrides))
    loaded, given = load_point(base)
    if grid and not vary:
        raise SpecError("--grid needs two varied values; give --vary twice.")
    step, label = (given, "The step that was given") if given is not None else _typical(loaded)
    axes = tuple(axis_of(text, loaded, step) for text in vary or suspects(loaded))
    asked = base.metrics or default_metrics(loaded, any(axis.is_device for axis in axes))
    others = tuple(text for text in overrides if not text.startswith(_STEP))  # the point has its step already
    base = replace(base, metrics=asked, step=step, overrides=others, intervals=intervals)
    question = WhatIf(base, axes, grid, tuple(against))
    if against:
        load_point(question.point(alternative=True))
    with watch("simulating") as progress:
        answers = answer(question, progress, workers, engine)
    turns: list[Payoff] = []
    if against:
        with watch("looking for crossovers") as progress:
            turns = payoffs(answers, base.metrics, progress, workers, engine)
    taker = engine_of_step(loaded, is_prompt=not step.batch)
    estimate = step_costs(taker).estimate(batch_shape(step, taker))
    named = {"step", *(row.name for row in estimate.rows if row.duration_s >= _TELLING * estimate.duration_s)}
    bounds = tuple(change for change in _bounds(question, loaded) if change.what in named)
    largest = _largest_batch(taker, step)
    return WhatIfResult(
        answers, step, label, estimate.bound, bounds, tuple(turns), *largest, load=load_of(answers) if vary else None
    )


def _largest_batch(taker: Scenario, step: StepSpec) -> tuple[int, str]:
    if not step.batch:
        return 0, ""
    try:
        held = plan_memory(taker.model, taker.hardware, taker.engine).max_batch(max(step.context or 1, 1))
    except DoesNotFitError:  # the points say so
        return 0, ""
    limit = taker.engine.max_num_seqs
    return (held, "the KV cache") if held < limit else (limit, "max_num_seqs")


def _typical(scenario: Scenario) -> tuple[StepSpec, str]:
    costs = step_costs(engine_of_step(scenario))
    choice = choose_step(scenario, lambda shape: costs.estimate(shape).duration_s / costs.tokens_per_decode(shape))
    batch = max(choice.shape.num_decodes, 1)
    where = " on a decode replica" if scenario.cluster.is_disaggregated else ""
    return StepSpec(batch=batch, context=max(choice.shape.decode_context // batch, 1)), choice.label + where


def _bounds(question: WhatIf, scenario: Scenario) -> list[BoundChange]:
    """Where the step's bound changes along the axes that it depends on, and along its batch."""
    step = question.base.step
    axes = {axis.path: axis for axis in question.axes if axis.xs and not axis.path.startswith("traffic.")}
    if step is not None and step.batch and "step.batch" not in axes:
        axes["step.batch"] = axis_of(f"step.batch=1..{_LARGEST_BATCH}:14", scenario, step)
    found: list[BoundChange] = []
    for path, axis in axes.items():
        try:
            found += bound_changes(question.base, axis, with_operators=path == "step.batch")
        except (DoesNotFitError, UnsupportedError):
            continue  # the points say so
    return found
