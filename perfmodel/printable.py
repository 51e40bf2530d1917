"""Results print themselves, though the rooms that make them know no tables: a printer is set from above."""

__all__ = ["Printable", "Printer", "print_with"]

from collections.abc import Callable
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
