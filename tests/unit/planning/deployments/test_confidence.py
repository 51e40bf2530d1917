"""Decisions under doubt: laws of any draws, and a case counted by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.planning.finalist import Option, certainty_of, pick, replicas_for

MOST = 12


def option(
    needed: list[float], price: float = 1.0, name: str = "a", device: str = "a", replicas: int | None = None
) -> Option:
    fewest = max(1, int(min(each for each in [*needed, MOST] if each <= MOST)))
    return Option(name, device, price, fewest, fewest if replicas is None else replicas, MOST, np.array(needed, float))


def sized(each: Option, confidence: float) -> Option:
    """With the replicas that a plan would give it."""
    wanted = replicas_for(each.needed, each.fewest, confidence)
    return replace(each, replicas=int(min(wanted, MOST)))


NEEDS = st.lists(st.sampled_from([*map(float, range(1, 20)), float("inf")]), min_size=10, max_size=10)
OPTIONS = st.lists(
    st.builds(
        lambda needed, price, device: option(needed, price, f"{needed} {price} {device}", device),
        NEEDS,
        st.floats(0.5, 20.0),
        st.sampled_from(["a", "b", "c"]),
    ),
    min_size=1,
    max_size=5,
)
CONFIDENCES = [0.0, 0.3, 0.5, 0.8, 0.9, 0.99]


def test_ties_in_cost_and_confidence_go_to_the_option_with_more_headroom() -> None:
    """Loads of 0.31 and 0.30 of one replica, and of 0.35 replicas out of two, the smallest share."""
    tight, loose = (replace(option([1.0] * 10), load=load) for load in (0.31, 0.30))
    assert [pick(order, 0.9) for order in ([tight, loose], [loose, tight])] == [1, 0]
    two = replace(option([1.0] * 10, price=0.5, replicas=2), load=0.35)
    assert pick([loose, two], 0.9) == 1


@given(OPTIONS)
def test_the_choice_never_gets_cheaper_as_confidence_grows(options: list[Option]) -> None:
    costs = []
    for confidence in CONFIDENCES:
        found = [sized(each, confidence) for each in options]
        costs.append(found[pick(found, confidence)].cost)
    assert costs == sorted(costs)


@given(OPTIONS, st.sampled_from(CONFIDENCES))
def test_the_choice_suffices_as_often_as_asked_and_is_the_cheapest_that_does(
    options: list[Option], confidence: float
) -> None:
    """Or nothing does: then none suffices more often."""
    found = [sized(each, confidence) for each in options]
    choice = found[pick(found, confidence)]
    able = [each for each in found if each.share >= confidence]
    if able:
        assert choice.share >= confidence
        assert choice.cost == min(each.cost for each in able)
    else:
        assert choice.share == max(each.share for each in found)


@given(st.lists(st.tuples(st.integers(1, MOST), st.floats(0.5, 20.0)), min_size=1, max_size=5))
def test_without_doubt_it_is_the_plain_choice_at_its_plain_cost(pairs: list[tuple[int, float]]) -> None:
    """All draws alike: the cheapest, at any confidence; nothing is added for doubt, and nothing is worth measuring."""
    options = [option([float(count)] * 10, price, f"{place}") for place, (count, price) in enumerate(pairs)]
    for confidence in CONFIDENCES:
        found = [sized(each, confidence) for each in options]
        choice = pick(found, confidence)
        assert found[choice].cost == min(count * price for count, price in pairs)
        certainty = certainty_of(found, choice, confidence)
        assert certainty.share == 1.0
        assert certainty.extra_cost == 0.0
        assert [each.value for each in certainty.measurements] == pytest.approx([0.0])


@given(OPTIONS, st.sampled_from(CONFIDENCES))
def test_knowing_is_never_worth_less_than_nothing(options: list[Option], confidence: float) -> None:
    """And missing the SLO has a price: nothing is expected to cost less than it does."""
    found = [sized(each, confidence) for each in options]
    choice = pick(found, confidence)
    certainty = certainty_of(found, choice, confidence)
    assert all(each.value >= -1e-9 for each in certainty.measurements)
    assert all(0.0 <= each.short <= 1.0 for each in certainty.measurements)
    assert certainty.expected[found[choice].name] >= found[choice].cost - 1e-9
    assert certainty.extra_cost >= -1e-9


def test_a_case_by_hand() -> None:
    """A needs 2 replicas of 10 USD in half of the draws and 4 in the others; B always 3 of 12.

    At 80 % A has to have 4, for 40; B costs 36 and is taken. Without doubt it would have been A, for 20: being sure
    costs 16. Knowing A is worth 36 - (20 + 36) / 2 = 8; knowing B nothing.
    """
    a, b = option([2.0, 4.0] * 5, 10.0, "A", "a"), option([3.0] * 10, 12.0, "B", "b")
    found = [sized(each, 0.8) for each in (a, b)]
    assert [each.replicas for each in found] == [4, 3]
    assert pick(found, 0.8) == 1
    certainty = certainty_of(found, 1, 0.8)
    assert certainty.plain == ("A", 2, 20.0, 0.5)
    assert certainty.extra_cost == 16.0
    assert [(each.device, each.value) for each in certainty.measurements] == [("a", 8.0), ("b", 0.0)]
    assert certainty.measurements[0].short == 0.0


def test_missing_is_priced_as_the_replicas_that_are_then_added() -> None:
    """Two of 10 USD, of which one draw in ten needs two more: 20 + 0.1 x 20; at most what the surest costs."""
    one = option([2.0] * 9 + [4.0], 10.0, replicas=2)
    assert certainty_of([one], 0, 0.8).expected == {"a": pytest.approx(22.0)}
    lost = option([2.0] * 9 + [float("inf")], 10.0, replicas=2)
    assert certainty_of([lost], 0, 0.8).expected == {"a": pytest.approx(22.0)}  # capped by 20, its own cost
