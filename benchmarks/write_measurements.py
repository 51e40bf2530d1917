"""Writes `measurements/`: the recorded figures whose licences allow it, in the layout that `perfmodel validate` reads.

    python benchmarks/write_measurements.py ../shared/truth                # writes measurements/
    python benchmarks/write_measurements.py ../shared/truth --out FOLDER   # or elsewhere, to be compared

The folder given holds the files as they were cited (their sources and commits are in `measurements/*/source.yaml`).
Rows are kept whose licence allows copies that are altered (MIT, Apache-2.0, CC-BY); columns, that describe what was
run and what was measured. Times of kernels and of servers are rounded to four digits, which repeated runs do not
reach; what was published with fewer digits, and every figure of MLPerf, is as published. Rows are sorted, and
equal sources give equal files.
"""

__all__ = ["ALLOWED", "TABLES", "Table", "is_allowed", "main", "target", "written_table"]

import argparse
import csv
import gzip
import io
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ALLOWED = ("MIT", "Apache-2.0", "CC-BY-4.0")  # a row's licence is one of these, or begins with it and a remark
_DIGITS = 4
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """A cited file, or a pattern of them, and what is kept of it.

    cited:   below the folder of cited files; `*` stands for any name
    kept:    below measurements/; `*` for the same names, `{stem}` for the name of the file without its suffix
    dropped: columns that say nothing of what was run or measured
    rounded: columns of measured times
    """

    cited: str
    kept: str
    dropped: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()


# What others derived from the figures, free text, and what is the same for all rows of a file.
_OF_KERNELS = ("device", "beam_width")
_OF_SERVERS = ("image", "mode")
_OF_MACHINES = ("bandwidth_share", "device_raw", "host", "model_raw", "notes", "std")
_OF_RESULTS = ("accelerator_raw", "notes", "result_valid", "suite")
TABLES = (
    Table("ops/*/*.parquet", "operators/*/{stem}.csv.gz", _OF_KERNELS, ("latency_ms",)),
    Table("serving/steady_state.csv.gz", "steady-state/unified.csv.gz", _OF_SERVERS, ("ttft_ms", "tpot_ms")),
    Table(
        "serving/steady_state_disaggregated.csv.gz",
        "steady-state/disaggregated.csv.gz",
        _OF_SERVERS,
        ("ttft_ms", "tpot_ms"),
    ),
    Table("per_request/*/e2e/requests.csv", "per-request/*/e2e/requests.csv"),
    Table("per_request/*/e2e/meta.json", "per-request/*/e2e/meta.json"),
    Table("per_request/*/ops/meta.yaml", "per-request/*/ops/meta.yaml"),
    Table("per_request/*/ops/*/dense.csv", "per-request/*/ops/*/dense.csv"),
    Table("per_request/*/ops/*/per_sequence.csv", "per-request/*/ops/*/per_sequence.csv"),
    Table("per_request/*/ops/*/attention.csv*", "per-request/*/ops/*/attention.csv.gz", (), ("time_us",)),
    Table("local/llama_bench.csv.gz", "local/llama_bench.csv.gz", _OF_MACHINES),
    Table("serving/mlperf.csv.gz", "mlperf/results.csv.gz", _OF_RESULTS),
    Table("serving/other_devices.csv.gz", "served/other_devices.csv.gz"),
    Table("throughput/*.csv", "throughput/{stem}.csv"),
    Table("acceptance.csv", "acceptance/lengths.csv"),
)


def is_allowed(row: Row) -> bool:
    """Whether a row's licence, where rows have one each, allows copies that are altered."""
    licence = row.get("licence")
    return licence is None or any(licence == name or licence.startswith(f"{name} (") for name in ALLOWED)


def written_table(table: Table, file: Path) -> bytes:
    """What is kept of a cited file, unpacked: CSV of the rows and columns, or the file itself where it is no table."""
    if file.suffix in (".json", ".yaml"):
        return file.read_bytes()
    rows = [row for row in _rows_of(file) if is_allowed(row)]
    names = [name for name in rows[0] if name not in table.dropped and any(row[name] not in ("", None) for row in rows)]
    formats = {name: _rounded if name in table.rounded else _shown for name in names}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    cells = [[formats[name](row[name]) for name in names] for row in rows]
    writer.writerows(cells if "id" in names else sorted(cells, key=_in_order))
    return text.getvalue().encode()


def _rows_of(file: Path) -> list[Row]:
    if file.suffix == ".parquet":
        import pyarrow.parquet as parquet

        rows: list[Row] = parquet.read_table(file).to_pylist()
        return rows
    raw = file.read_bytes()
    text = (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode()
    return list(csv.DictReader(io.StringIO(text)))


def _rounded(value: Any) -> str:
    return f"{float(value):.{_DIGITS}g}" if value not in ("", None) else ""


def _shown(value: Any) -> str:
    is_whole = isinstance(value, float) and value.is_integer()
    return "" if value is None else str(int(value)) if is_whole else str(value)


def _in_order(cells: list[str]) -> list[tuple[float, str]]:
    """A key that sorts numbers as numbers and texts behind them."""
    return [(float(cell), "") if _is_number(cell) else (float("inf"), cell) for cell in cells]


def _is_number(cell: str) -> bool:
    try:
        return float(cell) == float(cell)
    except ValueError:
        return False


def target(table: Table, file: Path, cited: Path) -> str:
    """Where a cited file goes: each `*` of the target is what the same `*` of the source stood for."""
    stem = file.name.removesuffix(".gz").removesuffix(".parquet").removesuffix(".csv")
    names = iter(
        part
        for pattern, part in zip(Path(table.cited).parts[:-1], file.relative_to(cited).parts[:-1], strict=True)
        if pattern == "*"
    )
    parts = (next(names) if part == "*" else part for part in Path(table.kept).parts)
    return "/".join(parts).format(stem=stem)


def main(say: Callable[[str], object] = print) -> int:
    """Write all tables. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cited", type=Path, help="Folder of the cited files.")
    parser.add_argument("--out", type=Path, default=ROOT / "measurements", help="Folder to write.")
    given = parser.parse_args()
    total = 0
    for table in TABLES:
        files = sorted(given.cited.glob(table.cited))
        if not files:
            say(f"{given.cited / table.cited}: no such file.")
            return 2
        for file in files:
            made = given.out / target(table, file, given.cited)
            made.parent.mkdir(parents=True, exist_ok=True)
            content = written_table(table, file)
            # Without a time and a name in the header, equal content gives equal bytes.
            made.write_bytes(gzip.compress(content, 9, mtime=0) if made.suffix == ".gz" else content)
            total += made.stat().st_size
            say(f"{made.relative_to(given.out)}: {made.stat().st_size:,} bytes")
    say(f"{total / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
