"""`ValidationReport`: predicted beside measured, the same document for every kind of truth (design section 3.4).

    ape  = |predicted / measured - 1|          bias = mean(predicted) / mean(measured) - 1
    interval_coverage = share of the rows with an interval whose measured value lies in the prediction's 80 % interval

All figures are fractions.
"""

__all__ = ["Basis", "ErrorStats", "Rows", "ValidationReport"]

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.cost import Calibration, EngineProfile
from perfmodel.cost.calibrations import PASSED_ON
from perfmodel.cost.generations import GenerationFit

if TYPE_CHECKING:
    from perfmodel.validate.groups import Comparison

_MOST_WORST = 10


@dataclass(frozen=True)
class ErrorStats:
    """How far predictions of one metric are from what was measured; `interval_coverage` is None without intervals."""

    rows: int
    median_ape: float
    mean_ape: float
    p90_ape: float
    bias: float
    interval_coverage: float | None

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "median_ape": self.median_ape,
            "mean_ape": self.mean_ape,
            "p90_ape": self.p90_ape,
            "bias": self.bias,
            "interval_coverage": self.interval_coverage,
        }


class Rows:
    """Pairs of one metric. `interval`: the prediction's 80 % interval as factors (low, high) of its value, one for all
    rows or one for each, nan where there is none.

    Pairs that are not finite, or not measured above zero, are left out.
    """

    def __init__(
        self,
        predicted: ArrayLike,
        measured: ArrayLike,
        labels: Sequence[str],
        interval: tuple[ArrayLike, ArrayLike] | None = None,
    ) -> None:
        p, m = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
        keep = np.isfinite(p) & np.isfinite(m) & (m > 0)
        self.kept: NDArray[np.bool_] = keep  # of the pairs that were given
        self.predicted: NDArray[np.float64] = p[keep]
        self.measured: NDArray[np.float64] = m[keep]
        self.labels = [label for label, is_kept in zip(labels, keep, strict=True) if is_kept]
        self.interval: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None
        if interval is not None:
            low, high = (np.broadcast_to(np.asarray(end, dtype=float), p.shape)[keep] for end in interval)
            self.interval = (low, high)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def errors(self) -> NDArray[np.float64]:
        """predicted / measured - 1"""
        return self.predicted / self.measured - 1

    def where(self, mask: Sequence[bool] | NDArray[np.bool_]) -> "Rows":
        """The rows at which `mask` is true."""
        chosen = np.asarray(mask, dtype=bool)
        labels = [label for label, is_kept in zip(self.labels, chosen, strict=True) if is_kept]
        interval = None if self.interval is None else (self.interval[0][chosen], self.interval[1][chosen])
        return Rows(self.predicted[chosen], self.measured[chosen], labels, interval)

    def stats(self) -> ErrorStats:
        """Needs at least one row."""
        ape = np.abs(self.errors)
        coverage = None
        if self.interval is not None:
            ratio = self.measured / self.predicted
            has_interval = np.isfinite(self.interval[0])
            is_within = ((ratio >= self.interval[0]) & (ratio <= self.interval[1]))[has_interval]
            coverage = float(np.mean(is_within)) if len(is_within) else None
        return ErrorStats(
            rows=len(self),
            median_ape=float(np.median(ape)),
            mean_ape=float(ape.mean()),
            p90_ape=float(np.quantile(ape, 0.9)),
            bias=float(self.predicted.mean() / self.measured.mean() - 1),
            interval_coverage=coverage,
        )

    def largest_errors(self, count: int = _MOST_WORST) -> list[int]:
        """Numbers of the rows with the largest errors, largest first."""
        found: list[int] = np.argsort(-np.abs(self.errors), kind="stable")[:count].tolist()
        return found

    def worst(
        self, metric: str, count: int = _MOST_WORST, breakdown: Callable[[int], Mapping[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        """The rows with the largest errors, largest first; `breakdown` tells of a row's number what its time is."""
        return [
            {
                "metric": metric,
                "row": self.labels[i],
                "predicted": float(self.predicted[i]),
                "measured": float(self.measured[i]),
                "error": float(self.errors[i]),
                **({"breakdown": dict(breakdown(i))} if breakdown is not None else {}),
            }
            for i in self.largest_errors(count)
        ]


@dataclass(frozen=True, order=True)
class Basis:
    """A calibration or an engine profile that predictions came from: its file, source and date."""

    name: str
    source: str
    date: str = ""

    @classmethod
    def of(cls, fitted: Calibration | EngineProfile | GenerationFit) -> "Basis":
        date = fitted.date.isoformat() if fitted.date else ""
        if isinstance(fitted, EngineProfile):
            return cls(f"engine@{fitted.engine}", fitted.source or "not fitted: adds nothing", date)
        if isinstance(fitted, GenerationFit):
            return cls(f"generation@{fitted.architecture}", fitted.source, date)
        if fitted.origin == "datasheet" or fitted.source.startswith(PASSED_ON):
            return cls(f"{fitted.device}, no file of its own", fitted.source, date)
        return cls(f"{fitted.device}@{fitted.engine}", fitted.source, date)

    def to_json(self) -> dict[str, str]:
        return {"name": self.name, "source": self.source, "date": self.date}


@dataclass(frozen=True)
class ValidationReport:
    """What `perfmodel validate` prints. `str()` is the readable form, `to_json()` the document.

    rows, covered: rows of the truth, and those that could be predicted
    metrics:       metric -> errors over all rows
    by:            group -> metric -> errors over the group's rows
    worst:         the rows with the largest errors, with metric, row, predicted, measured, error and, where parts of
                   a prediction can be told apart, breakdown (see `perfmodel.validate.breakdown`)
    notes:         sentences a reader needs beside the figures
    comparisons:   the rows themselves, for a written report; not part of the document
    basis:         what predictions came from
    about:         what was compared, and what of it the calibrations were fitted to, in words
    """

    kind: str
    rows: int
    covered: int
    metrics: Mapping[str, ErrorStats]
    by: Mapping[str, Mapping[str, ErrorStats]] = field(default_factory=dict)
    worst: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    comparisons: Sequence["Comparison"] = field(default=(), repr=False)
    basis: Sequence[Basis] = ()
    about: str = ""

    def to_json(self) -> dict[str, Any]:
        """The document of design section 3.4."""
        return {
            "kind": self.kind,
            "rows": self.rows,
            "covered": self.covered,
            "metrics": {name: stats.to_json() for name, stats in self.metrics.items()},
            "by": {g: {name: s.to_json() for name, s in group.items()} for g, group in self.by.items()},
            "worst": [dict(row) for row in self.worst],
            "notes": list(self.notes),
            "calibrations": [each.to_json() for each in self.basis],
        }

    def __str__(self) -> str:
        head = f"{'':<34} {'rows':>6} {'mean':>7} {'median':>7} {'p90':>7} {'bias':>7}  in 80 % interval"
        lines = [f"validate {self.kind}: {self.covered} of {self.rows} rows predicted", "", head]
        lines += [_line(name, stats) for name, stats in self.metrics.items()]
        for group, metrics in self.by.items():
            lines += [_line(f"  {group}: {name}", stats) for name, stats in metrics.items()]
        if self.worst:
            lines += ["", "largest errors"]
            lines += [
                f"  {row['metric']:<10} {row['error']:+7.1%}  predicted {row['predicted']:.4g}, "
                f"measured {row['measured']:.4g}: {row['row']}" + _why(row)
                for row in self.worst
            ]
        return "\n".join([*lines, *(["", *self.notes] if self.notes else [])])


def _why(row: Mapping[str, Any]) -> str:
    sentence = row.get("breakdown", {}).get("why", "")
    return f"\n{'':<13}{sentence}" if sentence else ""


def _line(name: str, stats: ErrorStats) -> str:
    coverage = "-" if stats.interval_coverage is None else f"{stats.interval_coverage:.0%}"
    return (
        f"{name:<34} {stats.rows:>6} {stats.mean_ape:>7.1%} {stats.median_ape:>7.1%} {stats.p90_ape:>7.1%} "
        f"{stats.bias:>+7.1%}  {coverage}"
    )
