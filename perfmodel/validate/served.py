"""`validate mlperf` and `validate served`: published results of servers and offline jobs beside predictions.

Submissions on one device are near repeats, so errors are pooled as for local engines: of each group (rows of one
setting) the prediction beside the median of its figures; of each device the median over its groups; and over devices
the median, mean and 90th percentile of those (`pooled_over_devices`).
"""

__all__ = ["report_served", "validate_mlperf", "validate_served"]

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.calibrate.served.mlperf import read_mlperf_rows
from perfmodel.calibrate.served.predictions import ServedPair, predict_served
from perfmodel.calibrate.served.setups import ServedRow
from perfmodel.calibrate.served.tables import devices_folder, read_served_rows
from perfmodel.cost.calibrations.provenance import Provenance, provenance_of
from perfmodel.validate.local import not_covered, pooled_over_devices
from perfmodel.validate.report import Comparison, ErrorStats, Rows, ValidationReport, dimensions_of

Progress = Callable[[int, int], None]
_MOST_WORST = 10
_ABOUT = {
    "mlperf": (
        "Results of MLPerf Inference's closed division. Offline: tokens per second of a saturated engine. Server and "
        "Interactive: TTFT and TPOT at the rate at which the submission just keeps its limits, which is taken to be "
        "near its own capacity. Lengths are the data sets'; over how many devices an instance is spread, and how many "
        "samples run together, results do not say: the layout that serves most within the limits is taken."
    ),
    "served": (
        "Published results of servers, offline jobs and static batches, each simulated as its table describes it. "
        "Where a table has medians for means, they stand for them."
    ),
}
_POOLED = (
    " Errors are of devices: a device's is the median over its groups (rows of one setting), a group's is the "
    "prediction against the median of its figures. Rows whose flags say that they repeat another or contradict "
    "themselves are listed apart."
)


@dataclass(frozen=True)
class _Figure:
    """A setting's figures of one metric as one: its first row, prediction, the median figure, its interval."""

    row: ServedRow
    metric: str
    predicted: float
    measured: float
    interval: tuple[float, float]
    figures: tuple[float, ...]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def is_within(self) -> bool:
        low, high = self.interval
        return low <= self.measured / self.predicted <= high


def validate_mlperf(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Predict every result and compare; rows that cannot be predicted are listed with the reason.

    Raises SpecError for a file that is no table of such results.
    """
    return _validated("mlperf", read_mlperf_rows(path), Path(path), progress)


def validate_served(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Likewise, of a table of published serving results."""
    return _validated("served", read_served_rows(path), Path(path), progress)


def _validated(
    kind: str, read: tuple[list[ServedRow], list[tuple[str, str]]], path: Path, progress: Progress | None
) -> ValidationReport:
    rows, left_out = read
    return report_served(kind, predict_served(rows, devices_folder(path), progress), left_out)


def report_served(kind: str, pairs: Sequence[ServedPair], left_out: Sequence[tuple[str, str]] = ()) -> ValidationReport:
    """`metrics` counts the rows that are not apart; `by` has every group of them, and the rows apart by themselves.

    kind: mlperf or served; left_out: (row, reason) of those that could not be read
    """
    covered = [pair for pair in pairs if not pair.reason]
    figures = _figures([pair for pair in covered if not pair.row.is_apart])
    apart = _figures([pair for pair in covered if pair.row.is_apart])
    reasons = [*left_out, *((pair.row.row_id, pair.reason) for pair in pairs if pair.reason)]
    by = {name: _stats(mine) for name, mine in _by_dimension(figures).items()}
    if apart:
        by["apart: flagged rows"] = _stats(apart)
    noise = _noise_floor(figures)
    if noise:
        by["identical settings elsewhere"] = noise
    metrics = sorted({figure.metric for figure in figures})
    return ValidationReport(
        kind=kind,
        rows=len(pairs) + len(left_out),
        covered=len(covered),
        metrics=_stats(figures),
        by=by,
        worst=[each for metric in metrics for each in _worst(_of(figures, metric))],
        notes=[*_notes(figures, apart, noise), *not_covered(reasons)],
        comparisons=[_comparison(metric, _of(figures, metric)) for metric in metrics],
        provenance=_provenance(covered),
        about=_ABOUT[kind] + _POOLED,
    )


def _figures(pairs: Sequence[ServedPair]) -> list[_Figure]:
    """Figures of one setting on one device as one, by metric."""
    found: dict[tuple[str, str, str], list[ServedPair]] = defaultdict(list)
    for pair in pairs:
        for metric in pair.row.measured:
            if isfinite(pair.predicted.get(metric, float("nan"))):
                found[pair.row.labels["device"], pair.row.group, metric].append(pair)
    return [
        _Figure(
            mine[0].row,
            metric,
            float(np.median([pair.predicted[metric] for pair in mine])),
            float(np.median([pair.row.measured[metric] for pair in mine])),
            mine[0].intervals.get(metric, (float("nan"), float("nan"))),
            tuple(pair.row.measured[metric] for pair in mine),
        )
        for (_, _, metric), mine in found.items()
    ]


def _of(figures: Iterable[_Figure], metric: str) -> list[_Figure]:
    return [figure for figure in figures if figure.metric == metric]


def _stats(figures: Sequence[_Figure]) -> dict[str, ErrorStats]:
    found = {}
    for metric in sorted({figure.metric for figure in figures}):
        mine = _of(figures, metric)
        has_intervals = all(isfinite(end) for figure in mine for end in figure.interval)
        found[metric] = pooled_over_devices(
            [figure.row.labels["device"] for figure in mine],
            [figure.error for figure in mine],
            [figure.is_within for figure in mine] if has_intervals else None,
        )
    return found


def _by_dimension(figures: Sequence[_Figure]) -> dict[str, list[_Figure]]:
    members: dict[str, list[_Figure]] = defaultdict(list)
    for figure in figures:
        for name, value in figure.row.labels.items():
            members[f"{name} {value}"].append(figure)
    return {name: members[name] for name in sorted(members)}


def _noise_floor(figures: Sequence[_Figure]) -> dict[str, ErrorStats]:
    """How far figures of one setting are from their own median: what no prediction can be better than."""
    found = {}
    for metric in sorted({figure.metric for figure in figures}):
        repeated = [figure for figure in _of(figures, metric) if len(figure.figures) > 1]
        devices = [figure.row.labels["device"] for figure in repeated for _ in figure.figures]
        errors = [value / figure.measured - 1 for figure in repeated for value in figure.figures]
        if errors:
            found[metric] = pooled_over_devices(devices, errors)
    return found


def _worst(figures: Sequence[_Figure]) -> list[dict[str, Any]]:
    ordered = sorted(figures, key=lambda figure: -abs(np.log(figure.predicted / figure.measured)))
    return [
        {
            "metric": figure.metric,
            "row": figure.row.row_id,
            "predicted": figure.predicted,
            "measured": figure.measured,
            "error": figure.error,
            "setting": _setting(figure.row),
        }
        for figure in ordered[:_MOST_WORST]
    ]


def _setting(row: ServedRow) -> str:
    """What ran on what, in a line."""
    setup = row.setup
    what = f"{setup.model} {setup.precision} on {setup.num_devices} x {setup.device}"
    return f"{what}, {setup.engine} {setup.version}, {row.labels['scenario']}"


def _notes(figures: Sequence[_Figure], apart: Sequence[_Figure], noise: Mapping[str, ErrorStats]) -> list[str]:
    devices = {figure.row.labels["device"] for figure in figures}
    groups = {(figure.row.labels["device"], figure.row.group) for figure in figures}
    notes = [f"metrics: {len(groups):,} groups on {len(devices)} devices; each device counts once."]
    if apart:
        notes.append(f"apart: {len({figure.row.row_id for figure in apart}):,} groups whose flags say so.")
    for metric, stats in noise.items():
        notes.append(
            f"noise floor of {metric}: figures of one setting lie {stats.median_ape:.1%} from their own median on half "
            f"of the devices, {stats.p90_ape:.1%} on nine in ten ({stats.rows:,} figures)."
        )
    return notes


def _comparison(metric: str, figures: Sequence[_Figure]) -> Comparison:
    rows = Rows(
        [figure.predicted for figure in figures],
        [figure.measured for figure in figures],
        [figure.row.row_id for figure in figures],
        ([figure.interval[0] for figure in figures], [figure.interval[1] for figure in figures]),
    )
    names = dict.fromkeys(name for figure in figures for name in figure.row.labels)
    named = {name: partial(_label, name) for name in names}
    return Comparison.of(metric, rows, "tok/s" if "tokens" in metric else "ms", dimensions_of(figures, named))


def _label(name: str, figure: _Figure) -> str:
    return figure.row.labels.get(name, "not said")


def _provenance(pairs: Sequence[ServedPair]) -> Provenance:
    return provenance_of([pair.scenario for pair in pairs if pair.scenario is not None])
