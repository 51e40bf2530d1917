"""What-ifs: what a metric does when one thing is varied at a time, or two together, and where an alternative pays.

All points see the same requests (equal seeds), so that differences are the change's and not the draw's.
"""

__all__ = ["NEAR", "Sensitivity", "WhatIf", "WhatIfAnswers", "answer", "default_metrics"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import log

from perfmodel.errors import SpecError
from perfmodel.planning.metrics import study_metric
from perfmodel.planning.sensitivity.vary import Axis
from perfmodel.planning.sweeps.points import Point, Record, load_point
from perfmodel.planning.sweeps.sweep import sweep
from perfmodel.planning.sweeps.workers import Progress
from perfmodel.specs.scenario import Scenario

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
    """Evaluate all points of a question, with `workers` and `engine` as for `perfmodel.planning.sweeps.sweep`.

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
