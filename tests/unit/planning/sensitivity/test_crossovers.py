"""Where two lines cross: bracketed whatever their form, in few looks where they are smooth."""

from collections.abc import Callable
from math import exp, log
from types import SimpleNamespace
from typing import Any

import pytest

from perfmodel.planning import whatif as crossovers
from perfmodel.planning.axes import Axis
from perfmodel.planning.points import Point, Record
from perfmodel.planning.whatif import WhatIfAnswers, _narrowed
from perfmodel.specs import load_scenario

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


@pytest.mark.parametrize(
    ("metric", "base", "other", "gain"),
    [
        ("p90_ttft_ms", 400.0, 200.0, log(2)),  # a halved latency
        ("request_goodput", 4.0, 8.0, log(2)),  # a doubled rate
        ("p90_ttft_ms", 200.0, 400.0, -log(2)),
        ("request_goodput", 0.0, 8.0, 1.0),  # nothing to divide
    ],
)
def test_a_gain_is_positive_where_the_alternative_is_better(
    monkeypatch: pytest.MonkeyPatch, metric: str, base: float, other: float, gain: float
) -> None:
    values = iter([base, other])
    monkeypatch.setattr(crossovers, "evaluate", lambda _: SimpleNamespace(values={metric: next(values)}))
    question: Any = SimpleNamespace(point=lambda *_, alternative: Point("llama-3.1-8b-a100", ()))
    asked: Any = SimpleNamespace(axis=AXIS, seed=0, metric=metric, question=question)
    assert crossovers._gain(asked, 5.0) == pytest.approx(gain)


def test_a_payoff_is_at_the_median_of_its_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three draws the median is at 5.5, and in two the alternative is better above the crossover."""
    places = [(7.0, True), (5.0, True), (5.5, False)]
    monkeypatch.setattr(crossovers, "spread", lambda *_: places)
    rising, falling = ([Record({"p90_ttft_ms": ms}) for ms in ends] for ends in ((1.0, 2.0), (2.0, 1.0)))
    question: Any = SimpleNamespace(axes=(AXIS,))
    base = Record()
    answers = WhatIfAnswers(
        question, load_scenario("llama-3.1-8b-a100"), base, (), {AXIS.path: rising}, base, {AXIS.path: falling}
    )
    (payoff,) = crossovers.payoffs(answers, ["p90_ttft_ms"], workers=1, seeds=3)
    assert (payoff.at, payoff.low, payoff.high, payoff.begins, payoff.num_seeds) == (5.5, 5.0, 7.0, True, 3)
