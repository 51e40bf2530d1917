"""`validate serving`: recorded runs of a server, simulated, and compared stage by stage."""

__all__ = ["StageRow", "report_serving", "simulate_runs", "validate_serving"]

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from perfmodel.calibrate.serving_runs import METRICS, ServingRun, StageLatencies, read_serving_runs, stage_latencies
from perfmodel.cost import Calibration, EngineProfile
from perfmodel.sim import simulate
from perfmodel.validate.report import ErrorStats, Rows, ValidationReport

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class StageRow:
    """One stage of a run: what was predicted beside what was measured, in ms, and the interval of the means."""

    run: ServingRun
    stage: int
    predicted: StageLatencies
    origin: str

    @property
    def measured(self) -> StageLatencies:
        return self.run.measured[self.stage]

    @property
    def label(self) -> str:
        return f"{self.run.run_id}, stage {self.stage}"


def validate_serving(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Simulate every run of the file and compare each stage. Runs that cannot be described are listed with a reason."""
    runs, left_out = read_serving_runs(path)
    rows = simulate_runs(runs, progress)
    return report_serving(rows, left_out)


def simulate_runs(
    runs: Sequence[ServingRun],
    progress: Progress | None = None,
    calibration: Calibration | None = None,
    profile: EngineProfile | None = None,
) -> list[StageRow]:
    """All stages of all runs, simulated over the cores of this machine; the answer does not depend on how many."""
    work = partial(_simulate_run, calibration=calibration, profile=profile)
    rows: list[StageRow] = []
    with ProcessPoolExecutor(min(len(runs), len(os.sched_getaffinity(0)))) as pool:
        for done, found in enumerate(pool.map(work, runs), 1):
            rows += found
            if progress is not None:
                progress(done, len(runs))
    return rows


def _simulate_run(
    run: ServingRun, calibration: Calibration | None = None, profile: EngineProfile | None = None
) -> list[StageRow]:
    result = simulate(run.scenario, calibration=calibration, profile=profile, keep_steps=False)
    assert result.requests is not None
    latencies = stage_latencies(run, result.requests)
    return [StageRow(run, i, found, result.summary["origin"]) for i, found in enumerate(latencies)]


def report_serving(rows: Sequence[StageRow], left_out: Sequence[tuple[str, str]] = ()) -> ValidationReport:
    """Errors over all stages, and by device, model and load."""
    by = {name: _stats(members) for name, members in _groups(rows) if members}
    worst = [row for metric in METRICS for row in _pairs(rows, metric).worst(metric, 3)]
    return ValidationReport(
        kind="serving",
        rows=len(rows) + len(left_out),
        covered=len(rows),
        metrics=_stats(rows),
        by=by,
        worst=worst,
        notes=[f"not covered: {name}: {reason}" for name, reason in left_out],
    )


def _pairs(rows: Sequence[StageRow], metric: str) -> Rows:
    kept = [row for row in rows if metric in row.measured]
    return Rows(
        [row.predicted[metric] for row in kept], [row.measured[metric] for row in kept], [row.label for row in kept]
    )


def _stats(rows: Sequence[StageRow]) -> dict[str, ErrorStats]:
    pairs = {metric: _pairs(rows, metric) for metric in METRICS}
    return {metric: found.stats() for metric, found in pairs.items() if len(found)}


def _groups(rows: Sequence[StageRow]) -> Iterator[tuple[str, list[StageRow]]]:
    """By device, by model, and whether a backlog grew."""
    for kind, name_of in (
        ("device", lambda row: row.run.scenario.hardware.name),
        ("model", lambda row: row.run.scenario.model.name),
        ("load", lambda row: "overloaded" if row.run.is_overloaded(row.stage) else "steady"),
    ):
        for name in sorted({name_of(row) for row in rows}):
            yield f"{kind} {name}", [row for row in rows if name_of(row) == name]
