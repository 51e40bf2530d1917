"""Numbers as text."""

import math

import pytest

from perfmodel.planning.metrics import metric_of
from perfmodel.report.numbers import (
    format_duration,
    format_factor,
    format_in,
    format_metric,
    format_number,
    format_short,
    format_si,
)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (2.039e12, "B/s", "2.04 TB/s"),
        (312e12, "FLOP/s", "312 TFLOP/s"),
        (1.53e-5, "s", "15.3 µs"),
        (1e-3, "s", "1.00 ms"),
        (8.03e9, "", "8.03 G"),
        (0, "B", "0 B"),
        (None, "B", "–"),
        (math.inf, "B", "–"),
    ],
)
def test_si(value, unit, text):
    assert format_si(value, unit) == text


def test_numbers_that_are_not_there_are_dashes():
    assert [format_number(v) for v in (None, math.nan, math.inf, 1234.5)] == ["–", "–", "–", "1,234.50"]


def test_fractions_are_shown_in_per_cent():
    mfu = metric_of("mfu")
    assert format_in({"mfu": 0.213}, mfu) == "21.3"
    assert format_metric(mfu, 0.2134) == "21.3"
    assert (mfu.unit, format_in({}, mfu)) == ("%", "–")


def test_an_interval_stands_beside_its_value_in_the_same_unit():
    summary = {"slo_attainment": 0.9, "interval": {"slo_attainment": [0.85, 0.95]}}
    assert format_in(summary, metric_of("slo_attainment")) == "90.0 (85.0 to 95.0)"


@pytest.mark.parametrize(("seconds", "text"), [(45, "45 s"), (119, "119 s"), (750, "12.5 min"), (11_520, "3.2 h")])
def test_durations_have_the_unit_that_people_use(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("factor", "text"), [(1.519, "1.52x"), (24.04, "24x"), (3100.4, "3,100x"), (0.5, "0.50x"), (0.0023, "0.0023x")]
)
def test_factors(factor, text):
    assert format_factor(factor) == text


@pytest.mark.parametrize(
    ("value", "text"), [(4e12, "4T"), (2.5e15, "2.5P"), (3e18, "3E"), (999.6e9, "1T"), (4e9, "4G"), (9990, "9,990")]
)
def test_large_numbers_have_a_prefix_and_no_exponent(value, text):
    assert format_short(value) == text
