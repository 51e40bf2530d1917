"""Pairs of predicted and measured values, and how far apart they are.

    ape  = |predicted / measured - 1|          bias = mean(predicted) / mean(measured) - 1
    interval_coverage = share of the rows with an interval whose measured value lies in the prediction's 80 % interval

All figures are fractions.
"""

__all__ = ["ErrorStats", "Rows"]

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
    """Pairs of one metric, `predicted` and `measured`, with their `labels`.

    interval: the prediction's 80 % interval as factors (low, high) of its value, one for all rows or one for each,
              nan where there is none

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
        """The rows with the largest errors, largest first; `breakdown` of a number gives the row's parts."""
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
