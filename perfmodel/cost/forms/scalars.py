"""`SCALARS`: the few numpy functions that forms use, for single Python floats.

A form is one formula over arrays, whose functions it takes from a namespace `xp`: numpy for tables and fits, this one
for the simulator, which asks for one operator at a time and would wait some ten times longer for arrays of size one.
"""

__all__ = ["SCALARS", "Namespace"]

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Namespace:
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
