"""A table of llama-bench figures as rows: what ran, on what, which test, how many tokens per second.

Columns are those of a `llama_bench.csv`; facts of devices that no file describes stand in a `devices.csv` beside it.
"""

__all__ = ["LocalRow", "read_local_rows"]

import csv
import datetime
import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perfmodel.errors import SpecError

# What a row's flags say that no model of the device can know: rows that are listed apart and never fitted.
_APART = ("slow", "anomalous", "weak host", "power limit", "patched-kernel", "rpc")
_NEEDED = ("id", "device", "device_class", "backend", "model", "gguf_type", "test", "tokens_per_s", "group")


@dataclass(frozen=True)
class LocalRow:
    """One figure.

    params, active_params, file_size_bytes, depth, ...: 0 where the table says nothing
    test:    pp (prompts) or tg (generation)
    batch:   sequences at once; tokens_per_s is over all of them
    flash:   attention without scores in memory; None where the table does not say
    ubatch:  tokens of a piece
    group:   rows of one setting (other hosts, builds, drivers)
    """

    row_id: str
    source: str
    device: str
    device_class: str
    num_devices: int
    tool: str
    backend: str
    backend_detail: str
    build: str
    date: datetime.date | None
    model: str
    params: float
    active_params: float
    gguf_type: str
    file_size_bytes: float
    flash: bool | None
    kv_type: str
    test: str
    num_prompt: int
    num_generated: int
    depth: int
    batch: int
    ubatch: int
    tokens_per_s: float
    flags: str
    group: str

    @property
    def is_apart(self) -> bool:
        """Whether its flags say that something was at work that no model of the device can know."""
        return any(word in self.flags for word in _APART)


def read_local_rows(path: str | Path) -> tuple[list[LocalRow], list[tuple[str, str]]]:
    """The rows of a table, plain or gzipped, and (row, reason) of those without a figure.

    Raises SpecError for a file that is missing or no such table.
    """
    file = Path(path)
    if not file.is_file():
        raise SpecError(f"{file}: no such file.")
    rows, left_out = [], []
    for number, cells in enumerate(_cells(file), start=2):
        try:
            row = _row(cells)
        except ValueError as error:
            left_out.append((cells.get("id") or f"line {number}", str(error)))
            continue
        rows.append(row)
    return rows, left_out


def _cells(file: Path) -> Iterator[dict[str, str]]:
    try:
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
            if missing:
                raise SpecError(f"{file}: is no table of local figures: column {missing[0]} is missing.")
            for cells in reader:
                yield {name: (value or "").strip() for name, value in cells.items() if isinstance(name, str)}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"{file}: cannot be read as a table ({error}).") from None


def _row(cells: dict[str, str]) -> LocalRow:
    rate = _number(cells, "tokens_per_s")
    if not rate > 0:
        raise ValueError("no figure in tokens_per_s")
    if cells["test"] not in ("pp", "tg"):
        raise ValueError(f"test is {cells['test']!r}, compared are pp and tg")
    flash = cells.get("flash_attn", "")
    return LocalRow(
        row_id=cells["id"],
        source=cells.get("source", ""),
        device=cells["device"],
        device_class=cells["device_class"],
        num_devices=max(1, int(_number(cells, "num_devices"))),
        tool=cells.get("tool", ""),
        backend=cells["backend"],
        backend_detail=cells.get("backend_detail", ""),
        build=cells.get("build", ""),
        date=_date(cells.get("date", "")),
        model=cells["model"],
        params=_number(cells, "model_params"),
        active_params=_number(cells, "active_params"),
        gguf_type=cells["gguf_type"],
        file_size_bytes=_number(cells, "file_size_bytes"),
        flash=None if flash == "" else flash != "0",
        kv_type=cells.get("kv_type", "").partition("/")[0],
        test=cells["test"],
        num_prompt=int(_number(cells, "n_prompt")),
        num_generated=int(_number(cells, "n_gen")),
        depth=int(_number(cells, "depth")),
        batch=max(1, int(_number(cells, "batch"))),
        ubatch=int(_number(cells, "n_ubatch")),
        tokens_per_s=rate,
        flags=cells.get("flags", ""),
        group=cells["group"],
    )


def _number(cells: dict[str, str], name: str) -> float:
    text = cells.get(name, "")
    return float(text) if text else 0.0


def _date(text: str) -> datetime.date | None:
    """The day, or the first one of a month or of the earlier of two ("2025-11/2026-02")."""
    text = text.partition("/")[0]
    try:
        return datetime.date.fromisoformat(text if len(text) > 7 else f"{text}-01")
    except ValueError:
        return None
