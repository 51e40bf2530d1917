"""Sizes of one kernel as numbers, or of many as columns: a form is one formula over either.

Sizes are named tuples, within one another, whose fields are columns, or one value for all rows. The functions of a
formula come from a namespace `xp`: numpy for tables and fits, `SCALARS` for the simulator, which asks for one operator
at a time and would wait some ten times longer for arrays of size one.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfmodel.ops.extents import Values

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


class KernelSeconds(NamedTuple):
    """What a form makes of sizes: seconds in all, and of the resources alone."""

    duration: Values
    compute: Values
    memory: Values


class Namespace(NamedTuple):
    """The functions of `numpy` by the same names."""

    ceil: Callable[[Any], Any] = math.ceil
    floor: Callable[[Any], Any] = math.floor
    log2: Callable[[Any], Any] = math.log2
    maximum: Callable[[Any, Any], Any] = max
    minimum: Callable[[Any, Any], Any] = min

    @staticmethod
    def where(condition: Any, one: Any, other: Any) -> Any:
        """`one` if the condition holds, else `other`; both are evaluated, as in numpy."""
        return one if condition else other


SCALARS = Namespace()
