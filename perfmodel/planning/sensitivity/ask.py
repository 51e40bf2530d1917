"""From what a person asks (names, texts) to answers: what `perfmodel whatif` and `perfmodel.whatif` share."""

__all__ = ["ask_whatif"]

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from perfmodel.cost import plan_memory, step_costs
from perfmodel.errors import DoesNotFitError, SpecError, UnsupportedError
from perfmodel.planning.sensitivity.crossovers import BoundChange, Payoff, bound_changes, payoffs
from perfmodel.planning.sensitivity.load import load_of
from perfmodel.planning.sensitivity.result import WhatIfResult
from perfmodel.planning.sensitivity.vary import axis_of, suspects
from perfmodel.planning.sensitivity.whatif import WhatIf, answer, default_metrics
from perfmodel.planning.sweeps.metrics import batch_shape
from perfmodel.planning.sweeps.points import Point, load_point
from perfmodel.planning.sweeps.typical_step import StepSpec, choose_step, engine_of_step
from perfmodel.planning.sweeps.workers import Progress
from perfmodel.specs.scenario import Scenario

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
    base = replace(base, metrics=asked, step=step, overrides=_without_step(overrides), intervals=intervals)
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


def _without_step(overrides: Sequence[str]) -> tuple[str, ...]:
    """What is left of overrides once those of the step are in the point's own step."""
    return tuple(text for text in overrides if not text.startswith(_STEP))


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
