"""Results as text, as JSON and as columns: they print themselves by what is set from above, which knows tables."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from perfmodel.errors import MissingExtraError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from pandas import DataFrame


class Printer(Protocol):
    """Makes text, and one element of HTML for notebooks, of a result of any kind."""

    def as_text(self, result: Any) -> str: ...

    def as_html(self, result: Any) -> str: ...


_printers: list[Callable[[], Printer]] = []


def print_with(printer: Callable[[], Printer]) -> None:
    """Let results print with what `printer` gives, which is asked on the first print, so that it may be costly."""
    _printers[:] = [printer]


class Renderable:
    """A result whose text is what its command shows on a terminal, and whose table is `columns()`."""

    __slots__ = ()
    columns: Callable[..., dict[str, "NDArray[Any]"]]

    def __str__(self) -> str:
        return _printers[0]().as_text(self) if _printers else object.__repr__(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return _printers[0]().as_html(self) if _printers else ""

    def to_pandas(self, of: str = "") -> "DataFrame":
        """`columns(of)` as a pandas.DataFrame. Raises MissingExtraError without pandas, which is no dependency."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise MissingExtraError(
                "to_pandas() needs pandas, which is not installed: `pip install pandas`, or read columns(), a dict of "
                "numpy arrays."
            ) from None
        return DataFrame(self.columns(of) if of else self.columns())


def columns_of(rows: Sequence[Mapping[str, Any]]) -> "dict[str, NDArray[Any]]":
    """Rows as arrays by the first row's keys: nan and "" for None; columns with lists or mappings are left out."""
    import numpy as np

    def column(name: str) -> "NDArray[np.generic] | None":
        values = [row.get(name) for row in rows]
        if any(isinstance(value, Mapping | list | tuple) for value in values):
            return None
        gap: Any = "" if any(isinstance(value, str) for value in values) else np.nan
        return np.array([gap if value is None else value for value in values])

    columns = {name: column(name) for name in (rows[0] if rows else ())}
    return {name: array for name, array in columns.items() if array is not None}


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
