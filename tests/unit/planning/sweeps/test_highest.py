"""The search for the highest value that passes: as near as it says, from wherever it begins."""

from hypothesis import given
from hypothesis import strategies as st

from perfmodel.planning.sweeps.metrics import highest


@given(st.floats(1e-2, 1e2), st.floats(1e-2, 1e2))
def test_the_edge_is_found_within_two_per_cent(edge: float, start: float) -> None:
    looks: list[float] = []

    def passes(value: float) -> bool:
        looks.append(value)
        return value <= edge

    found = highest(passes, start)
    assert found is not None
    assert found <= edge <= found * 1.02
    assert found in looks
    assert len(looks) < 30


def test_where_nothing_passes_there_is_none_and_where_all_does_one_far_beyond_the_start() -> None:
    assert highest(lambda _: False, 5.0) is None
    found = highest(lambda _: True, 5.0)
    assert found is not None
    assert found > 5e3
