"""perfmodel from Python: the commands as functions, whose results print themselves and give columns of numpy.

    import perfmodel as pm

    result = pm.simulate("llama-3.1-8b-a100", {"engine.max_num_seqs": 64})
    print(result)                     # the table of `perfmodel simulate`
    result.columns()["ttft_s"]        # one number per request; result.to_pandas() for pandas

Overrides are what `--set` takes: a mapping from paths to values (`"0.5x"` multiplies), or its texts.
"""

__all__ = ["Overrides", "make_plan", "simulate", "sweep", "whatif"]

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from perfmodel import sim
from perfmodel.errors import SpecError
from perfmodel.planning import search
from perfmodel.planning.points import Point
from perfmodel.planning.result import JobPlan, PlanResult
from perfmodel.planning.sweep import SweepResult
from perfmodel.planning.sweep import sweep as sweep_points
from perfmodel.planning.whatif import WhatIfResult, ask_whatif, default_metrics
from perfmodel.sim.records.result import RunResult
from perfmodel.specs import load_scenario
from perfmodel.specs.overrides import as_overrides, parse_override
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.scenario_file import source_of

Overrides = Mapping[str, Any] | Sequence[str]
Progress = Callable[[int, int | None], None]


def simulate(scenario: Scenario | str | Path, overrides: Overrides = (), /, **options: Any) -> RunResult:
    """Serve a scenario's traffic on the simulated clock: as `perfmodel simulate`.

    scenario:  a name, a path, or a `Scenario`
    overrides: as `--set` takes them; paths may also be given as keywords, `**{"engine.max_num_seqs": 64}`, `seed=1`
    options:   those of `perfmodel.sim.simulate`: calibration, profile, progress, out, keep_steps, intervals ...

    Raises SpecError for what cannot be read, DoesNotFitError for a model too large for the devices, WorkloadError for
    traffic that cannot be served.
    """
    named = {key: options.pop(key) for key in list(options) if "." in key or key in Scenario.model_fields}
    texts = (*_texts(overrides), *_texts(named))
    if isinstance(scenario, Scenario) and not texts:
        return sim.simulate(scenario, **options)
    return sim.simulate(load_scenario(*_source(scenario, texts)), **options)


def whatif(
    scenario: Scenario | str | Path,
    vary: Mapping[str, Any] | Sequence[str] | str = (),
    overrides: Overrides = (),
    metrics: Sequence[str] | str = (),
    *,
    grid: bool = False,
    against: Overrides | str = (),
    workers: int | None = None,
    engine: str = "local",
    intervals: bool = False,
) -> WhatIfResult:
    """Vary a scenario one value at a time: as `perfmodel whatif`.

    vary:    `{"engine.max_num_seqs": (16, 256), "hardware.hbm.bandwidth": "0.5x..2x"}` (values, or a range as the
             command takes it), or the command's texts; by default the resources that could be bought, and the load
    metrics: of runs, steps and memory; by default latencies and throughput
    grid:    two varied values in all their combinations
    against: overrides of an alternative: where along each axis does it begin to pay?
    workers: processes; in a script, start them below `if __name__ == "__main__":`
    intervals: also the 80 % intervals of means, for which each point is simulated several times
    """
    if isinstance(vary, Mapping):
        vary = [
            f"{path}={values if isinstance(values, str) else ','.join(map(str, values))}"
            for path, values in vary.items()
        ]
    path, texts = _source(scenario, overrides)
    return ask_whatif(
        path,
        [vary] if isinstance(vary, str) else vary,
        texts,
        [metrics] if isinstance(metrics, str) else metrics,
        grid,
        _texts(against.split() if isinstance(against, str) else against),
        workers,
        engine,
        intervals=intervals,
    )


def sweep(
    scenario: Scenario | str | Path,
    over: Mapping[str, Sequence[Any]],
    overrides: Overrides = (),
    metrics: Sequence[str] | str = (),
    *,
    progress: Progress | None = None,
    workers: int | None = None,
    engine: str = "local",
) -> SweepResult:
    """Metrics of a scenario at all combinations of some values, in processes of this machine or on Ray.

    over:    path -> values; `{"engine.max_num_seqs": [16, 64], "traffic.arrivals.rate": [1, 2, 4]}`
    metrics: of runs, steps (with `step.batch=8` among the overrides) and memory; by default latencies and throughput
    progress: called with (points done, points in all)
    workers: processes; in a script, start them below `if __name__ == "__main__":`
    engine:  local | ray | ray:ADDRESS
    """
    path, texts = _source(scenario, overrides)
    asked = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    asked = asked or default_metrics(load_scenario(path, [text for text in texts if not text.startswith("step.")]))
    combinations = list(product(*over.values()))
    points = [Point(path, asked, (*texts, *_texts(dict(zip(over, values, strict=True))))) for values in combinations]
    records = sweep_points(points, progress, workers, engine)
    return SweepResult(tuple(over), tuple(combinations), asked, tuple(records))


def make_plan(
    scenario: Scenario | str | Path,
    overrides: Overrides = (),
    *,
    store: Path | None = None,
    workers: int | None = None,
    engine: str = "local",
) -> PlanResult | JobPlan:
    """The deployment that serves a scenario's rate within its SLO, or does its job by an offline objective: as
    `perfmodel plan`; also called as `pm.plan(...)`.

    overrides: `{"plan.objective": "fewest_gpus", "traffic.arrivals.rate": 50}`
    store:     file with points that are already known, and for those evaluated now; default: the user's
    workers:   processes; in a script, start them below `if __name__ == "__main__":`
    engine:    local | ray | ray:ADDRESS
    """
    return search.make_plan(*_source(scenario, overrides), store, workers, engine)


def _source(scenario: Scenario | str | Path, overrides: Overrides) -> tuple[str, tuple[str, ...]]:
    """The name, path or text of a scenario, as worker processes get it, and its overrides.

    Raises SpecError as `source_of` does, and for a scenario that is a block of a study's file.
    """
    if not isinstance(scenario, Scenario):
        return str(scenario), _texts(overrides)
    source = source_of(scenario)
    if source.inside:
        raise SpecError(f"{scenario.name}: is a block of {source.path}; write it into a file of its own.")
    return source.path, (*source.overrides, *_texts(overrides))


def _texts(overrides: Overrides) -> tuple[str, ...]:
    """As `--set` takes them. Raises SpecError for a text without `=`."""
    if isinstance(overrides, Mapping):
        return as_overrides(overrides)
    if isinstance(overrides, str):
        raise SpecError(f"{overrides!r}: give a list of overrides, or a mapping from paths to values.")
    for text in overrides:
        parse_override(text)
    return tuple(overrides)
