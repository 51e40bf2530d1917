"""perfmodel from Python: the commands as functions, whose results print themselves and give columns of numpy.

    import perfmodel as pm

    result = pm.simulate("llama-3.1-8b-a100", {"engine.max_num_seqs": 64})
    print(result)                     # the table of `perfmodel simulate`
    result.columns()["ttft_s"]        # one number per request; polars.DataFrame(result.columns())

Overrides are what `--set` takes: a mapping from paths to values (`"0.5x"` multiplies), or its texts.
"""

__all__ = ["Overrides", "Plan", "Result", "SweepResult", "make_plan", "simulate", "sweep", "whatif"]

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel import sim
from perfmodel.errors import SpecError
from perfmodel.plan import search
from perfmodel.plan.deployments.result import PlanResult
from perfmodel.plan.jobs.result import JobPlan
from perfmodel.plan.sensitivity.ask import ask_whatif
from perfmodel.plan.sensitivity.whatif import default_metrics
from perfmodel.plan.sweeps.points import Point, Record
from perfmodel.plan.sweeps.sweep import sweep as sweep_points
from perfmodel.report.drawing.shown import as_html, as_text
from perfmodel.report.plans.printed import print_plan
from perfmodel.report.runs.tables import print_summary, rows_table
from perfmodel.report.whatifs.written import WhatIfReport
from perfmodel.sim.records.columns import RequestColumns, StepColumns
from perfmodel.sim.records.result import RunResult
from perfmodel.specs import load_scenario
from perfmodel.specs.overrides import as_overrides, parse_override
from perfmodel.specs.scenario import Scenario

Overrides = Mapping[str, Any] | Sequence[str]
Progress = Callable[[int, int | None], None]
Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True, repr=False)
class Result(RunResult):
    """A `RunResult` that prints itself as the command does, and gives its records as columns."""

    def columns(self, of: str = "requests") -> Columns:
        """One array per column, equally long: of `requests` (with ttft_s, tpot_s, e2el_s), or of `steps`.

        Raises SpecError where these records were not kept (`keep_steps=True` keeps steps).
        """
        if of not in ("requests", "steps"):
            raise SpecError(f"columns({of!r}): allowed 'requests' or 'steps'.")
        records = self.requests if of == "requests" else self.steps
        if records is None:
            raise SpecError(f"columns({of!r}): this run kept none; simulate with keep_steps=True, and without `out`.")
        columns = {field.name: getattr(records, field.name) for field in fields(records)}
        found: Columns = {name: column for name, column in columns.items() if column is not None}
        if isinstance(records, RequestColumns):
            found |= {"ttft_s": records.ttft_s, "tpot_s": records.tpot_s, "e2el_s": records.e2el_s}
        else:
            assert isinstance(records, StepColumns)
            found["duration_s"] = records.end_s - records.start_s
        return found

    def __str__(self) -> str:
        return as_text(partial(print_summary, self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(partial(print_summary, self))


@dataclass(frozen=True, repr=False)
class SweepResult:
    """Records of all combinations of some values, the last path varying fastest."""

    paths: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]
    metrics: tuple[str, ...]
    records: tuple[Record, ...]

    def columns(self) -> Columns:
        """The varied values by path, the metrics (nan without a value), and `problem`: why there is none."""
        found: Columns = {
            path: np.array([row[number] for row in self.values]) for number, path in enumerate(self.paths)
        }
        for name in self.metrics:
            there = [record.values.get(name) for record in self.records]
            found[name] = np.array([np.nan if value is None else value for value in there], dtype=np.float64)
        found["problem"] = np.array([record.problem for record in self.records])
        return found

    def _show(self, console: Any) -> None:
        rows = []
        for values, record in zip(self.values, self.records, strict=True):
            numbers = (record.values.get(name) for name in self.metrics)
            shown = ["–" if number is None else f"{number:,.4g}" for number in numbers]
            rows.append([*map(str, values), *shown])
        console.print(rows_table([*self.paths, *self.metrics], rows, left=0))
        for problem in dict.fromkeys(record.problem for record in self.records if record.problem):
            console.print(f"Note: {problem}", highlight=False, markup=False)

    def __str__(self) -> str:
        return as_text(self._show)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self._show)


@dataclass(frozen=True, repr=False)
class Plan(PlanResult):
    """A `PlanResult` that prints itself as the command does."""

    def columns(self) -> Columns:
        """The finalists' figures, best first, those that do not serve the rate (`serves`) last; nan without a value."""
        document = self.to_json()
        rows = [
            {**row, "serves": serves} for serves, key in ((True, "ranked"), (False, "missed")) for row in document[key]
        ]
        names = [
            name for name, value in (rows[0] if rows else {}).items() if not isinstance(value, dict | list | tuple)
        ]
        return {name: np.array([np.nan if row[name] is None else row[name] for row in rows]) for name in names}

    def __str__(self) -> str:
        return as_text(partial(print_plan, self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(partial(print_plan, self))


def simulate(scenario: Scenario | str | Path, overrides: Overrides = (), /, **options: Any) -> Result:
    """Serve a scenario's traffic on the simulated clock: as `perfmodel simulate`.

    scenario:  a name, a path, or what `load_scenario` gave
    overrides: as `--set` takes them; paths may also be given as keywords, `**{"engine.max_num_seqs": 64}`, `seed=1`
    options:   those of `perfmodel.sim.simulate`: calibration, profile, progress, out, keep_steps, intervals ...

    Raises SpecError for what cannot be read, DoesNotFitError for a model too large for the devices, WorkloadError for
    traffic that cannot be served.
    """
    named = {key: options.pop(key) for key in list(options) if "." in key or key in Scenario.model_fields}
    texts = (*_texts(overrides), *_texts(named))
    if isinstance(scenario, Scenario):
        if texts:
            raise SpecError(f"{texts[0]}: overrides change what files say; give the scenario by its name or path.")
        loaded = scenario
    else:
        loaded = load_scenario(scenario, texts)
    result = sim.simulate(loaded, **options)
    return Result(**{field.name: getattr(result, field.name) for field in fields(result)})


def whatif(
    scenario: str | Path,
    vary: Mapping[str, Any] | Sequence[str] | str = (),
    overrides: Overrides = (),
    metrics: Sequence[str] | str = (),
    *,
    grid: bool = False,
    against: Overrides | str = (),
    workers: int | None = None,
    engine: str = "local",
) -> WhatIfReport:
    """Vary a scenario one value at a time: as `perfmodel whatif`.

    vary:    `{"engine.max_num_seqs": (16, 256), "hardware.hbm.bandwidth": "0.5x..2x"}` (values, or a range as the
             command takes it), or the command's texts; by default the resources that could be bought, and the load
    metrics: of runs, steps and memory; by default latencies and throughput
    against: overrides of an alternative: where along each axis does it begin to pay?
    workers: processes; in a script, start them below `if __name__ == "__main__":`
    """
    if isinstance(vary, Mapping):
        vary = [f"{path}={_range(values)}" for path, values in vary.items()]
    result = ask_whatif(
        str(scenario),
        [vary] if isinstance(vary, str) else vary,
        _texts(overrides),
        [metrics] if isinstance(metrics, str) else metrics,
        grid,
        _texts(against.split() if isinstance(against, str) else against),
        workers,
        engine,
    )
    return WhatIfReport(result, f"perfmodel.whatif({str(scenario)!r}, ...)")


def sweep(
    scenario: str | Path,
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
    workers: processes; in a script, start them below `if __name__ == "__main__":`
    engine:  local | ray | ray:ADDRESS
    """
    texts = _texts(overrides)
    asked = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    asked = asked or default_metrics(load_scenario(scenario, [text for text in texts if not text.startswith("step.")]))
    combinations = list(product(*over.values()))
    points = [
        Point(str(scenario), asked, (*texts, *_texts(dict(zip(over, values, strict=True))))) for values in combinations
    ]
    records = sweep_points(points, progress, workers, engine)
    return SweepResult(tuple(over), tuple(combinations), asked, tuple(records))


def make_plan(
    scenario: str | Path,
    overrides: Overrides = (),
    *,
    store: Path | None = None,
    workers: int | None = None,
    engine: str = "local",
) -> Plan | JobPlan:
    """The deployment that serves a scenario's rate within its SLO, or does its job by an offline objective: as
    `perfmodel plan`; also called as `pm.plan(...)`.

    overrides: `{"plan.objective": "fewest_gpus", "traffic.arrivals.rate": 50}`
    store:     file with points that are already known, and for those evaluated now; default: the user's
    workers:   processes; in a script, start them below `if __name__ == "__main__":`
    """
    result = search.make_plan(str(scenario), _texts(overrides), store, workers, engine)
    if isinstance(result, JobPlan):
        return result
    return Plan(**{field.name: getattr(result, field.name) for field in fields(result)})


def _texts(overrides: Overrides) -> tuple[str, ...]:
    """As `--set` takes them. Raises SpecError for a text without `=`."""
    if isinstance(overrides, Mapping):
        return as_overrides(overrides)
    if isinstance(overrides, str):
        raise SpecError(f"{overrides!r}: give a list of overrides, or a mapping from paths to values.")
    for text in overrides:
        parse_override(text)
    return tuple(overrides)


def _range(values: Any) -> str:
    """A range's text as it is; else the values, separated."""
    return values if isinstance(values, str) else ",".join(map(str, values))
