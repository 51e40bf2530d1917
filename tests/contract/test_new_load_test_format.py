"""A load test's format whose figures and facts stand each in one place is a row of a table."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = """
stopwatch:
  names: [stopwatch]
  keys: [stopwatch, answered]
  figures:
  - [mean_ttft_ms, [latency, first_token], 1e3]
  - [mean_e2el_ms, [latency, whole], 1e3]
  - [output_throughput, [rate], 1.0]
  completed: [answered]
  failed: [lost]
  version: [stopwatch]
  load: {concurrency: [users], prompt: [tokens, in], answer: [tokens, out]}
  says: {model: [server, model], hardware: [server, device]}
"""
RESULT = {
    "stopwatch": "2.1",
    "answered": 30,
    "lost": 2,
    "users": 4,
    "tokens": {"in": 500, "out": 40},
    "latency": {"first_token": 0.04, "whole": 0.4},
    "rate": 390.0,
    "server": {"model": "meta-llama/Llama-3.1-8B-Instruct", "device": "NVIDIA H100 80GB HBM3"},
}


@pytest.fixture
def checkout(tmp_path):
    """A copy of the package and of its tables, to which the row is added."""
    shutil.copytree(ROOT / "perfmodel", tmp_path / "perfmodel", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "workloads/tables", tmp_path / "workloads/tables")
    for name in ("hardware_specs", "reports", "measurements", "workloads/models", "workloads/traffic"):
        (tmp_path / name).symlink_to(ROOT / name)
    with (tmp_path / "workloads/tables/load_tools.yaml").open("a", encoding="utf-8") as table:
        table.write(ROW)
    return tmp_path


def test_a_new_format_is_a_row_of_the_table(checkout):
    file = checkout / "run.json"
    file.write_text(json.dumps(RESULT), encoding="utf-8")

    def validate(*arguments):
        command = [sys.executable, "-m", "perfmodel", "validate", "bench", *arguments, "--json"]
        return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)

    (run,) = json.loads(validate(str(file)).stdout)["runs"]
    assert (run["tool"], run["completed"], run["failed"]) == ("stopwatch 2.1", 30, 2)
    assert {item["metric"]: item["measured"] for item in run["figures"]} == {
        "mean_ttft_ms": 40.0,
        "mean_e2el_ms": 400.0,
        "output_throughput": 390.0,
    }
    facts = {fact["fact"]: fact for fact in run["facts"]}
    assert (facts["hardware"]["value"], facts["hardware"]["said_by"]) == ("h100-sxm-80gb", "the file")
    assert facts["arrivals"]["value"] == "4 in flight"
    file.write_text(json.dumps({"anything": 1}), encoding="utf-8")
    assert "stopwatch" in validate(str(file)).stderr  # messages name it among the tools
