"""From what a person asks (names, texts) to a `WhatIfResult`: what `perfmodel whatif` and `perfmodel.whatif` share."""

__all__ = ["WhatIfResult", "ask_whatif"]

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost import plan_memory, step_costs
from perfmodel.cost.calibrations.provenance import provenance_of, resolved
from perfmodel.errors import DoesNotFitError, SpecError, UnsupportedError
from perfmodel.planning.sensitivity.crossovers import BoundChange, Payoff, bound_changes, payoffs
from perfmodel.planning.sensitivity.load import OfferedLoad, load_of
from perfmodel.planning.sensitivity.vary import Axis, axis_of, suspects
from perfmodel.planning.sensitivity.whatif import WhatIf, WhatIfAnswers, answer, default_metrics
from perfmodel.planning.sweeps.metrics import batch_shape
from perfmodel.planning.sweeps.points import Point, Record, load_point
from perfmodel.planning.sweeps.typical_step import StepSpec, choose_step, engine_of_step
from perfmodel.planning.sweeps.workers import Progress
from perfmodel.printable import Printable
from perfmodel.specs.scenario import Scenario
from perfmodel.trust import trust_of


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
            "points": _points(question.axes, answers.by_axis),
            "grid": [{"set": list(key), **_record(record)} for key, record in answers.grid.items()],
            "against": {
                "set": list(question.against),
                "base": _record(answers.other) if answers.other is not None else None,
                "ratio": _ratios(answers.base, answers.other),
                "points": _points(question.axes, answers.others),
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


def _points(axes: Sequence[Axis], records: Mapping[str, Sequence[Record]]) -> list[dict[str, Any]]:
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
    workers, engine: as for `perfmodel.planning.sweeps.sweep`
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
