"""Files are read up to a limit: what never ends, or unpacks to gigabytes, is refused at once and in a sentence."""

import gzip
import io
import json
from pathlib import Path

import pytest

from perfmodel.errors import SpecError
from perfmodel.files.sandbox import bounded_lines, parse_json, read_json, read_limited, read_rows
from perfmodel.files.yaml_loader import load_yaml, parse_value


def test_a_device_without_end_is_refused_by_its_limit() -> None:
    with pytest.raises(OSError, match="larger than 1 MB"):
        read_limited(Path("/dev/zero"), 1_000_000)
    with pytest.raises(SpecError, match="/dev/zero: cannot be read: larger than 2 MB"):
        load_yaml("/dev/zero")


def test_a_file_of_just_the_limit_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"x" * 10)
    assert read_limited(file, 10) == b"x" * 10
    with pytest.raises(OSError, match="larger"):
        read_limited(file, 9)


def test_a_packed_table_is_limited_by_what_it_unpacks_to(tmp_path: Path) -> None:
    file = tmp_path / "a.csv.gz"
    file.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 100_000))
    assert len(read_rows(file)) == 100_000
    with pytest.raises(OSError, match="larger"):
        read_rows(file, 100_000)


@pytest.mark.parametrize("text", ["a,b\n1\n", "a,b\n1,2,3\n"])
def test_rows_have_the_cells_of_the_first_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match="line 2 has not the 2 cells"):
        read_rows(file)


def test_json_in_json_in_json_is_no_recursion_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"a": 1}))
    assert read_json(file) == {"a": 1}


def test_a_line_without_end_is_refused() -> None:
    assert list(bounded_lines(io.StringIO("a\n\nb"))) == ["a\n", "\n", "b"]
    with pytest.raises(ValueError, match="a line of more than"):
        list(bounded_lines(io.StringIO("x" * 20_000_000)))


def test_aliases_count_as_what_they_stand_for() -> None:
    """Nine lines, each nine times the line before: 9^9 values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    assert len(parse_value("\n".join(lines[:4]), "x")["a3"]) == 9
    with pytest.raises(SpecError, match="more than 300,000 values, aliases"):
        parse_value("\n".join(lines), "x")


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "{a: " * 100_000, "- " * 100_000 + "1", "? " * 100_000, "[" * 60 + "]" * 60],
    ids=["lists", "mappings", "items", "keys", "sixty"],
)
def test_depth_is_refused_before_the_parser_overflows_its_stack(text: str) -> None:
    with pytest.raises(SpecError, match="nested more than 50 levels deep"):
        parse_value(text, "x")


def test_many_brackets_beside_each_other_are_no_depth() -> None:
    assert len(parse_value("[" + "[1], " * 5000 + "]", "x")) == 5000


def test_a_number_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(SpecError, match="x:1: got a number of 5,000 digits; expected at most 400"):
        parse_value("9" * 5000, "x")


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": [1, -Infinity]}', '{"a": 1e999}'])
def test_strict_json_has_no_number_that_json_does_not_know(text: str) -> None:
    assert parse_json(text)
    with pytest.raises(ValueError, match="no number of JSON's"):
        parse_json(text, is_strict=True)
