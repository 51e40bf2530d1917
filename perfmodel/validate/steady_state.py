"""`validate steady-state`: mean TTFT and TPOT at a fixed concurrency, simulated under the benchmark's protocol."""

__all__ = ["SteadyStatePair", "report_steady_state", "simulate_steady_states", "validate_steady_state"]

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from perfmodel.calibrate.steady_state import SteadyState, read_steady_states
from perfmodel.errors import PerfmodelError
from perfmodel.sim import simulate
from perfmodel.validate.report import ErrorStats, Rows, ValidationReport

Progress = Callable[[int, int], None]
_METRICS = ("tpot_mean", "ttft_mean")


@dataclass(frozen=True)
class SteadyStatePair:
    """One row with its prediction, ms; None and a reason where it could not be simulated."""

    row: SteadyState
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    reason: str = ""

    def predicted(self, metric: str) -> float:
        return (self.tpot_ms if metric == "tpot_mean" else self.ttft_ms) or float("nan")

    def measured(self, metric: str) -> float:
        return self.row.measured_tpot_ms if metric == "tpot_mean" else self.row.measured_ttft_ms


def validate_steady_state(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Simulate every row and compare; rows that cannot be simulated are listed with the reason."""
    rows, left_out = read_steady_states(path)
    return report_steady_state(simulate_steady_states(rows, progress), left_out)


def simulate_steady_states(rows: Sequence[SteadyState], progress: Progress | None = None) -> list[SteadyStatePair]:
    """Predictions of all rows, over the cores of this machine."""
    pairs = []
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for done, pair in enumerate(pool.map(_simulate_row, rows, chunksize=8), 1):
            pairs.append(pair)
            if progress is not None:
                progress(done, len(rows))
    return pairs


def _simulate_row(row: SteadyState) -> SteadyStatePair:
    try:
        summary = simulate(row.scenario, keep_steps=False).summary
    except PerfmodelError as error:
        return SteadyStatePair(row, reason=str(error))
    return SteadyStatePair(row, summary["mean_ttft_ms"], summary["mean_tpot_ms"])


def report_steady_state(pairs: Sequence[SteadyStatePair], left_out: Sequence[tuple[str, str]] = ()) -> ValidationReport:
    """`metrics` counts the rows whose figures can be taken at face value, `by` has all groups."""
    covered = [pair for pair in pairs if not pair.reason]
    clear = [pair for pair in covered if pair.row.is_clear]
    reasons = [*left_out, *((pair.row.row_id, pair.reason) for pair in pairs if pair.reason)]
    return ValidationReport(
        kind="steady-state",
        rows=len(pairs) + len(left_out),
        covered=len(covered),
        metrics=_stats(clear),
        by={name: _stats(members) for name, members in _groups(covered)},
        worst=[row for metric in _METRICS for row in _rows(clear, metric).worst(metric, 5)],
        notes=[f"not covered: {name}: {reason}" for name, reason in reasons],
    )


def _groups(pairs: Sequence[SteadyStatePair]) -> Iterator[tuple[str, list[SteadyStatePair]]]:
    names = sorted({group for pair in pairs for group in pair.row.groups})
    for name in names:
        yield name, [pair for pair in pairs if name in pair.row.groups]


def _rows(pairs: Sequence[SteadyStatePair], metric: str) -> Rows:
    return Rows(
        [pair.predicted(metric) for pair in pairs],
        [pair.measured(metric) for pair in pairs],
        [pair.row.row_id for pair in pairs],
    )


def _stats(pairs: Sequence[SteadyStatePair]) -> dict[str, ErrorStats]:
    found = {metric: _rows(pairs, metric) for metric in _METRICS}
    return {metric: rows.stats() for metric, rows in found.items() if len(rows)}
