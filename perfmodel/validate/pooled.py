"""Published figures beside predictions, each device counting once.

Such tables are of a few devices mostly (two thirds of those of single machines are of one chip, submissions on one
device are near repeats), so errors are pooled in two steps: of each group (rows of one setting, on other hosts or under
other builds) the prediction beside the median of its figures; of each device the median over its groups; and over
devices the median, mean and 90th percentile of those. `interval_coverage` is the share of groups in their 80 %
interval, each device again counting once.
"""

__all__ = ["Read", "SettingFigure", "pooled_over_devices", "pooled_report"]

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import numpy as np

from perfmodel.cost.calibrations.provenance import Provenance
from perfmodel.trust.setups import MeasuredSetup
from perfmodel.validate.report import Comparison, ErrorStats, Rows, ValidationReport, dimensions_of

_MOST_WORST = 10
_MOST_REASONS = 40


@dataclass(frozen=True)
class SettingFigure:
    """A setting's figures of one metric as one.

    row_id, device, setting: of its first row, and what ran on what, in a line; labels: by dimension
    predicted, measured:     the medians of its rows; interval: 80 % of them, as factors of the prediction
    figures:                 what was measured, row by row
    setup:                   of its first row
    """

    metric: str
    row_id: str
    device: str
    setting: str
    labels: Mapping[str, str]
    predicted: float
    measured: float
    interval: tuple[float, float]
    figures: tuple[float, ...]
    setup: MeasuredSetup

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def is_within(self) -> bool:
        low, high = self.interval
        return low <= self.measured / self.predicted <= high


@dataclass(frozen=True)
class Read:
    """How many rows a table has, how many could be predicted, and (row, reason) of the others."""

    rows: int
    covered: int
    reasons: Sequence[tuple[str, str]]


def pooled_report(
    kind: str,
    read: Read,
    figures: Sequence[SettingFigure],
    apart: Sequence[SettingFigure],
    *,
    elsewhere: str,
    apart_because: str,
    provenance: Provenance,
    about: str,
) -> ValidationReport:
    """`metrics` counts the figures that are not apart; `by` has every group of them, and those apart by themselves.

    kind, read:    of the table; apart: figures whose flags say that no prediction can meet them
    elsewhere:     where settings repeat ("on other hosts"); apart_because: of what flags say, for a sentence
    provenance, about: of the report
    """
    by = {name: _stats(mine) for name, mine in _by_dimension(figures).items()}
    if apart:
        by["apart: flagged rows"] = _stats(apart)
    noise = _noise_floor(figures)
    if noise:
        by[f"identical settings {elsewhere}"] = noise
    metrics = _metrics(figures)
    return ValidationReport(
        kind=kind,
        rows=read.rows,
        covered=read.covered,
        metrics=_stats(figures),
        by=by,
        worst=[each for metric in metrics for each in _worst(_of(figures, metric))],
        notes=[*_notes(figures, apart, apart_because), *_floors(noise, elsewhere), *_not_covered(read.reasons)],
        comparisons=[_comparison(metric, _of(figures, metric)) for metric in metrics],
        provenance=provenance,
        about=about,
    )


def _metrics(figures: Sequence[SettingFigure]) -> list[str]:
    return sorted({figure.metric for figure in figures})


def _of(figures: Sequence[SettingFigure], metric: str) -> list[SettingFigure]:
    return [figure for figure in figures if figure.metric == metric]


def _stats(figures: Sequence[SettingFigure]) -> dict[str, ErrorStats]:
    """Errors of each metric that any figure has."""
    found = {}
    for metric in _metrics(figures):
        mine = _of(figures, metric)
        has_intervals = all(isfinite(end) for figure in mine for end in figure.interval)
        found[metric] = pooled_over_devices(
            [figure.device for figure in mine],
            [figure.error for figure in mine],
            [figure.is_within for figure in mine] if has_intervals else None,
        )
    return found


def pooled_over_devices(
    devices: Sequence[str], errors: Sequence[float], are_within: Sequence[bool] | None = None
) -> ErrorStats:
    """Errors of groups (predicted / measured - 1) pooled so that each device counts once; needs at least one.

    devices:    of each group
    are_within: whether each group's figure lies in its interval
    """
    names, error = np.asarray(devices), np.asarray(errors)
    masks = [names == name for name in dict.fromkeys(devices)]
    ape = np.array([np.median(np.abs(error[mask])) for mask in masks])
    signed = np.array([np.median(error[mask]) for mask in masks])
    within = None if are_within is None else np.asarray(are_within, dtype=float)
    return ErrorStats(
        rows=len(error),
        median_ape=float(np.median(ape)),
        mean_ape=float(ape.mean()),
        p90_ape=float(np.quantile(ape, 0.9)),
        bias=float(np.median(signed)),
        interval_coverage=None if within is None else float(np.mean([within[mask].mean() for mask in masks])),
    )


def _by_dimension(figures: Sequence[SettingFigure]) -> dict[str, list[SettingFigure]]:
    members: dict[str, list[SettingFigure]] = defaultdict(list)
    for figure in figures:
        for name, value in figure.labels.items():
            members[f"{name} {value}"].append(figure)
    return {name: members[name] for name in sorted(members)}


def _noise_floor(figures: Sequence[SettingFigure]) -> dict[str, ErrorStats]:
    """How far figures of one setting are from their own median: what no prediction can be better than."""
    found = {}
    for metric in _metrics(figures):
        repeated = [figure for figure in _of(figures, metric) if len(figure.figures) > 1]
        devices = [figure.device for figure in repeated for _ in figure.figures]
        errors = [value / figure.measured - 1 for figure in repeated for value in figure.figures]
        if errors:
            found[metric] = pooled_over_devices(devices, errors)
    return found


def _worst(figures: Sequence[SettingFigure]) -> list[dict[str, Any]]:
    ordered = sorted(figures, key=lambda figure: -abs(np.log(figure.predicted / figure.measured)))
    return [
        {
            "metric": figure.metric,
            "row": figure.row_id,
            "predicted": figure.predicted,
            "measured": figure.measured,
            "error": figure.error,
            "setting": figure.setting,
        }
        for figure in ordered[:_MOST_WORST]
    ]


def _notes(figures: Sequence[SettingFigure], apart: Sequence[SettingFigure], because: str) -> list[str]:
    devices = {figure.device for figure in figures}
    groups = {figure.row_id for figure in figures}
    notes = [f"metrics: {len(groups):,} groups on {len(devices)} devices; each device counts once."]
    if apart:
        notes.append(f"apart: {len({figure.row_id for figure in apart}):,} groups whose flags say {because}.")
    return notes


def _floors(noise: Mapping[str, ErrorStats], elsewhere: str) -> list[str]:
    return [
        f"noise floor of {metric}: figures of one setting {elsewhere} lie {stats.median_ape:.1%} from their own median "
        f"on half of the devices, {stats.p90_ape:.1%} on nine in ten ({stats.rows:,} figures)."
        for metric, stats in noise.items()
    ]


def _not_covered(reasons: Sequence[tuple[str, str]]) -> list[str]:
    """A sentence for each of the first (row, reason), and how many more there are."""
    shown = [f"not covered: {name}: {reason}" for name, reason in reasons[:_MOST_REASONS]]
    left = len(reasons) - len(shown)
    return [*shown, f"not covered: {left:,} more rows."] if left > 0 else shown


def _comparison(metric: str, figures: Sequence[SettingFigure]) -> Comparison:
    rows = Rows(
        [figure.predicted for figure in figures],
        [figure.measured for figure in figures],
        [figure.row_id for figure in figures],
        ([figure.interval[0] for figure in figures], [figure.interval[1] for figure in figures]),
    )
    names = dict.fromkeys(name for figure in figures for name in figure.labels)
    named = {name: partial(_label, name) for name in names}
    unit = "tok/s" if "tokens" in metric else "ms"
    return Comparison.of(metric, rows, unit, dimensions_of(figures, named), [figure.setup for figure in figures])


def _label(name: str, figure: SettingFigure) -> str:
    return figure.labels.get(name, "not said")
