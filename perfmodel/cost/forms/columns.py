"""Sizes of many kernels: named tuples, within one another, whose fields are columns, or one value for all rows."""

__all__ = ["joined", "take"]

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Sizes = TypeVar("Sizes", bound=tuple[Any, ...])


def take(sizes: Sizes, rows: NDArray[Any] | slice) -> Sizes:
    """The rows of an index array, a mask or a slice."""
    return type(sizes)(*(_rows_of(value, rows) for value in sizes))


def _rows_of(value: Any, rows: NDArray[Any] | slice) -> Any:
    if isinstance(value, np.ndarray):
        return value[rows]
    return take(value, rows) if hasattr(value, "_fields") else value


def joined(parts: Sequence[Sizes]) -> Sizes:
    """The rows of several tables, one after the other. What is one value for all rows is that of the first table."""
    return type(parts[0])(*(_one_after_the_other(values) for values in zip(*parts, strict=True)))


def _one_after_the_other(values: Sequence[Any]) -> Any:
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values)
    return joined(values) if hasattr(values[0], "_fields") else values[0]
