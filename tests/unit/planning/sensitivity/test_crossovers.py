"""Where two lines cross: bracketed whatever their form, in few looks where they are smooth."""

from collections.abc import Callable
from math import exp, log

import pytest

from perfmodel.planning.sensitivity.crossovers import _narrowed
from perfmodel.planning.sensitivity.vary import Axis

AXIS = Axis("traffic.arrivals.rate", ("4", "8"), (4.0, 8.0))
WHOLE = Axis("engine.max_num_seqs", ("16", "256"), (16.0, 256.0), present=64, is_whole=True)


@pytest.mark.parametrize("turn", [4.01, 4.9, 6.3, 7.95])
@pytest.mark.parametrize(
    ("gain", "most"),
    [
        (lambda x, turn: log(x / turn), 6),
        (lambda x, turn: -log(x / turn), 6),
        (lambda x, turn: log((9 - turn) / (9 - x)), 6),  # waiting times, against what does not wait
        (lambda x, turn: log(x / turn) ** 3, 11),
        (lambda x, turn: 1e-3 if x > turn else -0.5, 11),
        (lambda x, turn: exp(x) - exp(turn), 7),
    ],
)
def test_the_turn_is_between_two_places_two_per_cent_apart(
    gain: Callable[[float, float], float], most: int, turn: float
) -> None:
    looks: set[float] = set()

    def look(x: float) -> float:
        looks.add(x)
        return gain(x, turn)

    low, high = _narrowed(AXIS, look, 4.0, 8.0)
    assert low <= turn <= high
    assert high - low <= 0.02 * low
    assert len(looks) <= most  # bisection takes eight


@pytest.mark.parametrize("turn", [16, 17, 100, 255])
def test_of_whole_numbers_they_are_neighbours(turn: int) -> None:
    low, high = _narrowed(WHOLE, lambda x: 1.0 if x > turn else -1.0, 16.0, 256.0)
    assert low <= turn < high
    assert high == low + 1 or high - low <= 0.02 * low


def test_what_cannot_be_evaluated_ends_the_search() -> None:
    def gain(x: float) -> float | None:
        return None if 5 < x < 7 else x - 6

    low, high = _narrowed(AXIS, gain, 4.0, 8.0)
    assert (low, high) == (4.0, 8.0)
