"""A point: a scenario with overrides, and the metrics that are wanted of it; evaluated, a record.

A point is text and numbers, so that it can be sent to another process, written down and recognised. It knows nothing
of what asks for it.
"""

__all__ = ["Point", "Record", "Run", "evaluate", "evaluate_timed", "load_point", "step_of"]

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from perfmodel import sim
from perfmodel.cost import step_costs
from perfmodel.errors import PerfmodelError, SpecError, UnsupportedError
from perfmodel.files.validation import parse
from perfmodel.files.yaml_loader import Positions
from perfmodel.planning.metrics import basis_by_name
from perfmodel.planning.sweeps.metrics import batch_shape, max_request_rate, memory_metric, run_metric, step_metrics
from perfmodel.planning.sweeps.typical_step import StepSpec, engine_of_step
from perfmodel.sim.records.result import RunResult
from perfmodel.specs import load_scenario
from perfmodel.specs.overrides import apply_override, parse_override
from perfmodel.specs.scenario import Scenario

Run = Callable[[Scenario], RunResult]  # serves a scenario's traffic, on either clock
_STEP = "step."  # overrides that begin so are of the point's own step


@dataclass(frozen=True, slots=True)
class Point:
    """scenario: a file's path or name, `inside`: the keys of the block in it that is the scenario
    overrides:  as `--set` takes them; `step.batch=8` changes `step`
    metrics:    names of perfmodel.planning.metrics, of runs, steps and memory
    step:       the step that metrics of steps and of memory are of
    intervals:  also the 80 % intervals of a run's means, for which it is simulated several times
    """

    scenario: str
    metrics: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    step: StepSpec | None = None
    intervals: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """What came of a point.

    values:  metric -> value in its own unit; None where the run has none
    problem: why there are no values: a model that does not fit, traffic that cannot be served
    origin:  of the times: datasheet, calibrated, measured
    intervals: metric -> the ends of its 80 % interval, where the point asked for them and the run has them
    """

    values: Mapping[str, float | None] = field(default_factory=dict)
    problem: str = ""
    clock: str = "simulated"
    origin: str = ""
    notes: tuple[str, ...] = ()
    intervals: Mapping[str, Sequence[float]] = field(default_factory=dict)


def load_point(point: Point) -> tuple[Scenario, StepSpec | None]:
    """The point's scenario and step with its overrides. Raises SpecError that names the override at fault."""
    others = [text for text in point.overrides if not text.startswith(_STEP)]
    return load_scenario(point.scenario, others, point.inside), step_of(point)


def step_of(point: Point) -> StepSpec | None:
    """The point's step with its overrides, which needs no scenario. Raises SpecError as `load_point` does."""
    own = [text for text in point.overrides if text.startswith(_STEP)]
    return _changed_step(point.step, own) if own else point.step


def evaluate(point: Point, run: Run | None = None) -> Record:
    """The point's metrics; `run` serves the traffic where a metric is of a run (default: the simulator).

    Raises SpecError for overrides that are wrong; what cannot be served, or is not started by its engine, is a record
    with the problem.
    """
    try:
        scenario, step = load_point(point)
    except UnsupportedError as error:
        return Record(problem=f"{error.sentence}.")
    return _evaluate_scenario(scenario, step, point, run)


def evaluate_timed(point: Point) -> tuple[Record, float]:
    """See `evaluate`; also the seconds that it took here."""
    began = time.perf_counter()
    return evaluate(point), time.perf_counter() - began


def _evaluate_scenario(scenario: Scenario, step: StepSpec | None, point: Point, run: Run | None = None) -> Record:
    """See `evaluate`."""
    serve = run or partial(sim.simulate, keep_steps=False, intervals=point.intervals)
    try:
        return _measured(scenario, step, point.metrics, serve)
    except SpecError:
        raise
    except PerfmodelError as error:
        return Record(problem=str(error))


def _measured(scenario: Scenario, step: StepSpec | None, metrics: tuple[str, ...], serve: Run) -> Record:
    bases = {name: basis_by_name(name) for name in metrics}
    values: dict[str, float | None] = {}
    clock, origin = "simulated", ""
    notes: tuple[str, ...] = ()
    intervals: dict[str, Sequence[float]] = {}
    if "max_request_rate" in bases:
        values["max_request_rate"] = max_request_rate(scenario)
    of_run = [name for name, basis in bases.items() if basis == "run" and name not in values]
    if of_run:
        result = serve(scenario)
        values |= {name: run_metric(result, name) for name in of_run}
        clock, origin, notes = result.clock, str(result.summary.get("origin") or ""), result.notes
        found: Mapping[str, Sequence[float]] = result.summary.get("interval") or {}
        intervals = {name: found[name] for name in of_run if name in found}
    if "step" in bases.values():
        values |= _of_step(scenario, step, [name for name, basis in bases.items() if basis == "step"])
    values |= {name: memory_metric(scenario, name, step)[0] for name, basis in bases.items() if basis == "memory"}
    return Record({name: values[name] for name in metrics}, "", clock, origin, notes, intervals)


def _of_step(scenario: Scenario, step: StepSpec | None, names: list[str]) -> dict[str, float]:
    if step is None:
        raise SpecError(
            f"{names[0]} is of a step: give `step: {{batch: 1, context: 1024}}` or `step: {{prefill: 512}}`."
        )
    scenario = engine_of_step(scenario, is_prompt=not step.batch)
    shape = batch_shape(step, scenario)
    found = step_metrics(scenario, step_costs(scenario).estimate(shape), shape)
    return {name: found[name] for name in names}


def _changed_step(step: StepSpec | None, overrides: list[str]) -> StepSpec:
    data = {"step": {} if step is None else step.model_dump(exclude_defaults=True)}
    positions = Positions("step")
    for text in overrides:
        change = parse_override(text)
        apply_override(change, data, change.path, positions)
    return parse(StepSpec, data["step"], positions)
