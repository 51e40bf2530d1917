"""`validate throughput`: offline jobs, output tokens per second and device, simulated and compared."""

__all__ = ["report_throughput", "validate_throughput"]

from collections.abc import Callable, Sequence
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.calibrate.offline import OfflinePair, OfflineRun, read_offline_runs, simulate_offline_runs
from perfmodel.cost.calibrations.provenance import provenance_of
from perfmodel.trust.setups import setup_of
from perfmodel.validate.report import Comparison, Rows, ValidationReport, by_dimension, dimensions_of, pooled, worst_of

Progress = Callable[[int, int], None]
_UNITS = {"throughput": "tok/s", "static_throughput": "tok/s", "ttft": "ms"}
_DIMENSIONS: dict[str, Callable[[OfflinePair], str]] = {
    "device": lambda pair: pair.row.scenario.hardware.name,
    "model": lambda pair: pair.row.scenario.model.name,
    "precision": lambda pair: pair.row.scenario.model.quantization.weights or pair.row.scenario.model.dtype,
    "tensor parallel": lambda pair: str(pair.row.scenario.engine.tensor_parallel_size),
    "tokens": lambda pair: pair.row.lengths,
}
_ABOUT = (
    "Output tokens per second and device of TensorRT-LLM: with in-flight batching under more requests than it can run "
    "at once (throughput), and of single static batches (static_throughput; ttft: of one prompt alone). None of these "
    "rows was fitted to: kernels were calibrated on tables of kernels of later versions, the engine's profile on "
    "servers of later versions. How the engine was configured is not in the data; it is taken to have run with its "
    "defaults of that time (2,048 sequences, 8,192 tokens a step, KV in FP8 where weights are)."
)


def validate_throughput(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Simulate every row of a table, or of a folder of tables; rows that cannot be simulated are listed with why."""
    rows, left_out = read_offline_runs(path)
    return report_throughput(simulate_offline_runs(rows, progress), left_out)


def report_throughput(pairs: Sequence[OfflinePair], left_out: Sequence[tuple[str, str]] = ()) -> ValidationReport:
    """Errors over all rows, and by device, model, precision, parallelism and lengths."""
    covered = [pair for pair in pairs if not pair.reason]
    comparisons = [_comparison(covered, metric) for metric in _UNITS]
    reasons = [*left_out, *((pair.row.row_id, pair.reason) for pair in pairs if pair.reason)]
    return ValidationReport(
        kind="throughput",
        rows=len(pairs) + len(left_out),
        covered=len(covered),
        metrics=pooled(comparisons),
        by=by_dimension(comparisons),
        worst=worst_of(comparisons, 5, lambda comparison, number: _described(covered, comparison, number)),
        notes=[f"not covered: {name}: {reason}" for name, reason in reasons],
        comparisons=comparisons,
        provenance=provenance_of([pair.row.scenario for pair in covered]),
        about=_ABOUT,
    )


def _metric(row: OfflineRun) -> str:
    return row.metric if row.is_saturated or row.metric != "throughput" else "static_throughput"


def _of(pairs: Sequence[OfflinePair], metric: str) -> list[OfflinePair]:
    return [pair for pair in pairs if _metric(pair.row) == metric]


def _comparison(pairs: Sequence[OfflinePair], metric: str) -> Comparison:
    mine = _of(pairs, metric)
    rows = Rows(
        [pair.predicted or nan for pair in mine],
        [pair.row.measured for pair in mine],
        [pair.row.label for pair in mine],
        ([pair.interval[0] for pair in mine], [pair.interval[1] for pair in mine]),
    )
    setups = [setup_of(pair.row.scenario) for pair in mine]
    return Comparison.of(metric, rows, _UNITS[metric], dimensions_of(mine, _DIMENSIONS), setups)


def _described(pairs: Sequence[OfflinePair], comparison: Comparison, number: int) -> dict[str, Any]:
    pair = _of(pairs, comparison.metric)[np.flatnonzero(comparison.rows.kept)[number]]
    return {"sizes": {"sequences together": pair.batch}}
