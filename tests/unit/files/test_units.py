"""Quantities: numbers with units, numbers without, and everything that is neither."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from perfmodel.files.units import Bytes, Milliseconds, Seconds, parse_quantity


@pytest.mark.parametrize(
    ("text", "dimension", "expected"),
    [
        ("2039 GB/s", "bytes/s", 2039e9),
        ("80 GiB", "bytes", 80 * 2**30),
        ("164 KiB", "bytes", 164 * 1024),
        ("80GB", "bytes", 80e9),
        ("1.5 ms", "s", 1.5e-3),
        ("1.5 ms", "ms", 1.5),
        ("2 min", "ms", 120_000),
        ("312 TFLOPS", "FLOP/s", 312e12),
        ("312 TFLOP/s", "FLOP/s", 312e12),
        ("624 TOPS", "FLOP/s", 624e12),
        ("1.41 GHz", "Hz", 1.41e9),
        ("1e9", "bytes", 1e9),
        (".5 us", "s", 0.5e-6),
    ],
)
def test_units_convert_to_the_base_unit(text: str, dimension: str, expected: float) -> None:
    assert parse_quantity(text, dimension) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "dimension"),
    [("80 GX", "bytes"), ("80 GB", "s"), ("fast", "bytes/s"), ("1 2 GB", "bytes"), ("", "Hz"), ("5 gb", "bytes")],
)
def test_a_wrong_unit_is_named_with_the_right_ones(text: str, dimension: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity in") as caught:
        parse_quantity(text, dimension)
    assert repr(text) in str(caught.value)


def test_true_is_not_one() -> None:
    with pytest.raises(ValueError, match="found true"):
        parse_quantity(True, "ms")


@given(st.floats(min_value=1e-6, max_value=1e6), st.sampled_from(["B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB"]))
def test_written_quantities_read_back(number: float, unit: str) -> None:
    one = parse_quantity(f"1 {unit}", "bytes")
    assert math.isclose(parse_quantity(f"{number!r} {unit}", "bytes"), number * one, rel_tol=1e-12)


@given(st.one_of(st.integers(), st.floats(allow_nan=False)))
def test_numbers_pass_through(number: float) -> None:
    assert parse_quantity(number, "bytes") is number


@given(st.floats(min_value=1e-3, max_value=1e6))
def test_a_plain_number_is_in_the_unit_of_the_field(number: float) -> None:
    assert TypeAdapter(Milliseconds).validate_python(f"{number!r} s") == pytest.approx(number * 1e3)
    assert TypeAdapter(Seconds).validate_python(number) == number


def test_pydantic_reports_the_sentence() -> None:
    with pytest.raises(ValidationError, match="GiB"):
        TypeAdapter(Bytes).validate_python("80 elephants")
