"""Numbers as text."""

import math

import pytest

from perfmodel.report.drawing.fields import GROUPS, format_number, format_si, prediction_interval


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
    mfu = next(field for _, fields in GROUPS for field in fields if field.key == "mfu")
    assert mfu.show({"mfu": 0.213}) == "21.3"
    assert mfu.show({}) == "–"


def test_interval_is_found_by_the_name_of_the_mean():
    assert prediction_interval({"interval": {"mean_tpot_ms": [1, 2]}}, "tpot") == (1.0, 2.0)
    assert prediction_interval({"interval": {}}, "tpot") is None
    assert prediction_interval({}, "tpot") is None
