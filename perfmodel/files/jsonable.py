"""What results and specs hold, as JSON has it."""

__all__ = ["to_jsonable"]

import math
from collections.abc import Mapping
from typing import Any


def to_jsonable(value: Any) -> Any:
    """Plain dicts, lists, numbers, strings and None from what results and specs hold (numpy scalars, dates, paths);
    numbers that JSON has no word for become None."""
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        return [to_jsonable(item) for item in items]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return to_jsonable(value.tolist())
    return str(value)
