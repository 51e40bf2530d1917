"""`validate local`: figures of engines for single machines beside predictions, each device counting once.

Two thirds of such tables are of one chip, so errors are pooled in two steps: of each group (rows of one setting on
other hosts, under other builds) the prediction beside the median of its figures; of each device the median over its
groups; and over devices the median, mean and 90th percentile of those. `interval_coverage` is the share of groups in
their 80 % interval, each device again counting once.
"""

__all__ = ["not_covered", "pooled_over_devices", "report_local", "validate_local"]

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.calibrate.local.predictions import LocalPair, predict_rows
from perfmodel.calibrate.local.rows import LocalRow, read_local_rows
from perfmodel.cost.calibrations.backends import load_backends
from perfmodel.cost.calibrations.provenance import FittedSource, Provenance
from perfmodel.validate.report import Comparison, ErrorStats, Rows, ValidationReport, dimensions_of

Progress = Callable[[int, int], None]
_METRICS = {"decode_tokens_per_s": "tg", "prompt_tokens_per_s": "pp"}
_UNIT = "tok/s"
_DIMENSIONS: dict[str, Callable[[LocalRow], str]] = {
    "device": lambda row: row.device,
    "device class": lambda row: row.device_class,
    "backend": lambda row: row.backend,
    "model": lambda row: row.model,
    "gguf type": lambda row: row.gguf_type,
    "test": lambda row: row.test,
    "engine": lambda row: row.tool or "not said",
}
_MOST_WORST = 10
_MOST_REASONS = 40
_ABOUT = (
    "Tokens per second of llama.cpp (llama-bench, llama-server, Ollama, LocalScore) and MLX on single machines, each "
    "figure as the steps that it took. Errors are of devices: a device's is the median over its groups (rows of one "
    "setting), a group's is the prediction against the median of its figures. Rows whose flags say that the host was "
    "at fault (slow, anomalous, weak host, power limit, patched kernels, RPC) are listed apart. Figures of the same "
    "table may have been fitted to; `benchmarks/cross_validate_local.py` leaves out whole devices and whole models."
)


@dataclass(frozen=True)
class _Group:
    """A setting's rows as one: its first row, prediction, the median figure, its interval as factors."""

    row: LocalRow
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


def validate_local(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Price every row and compare; rows that cannot be priced are listed with the reason.

    Raises SpecError for a file that is no table of such figures.
    """
    rows, left_out = read_local_rows(path)
    return report_local(predict_rows(rows, Path(path).parent, progress), left_out)


def report_local(pairs: Sequence[LocalPair], left_out: Sequence[tuple[str, str]] = ()) -> ValidationReport:
    """`metrics` counts the rows that are not apart; `by` has every group of them, and the rows apart by themselves."""
    covered = [pair for pair in pairs if not pair.reason]
    groups = _groups([pair for pair in covered if not pair.row.is_apart])
    apart = _groups([pair for pair in covered if pair.row.is_apart])
    reasons = [*left_out, *((pair.row.row_id, pair.reason) for pair in pairs if pair.reason)]
    by = {f"{name} {value}": stats for name in _DIMENSIONS for value, stats in _by(groups, name).items()}
    if apart:
        by["apart: flagged rows"] = _stats(apart)
    noise = _noise_floor(groups)
    if noise:
        by["identical settings on other hosts"] = noise
    return ValidationReport(
        kind="local",
        rows=len(pairs) + len(left_out),
        covered=len(covered),
        metrics=_stats(groups),
        by=by,
        worst=[row for metric, test in _METRICS.items() for row in _worst(metric, _of(groups, test))],
        notes=[*_notes(groups, apart, noise), *not_covered(reasons)],
        comparisons=[_comparison(metric, _of(groups, test)) for metric, test in _METRICS.items()],
        provenance=_provenance(covered),
        about=_ABOUT,
    )


def _groups(pairs: Sequence[LocalPair]) -> list[_Group]:
    """Rows of one setting on one device as one."""
    found: dict[tuple[str, str, str], list[LocalPair]] = defaultdict(list)
    for pair in pairs:
        found[pair.row.device, pair.row.group, pair.row.test].append(pair)
    return [
        _Group(
            mine[0].row,
            float(np.median([pair.predicted for pair in mine])),
            float(np.median([pair.row.tokens_per_s for pair in mine])),
            mine[0].interval,
            tuple(pair.row.tokens_per_s for pair in mine),
        )
        for mine in found.values()
    ]


def _of(groups: Sequence[_Group], test: str) -> list[_Group]:
    return [group for group in groups if group.row.test == test]


def _stats(groups: Sequence[_Group]) -> dict[str, ErrorStats]:
    """Errors of each metric that any group has."""
    found = {metric: _of(groups, test) for metric, test in _METRICS.items()}
    return {
        metric: pooled_over_devices(
            [group.row.device for group in mine],
            [group.error for group in mine],
            [group.is_within for group in mine],
        )
        for metric, mine in found.items()
        if mine
    }


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


def _by(groups: Sequence[_Group], dimension: str) -> dict[str, dict[str, ErrorStats]]:
    members: dict[str, list[_Group]] = defaultdict(list)
    for group in groups:
        members[_DIMENSIONS[dimension](group.row)].append(group)
    return {value: _stats(members[value]) for value in sorted(members)}


def _noise_floor(groups: Sequence[_Group]) -> dict[str, ErrorStats]:
    """How far figures of one setting are from their own median: what no prediction can be better than."""
    found = {}
    for metric, test in _METRICS.items():
        repeated = [group for group in _of(groups, test) if len(group.figures) > 1]
        devices = [group.row.device for group in repeated for _ in group.figures]
        errors = [figure / group.measured - 1 for group in repeated for figure in group.figures]
        if errors:
            found[metric] = pooled_over_devices(devices, errors)
    return found


def _worst(metric: str, groups: Sequence[_Group]) -> list[dict[str, Any]]:
    ordered = sorted(groups, key=lambda group: -abs(np.log(group.predicted / group.measured)))
    return [
        {
            "metric": metric,
            "row": group.row.row_id,
            "predicted": group.predicted,
            "measured": group.measured,
            "error": group.error,
            "setting": _setting(group.row),
        }
        for group in ordered[:_MOST_WORST]
    ]


def _setting(row: LocalRow) -> str:
    """What ran on what, in a line."""
    return f"{row.model} {row.gguf_type} on {row.device}, {row.backend}, {row.tool or 'tool not said'}"


def _notes(groups: Sequence[_Group], apart: Sequence[_Group], noise: Mapping[str, ErrorStats]) -> list[str]:
    devices = {group.row.device for group in groups}
    notes = [f"metrics: {len(groups):,} groups on {len(devices)} devices; each device counts once."]
    if apart:
        flags = sorted({group.row.flags for group in apart})
        notes.append(f"apart: {len(apart):,} groups whose flags say that the host was at fault: {'; '.join(flags)}.")
    for metric, stats in noise.items():
        notes.append(
            f"noise floor of {metric}: figures of one setting on other hosts lie {stats.median_ape:.1%} from their "
            f"own median on half of the devices, {stats.p90_ape:.1%} on nine in ten ({stats.rows:,} figures)."
        )
    return notes


def not_covered(reasons: Sequence[tuple[str, str]]) -> list[str]:
    """A sentence for each of the first (row, reason), and how many more there are."""
    shown = [f"not covered: {name}: {reason}" for name, reason in reasons[:_MOST_REASONS]]
    left = len(reasons) - len(shown)
    return [*shown, f"not covered: {left:,} more rows."] if left > 0 else shown


def _comparison(metric: str, groups: Sequence[_Group]) -> Comparison:
    rows = Rows(
        [group.predicted for group in groups],
        [group.measured for group in groups],
        [group.row.row_id for group in groups],
        ([group.interval[0] for group in groups], [group.interval[1] for group in groups]),
    )
    named = {name: partial(_value, of) for name, of in _DIMENSIONS.items()}
    return Comparison.of(metric, rows, _UNIT, dimensions_of(groups, named))


def _value(of: Callable[[LocalRow], str], group: _Group) -> str:
    return of(group.row)


def _provenance(pairs: Sequence[LocalPair]) -> Provenance:
    """The files of the engines' backends that predictions came from."""
    engines = {pair.scenario.engine.described.description.name for pair in pairs if pair.scenario is not None}
    fits = [found for engine in sorted(engines) if (found := load_backends(engine)) is not None]
    return Provenance(tuple(FittedSource.of(fit) for fit in fits))
