"""A scenario beside itself without a technique: both calibrated for together, simulated, and executed in turns."""

from statistics import fmean

from perfmodel.errors import SpecError
from perfmodel.evidence.executed.technique import Sides, TechniqueRun
from perfmodel.planning.points import run_metric
from perfmodel.sim import simulate
from perfmodel.sim.records.result import RunResult
from perfmodel.specs.scenario import Scenario
from perfmodel_executors.measure import calibrate
from perfmodel_executors.measure.calibrate import Progress, ServedModel
from perfmodel_executors.models.support import CPU
from perfmodel_executors.parallel.ranks import open_ranks
from perfmodel_executors.run import as_executed_on_cpu, num_ranks, serve_calibrated

_MIN_ROUNDS = 6
_PAIR = 2  # the scenario and its baseline
# Fields of an engine that decide which steps there are, not how long a given one takes.
_COMPOSES_STEPS = {
    *("batching", "batch_timeout_ms", "enable_chunked_prefill", "max_num_batched_tokens"),
    *("prefill_exclusive", "reserve_output", "enable_prefix_caching"),
}


def measure_technique(
    scenario: Scenario,
    baseline: Scenario,
    metric: str,
    repeats: int = 1,
    progress: Progress | None = None,
    budget_s: float = 0.0,
    min_rounds: int = _MIN_ROUNDS,
) -> list[TechniqueRun]:
    """Calibrates on the steps of both together, then simulates and executes both `repeats` times, each with its seed,
    sides alternating. budget_s: wall seconds for the timed rounds, at least `min_rounds`."""
    sides = [as_executed_on_cpu(side) for side in (scenario, baseline)]
    counts = sorted({number for side in sides if (number := num_ranks(side)) > 1})
    if len(counts) > 1:
        raise SpecError(
            f"{sides[0].name}: {counts[0]} and {counts[1]} ranks are not executed beside each other; give both sides "
            f"as many, or one of them one."
        )
    with open_ranks(max(counts, default=1), CPU) as ranks:
        served = [ServedModel.of(side) for side in sides]
        is_alike = len(set(map(_what_steps_depend_on, served))) == 1  # then they are timed once
        times = calibrate.time_together(served[: 1 if is_alike else _PAIR], budget_s, min_rounds, progress, ranks)
        calibration = calibrate.fitted(sides[0].hardware, times, "perfmodel validate techniques")
        runs = []
        for number in range(repeats):
            seeded = [side.model_copy(update={"seed": side.seed + number}) for side in sides]
            simulated, executed, errors = [0.0] * _PAIR, [0.0] * _PAIR, [0.0] * _PAIR
            for i in range(_PAIR) if number % 2 else reversed(range(_PAIR)):
                result, steps = serve_calibrated(seeded[i], times[i % len(times)], calibration, progress)
                executed[i] = _metric(result, metric)
                predicted_s, measured_s = fmean(s.predicted_s for s in steps), fmean(s.measured_s for s in steps)
                errors[i] = predicted_s / measured_s - 1  # of the executed steps, all together
                # With the acceptance that was measured, where tokens are drafted.
                simulated[i] = _metric(simulate(result.scenario, calibration=calibration), metric)
            runs.append(TechniqueRun(Sides(*simulated), Sides(*executed), Sides(*errors)))
    return runs


def _what_steps_depend_on(served: ServedModel) -> str:
    """Equal for sides that differ in how steps are composed only."""
    engine = served.engine.model_dump(exclude=_COMPOSES_STEPS)
    return repr((served.model, engine, served.span, served.sampling, served.routing, served.seed))


def _metric(result: RunResult, metric: str) -> float:
    value = run_metric(result, metric)
    if not value:
        raise SpecError(f"{result.scenario.name}: this run has no {metric}; give another `technique.metric`.")
    return value
