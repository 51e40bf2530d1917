"""`validate local`, `mlperf` and `served`: published figures beside predictions, each device counting once.

Such tables are of a few devices mostly (two thirds of those of single machines are of one chip, submissions on one
device are near repeats), so errors are pooled in two steps: of each group (rows of one setting, on other hosts or under
other builds) the prediction beside the median of its figures; of each device the median over its groups; and over
devices the median, mean and 90th percentile of those. `interval_coverage` is the share of groups in their 80 %
interval, each device again counting once.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perfmodel.cost.calibrations.backends import load_backends
from perfmodel.cost.calibrations.provenance import FittedSource, Provenance, provenance_of
from perfmodel.evidence.observation import NO_INTERVAL, Interval, Observation, Prediction, Progress, Reasons
from perfmodel.evidence.predict.results import predict_rows, predict_served
from perfmodel.evidence.report import Comparison, ErrorStats, Rows, ValidationReport, dimensions_of, not_covered
from perfmodel.evidence.sources.local import LocalSetup, read_local_rows
from perfmodel.evidence.sources.results import devices_folder, read_mlperf_rows, read_served_rows
from perfmodel.specs.scenario import Scenario
from perfmodel.trust.index import MeasuredSetup, setup_of

_MOST_WORST = 10
_MOST_REASONS = 40
_POOLED = (
    " Errors are of devices: a device's is the median over its groups (rows of one setting), a group's is the "
    "prediction against the median of its figures. Rows whose flags say that they repeat another or contradict "
    "themselves are listed apart."
)


class _Kind(NamedTuple):
    """How a kind's report reads. elsewhere: where settings repeat; apart_because: of rows whose flags say so"""

    elsewhere: str
    apart_because: str
    about: str


_CONTRADICT = "that they repeat another or contradict themselves"
_KINDS = {
    "mlperf": _Kind(
        "elsewhere",
        _CONTRADICT,
        "Results of MLPerf Inference's closed division. Offline: tokens per second of a saturated engine. Server and "
        "Interactive: TTFT and TPOT at the rate at which the submission just keeps its limits, which is taken to be "
        "near its own capacity. Lengths are the data sets'; over how many devices an instance is spread, and how many "
        "samples run together, results do not say: the layout that serves most within the limits is taken." + _POOLED,
    ),
    "served": _Kind(
        "elsewhere",
        _CONTRADICT,
        "Published results of servers, offline jobs and static batches, each simulated as its table describes it. "
        "Where a table has medians for means, they stand for them." + _POOLED,
    ),
    "local": _Kind(
        "on other hosts",
        "that the host was at fault: {flags}",
        "Tokens per second of llama.cpp (llama-bench, llama-server, Ollama, LocalScore) and MLX on single machines, "
        "each figure as the steps that it took. Errors are of devices: a device's is the median over its groups (rows "
        "of one setting), a group's is the prediction against the median of its figures. Rows whose flags say that the "
        "host was at fault (slow, anomalous, weak host, power limit, patched kernels, RPC) are listed apart. Figures "
        "of the same table may have been fitted to; `benchmarks/cross_validate_local.py` leaves out whole devices and "
        "whole models.",
    ),
}


def validate_local(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Price every row and compare; rows that cannot be priced are listed with the reason.

    Raises SpecError for a file that is no table of such figures.
    """
    rows, left_out = read_local_rows(path)
    return report_pooled("local", predict_rows(rows, Path(path).parent, progress), left_out)


def validate_mlperf(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Likewise, of MLPerf results."""
    return _validate_served("mlperf", path, read_mlperf_rows(path), progress)


def validate_served(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Likewise, of a table of published serving results."""
    return _validate_served("served", path, read_served_rows(path), progress)


def _validate_served(
    kind: str, path: str | Path, read: tuple[list[Observation], Reasons], progress: Progress | None
) -> ValidationReport:
    rows, left_out = read
    return report_pooled(kind, predict_served(rows, devices_folder(path), progress), left_out)


class _Figure(NamedTuple):
    """A setting's figures of one metric as one: of its first row, the medians of all, and each that was measured."""

    metric: str
    row: Observation
    scenario: Scenario
    predicted: float
    measured: float
    interval: Interval
    figures: tuple[float, ...]

    @property
    def device(self) -> str:
        return self.row.labels["device"]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def is_within(self) -> bool:
        low, high = self.interval
        return low <= self.measured / self.predicted <= high

    @property
    def setup(self) -> MeasuredSetup:
        setup = setup_of(self.scenario)
        is_test = isinstance(self.row.setup, LocalSetup)  # which has steps and no requests
        return setup._replace(input_tokens=0.0, output_tokens=0.0) if is_test else setup


Figures = Sequence[_Figure]


def report_pooled(kind: str, pairs: Sequence[Prediction], left_out: Sequence[tuple[str, str]] = ()) -> ValidationReport:
    """`metrics` counts the reliable figures; `by` has every group of them, and those apart by themselves.

    kind, pairs: of the table; left_out: (row, reason) of those that could not be read
    """
    shown = _KINDS[kind]
    covered = [pair for pair in pairs if not pair.reason]
    figures, apart = (_figures([pair for pair in covered if pair.row.is_reliable is kept]) for kept in (True, False))
    flags = "; ".join(sorted({pair.row.flags for pair in covered if not pair.row.is_reliable}))
    by = {name: _stats(members) for name, members in _by_dimension(figures).items()}
    if apart:
        by["apart: flagged rows"] = _stats(apart)
    noise = _noise_floor(figures)
    if noise:
        by[f"identical settings {shown.elsewhere}"] = noise
    by_metric = _by_metric(figures)
    return ValidationReport(
        kind=kind,
        rows=len(pairs) + len(left_out),
        covered=len(covered),
        metrics=_stats(figures),
        by=by,
        worst=[row for members in by_metric.values() for row in _worst(members)],
        notes=[
            *_counts(figures, apart, shown.apart_because.format(flags=flags)),
            *_floors(noise, shown.elsewhere),
            *_first(not_covered(pairs, left_out)),
        ],
        comparisons=[_comparison(metric, members) for metric, members in by_metric.items()],
        provenance=_backends(covered) if kind == "local" else provenance_of(_scenarios(covered)),
        about=shown.about,
    )


def _figures(pairs: Sequence[Prediction]) -> list[_Figure]:
    """Figures of one setting on one device as one, by metric."""
    result: defaultdict[tuple[str, str, str], list[Prediction]] = defaultdict(list)
    for pair in pairs:
        for metric in pair.row.metrics:
            if isfinite(pair.metrics.get(metric, float("nan"))):
                result[pair.row.labels["device"], pair.row.group, metric].append(pair)
    return [_figure(metric, members) for (_, _, metric), members in result.items()]


def _figure(metric: str, pairs: Sequence[Prediction]) -> _Figure:
    first, measured = pairs[0], tuple(pair.row.metrics[metric] for pair in pairs)
    assert first.scenario is not None
    medians = float(np.median([pair.metrics[metric] for pair in pairs])), float(np.median(measured))
    return _Figure(metric, first.row, first.scenario, *medians, first.intervals.get(metric, NO_INTERVAL), measured)


def _by_metric(figures: Figures) -> dict[str, list[_Figure]]:
    result: defaultdict[str, list[_Figure]] = defaultdict(list)
    for figure in figures:
        result[figure.metric].append(figure)
    return dict(sorted(result.items()))


def _stats(figures: Figures) -> dict[str, ErrorStats]:
    """Errors of each metric that any figure has."""
    result = {}
    for metric, members in _by_metric(figures).items():
        has_intervals = all(isfinite(end) for figure in members for end in figure.interval)
        result[metric] = pooled_over_devices(
            [figure.device for figure in members],
            [figure.error for figure in members],
            [figure.is_within for figure in members] if has_intervals else None,
        )
    return result


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


def _by_dimension(figures: Figures) -> dict[str, list[_Figure]]:
    members: defaultdict[str, list[_Figure]] = defaultdict(list)
    for figure in figures:
        for name, value in figure.row.labels.items():
            members[f"{name} {value}"].append(figure)
    return dict(sorted(members.items()))


def _noise_floor(figures: Figures) -> dict[str, ErrorStats]:
    """How far figures of one setting are from their own median: what no prediction can be better than."""
    result = {}
    for metric, members in _by_metric([figure for figure in figures if len(figure.figures) > 1]).items():
        devices = [figure.device for figure in members for _ in figure.figures]
        errors = [value / figure.measured - 1 for figure in members for value in figure.figures]
        result[metric] = pooled_over_devices(devices, errors)
    return result


def _worst(figures: Figures) -> list[dict[str, Any]]:
    ordered = sorted(figures, key=lambda figure: -abs(np.log(figure.predicted / figure.measured)))
    return [
        {
            "metric": figure.metric,
            "row": figure.row.name,
            "predicted": figure.predicted,
            "measured": figure.measured,
            "error": figure.error,
            "setting": figure.row.label,
        }
        for figure in ordered[:_MOST_WORST]
    ]


def _counts(figures: Figures, apart: Figures, because: str) -> list[str]:
    groups, devices = {figure.row.name for figure in figures}, {figure.device for figure in figures}
    notes = [f"metrics: {len(groups):,} groups on {len(devices)} devices; each device counts once."]
    if apart:
        notes.append(f"apart: {len({figure.row.name for figure in apart}):,} groups whose flags say {because}.")
    return notes


def _floors(noise: Mapping[str, ErrorStats], elsewhere: str) -> list[str]:
    return [
        f"noise floor of {metric}: figures of one setting {elsewhere} lie {stats.median_ape:.1%} from their own median "
        f"on half of the devices, {stats.p90_ape:.1%} on nine in ten ({stats.rows:,} figures)."
        for metric, stats in noise.items()
    ]


def _first(reasons: Sequence[str]) -> list[str]:
    left = len(reasons) - _MOST_REASONS
    return [*reasons[:_MOST_REASONS], *([f"not covered: {left:,} more rows."] if left > 0 else [])]


def _comparison(metric: str, figures: Figures) -> Comparison:
    rows = Rows(
        [figure.predicted for figure in figures],
        [figure.measured for figure in figures],
        [figure.row.name for figure in figures],
        ([figure.interval[0] for figure in figures], [figure.interval[1] for figure in figures]),
    )
    names = dict.fromkeys(name for figure in figures for name in figure.row.labels)
    named: dict[str, Callable[[_Figure], str]] = {name: partial(_label, name) for name in names}
    unit = "tok/s" if "tokens" in metric else "ms"
    return Comparison.of(metric, rows, unit, dimensions_of(figures, named), [figure.setup for figure in figures])


def _label(name: str, figure: _Figure) -> str:
    return figure.row.labels.get(name, "not said")


def _scenarios(pairs: Sequence[Prediction]) -> list[Scenario]:
    return [pair.scenario for pair in pairs if pair.scenario is not None]


def _backends(pairs: Sequence[Prediction]) -> Provenance:
    """The files of the engines' backends that predictions came from."""
    engines = {scenario.engine.described.description.name for scenario in _scenarios(pairs)}
    fits = [result for engine in sorted(engines) if (result := load_backends(engine)) is not None]
    return Provenance(tuple(FittedSource.of(fit) for fit in fits))
