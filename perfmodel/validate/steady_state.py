"""`validate steady-state`: mean TTFT and TPOT at a fixed concurrency, simulated under the benchmark's protocol."""

__all__ = ["report_steady_state", "validate_steady_state"]

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from perfmodel.calibrate.steady_simulation import SteadyStatePair, simulate_steady_states
from perfmodel.calibrate.steady_state import read_steady_states
from perfmodel.validate.report import ErrorStats, Rows, ValidationReport

Progress = Callable[[int, int], None]
_METRICS = ("tpot_mean", "ttft_mean")


def validate_steady_state(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Simulate every row and compare; rows that cannot be simulated are listed with the reason."""
    rows, left_out = read_steady_states(path)
    return report_steady_state(simulate_steady_states(rows, progress), left_out)


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
