"""Blocks: reuse in the order of vLLM's free queue, sharing by reference count, eviction."""

import pytest
from engine_integrity import check_blocks, num_aside

from perfmodel.engine import KVBlockManager, Request


def request(number: int, prompt: int, hashes: tuple[str, ...] = ()) -> Request:
    return Request(number, 0, prompt, 10, hashes)


def compute(blocks: KVBlockManager, r: Request, num_tokens: int) -> None:
    """Allocate for and compute the first `num_tokens` of `r`, reusing what is cached."""
    cached = blocks.cached_prefix(r)
    assert blocks.can_allocate(r, num_tokens, cached)
    blocks.allocate(r, num_tokens, cached)
    r.num_computed_tokens = num_tokens
    blocks.publish(r)


def test_blocks_round_up_and_come_back() -> None:
    blocks = KVBlockManager(10, 4)
    r = request(0, 9)
    compute(blocks, r, 9)
    assert (len(r.block_ids), blocks.num_free) == (3, 7)
    assert not blocks.can_allocate(r, 41)
    assert blocks.can_allocate(r, 40)
    blocks.free(r)
    assert blocks.num_free == 10
    check_blocks(blocks, [])


def test_a_cached_block_is_shared_while_owned_and_revived_after() -> None:
    blocks = KVBlockManager(10, 4)
    first, second, third = (request(i, 9, ("a", "b")) for i in range(3))
    compute(blocks, first, 9)
    compute(blocks, second, 9)
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    assert blocks.num_used == 4
    check_blocks(blocks, [first, second])
    blocks.free(first)
    check_blocks(blocks, [second])
    blocks.free(second)
    assert blocks.num_used == 0
    compute(blocks, third, 9)
    assert third.num_hashed_blocks == 2
    check_blocks(blocks, [third])


def test_the_least_recently_freed_is_evicted_first_and_a_prefix_outlives_its_tail() -> None:
    """3 blocks. `old` is freed before `new`; taking one block evicts the tail of `old`, not its head nor `new`."""
    blocks = KVBlockManager(3, 4)
    old, new = request(0, 8, ("a", "b")), request(1, 4, ("c",))
    compute(blocks, old, 8)
    compute(blocks, new, 4)
    blocks.free(old)
    blocks.free(new)
    taker = request(2, 4)
    compute(blocks, taker, 4)
    assert len(blocks.cached_prefix(request(3, 12, ("a", "b")))) == 1
    assert len(blocks.cached_prefix(request(4, 12, ("c",)))) == 1
    check_blocks(blocks, [taker])


def test_blocks_of_a_request_are_reused_from_its_last_one_on() -> None:
    """vLLM v1 frees a request's blocks in reverse and takes blocks from the head of the queue."""
    blocks = KVBlockManager(4, 4, enable_prefix_caching=False)
    first, second, third = request(0, 16), request(1, 8), request(2, 8)
    compute(blocks, first, 16)
    held = list(first.block_ids)
    blocks.free(first)
    compute(blocks, second, 8)
    compute(blocks, third, 8)
    assert second.block_ids + third.block_ids == held[::-1]


def test_of_blocks_freed_before_they_were_full_the_last_is_reused_first() -> None:
    """Three requests of half a block each leave in turn; the next takes the blocks of the third and the second, and
    no full block, though a full one was freed before."""
    blocks = KVBlockManager(4, 4)
    full, *partial = request(0, 4, ("a",)), *(request(number, 2) for number in (1, 2, 3))
    for owner, num_tokens in zip((full, *partial), (4, 2, 2, 2), strict=True):
        compute(blocks, owner, num_tokens)
    held = [owner.block_ids[0] for owner in partial]
    for owner in (full, *partial):
        blocks.free(owner)
    taker = request(4, 8)
    compute(blocks, taker, 8)
    assert taker.block_ids == [held[2], held[1]]


def test_the_last_cached_block_is_computed_again_for_a_drafter_that_reads_the_model() -> None:
    """Of a prompt of 13 tokens three blocks are cached; vLLM takes two of them for EAGLE, and none of one."""
    for rereads, num_cached in ((False, [3, 1, 0]), (True, [2, 0, 0])):
        blocks = KVBlockManager(10, 4)
        blocks.rereads_last_block = rereads
        compute(blocks, request(0, 12, ("a", "b", "c")), 12)
        prompts = (request(1, 13, ("a", "b", "c")), request(2, 5, ("a",)), request(3, 5, ("x",)))
        assert [len(blocks.cached_prefix(prompt)) for prompt in prompts] == num_cached


def test_prefix_caching_off_shares_nothing() -> None:
    blocks = KVBlockManager(10, 4, enable_prefix_caching=False)
    first, second = request(0, 9, ("a", "b")), request(1, 9, ("a", "b"))
    compute(blocks, first, 9)
    compute(blocks, second, 9)
    assert not set(first.block_ids) & set(second.block_ids)


def test_hits_that_wait_in_the_free_queue_cannot_be_counted_as_free_too() -> None:
    """2 free blocks, both hits: a request of three blocks needs one more than there is."""
    blocks = KVBlockManager(2, 4)
    first = request(0, 8, ("a", "b"))
    compute(blocks, first, 8)
    blocks.free(first)
    second = request(1, 12, ("a", "b", "c"))
    assert not blocks.can_allocate(second, 12, blocks.cached_prefix(second))


def test_the_free_queue_stays_bounded_when_the_same_prefix_comes_back_forever() -> None:
    blocks = KVBlockManager(100, 4)
    for number in range(5_000):
        r = request(number, 41, tuple(f"p{k}" for k in range(10)))
        compute(blocks, r, 41)
        blocks.free(r)
    check_blocks(blocks, [])
    assert sum(len(lot.blocks) for lot in blocks._queue) <= 4 * 100 + 1024 + 11


@pytest.mark.parametrize("num_looks", range(6))
def test_blocks_set_aside_leave_the_queue_as_if_taken_one_by_one(num_looks: int) -> None:
    """Two managers in one state: five blocks taken one at a time, or set aside and looked at after `num_looks` of them.

    Whatever order they are handed out in, the same prefixes are left in the cache and the same blocks are free.
    """
    one_by_one, aside = KVBlockManager(8, 4), KVBlockManager(8, 4)
    for blocks in (one_by_one, aside):
        for number, names in enumerate(("ab", "cd", "ef")):
            r = request(number, 9, tuple(names))
            compute(blocks, r, 8)
            blocks.free(r)
    holder, receiver = request(8, 40), request(9, 40)
    for i in range(5):
        one_by_one.allocate(holder, 4 * (i + 1))
        aside.set_aside(1)
        if i < num_looks:
            aside.cached_prefix(request(3, 9, ("e", "f")))
        assert one_by_one.num_free == aside.num_free
    left = [[len(b.cached_prefix(request(3, 9, tuple(n)))) for n in ("ab", "cd", "ef")] for b in (one_by_one, aside)]
    assert left[0] == left[1] == [0, 1, 2]  # 2 never used, then b, a and d
    assert num_aside(aside) == 5
    aside.hand_out(receiver, 5)
    assert sorted(receiver.block_ids) == sorted(holder.block_ids)
    check_blocks(one_by_one, [holder])
    check_blocks(aside, [receiver])


def test_a_prefix_is_cached_until_its_last_copy_is_reused() -> None:
    """Three requests compute the same block at once; their blocks are freed and reused in order. The prefix is cached
    until the third is reused, and again after it is computed again."""
    blocks = KVBlockManager(3, 4)
    owners = [request(number, 4, ("a",)) for number in range(3)]
    for owner in owners:
        blocks.allocate(owner, 4)
        owner.num_computed_tokens = 4
    for owner in owners:
        blocks.publish(owner)
    check_blocks(blocks, owners)
    for owner in owners:
        blocks.free(owner)
    probe, taker = request(9, 8, ("a",)), request(8, 12)
    num_hits = [len(blocks.cached_prefix(probe))]
    for num_tokens in (4, 8, 12):
        blocks.allocate(taker, num_tokens)
        check_blocks(blocks, [taker])
        num_hits.append(len(blocks.cached_prefix(probe)))
    assert num_hits == [1, 1, 1, 0]
    blocks.free(taker)
    again = request(7, 4, ("a",))
    compute(blocks, again, 4)
    assert len(blocks.cached_prefix(probe)) == 1
    check_blocks(blocks, [again])


@pytest.mark.parametrize("span", [None, 0, 6, 20])
def test_a_request_holds_whole_blocks_up_to_its_window_and_its_buffers_once(span: int | None) -> None:
    """Blocks of 4 tokens; 3 buffers come with the first block."""
    blocks, holder = KVBlockManager(100, 4, span=span, num_buffers=3), request(0, 40)
    for num_tokens in range(1, 41):
        max_rows = 10 if span is None else -(-span // 4)
        rows = min(-(-num_tokens // 4), max_rows)
        assert blocks.num_filled(num_tokens) == rows
        assert blocks.num_needed(holder, num_tokens) == rows - len(holder.block_ids) + 3 * (num_tokens == 1)
        blocks.allocate(holder, num_tokens)
        assert blocks.num_used == rows + 3
    check_blocks(blocks, [holder])
    blocks.free(holder)
    assert blocks.num_used == 0
