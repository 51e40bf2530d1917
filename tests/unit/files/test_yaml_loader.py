"""YAML 1.2 scalars, positions, and one clear sentence for every way a file can be unreadable."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import SpecError
from perfmodel.files.yaml_loader import load_yaml, parse_value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4.8e12", 4.8e12),
        ("1e9", 1e9),
        (".5", 0.5),
        ("1.", 1.0),
        ("-3E-2", -0.03),
        ("12", 12),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("~", None),
        ("null", None),
        ("2026-03-10", "2026-03-10"),
        ("1:30", "1:30"),
        ("'12'", "12"),
        ('"true"', "true"),
        ("1_000", "1_000"),
        ("80 GiB", "80 GiB"),
        ("[1, 2e3]", [1, 2000.0]),
        ("{a: {b: no}}", {"a": {"b": "no"}}),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, expected: object) -> None:
    found = parse_value(text, "test")
    assert found == expected
    assert type(found) is type(expected)


@given(st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans()))
def test_numbers_as_python_writes_them_read_back(value: object) -> None:
    text = repr(value).replace("inf", ".inf")
    assert parse_value(text, "test") == value


def test_positions_are_those_of_keys_and_items(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("# comment\na: 1\nb:\n  c:\n    - x: 1\n    - {y: 2,\n       z: 3}\n")
    positions = load_yaml(path).positions
    assert positions.line(("a",)) == 2
    assert positions.line(("b", "c")) == 4
    assert positions.line(("b", "c", 1)) == 6
    assert positions.line(("b", "c", 1, "z")) == 7
    assert positions.line(("b", "missing")) == 3  # the nearest enclosing field
    assert positions.where(("b", "c", 0, "x")) == f"{path}:5"


@pytest.mark.parametrize(
    ("content", "place", "says"),
    [
        (b"a: 1\n\tb: 2\n", ":2: ", "got a tab in the indentation"),
        (b"a:\n\t- 2\n", ":2: ", "got a tab in the indentation"),
        (b"a: 1\nx: 2\na: 3\n", ":3: ", "key 'a' is given twice, first on line 1"),
        (b"a:\n  b: 1\n  b: 2\n", ":3: ", "key 'b' is given twice, first on line 2"),
        (b"a: 1\nb: [1,\nc: 2\n", ":2: ", "is not closed"),
        (b"a: b: c\n", ":1: ", "mapping values are not allowed"),
        (b"a: @x\n", ":1: ", "not valid YAML at 'a: @x'"),
        (b"a: *q\n", ":1: ", "undefined alias"),
        (b"a: &x [*x]\n", ":1: ", "contains itself"),
        (b"a: !include x\n", ":1: ", "got the tag !include"),
        (b"[a]: 1\n", ":1: ", "keys are strings"),
        (b"a: 1\n---\nb: 1\n", ":2: ", "second document"),
        (b"# nothing\n", ": ", "the file is empty"),
        (b"- 1\n", ":1: ", "got a list; expected a mapping"),
        (b"hello\n", ":1: ", "got 'hello'; expected a mapping"),
        (b'a: "\xff"\n', ": ", "is not UTF-8 text (byte 4)"),
        (b"a: \x01\n", ": ", "not valid YAML"),
        (b"a: " + b"[" * 60 + b"]" * 60, ":1: ", "nested more than 50 levels"),
    ],
)
def test_an_unreadable_file_gets_one_sentence(tmp_path: Path, content: bytes, place: str, says: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        load_yaml(path)
    message = str(caught.value)
    assert message.startswith(f"{path}{place}")
    assert says in message
    assert "\n" not in message
    assert message.endswith(".")


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file"):
        load_yaml(tmp_path / "absent.yaml")
    with pytest.raises(SpecError, match="is a folder"):
        load_yaml(tmp_path)


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert load_yaml(path).data == {"a": 1}
