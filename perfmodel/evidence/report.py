"""Predicted vs. measured: pairs, pooled errors, and reports.

    ape  = |predicted / measured - 1|          bias = mean(predicted) / mean(measured) - 1
    interval_coverage = share of rows with an interval whose measured value lies in the 80 % interval
    interval_width    = median of high / low over these rows

For comparison, what needs no model, so that a figure that proves nothing shows it: `trivial_ape` is the median error of
the simplest predictor, `trivial_width` how wide its 80 % interval has to be. The simplest predictor is the limit for
rows of a benchmark with limits, what the datasheet's peaks give for kernels and published steps, no effect for a
technique, else the median of the other rows of the device (or run).

Figures are fractions. A `Comparison` holds all rows of one metric; each row has one group per dimension (device, model,
load ...). A report's `by` and its tables come from these."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from math import nan
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.cost.calibrations.provenance import Provenance, provenance_of
from perfmodel.evidence.observation import NO_INTERVAL, Prediction, grouped
from perfmodel.files.tables import load_table
from perfmodel.renderable import Renderable, columns_of
from perfmodel.trust.index import MeasuredRow, MeasuredSetup, setup_of

_MAX_WORST = 10
NOT_APPLICABLE = "-"  # the group of rows that have no such size


@dataclass(frozen=True)
class ErrorStats:
    """Errors of one metric; None: without intervals, or without a trivial prediction."""

    rows: int
    median_ape: float
    mean_ape: float
    p90_ape: float
    bias: float
    interval_coverage: float | None
    interval_width: float | None = None
    trivial_ape: float | None = None
    trivial_width: float | None = None

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


class Rows:
    """Pairs of one metric, `predicted` and `measured`, with `labels`. Pairs not finite, or not measured above zero, are
    dropped; `kept` marks the others. interval: the 80 % interval as factors (low, high), for all rows or per row, nan
    without one; trivial: the simplest predictor's values, nan without one"""

    def __init__(
        self,
        predicted: ArrayLike,
        measured: ArrayLike,
        labels: Sequence[str],
        interval: tuple[ArrayLike, ArrayLike] | None = None,
        trivial: ArrayLike = nan,
    ) -> None:
        p, m = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
        self.kept: NDArray[np.bool_] = np.isfinite(p) & np.isfinite(m) & (m > 0)
        self.predicted: NDArray[np.float64] = p[self.kept]
        self.measured: NDArray[np.float64] = m[self.kept]
        self.labels = list(compress(labels, self.kept.tolist()))
        self.interval: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None
        if interval is not None:
            low, high = (np.broadcast_to(np.asarray(end, dtype=float), p.shape)[self.kept] for end in interval)
            self.interval = (low, high)
        self.trivial: NDArray[np.float64] = np.broadcast_to(np.asarray(trivial, dtype=float), p.shape)[self.kept]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def errors(self) -> NDArray[np.float64]:
        """predicted / measured - 1"""
        return self.predicted / self.measured - 1

    def where(self, mask: Sequence[bool] | NDArray[np.bool_]) -> "Rows":
        """The rows at which `mask` is true."""
        chosen = np.asarray(mask, dtype=bool)
        labels = list(compress(self.labels, chosen.tolist()))
        interval = None if self.interval is None else (self.interval[0][chosen], self.interval[1][chosen])
        return Rows(self.predicted[chosen], self.measured[chosen], labels, interval, self.trivial[chosen])

    def stats(self) -> ErrorStats:
        """Error statistics; needs at least one row."""
        ape = np.abs(self.errors)
        coverage = width = None
        if self.interval is not None:
            ratio, (low, high) = self.measured / self.predicted, self.interval
            has_interval = np.isfinite(low)
            if has_interval.any():
                coverage = float(np.mean(((ratio >= low) & (ratio <= high))[has_interval]))
                width = float(np.median((high / low)[has_interval]))
        return ErrorStats(
            rows=len(self),
            median_ape=float(np.median(ape)),
            mean_ape=float(ape.mean()),
            p90_ape=float(np.quantile(ape, 0.9)),
            bias=float(self.predicted.mean() / self.measured.mean() - 1),
            interval_coverage=coverage,
            interval_width=width,
            **trivial_errors(self.trivial, self.measured),
        )

    def worst(
        self, metric: str, count: int = _MAX_WORST, breakdown: Callable[[int], Mapping[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """The `count` rows of `metric` with the largest errors, largest first; `breakdown` gives a row's parts."""
        return [
            {
                "metric": metric,
                "row": self.labels[i],
                "predicted": float(self.predicted[i]),
                "measured": float(self.measured[i]),
                "error": float(self.errors[i]),
                **({"breakdown": dict(breakdown(i))} if breakdown is not None else {}),
            }
            for i in np.argsort(-np.abs(self.errors), kind="stable")[:count].tolist()
        ]


def trivial_errors(trivial: NDArray[np.float64], measured: NDArray[np.float64]) -> dict[str, float]:
    """`trivial_ape` and `trivial_width` of the rows with a trivial prediction; empty without any."""
    known = np.isfinite(trivial) & (trivial > 0)
    if not known.any():
        return {}
    ratio = measured[known] / trivial[known]
    low, high = np.quantile(ratio, [0.1, 0.9])
    return {"trivial_ape": float(np.median(np.abs(1 / ratio - 1))), "trivial_width": float(high / low)}


def median_of_others(measured: ArrayLike, groups: Sequence[str]) -> NDArray[np.float64]:
    """For each row the median of the other rows of its group, or of all others if alone; nan if it is the only one."""
    values, names = np.asarray(measured, dtype=float), np.asarray(groups)
    finite = np.isfinite(values)
    result, of_all = np.full(len(values), nan), np.full(len(values), nan)
    of_all[finite] = _medians_without(values[finite])
    for name in dict.fromkeys(names[finite].tolist()):
        members = finite & (names == name)
        alone = int(members.sum()) == 1
        result[members] = of_all[members] if alone else _medians_without(values[members])
    return result


def _medians_without(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each value the median of the others; nan of the only one."""
    others = len(values) - 1
    if others < 1:
        return np.full(len(values), nan)
    order = np.argsort(values, kind="stable")
    rank = np.empty(len(values), dtype=np.int64)
    rank[order] = np.arange(len(values))
    ordered, low, high = values[order], (others - 1) // 2, others // 2
    # Without the value of a rank, the ones behind it move up by one.
    result: NDArray[np.float64] = (ordered[low + (low >= rank)] + ordered[high + (high >= rank)]) / 2
    return result


@dataclass(frozen=True)
class Dimension:
    """Ordered groups of one dimension, and each row's group index."""

    names: tuple[str, ...]
    codes: NDArray[np.int64]

    @classmethod
    def of(cls, values: Sequence[str]) -> "Dimension":
        """The dimension from each row's group."""
        names = sorted(set(values))
        number = {name: i for i, name in enumerate(names)}
        return cls(tuple(names), np.array([number[value] for value in values], dtype=np.int64))

    @classmethod
    def constant(cls, name: str, num_rows: int) -> "Dimension":
        """All rows in one group."""
        return cls((name,), np.zeros(num_rows, dtype=np.int64))


def joined(parts: Sequence[Dimension]) -> Dimension:
    """Concatenate dimensions; names keep the order of the part with most of them."""
    longest_first = sorted(parts, key=lambda part: -len(part.names))
    names = list(dict.fromkeys(name for part in longest_first for name in part.names))
    number = {name: i for i, name in enumerate(names)}
    codes = [np.array([number[name] for name in part.names], dtype=np.int64)[part.codes] for part in parts]
    return Dimension(tuple(names), np.concatenate(codes))


@dataclass(frozen=True)
class Comparison:
    """Predicted vs. measured over all rows of one metric.

    unit:       of both, "s" or "ms"
    dimensions: name -> groups of the rows
    setups:     of rows of whole deployments; else empty"""

    metric: str
    rows: Rows
    unit: str
    dimensions: Mapping[str, Dimension] = field(default_factory=dict)
    setups: Sequence[MeasuredSetup] = ()

    @classmethod
    def of(
        cls,
        metric: str,
        rows: Rows,
        unit: str,
        dimensions: Mapping[str, Dimension],
        setups: Sequence[MeasuredSetup] = (),
    ) -> "Comparison":
        """A comparison of the rows kept by `rows`; `metric`, `unit` as of the class; `dimensions`, `setups` are of all
        given pairs."""
        kept = {name: Dimension(item.names, item.codes[rows.kept]) for name, item in dimensions.items()}
        return cls(metric, rows, unit, kept, tuple(compress(setups, rows.kept.tolist())))

    def measured_rows(self, kind: str) -> list[MeasuredRow]:
        """Rows for the trust index; empty if not of deployments."""
        rows = self.rows
        values = zip(rows.predicted.tolist(), rows.measured.tolist(), rows.labels, strict=True)
        return [MeasuredRow(kind, setup, self.metric, *item) for setup, item in zip(self.setups, values, strict=False)]

    def groups(self, dimension: str) -> Iterator[tuple[str, Rows]]:
        """Rows of each non-empty group."""
        result = self.dimensions[dimension]
        for number, name in enumerate(result.names):
            mask = result.codes == number
            if mask.any():
                yield name, self.rows.where(mask)


def pooled(comparisons: Sequence[Comparison]) -> dict[str, ErrorStats]:
    """Errors over all rows, per metric with rows."""
    return {item.metric: item.rows.stats() for item in comparisons if len(item.rows)}


def comparison_of(
    metric: str,
    unit: str,
    pairs: Sequence[Prediction],
    dimensions: Mapping[str, Callable[[Prediction], str]],
    also: Mapping[str, Dimension] = MappingProxyType({}),
) -> Comparison:
    """Compare `pairs` that have `metric` measured, in `unit`. dimensions: name -> group of a pair; also: further
    dimensions of the pairs with the metric"""
    members = [pair for pair in pairs if metric in pair.row.metrics]
    setups = [setup_of(pair.scenario) for pair in members if pair.scenario is not None]
    names = {name: [group_of(pair) for pair in members] for name, group_of in dimensions.items()}
    groups = {name: Dimension.of(values) for name, values in names.items()}
    rows = rows_of(metric, members, names.get("device") or [""] * len(members))
    return Comparison.of(metric, rows, unit, {**groups, **also}, setups)


def rows_of(metric: str, pairs: Sequence[Prediction], devices: Sequence[str] | None = None) -> Rows:
    """Values of one metric. devices: of each pair, for the simplest predictor where rows have none of their own"""
    low, high = zip(*(pair.intervals.get(metric, NO_INTERVAL) for pair in pairs), strict=True) if pairs else ((), ())
    measured = [pair.row.metrics[metric] for pair in pairs]
    given = np.array([pair.row.trivial.get(metric, nan) for pair in pairs])
    return Rows(
        [pair.metrics.get(metric, nan) for pair in pairs],
        measured,
        [pair.row.label or pair.row.name for pair in pairs],
        (low, high) if np.isfinite(low).any() else None,
        np.where(np.isfinite(given), given, nan if devices is None else median_of_others(measured, devices)),
    )


def not_covered(pairs: Sequence[Prediction], left_out: Sequence[tuple[str, str]]) -> list[str]:
    """A sentence per reason for which rows were not read or not predicted, the most frequent first."""
    reasons = [*left_out, *((pair.row.name, pair.reason) for pair in pairs if pair.reason)]
    rows = grouped((reason, name) for name, reason in reasons)
    ordered = sorted(rows.items(), key=lambda item: -len(item[1]))
    also = {reason: f" and {len(names) - 1:,} more rows" if len(names) > 1 else "" for reason, names in ordered}
    return [f"not covered: {names[0]}{also[reason]}: {reason}" for reason, names in ordered]


def by_dimension(comparisons: Sequence[Comparison]) -> dict[str, dict[str, ErrorStats]]:
    """ "<dimension> <group>" -> metric -> errors."""
    result: dict[str, dict[str, ErrorStats]] = {}
    for item in comparisons:
        for dimension in item.dimensions:
            for name, rows in item.groups(dimension):
                result.setdefault(f"{dimension} {name}", {})[item.metric] = rows.stats()
    return result


def about_of(kind: str) -> str:
    """What a kind compares, and which of it calibrations were fitted to: a paragraph of its report."""
    return str(load_table("validations")[kind])


Breakdown = Callable[[Comparison, int], Mapping[str, Any]]


def worst_of(comparisons: Sequence[Comparison], count: int, breakdown: Breakdown) -> list[dict[str, Any]]:
    """The `count` rows per metric with the largest errors; `breakdown` gives a row's parts."""
    return [row for item in comparisons for row in item.rows.worst(item.metric, count, partial(breakdown, item))]


def range_names(values: ArrayLike, edges: Sequence[float], unit: str = "") -> Dimension:
    """Bin values at `edges`: "below 64", "64 to 1,024", "from 1,024 on"."""
    texts = [f"{x:,.0f}" if x < 1e6 else f"{x:.0e}".replace("e+0", "e").replace("e+", "e") for x in edges]
    ends = [f"{text} {unit}".rstrip() for text in texts]
    middle = [f"{low} to {high}" for low, high in zip(texts, ends[1:], strict=False)]
    names = (f"below {ends[0]}", *middle, f"from {ends[-1]} on")
    return Dimension(names, np.searchsorted(np.asarray(edges), np.asarray(values, dtype=float), side="right"))


@dataclass(frozen=True, repr=False)
class ValidationReport(Renderable):
    """The result of `perfmodel validate`; it prints itself as the command does.

    rows, covered: all rows, and the predicted ones
    metrics:       metric -> errors over all rows
    by:            group -> metric -> errors
    worst:         rows with the largest errors: metric, row, predicted, measured, error and, if separable, breakdown
                   (see `perfmodel.evidence.breakdown`)
    notes:         caveats, in sentences
    comparisons:   the rows, for a written report; not in the JSON
    provenance:    of the predictions
    about:         what was compared, and which of it calibrations were fitted to
    figures:       each published figure (id, technique, metric, unit, predicted, published, ratio, source, reason)
    techniques:  each technique (technique, file, page, metric, simulated and executed speedup, quotient, bias of steps
                 with and without it)
    runs:        each run of a load tool: figures, parts, and facts of its setup with their sources"""

    kind: str
    rows: int
    covered: int
    metrics: Mapping[str, ErrorStats]
    by: Mapping[str, Mapping[str, ErrorStats]] = field(default_factory=dict)
    worst: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    comparisons: Sequence[Comparison] = field(default=(), repr=False)
    provenance: Provenance = field(default_factory=Provenance)
    about: str = ""
    figures: Sequence[Mapping[str, Any]] = ()
    techniques: Sequence[Mapping[str, Any]] = ()
    runs: Sequence[Mapping[str, Any]] = ()

    @property
    def measured_rows(self) -> list[MeasuredRow]:
        """Rows of deployments, for the trust index (`perfmodel.trust`)."""
        return [row for item in self.comparisons for row in item.measured_rows(self.kind)]

    def columns(self) -> dict[str, NDArray[Any]]:
        """Errors by group and metric; the group `all` comes first."""
        return columns_of(
            [
                {"group": group, "metric": name, **stats.to_json()}
                for group, metrics in {"all": self.metrics, **self.by}.items()
                for name, stats in metrics.items()
            ]
        )

    def to_json(self) -> dict[str, Any]:
        """The report as JSON, in one form for every kind."""
        return {
            "kind": self.kind,
            "rows": self.rows,
            "covered": self.covered,
            "metrics": {name: stats.to_json() for name, stats in self.metrics.items()},
            "by": {g: {name: s.to_json() for name, s in group.items()} for g, group in self.by.items()},
            "worst": [dict(row) for row in self.worst],
            "notes": list(self.notes),
            "calibrations": [item.to_json() for item in self.provenance.fitted],
            "provenance": self.provenance.to_json("validation", {"kind": self.kind}),
            **({"figures": [dict(row) for row in self.figures]} if self.figures else {}),
            **({"techniques": [dict(row) for row in self.techniques]} if self.techniques else {}),
            **({"runs": [dict(row) for row in self.runs]} if self.runs else {}),
        }


def report_of(
    kind: str,
    pairs: Sequence[Prediction],
    left_out: Sequence[tuple[str, str]],
    comparisons: Sequence[Comparison],
    breakdown: Breakdown = lambda *_: {},
    notes: Sequence[str] = (),
    num_worst: int = 5,
    counted: Sequence[Comparison] | None = None,
    groups: Sequence[Mapping[str, Mapping[str, ErrorStats]]] = ({}, {}),
) -> ValidationReport:
    """The report of predicted rows.

    kind, pairs, left_out: the kind's rows, and (row, reason) of unreadable ones
    comparisons: by metric; counted: those used for `metrics` and `worst`, default: all
    notes: as of the report, which has its kind's `about`; num_worst, breakdown: as of `worst_of`
    groups:      of `by`, before and after those of the dimensions"""
    counted = comparisons if counted is None else counted
    covered = [pair for pair in pairs if not pair.reason]
    return ValidationReport(
        kind=kind,
        rows=len(pairs) + len(left_out),
        covered=len(covered),
        metrics=pooled(counted),
        by={**groups[0], **by_dimension(comparisons), **groups[1]},
        worst=worst_of(counted, num_worst, breakdown),
        notes=[*notes, *not_covered(pairs, left_out)],
        comparisons=comparisons,
        provenance=provenance_of([pair.scenario for pair in covered if pair.scenario is not None]),
        about=about_of(kind),
    )
