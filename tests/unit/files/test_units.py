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
        ("3 µs", "s", 3e-6),
        ("3 ns", "ms", 3e-6),
        ("1.5 h", "s", 5400),
        ("7200 req/h", "requests/s", 2),
        ("90 rpm", "requests/s", 1.5),
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
    with pytest.raises(ValueError, match="got true"):
        parse_quantity(True, "ms")


@given(st.floats(min_value=1e-6, max_value=1e6), st.sampled_from(["B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB"]))
def test_written_quantities_read_back(number: float, unit: str) -> None:
    one = parse_quantity(f"1 {unit}", "bytes")
    assert math.isclose(parse_quantity(f"{number!r} {unit}", "bytes"), number * one, rel_tol=1e-12)


@pytest.mark.parametrize("dimension", ["bytes", "bytes/s"])
def test_prefixes_are_powers_of_a_thousand_or_of_1024(dimension: str) -> None:
    """SI and IEC 80000-13: each prefix is a thousand, or 1,024, times the one before."""
    per = dimension.removeprefix("bytes")
    for base, names in ((1000, ("B", "kB", "MB", "GB", "TB", "PB", "EB")), (1024, ("B", "KiB", "MiB", "GiB", "TiB"))):
        for power, unit in enumerate(names):
            assert parse_quantity(f"3 {unit}{per}", dimension) == 3 * base**power


@pytest.mark.parametrize(("dimension", "unit"), [("FLOP/s", "FLOPS"), ("FLOP/s", "OP/s"), ("Hz", "Hz")])
def test_rates_take_the_same_prefixes(dimension: str, unit: str) -> None:
    for power, prefix in enumerate(("", "k", "M", "G", "T", "P", "E")):
        assert parse_quantity(f"3 {prefix}{unit}", dimension) == 3 * 1000**power


@pytest.mark.parametrize(
    ("unit", "seconds"), [("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1), ("min", 60), ("h", 3600)]
)
def test_times_are_in_seconds_or_in_milliseconds(unit: str, seconds: float) -> None:
    assert parse_quantity(f"3 {unit}", "s") == pytest.approx(3 * seconds)
    assert parse_quantity(f"3 {unit}", "ms") == pytest.approx(3000 * seconds)


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
