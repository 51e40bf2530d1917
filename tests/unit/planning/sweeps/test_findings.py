"""Crossings, winners, ladders and fronts, against answers that can be had by hand."""

import pytest

from perfmodel.planning.findings import better_by, crossings, ladder_gains, pareto_front, stretches


def test_power_laws_cross_where_they_are_equal() -> None:
    """8 x^-1 and x^0.5 are equal at x = 8^(2/3) = 4, between the values of the axis."""
    xs = [1.0, 3.0, 10.0, 30.0]
    assert crossings(xs, [8 / x for x in xs], [x**0.5 for x in xs]) == pytest.approx([4.0])


def test_straight_lines_cross_where_they_are_equal_when_there_is_no_logarithm() -> None:
    assert crossings([0, 2], [0, 4], [3, 3]) == pytest.approx([1.5])


def test_lines_that_touch_do_not_cross() -> None:
    assert crossings([1, 2, 3], [1, 2, 1], [2, 2, 2]) == []


def test_missing_values_are_stepped_over() -> None:
    assert crossings([1, 2, 4], [1, None, 4], [2, 2, 2]) == pytest.approx([2.0])


def test_the_winner_changes_at_the_crossing() -> None:
    xs = [1, 4, 16]
    found = stretches(xs, {"steep": [1, 4, 16], "flat": [3, 3, 3]}, is_better_low=True)
    assert [stretch.winners for stretch in found] == [("steep",), ("flat",)]
    assert found[1].begins == pytest.approx(3.0)


def test_equal_variants_win_together() -> None:
    (only,) = stretches([1, 2], {"a": [100, 100], "b": [101, 99.5]}, is_better_low=False)
    assert only.winners == ("a", "b")


def test_the_rungs_of_a_ladder_multiply_to_the_whole() -> None:
    values = [7.0, 21.0, None, 14.0, 140.0]
    gains = ladder_gains(values, is_better_low=False)
    assert gains[0] == 1.0
    assert gains[2] is None
    product = 1.0
    for gain in gains:
        product *= gain or 1.0
    assert product == pytest.approx(better_by(140.0, 7.0, False)) == pytest.approx(20.0)


def test_nothing_on_a_front_is_dominated() -> None:
    points = {"cheap": (1.0, 1.0), "fast": (4.0, 9.0), "bad": (4.0, 2.0), "unknown": (None, 3.0)}
    assert pareto_front(points, (True, False)) == ("cheap", "fast")
