"""`validate serving`: recorded runs of a server, simulated, and compared stage by stage."""

__all__ = ["mean_backlog_wait_s", "report_serving", "validate_serving"]

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.calibrate.serving.runs import METRICS, ServingRun, read_serving_runs
from perfmodel.calibrate.serving.simulation import StageRow, simulate_runs
from perfmodel.cost import plan_memory
from perfmodel.cost.calibrations.provenance import provenance_of
from perfmodel.specs import Scenario
from perfmodel.trust.setups import setup_of
from perfmodel.validate.report import (
    Comparison,
    Rows,
    ValidationReport,
    by_dimension,
    dimensions_of,
    pooled,
    range_names,
    worst_of,
)
from perfmodel.validate.typical_steps import TypicalSteps, latency_breakdown

Progress = Callable[[int, int], None]
_DIMENSIONS: dict[str, Callable[[StageRow], str]] = {
    "device": lambda row: row.run.scenario.hardware.name,
    "model": lambda row: row.run.scenario.model.name,
    "load": lambda row: "overloaded" if row.run.is_overloaded(row.stage) else "steady",
    "engine": lambda row: row.run.scenario.engine.profile,
    "tensor parallel": lambda row: str(row.run.scenario.engine.tensor_parallel_size),
}
_RATES = (2, 5, 10, 20)
_ABOUT = (
    "Recorded runs of a server under open-loop load in stages, each simulated whole: the same engine "
    "arguments, arrivals drawn by the same process, prompts that repeat as the load tool repeats them. One row"
    " is one stage. Calibrations of devices come from kernel tables or layer profiles, never from serving "
    "runs, so what they say of models, loads and parallelism is no training data. The engine's profile (host "
    "time, front end, sampling traffic: the same few numbers for all runs) was fitted to the means of steady "
    "stages of the runs that its source names; if these are those runs, means are training data for these"
    " numbers, while percentiles and overloaded stages are not."
)


def validate_serving(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Simulate every run of the file and compare each stage. Runs that cannot be described are listed with a reason."""
    runs, left_out = read_serving_runs(path)
    rows = simulate_runs(runs, progress, intervals=True)
    return report_serving(rows, left_out)


def report_serving(rows: Sequence[StageRow], left_out: Sequence[tuple[str, str]] = ()) -> ValidationReport:
    """Errors over all stages, and by device, model and load."""
    comparisons = [_comparison(rows, metric) for metric in METRICS]
    return ValidationReport(
        kind="serving",
        rows=len(rows) + len(left_out),
        covered=len(rows),
        metrics=pooled(comparisons),
        by=by_dimension(comparisons),
        worst=worst_of(comparisons, 3, partial(_breakdown, rows)),
        notes=[
            *_memory_notes([row.run for row in rows]),
            *_overload_notes(rows),
            *(f"not covered: {n}: {why}" for n, why in left_out),
        ],
        comparisons=comparisons,
        provenance=provenance_of([row.run.scenario for row in rows]),
        about=_ABOUT,
    )


def _memory_notes(runs: Sequence[ServingRun]) -> list[str]:
    """The plan's KV blocks beside those that servers logged: the runs above are simulated with the latter."""
    found: dict[str, None] = {}
    for run in runs:
        engine, logged = run.scenario.engine, run.scenario.engine.num_gpu_blocks_override
        if logged is None:
            continue
        model, hardware = run.scenario.model, run.scenario.hardware
        free = engine.model_copy(update={"num_gpu_blocks_override": None})
        planned = plan_memory(model, hardware, free).num_kv_blocks
        where = f"memory: {model.name} on {engine.num_devices} x {hardware.name}"
        found[f"{where}: {planned:,} KV blocks planned, {logged:,} logged ({planned / logged - 1:+.1%})."] = None
    return list(found)


def mean_backlog_wait_s(rate: float, capacity: float, duration_s: float) -> float:
    """Mean wait in a queue that begins empty and grows by what `capacity` cannot take of `rate`, both in requests/s,
    over the `duration_s` seconds in which requests arrive: one that arrives at t waits t (rate / capacity - 1)."""
    return max(rate / capacity - 1, 0.0) * duration_s / 2


def _overload_notes(rows: Sequence[StageRow]) -> list[str]:
    """What an error of the steps' durations makes of the wait, where more requests arrive than all slots serve."""
    notes = []
    for row in rows:
        if not row.run.is_overloaded(row.stage):
            continue
        scenario, (measured, predicted) = row.run.scenario, (row.measured, row.predicted)
        stage = scenario.traffic.arrivals.stages[row.stage]
        served, expected = (
            scenario.engine.max_num_seqs * 1e3 / (each["e2el_mean"] - each["ttft_mean"])
            for each in (measured, predicted)
        )
        waits = [mean_backlog_wait_s(stage.rate, each, stage.duration_s) for each in (served, expected)]
        if waits[0]:
            notes.append(
                f"overloaded: {row.label}: all slots serve {served:.2f} requests/s as measured, {expected:.2f} "
                f"({expected / served - 1:+.1%}) as predicted, of {stage.rate:g} that arrive; what is left over waits, "
                f"which alone makes TTFT {waits[1] / waits[0] - 1:+.0%} "
                f"({predicted['ttft_mean'] / measured['ttft_mean'] - 1:+.0%} found)."
            )
    return notes


def _comparison(rows: Sequence[StageRow], metric: str) -> Comparison:
    kept = _with(rows, metric)
    rates = [row.run.scenario.traffic.arrivals.stages[row.stage].rate for row in kept]
    dimensions = dimensions_of(kept, _DIMENSIONS) | {"rate": range_names(rates, _RATES, "req/s")}
    setups = [setup_of(row.run.scenario) for row in kept]
    return Comparison.of(metric, _pairs(kept, metric), "ms", dimensions, setups)


def _with(rows: Sequence[StageRow], metric: str) -> list[StageRow]:
    return [row for row in rows if metric in row.measured]


def _breakdown(rows: Sequence[StageRow], comparison: Comparison, number: int) -> dict[str, Any]:
    kept = np.flatnonzero(comparison.rows.kept)
    row, metric = _with(rows, comparison.metric)[kept[number]], comparison.metric
    ttft = row.predicted["ttft_mean"]
    return latency_breakdown(metric, row.predicted[metric], row.measured[metric], ttft, TypicalSteps.of(_at_stage(row)))


def _at_stage(row: StageRow) -> Scenario:
    """The run's scenario under the load of one stage only."""
    scenario = row.run.scenario
    stages = scenario.traffic.arrivals.stages[row.stage : row.stage + 1]
    arrivals = scenario.traffic.arrivals.model_copy(update={"stages": stages})
    return scenario.model_copy(update={"traffic": scenario.traffic.model_copy(update={"arrivals": arrivals})})


def _pairs(kept: Sequence[StageRow], metric: str) -> Rows:
    ends = [row.intervals[metric] for row in kept if metric in row.intervals]
    has_interval = len(ends) == len(kept)
    return Rows(
        [row.predicted[metric] for row in kept],
        [row.measured[metric] for row in kept],
        [row.label for row in kept],
        ([low for low, _ in ends], [high for _, high in ends]) if has_interval else None,
    )
