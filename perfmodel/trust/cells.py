"""The index of what was measured and how well it was predicted: `hardware_specs/validated`, written by validations.

`<name>.csv` has a line for each cell (device x engine version x model x number format) and metric: the range of the
setups that were measured, and the errors of their predictions. `<name>.rows.csv.gz` has the rows themselves, where
they may be copied.
"""

__all__ = [
    "MeasuredCell",
    "MeasuredRow",
    "cells_of",
    "measured_cells",
    "measured_rows",
    "quantile",
    "write_index",
]

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.catalog import data_dir
from perfmodel.files.reach import read_rows
from perfmodel.trust.setups import SIZES, MeasuredSetup

_NAMES = tuple(name for name in MeasuredSetup._fields if name not in SIZES)
_CELL = (*_NAMES, *(f"{size}_{end}" for size in SIZES for end in ("low", "high")))
_CELL_COLUMNS = ("kind", *_CELL, "metric", "errors")
_ROW_COLUMNS = ("kind", *_NAMES, *SIZES, "metric", "predicted", "measured", "label")
_DIGITS, _ERROR_DIGITS = 4, 3


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One measurement beside its prediction, in the metric's unit. kind: of the validation"""

    kind: str
    setup: MeasuredSetup
    metric: str
    predicted: float
    measured: float
    label: str

    @property
    def error(self) -> float:
        """predicted / measured - 1"""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """Measurements of one cell in one metric.

    low, high: the setups of its rows, each size at its least and its most
    errors:    predicted / measured - 1 of each row, in ascending order
    """

    kind: str
    low: MeasuredSetup
    high: MeasuredSetup
    metric: str
    errors: tuple[float, ...]

    @property
    def rows(self) -> int:
        """Number of measurements."""
        return len(self.errors)

    @property
    def median_error(self) -> float:
        """Median of |predicted / measured - 1|."""
        return quantile([abs(error) for error in self.errors], 0.5)


def quantile(values: Sequence[float], share: float) -> float:
    """The `share` quantile of `values`, linear between the two nearest, as numpy's default."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


@cache
def measured_cells() -> tuple[MeasuredCell, ...]:
    """All cells of the index."""
    files = sorted(path for path in data_dir("validated").glob("*.csv"))
    return tuple(_cell(line) for file in files for line in _lines(file))


@cache
def measured_rows() -> tuple[MeasuredRow, ...]:
    """The single rows of all validations, of those that may be copied."""
    files = sorted(data_dir("validated").glob("*.rows.csv.gz"))
    return tuple(_row(line) for file in files for line in _lines(file))


def cells_of(rows: Sequence[MeasuredRow]) -> list[MeasuredCell]:
    """Rows by cell and metric."""
    found: dict[tuple[str, ...], list[MeasuredRow]] = defaultdict(list)
    for row in rows:
        found[row.kind, row.metric, *(str(getattr(row.setup, name)) for name in _NAMES)].append(row)
    return [_pooled(found[key]) for key in sorted(found)]


def write_index(name: str, rows: Sequence[MeasuredRow], folder: Path, lists_rows: bool) -> None:
    """Write one validation's part of the index; nothing where `rows` are not of deployments.

    name:   of its files; lists_rows: whether single rows may be copied
    folder: of the index
    """
    if not rows:
        return
    import gzip  # here and below what only writing needs: every answer imports this module

    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.csv").write_text(
        _table(_CELL_COLUMNS, map(_cell_line, cells_of(rows))), encoding="utf-8", newline="\n"
    )
    if lists_rows:
        text = _table(_ROW_COLUMNS, map(_row_line, _by_setup(rows)))
        (folder / f"{name}.rows.csv.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def _by_setup(rows: Iterable[MeasuredRow]) -> list[MeasuredRow]:
    """Rows of one setup as one, by their medians: requests of a run, repeated runs."""
    by_setup: dict[tuple[MeasuredSetup, str], list[MeasuredRow]] = defaultdict(list)
    for row in rows:
        by_setup[row.setup, row.metric].append(row)
    return [
        replace(
            repeated[0],
            predicted=quantile([row.predicted for row in repeated], 0.5),
            measured=quantile([row.measured for row in repeated], 0.5),
            label=repeated[0].label
            if len(repeated) == 1
            else f"median of {len(repeated):,}: {repeated[0].label} and so on",
        )
        for repeated in by_setup.values()
    ]


def _pooled(rows: Sequence[MeasuredRow]) -> MeasuredCell:
    first = rows[0]
    names: dict[str, Any] = {name: getattr(first.setup, name) for name in _NAMES}
    low, high = (
        MeasuredSetup(**names | {size: end(getattr(row.setup, size) for row in rows) for size in SIZES})
        for end in (min, max)
    )
    return MeasuredCell(first.kind, low, high, first.metric, tuple(sorted(row.error for row in rows)))


def _lines(file: Path) -> list[dict[str, str]]:
    try:
        return read_rows(file)
    except (OSError, ValueError) as error:
        raise SpecError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _setup(line: dict[str, str], end: str = "") -> MeasuredSetup:
    """The setup that a line has; of a cell the one at an `end` of its ranges."""
    named = (line[name] == "True" if name == "separate" else line[name] for name in _NAMES)
    return MeasuredSetup(*named, *(float(line[size + end]) for size in SIZES))  # type: ignore[arg-type]


def _cell(line: dict[str, str]) -> MeasuredCell:
    ends = _setup(line, "_low"), _setup(line, "_high")
    return MeasuredCell(line["kind"], *ends, line["metric"], tuple(map(float, line["errors"].split())))


def _row(line: dict[str, str]) -> MeasuredRow:
    values = float(line["predicted"]), float(line["measured"])
    return MeasuredRow(line["kind"], _setup(line), line["metric"], *values, line["label"])


def _cell_line(cell: MeasuredCell) -> Sequence[str]:
    ends = [_rounded(getattr(setup, size)) for size in SIZES for setup in (cell.low, cell.high)]
    names = [str(getattr(cell.low, name)) for name in _NAMES]
    return cell.kind, *names, *ends, cell.metric, " ".join(f"{error:.{_ERROR_DIGITS}g}" for error in cell.errors)


def _row_line(row: MeasuredRow) -> Sequence[str]:
    names = [str(getattr(row.setup, name)) for name in _NAMES]
    sizes = [_rounded(getattr(row.setup, size)) for size in SIZES]
    return row.kind, *names, *sizes, row.metric, f"{row.predicted:.6g}", f"{row.measured:.6g}", row.label


def _rounded(value: float) -> str:
    return f"{value:.{_DIGITS}g}" if abs(value) < 10**_DIGITS else f"{value:.0f}"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    import csv
    import io

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(lines)
    return text.getvalue()
