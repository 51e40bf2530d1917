"""What-ifs: metrics as one or two values vary, and where an alternative pays off. All points see the same requests
(common random numbers), so differences are free of sampling noise."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import product
from math import log
from typing import Any

from numpy.typing import NDArray

from perfmodel.cores import num_processes
from perfmodel.cost import plan_memory, step_costs
from perfmodel.cost.calibrations.provenance import provenance_of, resolved
from perfmodel.errors import DoesNotFitError, SpecError, UnsupportedError
from perfmodel.planning.axes import Axis, BoundChange, axis_of, bound_changes, suspects
from perfmodel.planning.findings import crossings
from perfmodel.planning.load import OfferedLoad, load_of
from perfmodel.planning.metrics import study_metric
from perfmodel.planning.points import Point, Record, batch_shape, evaluate, load_point
from perfmodel.planning.sweep import sweep
from perfmodel.planning.typical_step import StepSpec, engine_of_step, typical_step
from perfmodel.planning.workers import Progress, Watch, spread
from perfmodel.renderable import Renderable, columns_of
from perfmodel.specs.scenario import Scenario
from perfmodel.trust import trust_of

NEAR = 1.1  # how far from the present value elasticities are taken, up and down: beyond a simulation's granularity


@dataclass(frozen=True)
class WhatIf:
    """The question.

    base:    the scenario, its metrics and step
    axes:    varied one at a time; with `is_grid`, two together
    against: overrides of an alternative, compared along each axis"""

    base: Point
    axes: tuple[Axis, ...]
    is_grid: bool = False
    against: tuple[str, ...] = ()

    def point(self, *overrides: str, alternative: bool = False) -> Point:
        """The base with more overrides, applied after those of the alternative."""
        more = (*(self.against if alternative else ()), *overrides)
        return replace(self.base, overrides=(*self.base.overrides, *more))


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """One metric along one axis. elasticity: d ln metric / d ln value at the present value; None unless positive"""

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
        """ln(largest / smallest) of the values, base included."""
        there = [value for value in (self.base, *self.values) if value is not None and value > 0]
        return log(max(there) / min(there)) if there else 0.0


@dataclass(frozen=True)
class WhatIfAnswers:
    """Records of all points. by_axis: axis -> a record for each value; `others`: the alternative's; grid: (value of the
    first axis, of the second) -> record"""

    question: WhatIf
    scenario: Scenario
    base: Record
    sensitivities: tuple[Sensitivity, ...]
    by_axis: Mapping[str, Sequence[Record]]
    other: Record | None = None
    others: Mapping[str, Sequence[Record]] = field(default_factory=dict)
    grid: Mapping[tuple[str, str], Record] = field(default_factory=dict)

    def of_metric(self, metric: str) -> list[Sensitivity]:
        """Sensitivities of the metric, largest swing first."""
        return sorted((one for one in self.sensitivities if one.metric == metric), key=lambda one: -one.swing)

    @property
    def problems(self) -> list[str]:
        """Distinct reasons for missing values."""
        named = [("", self.base)]
        for axis in self.question.axes:
            named += zip(axis.overrides, self.by_axis.get(axis.path, ()), strict=False)
        named += ((", ".join(pair), record) for pair, record in self.grid.items())
        return [f"{name}: {one.problem}" if name else one.problem for name, one in named if one.problem]


def default_metrics(scenario: Scenario, compares_devices: bool = False) -> tuple[str, ...]:
    """Default metrics: latencies and throughput that the answers have; costs if devices are compared."""
    metrics = ["mean_ttft_ms", "mean_tpot_ms", "output_throughput"]
    is_text = scenario.model.pooling is None
    if not is_text or scenario.traffic.beam_width > 1:  # which come whole
        metrics = ["mean_e2el_ms", "output_throughput" if is_text else "total_token_throughput"]
    metrics += ["request_goodput"] if scenario.slo.is_given else []
    cost = "usd_per_million_output_tokens" if is_text else "usd_per_million_tokens"
    return (*metrics, *([cost] if compares_devices else []))


def answer(
    question: WhatIf, progress: Progress | None = None, workers: int | None = None, engine: str = "local"
) -> WhatIfAnswers:
    """Evaluate all points of a question; `progress`, `workers`, `engine` as for `sweep`. Raises SpecError for a grid
    without exactly two axes, or a wrong override."""
    axes, is_compared = question.axes, bool(question.against)
    for metric in question.base.metrics:
        try:
            study_metric(metric)
        except ValueError as error:
            raise SpecError(f"--metric {metric}: {error}") from None
    if question.is_grid and len(axes) != 2:
        raise SpecError(f"--grid: got {len(axes)} varied values; a grid has two, give --vary twice.")
    scenario, _ = load_point(question.base)
    texts = [(), *((text,) for axis in axes for text in axis.overrides)]
    points = [question.point(*one, alternative=side) for side in (False, True)[: 1 + is_compared] for one in texts]
    points += [_near(question, text) for axis in axes for text, _ in axis.nearby(NEAR) or ()]
    pairs = list(product(axes[0].overrides, axes[1].overrides)) if question.is_grid else []
    points += [question.point(*pair) for pair in pairs]
    records = dict(zip(points, sweep(points, progress, workers, engine), strict=True))

    def along(axis: Axis, alternative: bool = False) -> list[Record]:
        return [records[question.point(text, alternative=alternative)] for text in axis.overrides]

    base, by_axis = records[question.point()], {axis.path: along(axis) for axis in axes}
    sensitivities = []
    for axis, metric in product(axes, question.base.metrics):
        near = [(records[_near(question, text)].values.get(metric), ratio) for text, ratio in axis.nearby(NEAR) or ()]
        values = tuple(record.values.get(metric) for record in by_axis[axis.path])
        sensitivities.append(Sensitivity(axis, metric, base.values.get(metric), values, _elasticity(near)))
    other = records[question.point(alternative=True)] if is_compared else None
    others = {axis.path: along(axis, True) for axis in axes} if is_compared else {}
    cells = {pair: records[question.point(*pair)] for pair in pairs}
    return WhatIfAnswers(question, scenario, base, tuple(sensitivities), by_axis, other, others, cells)


def _near(question: WhatIf, text: str) -> Point:
    return replace(question.point(text), intervals=False)


def _elasticity(near: Sequence[tuple[float | None, float]]) -> float | None:
    """Elasticity between two (metric, ratio to the present value) pairs."""
    if not near:
        return None
    (below, low), (above, high) = near
    if below is None or above is None or below <= 0 or above <= 0:
        return None
    return log(above / below) / log(high / low)


_PRECISION = 0.02  # of simulated crossings
_SEEDS = 5  # the median lies between the lowest and the highest of five with 94 %


@dataclass(frozen=True, slots=True)
class Payoff:
    """An axis value at which the alternative becomes better by a metric, or stops being better. begins: it is better
    above `at`; low, high: lowest and highest crossing over `num_seeds` traffic seeds"""

    path: str
    metric: str
    at: float
    low: float
    high: float
    begins: bool
    num_seeds: int
    unit: str = ""


def payoffs(
    answers: WhatIfAnswers,
    metrics: Sequence[str],
    progress: Progress | None = None,
    workers: int | None = None,
    engine: str = "local",
    seeds: int = _SEEDS,
) -> list[Payoff]:
    """Crossovers along each axis where the alternative of `answers` becomes better by each of `metrics`, or stops being
    better. progress: called with (crossings found, to find); workers, engine: see `perfmodel.planning.sweep`; seeds:
    traffic seeds for the interval"""
    first = answers.scenario.seed
    tasks = []  # neighbouring values of an axis between which the alternative becomes better or worse
    for metric, axis in product(metrics, answers.question.axes):
        ones = [record.values.get(metric) for record in answers.by_axis[axis.path]]
        others = [record.values.get(metric) for record in answers.others.get(axis.path, ())]
        for at in crossings(axis.xs, others, ones) if axis.xs else ():
            low = max(x for x in axis.xs if x <= at)
            high = min((x for x in axis.xs if x >= at and x > low), default=low)
            tasks.append(_Crossing(answers.question, axis, metric, low, high, first))
    drawn = [replace(task, seed=seed) for task in tasks for seed in range(first, first + seeds)]
    # Each is a chain of simulations, and all chains can run at once: starting processes pays for a few of them.
    places = spread(_place, drawn, lambda *_: None, progress, workers or num_processes(len(drawn)), engine)
    result = []
    for number, task in enumerate(tasks):
        known = [place for place in places[number * seeds : (number + 1) * seeds] if place is not None]
        if known:
            ats = sorted(at for at, _ in known)
            begins = sum(begins for _, begins in known) * 2 >= len(known)
            ends = (ats[len(ats) // 2], ats[0], ats[-1])
            result.append(Payoff(task.axis.path, task.metric, *ends, begins, len(known), task.axis.unit))
    return result


@dataclass(frozen=True, slots=True)
class _Crossing:
    question: WhatIf
    axis: Axis
    metric: str
    low: float
    high: float
    seed: int


def _place(asked: _Crossing) -> tuple[float, bool] | None:
    """(crossing, whether the alternative is better above); None without one. If this seed's crossing is outside the two
    values, other intervals of the axis are searched."""
    axis, low, high = asked.axis, asked.low, asked.high
    gain = cache(partial(_gain, asked))
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
    """Bracket a sign change of the gain to `_PRECISION`. Halves twice, then probes just above and below the zero of the
    secant (over the axis' logarithm) so that both ends close in: five or six evaluations on smooth lines, not eight."""
    above = (gain(high) or 0.0) > 0
    beyond, turn = 1.0, itertools.cycle((True, True, False, False))
    while high - low > _PRECISION * abs(low):
        if next(turn) or axis.is_whole or low <= 0:
            x = axis.middle(low, high)
        else:
            one, other = gain(low) or 0.0, gain(high) or 0.0
            share = one / (one - other) if one != other else 0.5
            zero = low * float((high / low) ** share) * (1 + 0.45 * beyond * _PRECISION)
            x = min(max(zero, low * (1 + 0.1 * _PRECISION)), high * (1 - 0.1 * _PRECISION))
        there = None if x is None else gain(x)
        if x is None or there is None:
            break
        is_low = (there > 0) != above
        low, high = (x, high) if is_low else (low, x)
        beyond = 1.0 if is_low else -1.0
    return low, high


def _gain(asked: _Crossing, x: float) -> float | None:
    """Log of the factor by which the alternative is better at `x`."""
    text, metric = (asked.axis.override(x), f"seed={asked.seed}"), asked.metric
    points = (asked.question.point(*text, alternative=alternative) for alternative in (False, True))
    base, other = (evaluate(replace(point, metrics=(metric,), intervals=False)).values.get(metric) for point in points)
    if base is None or other is None:
        return None
    # Where there is nothing to divide only which is larger counts.
    ratio = log(base / other) if base > 0 and other > 0 else float((base > other) - (base < other))
    return ratio if study_metric(metric).is_better_low else -ratio


@dataclass(frozen=True, repr=False)
class WhatIfResult(Renderable):
    """Answers with crossovers and changes of bound.

    step:   the decode step of bounds and step metrics; `step_label` as text
    bounds: along the varied values and the batch
    largest_batch: largest feasible batch of such sequences, and `largest_by` its limit; 0 if they do not decode
    assumed: sentences on values the scenario leaves open
    load:    for an axis of arrival rates"""

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
        """A row per path and metric; nan without a number."""
        return columns_of(
            [
                {
                    "path": row.axis.path,
                    "metric": row.metric,
                    "low_value": row.axis.texts[0],
                    "high_value": row.axis.texts[-1],
                    "low": row.low,
                    "base": row.base,
                    "high": row.high,
                    "elasticity": row.elasticity,
                }
                for row in self.answers.sensitivities
            ]
        )

    def to_json(self) -> dict[str, Any]:
        """Every point with its values, sensitivities, changes of bound and crossovers."""
        answers, question, step = self.answers, self.answers.question, self.step
        metrics, against = list(question.base.metrics), None
        if answers.other is not None:
            pairs = {name: (value, answers.base.values.get(name)) for name, value in answers.other.values.items()}
            against = {
                "set": list(question.against),
                "base": _record(answers.other),
                "ratio": {name: one / before for name, (one, before) in pairs.items() if one is not None and before},
                "points": _points_json(question.axes, answers.others),
            }
        varied = {axis.path: list(axis.texts) for axis in question.axes}
        inputs = {"scenario": resolved(answers.scenario), "metrics": metrics, "varied": varied}
        return {
            "scenario": answers.scenario.name,
            "metrics": metrics,
            "base": _record(answers.base),
            "sensitivities": [
                {
                    "path": row.axis.path,
                    "metric": row.metric,
                    "low": {"value": row.axis.texts[0], "metric": row.low},
                    "base": {
                        "value": 1.0 if row.axis.is_multiple else None if row.axis.unit else row.axis.present,
                        "metric": row.base,
                    },
                    "high": {"value": row.axis.texts[-1], "metric": row.high},
                    "elasticity": row.elasticity,
                }
                for row in answers.sensitivities
            ],
            "points": _points_json(question.axes, answers.by_axis),
            "grid": [{"set": list(key), **_record(record)} for key, record in answers.grid.items()],
            "against": against,
            "step": {"label": self.step_label, "bound": self.step_bound, **step.model_dump(include=_OF_STEP)},
            "bound_changes": [asdict(change) for change in self.bounds],
            "crossovers": [asdict(payoff) for payoff in self.payoffs],
            **({} if self.load is None else {"load": asdict(self.load)}),
            "trust": trust_of(answers.scenario).to_json(),
            "provenance": provenance_of([answers.scenario]).to_json(
                "what-if", {**inputs, "against": list(question.against)}
            ),
        }


_OF_STEP = {"batch", "context", "prefill"}


def _points_json(axes: Sequence[Axis], records: Mapping[str, Sequence[Record]]) -> list[dict[str, Any]]:
    return [
        {"set": text, **_record(record)}
        for axis in axes
        for text, record in zip(axis.overrides, records.get(axis.path, ()), strict=False)
    ]


def _record(record: Record) -> dict[str, Any]:
    return {
        "values": dict(record.values),
        **({"interval": {name: list(ends) for name, ends in record.intervals.items()}} if record.intervals else {}),
        **({"problem": record.problem} if record.problem else {}),
    }


_LARGEST_BATCH = 8192  # up to which the batch is looked for at which the bound of a decode step changes
_STEP = "step."
_TELLING = 0.01  # share of the step from which on an operator's bound is reported


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

    vary:      `PATH=lo..hi[:n]` or `PATH=a,b,c`; default: purchasable resources, and the load
    overrides: as `--set` takes them; `step.batch=8` sets the step of step metrics, else the typical one
    metrics:   of runs, steps and memory; default: latencies and throughput
    grid:      two varied values in all combinations
    against:   overrides of an alternative: where along each axis does it pay off?
    workers, engine: see `perfmodel.planning.sweep`
    watch:     stage name -> progress display
    intervals: also 80 % intervals of means, from several simulations per point

    Raises SpecError for invalid input."""
    base = Point(scenario, tuple(metrics), tuple(overrides))
    loaded, given = load_point(base)
    if grid and not vary:
        raise SpecError("--grid needs two varied values; give --vary twice.")
    step, label = (given, "The step that was given") if given is not None else _typical(loaded)
    axes = tuple(axis_of(text, loaded, step) for text in vary or suspects(loaded))
    asked = base.metrics or default_metrics(loaded, any(axis.path.rpartition(".")[2] == "hardware" for axis in axes))
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
    bounds = tuple(change for change in _bounds(question, loaded, step) if change.what in named)
    largest = 0, ""
    with suppress(DoesNotFitError):  # the points say so
        if step.batch:
            held = plan_memory(taker.model, taker.hardware, taker.engine).max_batch(max(step.context or 1, 1))
            largest = min((taker.engine.max_num_seqs, "max_num_seqs"), (held, "the KV cache"), key=lambda one: one[0])
    load = load_of(loaded, axes, answers.by_axis) if vary else None
    return WhatIfResult(answers, step, label, estimate.bound, bounds, tuple(turns), *largest, load=load)


def _typical(scenario: Scenario) -> tuple[StepSpec, str]:
    costs = step_costs(engine_of_step(scenario))
    choice = typical_step(scenario, lambda shape: costs.estimate(shape).duration_s / costs.tokens_per_decode(shape))
    if choice.shape.prefills:  # of a model without answers, or of beams
        prefill, cached = choice.shape.prefills[0]
        return StepSpec(prefill=prefill, prompts=len(choice.shape.prefills), cached=cached), choice.label
    batch = max(choice.shape.num_decodes, 1)
    where = " on a decode replica" if scenario.cluster.is_disaggregated else ""
    return StepSpec(batch=batch, context=max(choice.shape.decode_context // batch, 1)), choice.label + where


def _bounds(question: WhatIf, scenario: Scenario, step: StepSpec) -> Iterator[BoundChange]:
    """Changes of the step's bound along the axes it depends on, and along its batch."""
    axes = {axis.path: axis for axis in question.axes if axis.xs and not axis.path.startswith("traffic.")}
    if step.batch and "step.batch" not in axes:
        axes["step.batch"] = axis_of(f"step.batch=1..{_LARGEST_BATCH}:14", scenario, step)
    for path, axis in axes.items():
        with suppress(DoesNotFitError, UnsupportedError):  # the points say so
            yield from bound_changes(question.base, axis, with_operators=path == "step.batch")
