"""The public table of errors by setup: the index and the stored rows, nothing lost, and as committed."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_spec = importlib.util.spec_from_file_location("accuracy_by_setup", ROOT / "benchmarks/accuracy_by_setup.py")
setups = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(setups)


@pytest.fixture(scope="module")
def lines():
    return setups.by_setup()


def test_the_file_is_what_its_command_writes(lines):
    """A line that is off: `make validate WRITE=1` wrote the index without the file."""
    assert json.loads(setups.FILE.read_text(encoding="utf-8"))["rows"] == lines


def test_no_row_of_the_index_is_lost(lines):
    counted = 0
    for file in setups._INDEX.glob("*.csv"):
        counted += sum(len(row["errors"].split()) for row in setups._rows(file))
    assert sum(line["rows"] for line in lines) == counted


def test_errors_coverage_and_trivial_predictor_by_hand(tmp_path, monkeypatch):
    """Errors of -10 %, 20 and 30 %; of two stored rows one lies in its interval, measured over predicted; a median of
    repeated rows is found by the first of them."""
    head = "device,engine,version,weights,metric"
    (tmp_path / "a.csv").write_text(
        f"{head},errors\nh100,vllm,0.9,fp8,tpot_mean,-0.1 0.2\nh100,vllm,0.9,fp8,tpot_mean,0.3\n"
    )
    rows = f"{head},label\nh100,vllm,0.9,fp8,tpot_mean,one\nh100,vllm,0.9,fp8,tpot_mean,median of 2: two and so on\n"
    (tmp_path / "a.rows.csv.gz").write_bytes(setups.gzip.compress(rows.encode()))
    stored = "tpot_mean,one,9,10,0.9,1.2,12\ntpot_mean,two,12,10,0.9,1.2,10\n"
    (tmp_path / "stored").write_text(f"metric,row,predicted,measured,low,high,trivial\n{stored}")
    monkeypatch.setattr(setups, "_INDEX", tmp_path)
    monkeypatch.setattr(setups, "_STORE", tmp_path / "stored")
    (line,) = setups.by_setup()
    assert (line["rows"], line["stored_rows"]) == (3, 2)
    assert (line["median"], line["trivial"], line["covered"]) == (0.2, 0.1, 0.5)
