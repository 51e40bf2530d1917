"""Reads measured kernel tables, `<system>/<op>.parquet` (`.csv`, `.csv.gz`): a row per shape with `latency_ms`. Tables
split into groups (engine, format, kernel) that are fitted separately, as defined by the module of the kernel's kind.
Names are the tables' own."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.cost.kernel_models.fits import take
from perfmodel.errors import MissingExtraError, SpecError
from perfmodel.evidence.observation import MALFORMED, table_rows
from perfmodel.files.tables import load_table

Column = NDArray[Any]


@dataclass(frozen=True)
class KernelTable:
    """Columns of one kind of kernel. system: the folder's name, an alias of a device; untimed: rows of the file that
    carry no time (failed measurements), which are not here"""

    system: str
    op: str
    columns: Mapping[str, Column]
    untimed: int = 0

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, name: str) -> Column:
        """Raises SpecError for a missing column."""
        if name not in self.columns:
            raise SpecError(f"{self.system}/{self.op}: has no column {name!r}; it has {', '.join(self.columns)}.")
        return self.columns[name]

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Measured time per row."""
        return np.asarray(self.columns["latency_ms"], dtype=np.float64) * 1e-3

    def take(self, rows: Column) -> "KernelTable":
        """Rows of a mask or an index array."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return KernelTable(self.system, self.op, columns, self.untimed)

    def groups(self, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Column]]:
        """(values of `names`, row indices) of each combination, sorted."""
        number = self.numbered(names)
        if not len(number):
            return
        order = np.argsort(number, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(number[order])) + 1):
            yield tuple(str(self[name][rows[0]]) for name in names), rows

    def sampled(self, most_rows: int) -> "KernelTable":
        """At most `most_rows` of each combination of texts and head size (kernel, formats, versions), reproducibly."""
        names = (name for name, column in self.columns.items() if column.dtype.kind in "OU" or name == "head_dim")
        number = self.numbered(tuple(names))
        shuffled = np.random.default_rng(0).permutation(len(self))
        order = shuffled[np.argsort(number[shuffled], kind="stable")]
        first = np.searchsorted(number[order], number[order])
        return self.take(np.sort(order[np.arange(len(order)) - first < most_rows]))

    def numbered(self, names: tuple[str, ...]) -> NDArray[np.int64]:
        """The number of each row's combination of `names`, in sorted order."""
        number = np.zeros(len(self), dtype=np.int64)
        for name in names:
            values, index = np.unique(self[name].astype(str), return_inverse=True)
            number = np.unique(number * len(values) + index, return_inverse=True)[1].ravel()
        return number


@dataclass(frozen=True)
class Group:
    """Rows of one kernel on one device, with engine, calibration key, sizes, and measured seconds.

    key:     family, formats and kernel, which `Calibration.families` calls them by (`perfmodel.evidence.fit.systems`)
    version: of the engine
    sizes:   of the family's kernel model, one entry per row
    rows:    indices in the table"""

    engine: str
    version: str
    key: str
    device: DeviceFacts
    sizes: Any
    seconds: NDArray[np.float64]
    rows: NDArray[np.int64]

    def take(self, rows: Column) -> "Group":
        """Rows of a mask or an index array."""
        return replace(self, sizes=take(self.sizes, rows), seconds=self.seconds[rows], rows=self.rows[rows])


_SUFFIXES = (".parquet", ".csv", ".csv.gz")


def table_files(folder: str | Path) -> list[Path]:
    """The tables `<system>/<op>` of a folder, sorted."""
    return sorted(file for file in Path(folder).glob("*/*") if file.name.endswith(_SUFFIXES))


def op_of(file: Path) -> str:
    """The operator that a table's file is named after."""
    return file.name.partition(".")[0]


def read_table(path: str | Path) -> KernelTable:
    """Read `<system>/<op>.parquet`, `.csv` or `.csv.gz`, without the rows that carry no time. Raises SpecError for a
    missing, empty or unreadable file or one without times, MissingExtraError for parquet without pyarrow."""
    path = Path(path)
    columns = _parquet(path) if path.suffix == ".parquet" else {}
    if path.suffix != ".parquet":
        rows = table_rows(path)
        for name in rows[0] if rows else ():
            column = np.array([row[name] for row in rows])
            try:  # numbers where all cells are, nan where one is empty
                columns[name] = np.where(column == "", "nan", column).astype(np.float64)
            except ValueError:
                columns[name] = column
    if "latency_ms" not in columns and {"dispatch", "combine"} <= {name.partition("_")[0] for name in columns}:
        with understood(path):
            columns = _by_direction(columns)
    if "latency_ms" not in columns:
        raise SpecError(f"{path}: has no column latency_ms; expected one measured time per row")
    table = KernelTable(path.parent.name, op_of(path), columns)
    with understood(path):
        is_timed = np.isfinite(table.seconds) & (table.seconds > 0)
    if not is_timed.any():
        raise SpecError(f"{path}: no row has a latency_ms above 0.")
    return replace(table.take(is_timed), untimed=int((~is_timed).sum()))


def _by_direction(columns: Mapping[str, Column]) -> dict[str, Column]:
    """A row for each dispatch and each combine of tables that have both in microseconds, with the notices before."""
    rows = np.arange(len(next(iter(columns.values()))))
    times, units = list[Column](), list[Column]()
    for exchange in ("dispatch", "combine"):
        names = (f"{exchange}_{part}_us" for part in ("avg_t", "transmit", "notify"))
        times.append(sum((columns[name].astype(np.float64) for name in names if name in columns), 0.0 * rows) * 1e-3)
        units.append(columns.get(f"{exchange}_sms", 0.0 * rows))
    more = {"latency_ms": np.concatenate(times), "units": np.concatenate(units)}
    result: dict[str, Column] = {name: np.concatenate([column, column]) for name, column in columns.items()}
    return result | {"exchange": np.repeat(["dispatch", "combine"], len(rows)), **more}


@contextmanager
def understood(file: Path) -> Iterator[None]:
    """Turn errors caused by the contents of `file` into SpecError."""
    try:
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            yield
    except MALFORMED as error:
        raise SpecError(f"{file}: its rows cannot be understood: {str(error).splitlines()[0]}.") from None


def _parquet(path: Path) -> dict[str, Column]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise MissingExtraError(f"{path} needs pyarrow to be read: pip install '.[data]' in the checkout") from None
    try:
        table = parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise SpecError(f"{path}: cannot be read as parquet ({str(error).splitlines()[0]})") from None
    return {name: np.asarray(table.column(name).to_numpy(zero_copy_only=False)) for name in table.column_names}


_FORMATS = {"bfloat16": "bf16", "half": "fp16", "float16": "fp16", "float32": "fp32", "float8": "fp8"}
_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5, "nvfp4": 0.5}


def numbers(table: KernelTable, name: str) -> NDArray[np.float64]:
    """A column as floats; 0 if the column or a value is missing."""
    if name not in table.columns:
        return np.zeros(len(table))
    return np.nan_to_num(np.asarray(table[name], dtype=np.float64), nan=0.0)


def format_name(name: str) -> str:
    """The format's name in `peak_flops_per_s`."""
    return _FORMATS.get(name, name)


def bytes_of(name: str) -> float:
    """Bytes per element of a format; 2 if unknown."""
    return _BYTES.get(format_name(name), 2.0)


def format_bytes(table: KernelTable, name: str) -> NDArray[np.float64]:
    """Bytes per element of a column of formats; 2 if unknown."""
    names, which = np.unique(table[name].astype(str), return_inverse=True)
    return np.array([bytes_of(str(item)) for item in names])[which]


def engine_and_version(text: str) -> tuple[str, str]:
    """The engine and the version in "vllm 0.14.0"."""
    engine, _, version = text.partition(" ")
    return engine, version


def version_order(version: str) -> tuple[int, ...]:
    """What versions sort by: all numbers in them, 1.3.0rc20 after 1.3.0rc15 and before 1.3.0."""
    release, is_candidate, candidate = version.partition("rc")
    numbers = tuple(map(int, re.findall(r"\d+", release)))
    return (*numbers, -1, *map(int, re.findall(r"\d+", candidate))) if is_candidate else numbers


def kernel_groups(
    table: KernelTable,
    device: DeviceFacts,
    family: str,
    too_fast: Callable[[KernelTable, DeviceFacts], NDArray[np.bool_]],
    kernels: Callable[[KernelTable, DeviceFacts], NDArray[np.str_]],
    sizes_of: Callable[[KernelTable], Any],
) -> list[Group]:
    """Groups of `table` by engine, kernel, formats and head size. device: that was timed; family: operator; too_fast:
    rows to leave out; kernels: each row's kernel; sizes_of: sizes of one kernel's rows"""
    usable = np.flatnonzero(~too_fast(table, device))
    part = table.take(usable)
    part = KernelTable(table.system, table.op, {**part.columns, "kernel": kernels(part, device)})
    result = []
    for names, rows in part.groups(("engine_version", "kernel", "attn_dtype", "kv_cache_dtype", "head_dim")):
        engine, kernel, rate, kv_format, head_dim = names
        key = f"{family}/{format_name(rate)}/kv_{format_name(kv_format)}/hd{float(head_dim):.0f}/{kernel}"
        one = part.take(rows)
        result.append(Group(*engine_and_version(engine), key, device, sizes_of(one), one.seconds, usable[rows]))
    return result


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A number format of a kernel table, as `workloads/tables/number_formats.yaml` explains it."""

    name: str
    rate: str
    weight_bytes: float
    input_bytes: float
    quantizes_input: bool = False

    @property
    def quantized_bytes(self) -> float:
        """Bytes per input element of the quantizing kernel."""
        return 2.0 + self.input_bytes if self.quantizes_input else 0.0


WEIGHT_FORMATS = {name: WeightFormat(**row) for name, row in load_table("number_formats")["kernel_tables"].items()}
