"""The second tier of KV: what is parked comes back or is forgotten, and room is what it says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.engine import Request
from perfmodel.engine.host_blocks import HostBlocks

BLOCK_SIZE = 4
# (what happens, to which request or content, with how many blocks)
moves = st.lists(
    st.tuples(st.sampled_from(["park", "forget", "restore", "keep"]), st.integers(0, 4), st.integers(1, 6)), max_size=40
)


@given(st.integers(0, 12), moves)
def test_room_is_taken_by_what_is_there_and_free_again_after_it(
    capacity: int, happenings: list[tuple[str, int, int]]
) -> None:
    """Parked sequences keep their place until they come back or are given up; shared contents make way for them."""
    host, parked = HostBlocks(capacity), dict[int, int]()
    requests = [Request(i, 0, 40, 10) for i in range(5)]
    for what, number, count in happenings:
        request = requests[number]
        if what == "park" and number not in parked:
            fits = sum(parked.values()) + count <= capacity
            host.park(request, count * BLOCK_SIZE, count)
            parked |= {number: count} if fits else {}
        elif what == "forget":
            host.forget(request)
            parked.pop(number, None)
        elif what == "restore" and number in parked:
            assert host.num_ready(request, 0, BLOCK_SIZE) == parked[number] * BLOCK_SIZE
            assert host.restore(request, 0, parked[number] * BLOCK_SIZE, BLOCK_SIZE) == parked.pop(number)
        elif what == "keep":
            host.keep(("content", number), number)
        assert sum(parked.values()) <= host.num_used <= capacity
        for i in range(5):
            assert (host.num_ready(requests[i], 0, BLOCK_SIZE) > 0) == (i in parked)
    for request in requests:
        host.forget(request)
    assert host.num_used <= 5
    host.forget_all()
    assert host.num_used == 0


@pytest.mark.parametrize(("tokens", "is_parked"), [(11, False), (12, True)])
def test_what_is_computed_again_faster_than_copied_is_not_parked(tokens: int, is_parked: bool) -> None:
    host, request = HostBlocks(100, least_tokens=12), Request(0, 0, 40, 10)
    host.park(request, tokens, 3)
    assert host.num_used == 3 * is_parked
    assert host.num_ready(request, 0, BLOCK_SIZE) == tokens * is_parked


def test_contents_are_found_in_a_row_and_the_least_recently_used_goes_first() -> None:
    """Room for three: a fourth content pushes out the first, unless that was restored in between. A prompt finds what
    it begins with, up to the first content that is missing."""
    host, request = HostBlocks(3), Request(0, 0, 4 * BLOCK_SIZE + 1, 10, ("a", "b", "c", "d"))
    for content in "abc":
        host.keep(content, 0)
    assert host.num_ready(request, 0, BLOCK_SIZE) == 3 * BLOCK_SIZE
    assert host.num_ready(request, BLOCK_SIZE, BLOCK_SIZE) == 3 * BLOCK_SIZE
    assert host.restore(request, 0, BLOCK_SIZE, BLOCK_SIZE) == 1  # "a" is used now
    host.keep("d", 1)
    assert host.num_ready(request, 0, BLOCK_SIZE) == BLOCK_SIZE
    assert host.num_ready(request, 2 * BLOCK_SIZE, BLOCK_SIZE) == 4 * BLOCK_SIZE
    assert (host.num_stored, host.num_restored, host.num_restored_tokens) == (4, 1, BLOCK_SIZE)
