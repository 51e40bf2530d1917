"""Records on disk: the same bits after a round trip, readable after an interruption."""

import json
from dataclasses import fields

import numpy as np
import pytest

from perfmodel.errors import WorkloadError
from perfmodel.report.runs.records import read_requests, read_steps, write_requests, write_requests_jsonl, write_steps


def assert_equal_columns(a, b):
    for column in fields(a):
        assert np.array_equal(getattr(a, column.name), getattr(b, column.name)), column.name


def test_requests_round_trip_bit_for_bit(result, tmp_path):
    assert_equal_columns(read_requests(write_requests(tmp_path / "requests.csv", result.requests)), result.requests)


def test_steps_round_trip_bit_for_bit(result, tmp_path):
    assert_equal_columns(read_steps(write_steps(tmp_path / "steps.csv", result.steps)), result.steps)


def test_jsonl_has_one_object_per_request(result, tmp_path):
    lines = write_requests_jsonl(tmp_path / "requests.jsonl", result.requests).read_text().splitlines()
    assert len(lines) == len(result.requests)
    assert json.loads(lines[3])["first_token_s"] == result.requests.first_token_s[3]


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_a_broken_last_line_is_passed_over(result, tmp_path, cut):
    path = write_requests(tmp_path / "requests.csv", result.requests)
    path.write_bytes(path.read_bytes()[:-cut])
    assert len(read_requests(path)) == len(result.requests) - 1


def test_further_columns_and_any_order_are_fine(result, tmp_path):
    path = write_steps(tmp_path / "steps.csv", result.steps)
    lines = [[*line.split(",")[::-1], "extra"] for line in path.read_text().splitlines()]
    path.write_text("".join(",".join(line) + "\n" for line in lines))
    assert_equal_columns(read_steps(path), result.steps)


def test_only_a_header(result, tmp_path):
    path = write_requests(tmp_path / "requests.csv", result.requests)
    path.write_text(path.read_text().splitlines()[0] + "\n")
    assert len(read_requests(path)) == 0


def test_another_file_is_refused_by_name(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(WorkloadError, match=r"other\.csv: has no column 'request_id'"):
        read_requests(path)
