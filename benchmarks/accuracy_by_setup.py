"""Accuracy in public: errors of all measured deployments by device, engine, version and number format.

    python benchmarks/accuracy_by_setup.py   # writes reports/accuracy_by_setup_202611.json

Errors are those of the index that answers' trust is read from (hardware_specs/validated), all rows of it; the trivial
predictor's and the coverage of 80 % intervals are of the rows that reports/accuracy_202611.csv.gz lists.
`make validate WRITE=1` writes all three; the documentation makes a page of the file.
"""

__all__ = ["FILE", "by_setup", "write_by_setup"]

import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.dates import today

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "reports" / "accuracy_by_setup_202611.json"
_STORE, _INDEX = ROOT / "reports" / "accuracy_202611.csv.gz", ROOT / "hardware_specs" / "validated"
_KEYS = ("device", "engine", "version", "weights", "metric")


def _rows(file: Path) -> Iterator[dict[str, str]]:
    text = gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text(encoding="utf-8")
    yield from csv.DictReader(text.splitlines())


def by_setup() -> list[dict[str, Any]]:
    """A line for each device, engine, version, format and metric, sorted."""
    errors, stored = defaultdict[tuple[str, ...], list[float]](list), defaultdict[tuple[str, ...], list[Any]](list)
    for file in sorted(_INDEX.glob("*.csv")):
        for row in _rows(file):
            errors[tuple(row[key] for key in _KEYS)] += map(float, row["errors"].split())
    setups = {}
    for file in sorted(_INDEX.glob("*.rows.csv.gz")):
        for row in _rows(file):
            label = row["label"].partition(": ")[2].removesuffix(" and so on") or row["label"]
            setups[row["metric"], label] = tuple(row[key] for key in _KEYS)
    for row in _rows(_STORE):
        if (setup := setups.get((row["metric"], row["row"]))) is not None:
            stored[setup].append(
                [float(row[name] or "nan") for name in ("predicted", "measured", "low", "high", "trivial")]
            )
    return [_line(setup, np.abs(errors[setup]), stored.get(setup, [])) for setup in sorted(errors)]


def _line(setup: tuple[str, ...], errors: Any, stored: list[list[float]]) -> dict[str, Any]:
    line = dict(zip(_KEYS, setup, strict=True)) | {"rows": len(errors), "median": round(float(np.median(errors)), 4)}
    line["nine_in_ten"] = round(float(np.quantile(errors, 0.9)), 4)
    if stored:
        predicted, measured, low, high, trivial = np.array(stored).T
        naive = np.abs(trivial / measured - 1)
        ratio, has_ends = measured / predicted, np.isfinite(low)
        line["trivial"] = round(float(np.nanmedian(naive)), 4) if np.isfinite(naive).any() else None
        inside = (low <= ratio) & (ratio <= high)
        line["covered"] = round(float(inside[has_ends].mean()), 3) if has_ends.any() else None
        line["stored_rows"] = len(stored)
    return line


def write_by_setup(file: Path = FILE) -> None:
    text = ",\n".join(json.dumps(line) for line in by_setup())
    file.write_text(f'{{"date": "{today()}", "rows": [\n{text}\n]}}\n', encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write_by_setup()
