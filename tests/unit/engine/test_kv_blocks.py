"""Blocks: reuse in the order of vLLM's free queue, sharing by reference count, eviction."""

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
    blocks.check_integrity([])


def test_a_cached_block_is_shared_while_owned_and_revived_after() -> None:
    blocks = KVBlockManager(10, 4)
    first, second, third = (request(i, 9, ("a", "b")) for i in range(3))
    compute(blocks, first, 9)
    compute(blocks, second, 9)
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    assert blocks.num_used == 4
    blocks.check_integrity([first, second])
    blocks.free(first)
    blocks.check_integrity([second])
    blocks.free(second)
    assert blocks.num_used == 0
    compute(blocks, third, 9)
    assert third.num_hashed_blocks == 2
    blocks.check_integrity([third])


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
    blocks.check_integrity([taker])


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
    blocks.check_integrity([])
    assert sum(len(lot.blocks) for lot in blocks._queue) <= 4 * 100 + 1024 + 11
