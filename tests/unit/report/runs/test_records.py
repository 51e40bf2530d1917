"""Records on disk: the same bits as in memory, readable after an interruption."""

from dataclasses import fields

import numpy as np
import pytest

from perfmodel.errors import WorkloadError
from perfmodel.report.runs import read_requests, read_steps
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario

SCENARIO = load_scenario("llama-3.1-8b-a100", ["traffic.num_requests=40"])


@pytest.fixture(scope="module")
def kept():
    """The run with its records in memory."""
    return simulate(SCENARIO, keep_steps=True)


@pytest.fixture
def folder(tmp_path):
    """The same run with its records on disk."""
    simulate(SCENARIO, out=tmp_path)
    return tmp_path


def assert_equal_columns(a, b):
    for column in fields(a):
        assert np.array_equal(getattr(a, column.name), getattr(b, column.name)), column.name


def test_records_on_disk_are_those_in_memory_bit_for_bit(kept, folder):
    assert_equal_columns(read_requests(folder / "requests.csv"), kept.requests)
    assert_equal_columns(read_steps(folder / "steps.csv"), kept.steps)


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_a_broken_last_line_is_passed_over(kept, folder, cut):
    path = folder / "requests.csv"
    path.write_bytes(path.read_bytes()[:-cut])
    assert len(read_requests(path)) == len(kept.requests) - 1


def test_further_columns_and_any_order_are_fine(kept, folder):
    path = folder / "steps.csv"
    lines = [[*line.split(",")[::-1], "extra"] for line in path.read_text().splitlines()]
    path.write_text("".join(",".join(line) + "\n" for line in lines))
    assert_equal_columns(read_steps(path), kept.steps)


def test_only_a_header(folder):
    path = folder / "requests.csv"
    path.write_text(path.read_text().splitlines()[0] + "\n")
    assert len(read_requests(path)) == 0


def test_another_file_is_refused_by_name(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(WorkloadError, match=r"other\.csv: has no column 'request_id'"):
        read_requests(path)
