"""Plain numbers of files, within what arithmetic carries: no input makes a product overflow or a division vanish.

A billion of one thing for each of a billion others still fits into 64 bits, and a chain of twenty factors of
1e15 into a double. Nothing that anyone serves, buys or measures comes near; what is found beyond is a slip of the
finger or of a unit. Quantities with units have their limits in `perfmodel.files.units`.
"""

__all__ = ["LARGEST", "LARGEST_COUNT", "SMALLEST", "NonNegativeFloat", "NonNegativeInt", "PositiveFloat", "PositiveInt"]

from typing import Annotated

from pydantic import AfterValidator, Field

LARGEST_COUNT = 10**9
LARGEST = 1e15
SMALLEST = 1e-12  # of what is above 0


def _not_vanishing(value: float) -> float:
    """`value`. Raises ValueError where it is nearer to 0 than anything that is divided by."""
    if 0 < value < SMALLEST:
        raise ValueError(f"found {value:g}, allowed a number of at least {SMALLEST:g}")
    return value


PositiveInt = Annotated[int, Field(gt=0, le=LARGEST_COUNT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
PositiveFloat = Annotated[float, Field(gt=0, le=LARGEST), AfterValidator(_not_vanishing)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=LARGEST), AfterValidator(_not_vanishing)]
