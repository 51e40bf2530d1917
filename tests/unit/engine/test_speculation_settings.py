"""How deep to draft: by batch, by what acceptance was lately, by room."""

import pytest

from perfmodel.engine.config import Speculation
from perfmodel.engine.drafting import AcceptanceEstimate

TREE = Speculation((0, 4, 12, 20))


def test_all_the_way_unless_something_says_otherwise() -> None:
    assert TREE.depth == 3
    assert TREE.depth_at(1, 0.0) == TREE.depth_at(1000, 1.0) == 3
    assert TREE.spare_slots == 17


@pytest.mark.parametrize(("slots", "depth"), [(0, 0), (3, 0), (4, 1), (11, 1), (12, 2), (19, 2), (20, 3), (99, 3)])
def test_a_draft_is_as_deep_as_there_is_room(slots: int, depth: int) -> None:
    assert TREE.depth_within(3, slots) == depth


def test_large_batches_draft_nothing() -> None:
    limited = Speculation((0, 1, 2), disable_by_batch_size=8)
    assert [limited.depth_at(batch, 0.5) for batch in (1, 8, 9, 500)] == [2, 2, 0, 0]


def test_the_table_is_read_by_acceptance_and_batch_and_its_last_entry_repeats() -> None:
    table = Speculation((0, 1, 2), depths=((1, 0), (2, 2, 1)))
    assert [table.depth_at(batch, 0.49) for batch in (1, 2, 3)] == [1, 0, 0]
    assert [table.depth_at(batch, 0.5) for batch in (1, 2, 3, 9)] == [2, 2, 1, 1]
    assert table.depth_at(1, 1.0) == 2


def test_the_estimate_follows_what_is_judged_and_goes_back_where_nothing_is() -> None:
    estimate = AcceptanceEstimate(0.8)
    for _ in range(3000):
        estimate.add(4, 1)
    assert estimate.value == pytest.approx(0.25, abs=0.01)
    for _ in range(5000):
        estimate.fade()
    assert estimate.value == pytest.approx(0.8, abs=0.01)
