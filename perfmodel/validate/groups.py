"""Rows by what they have in common: one way of pooling errors for every kind of truth.

A `Comparison` holds all rows of one metric with their dimensions (device, model, load ...); every row has one group in
each dimension. The groups of a report's `by` and the tables of a written report come from it.
"""

__all__ = [
    "NOT_APPLICABLE",
    "Comparison",
    "Dimension",
    "by_dimension",
    "dimensions_of",
    "joined",
    "pooled",
    "range_names",
    "worst_of",
]

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.validate.rows import ErrorStats, Rows

RowT = TypeVar("RowT")
NOT_APPLICABLE = "-"  # the group of rows that have no such size


@dataclass(frozen=True)
class Dimension:
    """The groups of one dimension in their order, and the number of each row's group."""

    names: tuple[str, ...]
    codes: NDArray[np.int64]

    @classmethod
    def of(cls, values: Sequence[str], order: Sequence[str] = ()) -> "Dimension":
        """The dimension of each row's group; groups in `order` come first, in that order, others sorted."""
        present = set(values)
        names = (*(n for n in order if n in present), *sorted(present - set(order)))
        number = {name: i for i, name in enumerate(names)}
        return cls(names, np.array([number[value] for value in values], dtype=np.int64))

    @classmethod
    def constant(cls, name: str, num_rows: int) -> "Dimension":
        """All rows in one group."""
        return cls((name,), np.zeros(num_rows, dtype=np.int64))


def joined(parts: Sequence[Dimension]) -> Dimension:
    """One dimension over the rows of all parts; names keep the order of the part that has most of them."""
    longest_first = sorted(parts, key=lambda part: -len(part.names))
    names = list(dict.fromkeys(name for part in longest_first for name in part.names))
    number = {name: i for i, name in enumerate(names)}
    codes = [np.array([number[name] for name in part.names], dtype=np.int64)[part.codes] for part in parts]
    return Dimension(tuple(names), np.concatenate(codes))


@dataclass(frozen=True)
class Comparison:
    """Predicted beside measured for all rows of one metric.

    unit:       of both, "s" or "ms"
    dimensions: name -> groups of the rows
    """

    metric: str
    rows: Rows
    unit: str
    dimensions: Mapping[str, Dimension] = field(default_factory=dict)

    @classmethod
    def of(cls, metric: str, rows: Rows, unit: str, dimensions: Mapping[str, Dimension]) -> "Comparison":
        """The comparison by `metric` in `unit`, with `dimensions` of all pairs that were given to `rows`, of which
        it may have left out some."""
        kept = {name: Dimension(each.names, each.codes[rows.kept]) for name, each in dimensions.items()}
        return cls(metric, rows, unit, kept)

    def groups(self, dimension: str) -> Iterator[tuple[str, Rows]]:
        """The rows of each group that has any."""
        found = self.dimensions[dimension]
        for number, name in enumerate(found.names):
            mask = found.codes == number
            if mask.any():
                yield name, self.rows.where(mask)


def pooled(comparisons: Sequence[Comparison]) -> dict[str, ErrorStats]:
    """Errors over all rows of each metric that has rows."""
    return {each.metric: each.rows.stats() for each in comparisons if len(each.rows)}


def by_dimension(comparisons: Sequence[Comparison], dimensions: Sequence[str] = ()) -> dict[str, dict[str, ErrorStats]]:
    """ "<dimension> <group>" -> metric -> errors, for the dimensions named, or all."""
    found: dict[str, dict[str, ErrorStats]] = {}
    for each in comparisons:
        for dimension in dimensions or each.dimensions:
            for name, rows in each.groups(dimension):
                found.setdefault(f"{dimension} {name}", {})[each.metric] = rows.stats()
    return found


def worst_of(
    comparisons: Sequence[Comparison], count: int, breakdown: Callable[[Comparison, int], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The `count` rows of each metric with the largest errors; `breakdown` of a number gives the row's parts."""
    return [row for each in comparisons for row in each.rows.worst(each.metric, count, partial(breakdown, each))]


def dimensions_of(items: Sequence[RowT], names: Mapping[str, Callable[[RowT], str]]) -> dict[str, Dimension]:
    """Dimensions whose groups `names` gives for each item."""
    return {dimension: Dimension.of([name_of(item) for item in items]) for dimension, name_of in names.items()}


def range_names(values: ArrayLike, edges: Sequence[float], unit: str = "") -> Dimension:
    """Values by the ranges between `edges`: "below 64", "64 to 1,024", "from 1,024 on"."""
    ends = [_number(edge) + (f" {unit}" if unit else "") for edge in edges]
    middle = [f"{_number(low)} to {high}" for low, high in zip(edges, ends[1:], strict=False)]
    names = (f"below {ends[0]}", *middle, f"from {ends[-1]} on")
    return Dimension(names, np.searchsorted(np.asarray(edges), np.asarray(values, dtype=float), side="right"))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value < 1e6 else f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
