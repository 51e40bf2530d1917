"""Measured kernel tables: a folder `<system>/<op>.parquet` (or `.csv`), one row per shape, `latency_ms` each.

A table is read once into numpy columns. Rows of different kernels must not be fitted together, so a table falls into
groups; what makes a group (engine, number format, kernel) is the business of the file that knows the kind of kernel.
"""

__all__ = ["Group", "KernelTable", "read_table"]

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import MissingExtraError, SpecError

Column = NDArray[Any]


@dataclass(frozen=True)
class KernelTable:
    """Columns of one kind of kernel on one system; `system` is the folder's name, an alias of a device."""

    system: str
    op: str
    columns: Mapping[str, Column]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Measured time of each row."""
        return np.asarray(self.columns["latency_ms"], dtype=np.float64) * 1e-3

    def take(self, rows: Column) -> "KernelTable":
        """The rows of a mask or an index array."""
        return KernelTable(self.system, self.op, {name: column[rows] for name, column in self.columns.items()})

    def groups(self, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Column]]:
        """(values of `names`, row numbers) for each combination that occurs, in sorted order."""
        keys = np.array(["\x1f".join(map(str, row)) for row in zip(*(self.columns[n] for n in names), strict=True)])
        for key in np.unique(keys):
            yield tuple(str(key).split("\x1f")), np.flatnonzero(keys == key)


@dataclass(frozen=True)
class Group:
    """Rows of one kernel: the engine it belongs to, its key in a calibration, its sizes, its measured seconds.

    key:   family and rate (and variant) in `Calibration.families`, e.g. "gemm/fp8"
    sizes: the sizes object of the family's form, one entry per row
    rows:  row numbers in the table
    """

    engine: str
    key: str
    sizes: Any
    seconds: NDArray[np.float64]
    rows: NDArray[np.int64]


def read_table(path: str | Path) -> KernelTable:
    """Read `<system>/<op>.parquet` or `.csv`.

    Raises SpecError for a file that is missing, empty, unreadable or without `latency_ms`, MissingExtraError for a
    parquet file without pyarrow.
    """
    path = Path(path)
    columns = _parquet(path) if path.suffix == ".parquet" else _csv(path)
    if "latency_ms" not in columns or not len(columns["latency_ms"]):
        raise SpecError(f"{path}: has no rows with latency_ms; expected one measured time per row")
    return KernelTable(path.parent.name, path.stem, columns)


def _parquet(path: Path) -> dict[str, Column]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise MissingExtraError(f"{path} needs pyarrow to be read; install perfmodel[data]") from None
    try:
        table = parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise SpecError(f"{path}: cannot be read as parquet ({str(error).splitlines()[0]})") from None
    return {name: np.asarray(table.column(name).to_numpy(zero_copy_only=False)) for name in table.column_names}


def _csv(path: Path) -> dict[str, Column]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None
    names = rows[0].keys() if rows else ()
    return {name: _numbers_if_all(np.array([row[name] for row in rows])) for name in names}


def _numbers_if_all(column: Column) -> Column:
    try:
        return column.astype(np.float64)
    except ValueError:
        return column
