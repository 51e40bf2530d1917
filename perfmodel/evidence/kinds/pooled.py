"""`validate local`, `mlperf` and `served`: published figures vs. predictions, pooled so that each device counts once.

Such tables are dominated by few devices (two thirds of single-machine rows are of one chip; submissions on one device
are near repeats). Errors are pooled in two steps: per group (one setting, on other hosts or builds) the prediction vs.
the median figure; per device the median over groups. Reported are median, mean and 90th percentile over devices.
`interval_coverage` is the share of groups in their 80 % interval, devices weighted equally."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.cost.calibrations.backends import load_backends
from perfmodel.cost.calibrations.provenance import FittedSource, Provenance, provenance_of
from perfmodel.cost.calibrations.whole_runs import WholeRunFits
from perfmodel.evidence.observation import Observation, Prediction, Progress, Reasons, grouped
from perfmodel.evidence.predict.results import predict_rows, predict_served
from perfmodel.evidence.report import (
    Comparison,
    Dimension,
    ErrorStats,
    Rows,
    ValidationReport,
    about_of,
    not_covered,
    rows_of,
)
from perfmodel.evidence.sources.local import LocalSetup, read_local_rows
from perfmodel.evidence.sources.results import devices_folder, read_mlperf_rows, read_served_rows
from perfmodel.specs.scenario import Scenario
from perfmodel.trust.index import MeasuredSetup, setup_of

_MAX_WORST = 10
_MAX_REASONS = 40
_FLAGGED = {"local": "that the host was at fault: {flags}"}  # what flags of rows that are listed apart say
_CONTRADICT = "that they repeat another or contradict themselves"

# By metric, a prediction for each setting: of its first row, with medians of what was predicted and measured, and all
# `figures` that were measured in the details.
Figures = Mapping[str, Sequence[Prediction]]


def report_pooled(kind: str, pairs: Sequence[Prediction], left_out: Sequence[tuple[str, str]] = ()) -> ValidationReport:
    """`metrics` counts reliable figures; `by` has all groups, unreliable ones apart. kind, pairs: of the table;
    left_out: (row, reason) of unreadable ones"""
    covered = [pair for pair in pairs if not pair.reason]
    figures, apart = (_figures([pair for pair in covered if pair.row.is_reliable is kept]) for kept in (True, False))
    by = _by_dimension(figures)
    groups = {item.row.name for members in figures.values() for item in members}
    devices = {_device(item) for members in figures.values() for item in members}
    notes = [f"metrics: {len(groups):,} groups on {len(devices)} devices; each device counts once."]
    if apart:
        by["apart: flagged rows"] = _stats(apart)
        flags = "; ".join(sorted({pair.row.flags for pair in covered if not pair.row.is_reliable}))
        rows_apart = {item.row.name for members in apart.values() for item in members}
        because = _FLAGGED.get(kind, _CONTRADICT).format(flags=flags)
        notes.append(f"apart: {len(rows_apart):,} groups whose flags say {because}.")
    noise, elsewhere = _noise_floor(figures), "on other hosts" if kind == "local" else "elsewhere"
    if noise:
        by[f"identical settings {elsewhere}"] = noise
    notes += [
        f"noise floor of {metric}: figures of one setting {elsewhere} lie {stats.median_ape:.1%} from their own "
        f"median on half of the devices, {stats.p90_ape:.1%} on nine in ten ({stats.rows:,} figures)."
        for metric, stats in noise.items()
    ]
    reasons = not_covered(pairs, left_out)
    more = len(reasons) - _MAX_REASONS
    notes += [*reasons[:_MAX_REASONS], *([f"not covered: rows of {more:,} more reasons."] if more > 0 else [])]
    scenarios = [pair.scenario for pair in covered if pair.scenario is not None]
    return ValidationReport(
        kind=kind,
        rows=len(pairs) + len(left_out),
        covered=len(covered),
        metrics=_stats(figures),
        by=by,
        worst=[
            {
                "metric": metric,
                "row": item.row.name,
                "predicted": item.metrics[metric],
                "measured": item.row.metrics[metric],
                "error": item.metrics[metric] / item.row.metrics[metric] - 1,
                "setting": item.details["setting"],
            }
            for metric, members in figures.items()
            for item in sorted(members, key=partial(_closeness, metric))[:_MAX_WORST]
        ],
        notes=notes,
        comparisons=[_comparison(metric, members) for metric, members in figures.items()],
        provenance=_backends(scenarios) if kind == "local" else provenance_of(scenarios),
        about=about_of(kind),
    )


def _closeness(metric: str, item: Prediction) -> float:
    return -abs(float(np.log(item.metrics[metric] / item.row.metrics[metric])))


def _device(item: Prediction) -> str:
    return item.row.labels["device"]


def _figures(pairs: Sequence[Prediction]) -> Figures:
    settings = grouped(
        ((pair.row.labels["device"], pair.row.group, metric), pair)
        for pair in pairs
        for metric in pair.row.metrics
        if isfinite(pair.metrics.get(metric, nan))
    )
    result: defaultdict[str, list[Prediction]] = defaultdict(list)
    for (_, _, metric), members in settings.items():
        first, measured = members[0], tuple(pair.row.metrics[metric] for pair in members)
        row = replace(first.row, label="", metrics={metric: float(np.median(measured))})
        details = {"figures": measured, "setting": first.row.label}
        metrics = {metric: float(np.median([pair.metrics[metric] for pair in members]))}
        result[metric].append(replace(first, row=row, metrics=metrics, details=details))
    return {metric: _with_trivial(metric, members) for metric, members in sorted(result.items())}


def _with_trivial(metric: str, members: Sequence[Prediction]) -> list[Prediction]:
    """Adds the trivial prediction: the benchmark's limit, else the median of the device's other settings."""
    trivial = rows_of(metric, members, list(map(_device, members))).trivial.tolist()
    return [
        replace(item, row=replace(item.row, trivial={metric: value}))
        for item, value in zip(members, trivial, strict=True)
    ]


def _stats(figures: Figures) -> dict[str, ErrorStats]:
    return {
        metric: pooled_over_devices(rows_of(metric, members), list(map(_device, members)))
        for metric, members in figures.items()
    }


def pooled_over_devices(rows: Rows, devices: Sequence[str]) -> ErrorStats:
    """Errors of groups (at least one) pooled so that each device counts once, but for `trivial_width`, which is of all
    rows. devices: of each row"""
    names = np.asarray(devices)
    parts = [rows.where(names == name) for name in dict.fromkeys(devices)]
    stats = [part.stats() for part in parts]
    ape = np.array([item.median_ape for item in stats])

    def of_devices(key: str, pool: Callable[[list[float]], Any] = np.median) -> float | None:
        values = [value for item in stats if (value := getattr(item, key)) is not None]
        return float(pool(values)) if values else None

    return replace(
        rows.stats(),
        median_ape=float(np.median(ape)),
        mean_ape=float(ape.mean()),
        p90_ape=float(np.quantile(ape, 0.9)),
        bias=float(np.median([np.median(part.errors) for part in parts])),
        interval_coverage=of_devices("interval_coverage", np.mean),
        interval_width=of_devices("interval_width"),
        trivial_ape=of_devices("trivial_ape"),
    )


def _by_dimension(figures: Figures) -> dict[str, dict[str, ErrorStats]]:
    groups: defaultdict[str, defaultdict[str, list[Prediction]]] = defaultdict(lambda: defaultdict(list))
    for metric, members in figures.items():
        for item in members:
            for name, value in item.row.labels.items():
                groups[f"{name} {value}"][metric].append(item)
    return {name: _stats(group) for name, group in sorted(groups.items())}


def _noise_floor(figures: Figures) -> dict[str, ErrorStats]:
    """Deviation of a setting's figures from their median: a lower bound on any prediction's error."""
    result = {}
    for metric, members in figures.items():
        repeated = [item for item in members if len(item.details["figures"]) > 1]
        figures_of = [(item, value) for item in repeated for value in item.details["figures"]]
        if figures_of:
            values, medians = [value for _, value in figures_of], [item.row.metrics[metric] for item, _ in figures_of]
            rows = Rows(values, medians, [item.row.name for item, _ in figures_of])
            result[metric] = pooled_over_devices(rows, [_device(item) for item, _ in figures_of])
    return result


def _comparison(metric: str, members: Sequence[Prediction]) -> Comparison:
    names = dict.fromkeys(name for item in members for name in item.row.labels)
    dimensions = {name: Dimension.of([item.row.labels.get(name, "not said") for item in members]) for name in names}
    unit = "tok/s" if "tokens" in metric else "W" if "power" in metric else "ms"
    return Comparison.of(metric, rows_of(metric, members), unit, dimensions, list(map(_setup, members)))


def _setup(item: Prediction) -> MeasuredSetup:
    assert item.scenario is not None
    setup, is_test = setup_of(item.scenario), isinstance(item.row.setup, LocalSetup)  # which has steps and no requests
    return setup._replace(input_tokens=0.0, output_tokens=0.0) if is_test else setup


def _backends(scenarios: Sequence[Scenario]) -> Provenance:
    engines = {scenario.engine.described.description.name for scenario in scenarios}
    fits = [result for engine in sorted(engines) if (result := load_backends(engine)) is not None]
    return Provenance(tuple(FittedSource.of(fit) for fit in fits))


def _validated(
    kind: str,
    read: Callable[[str | Path], tuple[list[Observation], Reasons]],
    path: str | Path,
    progress: Progress | None = None,
    fits: WholeRunFits | None = None,
) -> ValidationReport:
    """Predict every row that `read` finds at `path` and compare; failures are listed with the reason. fits: see
    `predict_served`. Raises SpecError for another kind of file."""
    rows, left_out = read(path)
    if kind == "local":
        return report_pooled(kind, predict_rows(rows, Path(path).parent, progress), left_out)
    return report_pooled(kind, predict_served(rows, devices_folder(path), progress, fits), left_out)


validate_local = partial(_validated, "local", read_local_rows)
validate_mlperf = partial(_validated, "mlperf", read_mlperf_rows)
validate_served = partial(_validated, "served", read_served_rows)
