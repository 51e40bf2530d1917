"""`validate steady-state`: mean TTFT and TPOT at a fixed concurrency, simulated under the benchmark's protocol."""

from collections.abc import Callable, Sequence
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.cost.calibrations.provenance import provenance_of
from perfmodel.evidence.breakdown import TypicalSteps, latency_breakdown
from perfmodel.evidence.fit.steady import cell_of
from perfmodel.evidence.predict.steady import SteadyStatePair, num_slices, simulate_steady_states
from perfmodel.evidence.report import (
    Comparison,
    ErrorStats,
    Rows,
    ValidationReport,
    by_dimension,
    dimensions_of,
    pooled,
    worst_of,
)
from perfmodel.evidence.sources.steady import read_steady_states
from perfmodel.specs.cluster import PoolSpec
from perfmodel.specs.traffic import Lengths
from perfmodel.trust.index import setup_of

Progress = Callable[[int, int], None]
_METRICS = ("tpot_mean", "ttft_mean")


def _most(lengths: Lengths | None) -> int:
    return (lengths.high or 0) if lengths else 0


def _parallelism(pool: PoolSpec) -> str:
    engine = pool.engine
    degrees = f"TP {engine.tensor_parallel_size}, DP {engine.data_parallel_size}"
    experts = ", experts shared out" if engine.enable_expert_parallel else ""
    return f"{'' if pool.role == 'unified' else pool.role + ' '}{degrees}{experts}"


_DIMENSIONS: dict[str, Callable[[SteadyStatePair], str]] = {
    "device": lambda pair: pair.row.scenario.hardware.name,
    "engine": lambda pair: pair.row.scenario.engine.profile,
    "model": lambda pair: pair.row.scenario.model.name,
    "precision": lambda pair: pair.row.scenario.model.quantization.weights or pair.row.scenario.model.dtype,
    "concurrency": lambda pair: f"{pair.row.scenario.traffic.arrivals.concurrency:,}",
    "tokens": lambda pair: (
        f"{_most(pair.row.scenario.traffic.input_tokens):,} in, {_most(pair.row.scenario.traffic.output_tokens):,} out"
    ),
    "parallelism": lambda pair: "; ".join(_parallelism(pool) for pool in pair.row.scenario.pools),
    "cell": lambda pair: cell_of(pair.row.scenario),
    "face value": lambda pair: "yes" if pair.row.is_clear else "no",
}
_ABOUT = (
    "Mean TTFT and TPOT of servers at a fixed concurrency, each row simulated under the benchmark's protocol: "
    "a closed loop, ten requests per slot, all sent at once on an idle server (of many slots fewer requests are "
    "simulated, the later ones counting for those left out). Calibrations of devices come "
    "from kernel tables, for which none of these rows is training data. The few numbers of an engine's profile "
    "and of a generation of devices may have been fitted to steady states: where the sources below say so, and "
    "these are those, the rows of that engine or generation are training data for them; models, sizes and "
    "parallelism are not. Rows of unknown lengths or with suspected, unlabelled multi-token prediction are "
    "simulated as they are labelled, and count in the groups only."
)


def validate_steady_state(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Simulate every row and compare; rows that cannot be simulated are listed with the reason."""
    rows, left_out = read_steady_states(path)
    return report_steady_state(simulate_steady_states(rows, progress, intervals=True), left_out)


def report_steady_state(pairs: Sequence[SteadyStatePair], left_out: Sequence[tuple[str, str]] = ()) -> ValidationReport:
    """`metrics` counts the rows whose figures can be taken at face value, or all where there are none such.

    `by` has all groups, and "all rows".
    """
    covered = [pair for pair in pairs if not pair.reason]
    clear = [pair for pair in covered if pair.row.is_clear]
    counted = clear or covered
    comparisons = [_comparison(covered, metric) for metric in _METRICS]
    counted_only = [_comparison(counted, metric) for metric in _METRICS]
    reasons = [*left_out, *((pair.row.row_id, pair.reason) for pair in pairs if pair.reason)]
    return ValidationReport(
        kind="steady-state",
        rows=len(pairs) + len(left_out),
        covered=len(covered),
        metrics=pooled(counted_only),
        by={"all rows": pooled(comparisons)} | by_dimension(comparisons) | _by_given_groups(covered),
        worst=worst_of(counted_only, 5, partial(_breakdown, counted)),
        notes=[
            _counted(len(clear), len(covered)),
            *_cells(counted),
            *_sliced(covered),
            *_shortened(covered),
            *(f"not covered: {name}: {reason}" for name, reason in reasons),
        ],
        comparisons=comparisons,
        provenance=provenance_of([pair.row.scenario for pair in covered]),
        about=_ABOUT,
    )


def _counted(num_clear: int, num_covered: int) -> str:
    """What `metrics` is over."""
    if num_clear:
        return f"metrics: {num_clear} of {num_covered} rows, those with known lengths and no unlabelled MTP."
    return "metrics: all rows; none has known lengths and no suspicion of unlabelled MTP."


def _cells(pairs: Sequence[SteadyStatePair]) -> list[str]:
    """Errors by cell, which is what somebody meets whose cell was never measured; each counts once."""
    members: dict[str, list[SteadyStatePair]] = {}
    for pair in pairs:
        members.setdefault(cell_of(pair.row.scenario), []).append(pair)
    found = []
    for metric in _METRICS if members else ():
        medians = [_rows(cell, metric).stats().median_ape for cell in members.values()]
        middle, most = np.quantile(medians, [0.5, 0.9])
        found.append(f"{metric.split('_')[0].upper()} {middle:.1%} and {most:.1%}")
    if not found:
        return []
    what = f"{len(members)} cells (model x engine version x device x number format)"
    return [f"by cell: median and p90 over {what} of each one's median error: {'; '.join(found)}."]


def _sliced(pairs: Sequence[SteadyStatePair]) -> list[str]:
    """What was not simulated whole."""
    count = sum(num_slices(pair.row.scenario) > 1 for pair in pairs)
    what = "large disaggregated deployments: one of their equal slices was simulated, under its share of the load."
    return [f"simulated in part: {count} rows are {what}"] if count else []


def _shortened(pairs: Sequence[SteadyStatePair]) -> list[str]:
    """What was simulated with fewer requests than were sent."""
    count = sum(pair.is_shortened for pair in pairs)
    how = (
        "four or five rounds of requests were simulated instead of ten, the last but one counting for those left out "
        "(mean TPOT within 1 %, mean TTFT within 3 % of whole runs)."
    )
    return [f"shortened: of {count} rows {how}"] if count else []


def _comparison(pairs: Sequence[SteadyStatePair], metric: str) -> Comparison:
    setups = [setup_of(pair.row.scenario) for pair in pairs]
    return Comparison.of(metric, _rows(pairs, metric), "ms", dimensions_of(pairs, _DIMENSIONS), setups)


def _by_given_groups(pairs: Sequence[SteadyStatePair]) -> dict[str, dict[str, ErrorStats]]:
    """The groups that the reader of the rows names."""
    found = {}
    for name in sorted({group for pair in pairs for group in pair.row.groups}):
        members = [pair for pair in pairs if name in pair.row.groups]
        found[name] = pooled([Comparison(metric, _rows(members, metric), "ms") for metric in _METRICS])
    return found


def _breakdown(pairs: Sequence[SteadyStatePair], comparison: Comparison, number: int) -> dict[str, Any]:
    pair, metric = pairs[np.flatnonzero(comparison.rows.kept)[number]], comparison.metric
    predicted, measured, ttft = pair.predicted(metric), pair.measured(metric), pair.predicted("ttft_mean")
    return latency_breakdown(metric, predicted, measured, ttft, TypicalSteps.of(pair.row.scenario))


def _rows(pairs: Sequence[SteadyStatePair], metric: str) -> Rows:
    ends = [pair.intervals.get(metric, (nan, nan)) for pair in pairs]
    return Rows(
        [pair.predicted(metric) for pair in pairs],
        [pair.measured(metric) for pair in pairs],
        [pair.row.row_id for pair in pairs],
        ([low for low, _ in ends], [high for _, high in ends]) if any(pair.intervals for pair in pairs) else None,
    )
