"""`validate serving`: recorded runs of a server, simulated, and compared stage by stage."""

__all__ = ["report_serving", "validate_serving"]

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from perfmodel.calibrate.serving_runs import METRICS, read_serving_runs
from perfmodel.calibrate.serving_simulation import StageRow, simulate_runs
from perfmodel.validate.report import ErrorStats, Rows, ValidationReport

Progress = Callable[[int, int], None]


def validate_serving(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Simulate every run of the file and compare each stage. Runs that cannot be described are listed with a reason."""
    runs, left_out = read_serving_runs(path)
    rows = simulate_runs(runs, progress)
    return report_serving(rows, left_out)


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
    intervals = [row.interval for row in kept]
    ends = [interval for interval in intervals if interval is not None]
    has_interval = metric.endswith("_mean") and len(ends) == len(kept)
    return Rows(
        [row.predicted[metric] for row in kept],
        [row.measured[metric] for row in kept],
        [row.label for row in kept],
        ([low for low, _ in ends], [high for _, high in ends]) if has_interval else None,
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
