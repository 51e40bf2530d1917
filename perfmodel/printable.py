"""Results as text and as JSON: they print themselves by what is set from above, since their rooms know no tables."""

__all__ = ["Printable", "Printer", "print_with", "to_jsonable"]

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Printer(Protocol):
    """Makes text, and one element of HTML for notebooks, of a result of any kind."""

    def as_text(self, result: Any) -> str: ...

    def as_html(self, result: Any) -> str: ...


_printers: list[Callable[[], Printer]] = []


def print_with(printer: Callable[[], Printer]) -> None:
    """Let results print with what `printer` gives, which is asked on the first print, so that it may be costly."""
    _printers[:] = [printer]


class Printable:
    """A result whose text is what its command shows on a terminal."""

    __slots__ = ()

    def __str__(self) -> str:
        return _printers[0]().as_text(self) if _printers else object.__repr__(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return _printers[0]().as_html(self) if _printers else ""


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
