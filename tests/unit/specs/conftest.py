"""Fixtures of the specs tests: the shared folder with facts and traces, and a scenario file to write mistakes into."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]

SCENARIO = """\
name: mine
model: llama-3.1-8b
hardware: a100-sxm-80gb
engine:
  max_num_seqs: 64
traffic:
  arrivals: {process: poisson, rate: 4.0}
  num_requests: 100
  input_tokens: {distribution: fixed, value: 128}
  output_tokens: {distribution: fixed, value: 32}
"""


@pytest.fixture
def shared() -> Path:
    """The folder with measured truth and public traces, where a developer has it."""
    folder = Path(os.environ.get("PERFMODEL_SHARED", REPOSITORY.parent / "shared"))
    if not (folder / "truth").is_dir():
        pytest.skip(f"no shared folder at {folder} (set PERFMODEL_SHARED)")
    return folder


@pytest.fixture
def scenario_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes the scenario above to a file, with one piece of its text replaced."""

    def write(old: str = "", new: str = "") -> Path:
        assert old in SCENARIO
        path = tmp_path / "mine.yaml"
        path.write_text(SCENARIO.replace(old, new, 1) if old else SCENARIO)
        return path

    return write
