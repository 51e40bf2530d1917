"""The second tier of KV: what is parked comes back or is forgotten, and room is what it says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.engine import Request, StepPlan
from perfmodel.engine.host_blocks import HostBlocks, HostCopies

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


@pytest.mark.parametrize(("num_cached", "num_tokens", "num_blocks"), [(8, 9, 1), (0, 9, 3), (4, 9, 2), (9, 9, 0)])
def test_missing_blocks_of_a_parked_request_are_restored(num_cached: int, num_tokens: int, num_blocks: int) -> None:
    """9 tokens in 3 blocks of 4, of which the device still has the first `num_cached`; restoring frees the copy."""
    host, request = HostBlocks(10), Request(0, 0, 40, 10)
    host.park(request, num_tokens, 3)
    assert host.num_ready(request, num_cached, BLOCK_SIZE) == num_tokens
    assert host.restore(request, num_cached, num_tokens, BLOCK_SIZE) == num_blocks
    assert (host.num_restored, host.num_restored_tokens) == (num_blocks, num_tokens - num_cached)
    assert (host.num_stored, host.num_used) == (3, 0)


def test_a_plan_waits_for_blocks_stored_since_the_previous_plan() -> None:
    for is_awaited, counts in ((True, [3, 0, 2]), (False, [0, 0, 0])):
        host, num_stored = HostBlocks(10, is_awaited=is_awaited), []
        for number, count in enumerate((3, 0, 2)):
            if count:
                host.park(Request(number, 0, 40, 10), 4 * count, count)
            plan = StepPlan(number)
            host.finalize(plan)
            num_stored.append(plan.num_stored_blocks)
        assert num_stored == counts


def test_parking_evicts_no_more_cached_blocks_than_needed() -> None:
    """6 slots: five cached blocks, then 4 blocks are parked, which evicts the oldest three; 3 more do not fit."""
    host, request = HostBlocks(6), Request(0, 0, 40, 10, tuple("abcde"))
    for content in "abcde":
        host.keep(content, 0)
    assert host.park(Request(1, 0, 40, 10), 16, 4)
    assert host.num_used == 6
    assert host.num_ready(request, 3 * BLOCK_SIZE, BLOCK_SIZE) == 5 * BLOCK_SIZE
    assert host.num_ready(request, 2 * BLOCK_SIZE, BLOCK_SIZE) == 2 * BLOCK_SIZE
    assert not host.park(Request(2, 0, 40, 10), 12, 3)
    assert host.num_used == 6
    assert host.park(Request(3, 0, 40, 10), 8, 2)
    assert host.num_used == 6


def test_a_prompt_is_restored_above_a_minimum_of_missing_tokens() -> None:
    """At least 8 tokens: with one block on the device, two missing blocks are restored and one is not."""
    for contents, ready in ((("a", "b", "c"), 12), (("a", "b"), 4)):
        host, request = HostBlocks(9, least_tokens=8), Request(0, 0, 40, 10, tuple("abcd"))
        for content in contents:
            host.keep(content, 0)
        assert host.num_ready(request, BLOCK_SIZE, BLOCK_SIZE) == ready


def test_a_freed_slot_stays_readable_until_the_next_plan_reuses_it() -> None:
    """A plan's copies to the host precede its copies back, so an evicted block can still be read."""
    copies = HostCopies()
    copies.store("a", 7)
    assert copies.take() == ([(7, 0)], [])
    copies.drop("a")
    copies.store("b", 8)
    copies.restore("a", 9)
    assert copies.take() == ([(8, 1)], [(0, 9)])
    copies.store("c", 5)
    copies.restore("b", 6)
    assert copies.take() == ([(5, 0)], [(1, 6)])


@given(st.lists(st.tuples(st.sampled_from(["store", "drop", "restore", "take"]), st.integers(0, 5)), max_size=60))
def test_restored_blocks_have_the_stored_content(operations: list[tuple[str, int]]) -> None:
    """Copies are executed plan by plan, copies to the host first."""
    copies, tier, stored, expected = HostCopies(), dict[int, str](), set[str](), list[tuple[int, str]]()
    contents: dict[int, str] = {}  # of device blocks, by number; no number is reused
    for number, (operation, identity) in enumerate([*operations, ("take", 0)]):
        content = f"content {identity}"
        if operation == "store" and content not in stored:
            contents[number] = content
            copies.store(content, number)
            stored.add(content)
        elif operation == "drop" and content in stored:
            copies.drop(content)
            stored.discard(content)
        elif operation == "restore" and content in stored:
            copies.restore(content, 1000 + number)
            expected.append((1000 + number, content))
        elif operation == "take":
            out, back = copies.take()
            for block, slot in out:
                tier[slot] = contents[block]
            assert [(block, tier[slot]) for slot, block in back] == expected
            expected.clear()
