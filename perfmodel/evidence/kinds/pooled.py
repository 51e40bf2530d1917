"""`validate local`, `mlperf` and `served`: published figures vs. predictions, pooled so that each device counts once.

Such tables are dominated by few devices (two thirds of single-machine rows are of one chip; submissions on one device
are near repeats). Errors are pooled in two steps: per group (one setting, on other hosts or builds) the prediction vs.
the median figure; per device the median over groups. Reported are median, mean and 90th percentile over devices.
`interval_coverage` is the share of groups in their 80 % interval, devices weighted equally."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perfmodel.cost.calibrations.backends import load_backends
from perfmodel.cost.calibrations.provenance import FittedSource, Provenance, provenance_of
from perfmodel.evidence.observation import NO_INTERVAL, Interval, Observation, Prediction, Progress, grouped
from perfmodel.evidence.predict.results import predict_rows, predict_served
from perfmodel.evidence.report import (
    Comparison,
    Dimension,
    ErrorStats,
    Rows,
    ValidationReport,
    median_of_others,
    not_covered,
)
from perfmodel.evidence.sources.local import LocalSetup, read_local_rows
from perfmodel.evidence.sources.results import devices_folder, read_mlperf_rows, read_served_rows
from perfmodel.specs.scenario import Scenario
from perfmodel.trust.index import MeasuredSetup, setup_of

_MAX_WORST = 10
_MAX_REASONS = 40
_POOLED = (
    " Errors are of devices: a device's is the median over its groups (rows of one setting), a group's is the "
    "prediction against the median of its figures. Rows whose flags say that they repeat another or contradict "
    "themselves are listed apart."
)


class _Kind(NamedTuple):
    """Texts of a kind's report. elsewhere: where settings repeat; apart_because: of flagged rows"""

    elsewhere: str
    apart_because: str
    about: str


_CONTRADICT = "that they repeat another or contradict themselves"
_KINDS = {
    "mlperf": _Kind(
        "elsewhere",
        _CONTRADICT,
        "Results of MLPerf Inference's closed division. Offline: tokens per second of a saturated engine. Server and "
        "Interactive: TTFT and TPOT at the submitted rate, over the ten minutes that a run takes at least. It is "
        "close to the server's capacity, where both follow small errors of it; a rate beyond the predicted capacity is "
        "predicted to overload the server. Lengths are the data sets'; over how many devices an instance is spread, "
        "and how many samples run together, results do not say: of the layouts that keep the limit on TPOT at that "
        "rate the one that serves most is taken. Beam search (GPT-J) is predicted by mean steps, which never queue."
        + _POOLED,
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
        "of the same table may have been fitted to; `--leave-out device` and `--leave-out model` leave out "
        "whole chips and whole models.",
    ),
}


def validate_local(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Price every row and compare; failures are listed with the reason. Raises SpecError for another kind of file."""
    rows, left_out = read_local_rows(path)
    return report_pooled("local", predict_rows(rows, Path(path).parent, progress), left_out)


def validate_mlperf(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """As `validate_local`, for MLPerf results."""
    rows, left_out = read_mlperf_rows(path)
    return report_pooled("mlperf", predict_served(rows, devices_folder(path), progress), left_out)


def validate_served(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """As `validate_local`, for a table of published serving results."""
    rows, left_out = read_served_rows(path)
    return report_pooled("served", predict_served(rows, devices_folder(path), progress), left_out)


class _Figure(NamedTuple):
    """A setting's figures of one metric: its first row, the median, and each figure. trivial: see `ErrorStats`"""

    row: Observation
    scenario: Scenario
    predicted: float
    measured: float
    interval: Interval
    figures: tuple[float, ...]
    trivial: float = nan

    @property
    def device(self) -> str:
        return self.row.labels["device"]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def setup(self) -> MeasuredSetup:
        setup = setup_of(self.scenario)
        is_test = isinstance(self.row.setup, LocalSetup)  # which has steps and no requests
        return setup._replace(input_tokens=0.0, output_tokens=0.0) if is_test else setup


Figures = Mapping[str, Sequence[_Figure]]  # by metric


def report_pooled(kind: str, pairs: Sequence[Prediction], left_out: Sequence[tuple[str, str]] = ()) -> ValidationReport:
    """`metrics` counts reliable figures; `by` has all groups, unreliable ones apart. kind, pairs: of the table;
    left_out: (row, reason) of unreadable ones"""
    shown = _KINDS[kind]
    covered = [pair for pair in pairs if not pair.reason]
    figures, apart = (_figures([pair for pair in covered if pair.row.is_reliable is kept]) for kept in (True, False))
    by = _by_dimension(figures)
    rows_apart = {item.row.name for members in apart.values() for item in members}
    groups = {item.row.name for members in figures.values() for item in members}
    devices = {item.device for members in figures.values() for item in members}
    notes = [f"metrics: {len(groups):,} groups on {len(devices)} devices; each device counts once."]
    if apart:
        by["apart: flagged rows"] = _stats(apart)
        flags = "; ".join(sorted({pair.row.flags for pair in covered if not pair.row.is_reliable}))
        notes.append(f"apart: {len(rows_apart):,} groups whose flags say {shown.apart_because.format(flags=flags)}.")
    noise = _noise_floor(figures)
    if noise:
        by[f"identical settings {shown.elsewhere}"] = noise
    notes += [
        f"noise floor of {metric}: figures of one setting {shown.elsewhere} lie {stats.median_ape:.1%} from their own "
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
                "predicted": item.predicted,
                "measured": item.measured,
                "error": item.error,
                "setting": item.row.label,
            }
            for metric, members in figures.items()
            for item in sorted(members, key=lambda item: -abs(np.log(item.predicted / item.measured)))[:_MAX_WORST]
        ],
        notes=notes,
        comparisons=[_comparison(metric, members) for metric, members in figures.items()],
        provenance=_backends(scenarios) if kind == "local" else provenance_of(scenarios),
        about=shown.about,
    )


def _figures(pairs: Sequence[Prediction]) -> Figures:
    settings = grouped(
        ((pair.row.labels["device"], pair.row.group, metric), pair)
        for pair in pairs
        for metric in pair.row.metrics
        if isfinite(pair.metrics.get(metric, nan))
    )
    result: defaultdict[str, list[_Figure]] = defaultdict(list)
    for (_, _, metric), members in settings.items():
        first, measured = members[0], tuple(pair.row.metrics[metric] for pair in members)
        assert first.scenario is not None
        medians = float(np.median([pair.metrics[metric] for pair in members])), float(np.median(measured))
        interval = first.intervals.get(metric, NO_INTERVAL)
        result[metric].append(_Figure(first.row, first.scenario, *medians, interval, measured))
    return {metric: _with_trivial(metric, members) for metric, members in sorted(result.items())}


def _with_trivial(metric: str, members: Sequence[_Figure]) -> list[_Figure]:
    """Figures with the benchmark's limit as trivial prediction, else the median of the device's other settings."""
    medians = median_of_others([item.measured for item in members], [item.device for item in members]).tolist()
    return [
        item._replace(trivial=item.row.trivial.get(metric, median))
        for item, median in zip(members, medians, strict=True)
    ]


def _stats(figures: Figures) -> dict[str, ErrorStats]:
    return {
        metric: pooled_over_devices(_rows(members), [item.device for item in members])
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
    groups: defaultdict[str, defaultdict[str, list[_Figure]]] = defaultdict(lambda: defaultdict(list))
    for metric, members in figures.items():
        for item in members:
            for name, value in item.row.labels.items():
                groups[f"{name} {value}"][metric].append(item)
    return {name: _stats(group) for name, group in sorted(groups.items())}


def _noise_floor(figures: Figures) -> dict[str, ErrorStats]:
    """Deviation of a setting's figures from their median: a lower bound on any prediction's error."""
    result = {}
    for metric, members in figures.items():
        repeated = [item for item in members if len(item.figures) > 1]
        figures_of = [(item, value) for item in repeated for value in item.figures]
        if figures_of:
            values, medians = [value for _, value in figures_of], [item.measured for item, _ in figures_of]
            rows = Rows(values, medians, [item.row.name for item, _ in figures_of])
            result[metric] = pooled_over_devices(rows, [item.device for item, _ in figures_of])
    return result


def _rows(figures: Sequence[_Figure]) -> Rows:
    predicted, measured = [item.predicted for item in figures], [item.measured for item in figures]
    ends = [item.interval[0] for item in figures], [item.interval[1] for item in figures]
    names, trivial = [item.row.name for item in figures], [item.trivial for item in figures]
    return Rows(predicted, measured, names, ends, trivial)


def _comparison(metric: str, figures: Sequence[_Figure]) -> Comparison:
    names = dict.fromkeys(name for item in figures for name in item.row.labels)
    dimensions = {name: Dimension.of([item.row.labels.get(name, "not said") for item in figures]) for name in names}
    unit = "tok/s" if "tokens" in metric else "W" if "power" in metric else "ms"
    return Comparison.of(metric, _rows(figures), unit, dimensions, [item.setup for item in figures])


def _backends(scenarios: Sequence[Scenario]) -> Provenance:
    engines = {scenario.engine.described.description.name for scenario in scenarios}
    fits = [result for engine in sorted(engines) if (result := load_backends(engine)) is not None]
    return Provenance(tuple(FittedSource.of(fit) for fit in fits))
