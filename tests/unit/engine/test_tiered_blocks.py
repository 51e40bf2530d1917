"""Tiers behind the device: what is offered, what is awaited, what comes in part."""

from collections.abc import Callable, Hashable, Sequence

from perfmodel.engine import KVBlockManager, Request, Scheduler, SchedulerConfig
from perfmodel.engine.tiered_blocks import TieredBlocks

SIZE = 4


class FakeStores:
    """Has `held`; fetches run until the test says what arrives."""

    def __init__(self, held: str = "") -> None:
        self.held, self.written, self.fetched, self.num_stopped = set[Hashable](held), list[Hashable](), "", 0

    def holds(self, content: Hashable) -> bool:
        return content in self.held

    def put(self, contents: Sequence[Hashable]) -> None:
        self.written += contents

    def fetch(
        self, contents: Sequence[Hashable], arrive: Callable[[Sequence[Hashable]], None], done: Callable[[], None]
    ) -> Callable[[], None] | None:
        self.fetched, self.arrive, self.done = "".join(map(str, contents)), arrive, done
        return self.stop

    def stop(self) -> None:
        self.num_stopped += 1


def request(number: int, contents: str, more: int = 1) -> Request:
    return Request(number, number, SIZE * len(contents) + more, 2, tuple(contents))


def engine(host: TieredBlocks, num_blocks: int = 20, most_tokens: int = 64) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=most_tokens, max_model_len=64, block_size=SIZE)
    return Scheduler(config, KVBlockManager(num_blocks, SIZE, host=host))


def run(scheduler: Scheduler, num_steps: int) -> list[list[int]]:
    """Requests granted tokens in each of the next steps; loads end with the step that begins them."""
    granted = []
    for step in range(num_steps):
        plan = scheduler.plan(step)
        granted.append(sorted(r.request_id for r in [*plan.decodes, *(grant.request for grant in plan.chunks)]))
        scheduler.apply(plan, step + 1)
        for one in plan.loads:
            scheduler.finish_load(one)
    return granted


def test_prompts_are_written_through_once_computed_and_answers_are_not() -> None:
    """9 tokens in chunks of 4: a block with each of the first two steps, and nothing with the answer's two."""
    host = TieredBlocks(10, SIZE, store_after=1, stores=(stores := FakeStores()))
    scheduler = engine(host, most_tokens=4)
    scheduler.add(request(0, "ab"))
    counts = []
    for _ in range(4):
        run(scheduler, 1)
        counts.append(host.num_stored)
    assert counts == [1, 2, 2, 2]
    assert stores.written == ["a", "b"]


def test_selective_writing_waits_for_the_prompt_that_makes_the_count() -> None:
    host = TieredBlocks(10, SIZE, store_after=3)
    scheduler, counts = engine(host), []
    for number in range(4):
        scheduler.add(request(number, "ab"))
        run(scheduler, 4)
        counts.append(host.num_stored)
    assert counts == [0, 0, 2, 2]


def test_written_back_blocks_go_to_the_stores_with_the_plan_that_evicts_them() -> None:
    """Room for three blocks: the second prompt takes the first one's place."""
    host = TieredBlocks(10, SIZE, stores=(stores := FakeStores()))
    scheduler = engine(host, num_blocks=3)
    for number, contents in enumerate(("ab", "cd")):
        scheduler.add(request(number, contents))
        run(scheduler, 4)
    assert set(stores.written) == {"a", "b"}


def test_a_request_waits_for_its_load_while_others_run_and_computes_the_last_token_only() -> None:
    host = TieredBlocks(10, SIZE, is_async=True, store_after=1)
    scheduler = engine(host, num_blocks=6)
    for number, contents in enumerate(("ab", "cdef")):  # the second evicts the first
        scheduler.add(request(number, contents, more=0))
        run(scheduler, 4)
    back, other = request(2, "ab", more=0), request(3, "", more=3)
    scheduler.add(back)
    scheduler.add(other)
    plan = scheduler.plan(9)
    assert plan.loads == (back,)
    assert [grant.request for grant in plan.chunks] == [other]
    scheduler.apply(plan, 10)
    assert run(scheduler, 1) == [[3]]
    scheduler.finish_load(back)
    plan = scheduler.plan(11)
    assert [(back, 7, 1)] == [(r, r.num_computed_tokens - 1, 1) for r in plan.singles]
    assert scheduler.num_prefix_tokens_hit == 8


def test_what_one_request_loads_another_waits_for_and_finds_on_the_device() -> None:
    host = TieredBlocks(10, SIZE, is_async=True, store_after=1)
    scheduler = engine(host, num_blocks=5)
    for number, contents in enumerate(("ab", "cdef")):
        scheduler.add(request(number, contents, more=0))
        run(scheduler, 4)
    first, second = request(2, "ab"), request(3, "ab")
    scheduler.add(first)
    scheduler.add(second)
    plan = scheduler.plan(9)
    assert plan.loads == (first,)
    assert not plan
    scheduler.finish_load(first)
    scheduler.plan(10)
    assert second.num_cached_tokens == 8
    assert host.num_restored == 2


def test_best_effort_takes_what_has_come_and_waiting_takes_all() -> None:
    """Of three blocks in the store one has come by the request's turn."""
    for waits, num_steps, num_cached, num_stopped in ((False, 1, 4, 1), (True, 3, 12, 0)):
        stores = FakeStores("abc")
        host = TieredBlocks(10, SIZE, store_after=1, stores=stores, prefetches=True, waits=waits)
        scheduler, one = engine(host), request(0, "abc")
        scheduler.add(one)
        assert stores.fetched == "abc"
        stores.arrive("a")
        granted = run(scheduler, 1)
        if waits:
            assert granted == [[]]
            stores.arrive("bc")
            stores.done()
            scheduler.retry_waiting()
            run(scheduler, num_steps - 1)
        assert (one.num_cached_tokens, stores.num_stopped) == (num_cached, num_stopped)


def test_two_requests_fetch_a_block_once_and_an_abort_leaves_the_other_its_own_way() -> None:
    stores = FakeStores("abc")
    host = TieredBlocks(10, SIZE, store_after=1, stores=stores)
    scheduler, first, second = engine(host), request(0, "ab"), request(1, "abc")
    scheduler.add(first)
    scheduler.add(second)
    assert run(scheduler, 1) == [[]]
    assert stores.fetched == "c"  # of the second; the first's are on their way
    scheduler.abort(first)
    assert stores.num_stopped == 1
    stores.arrive("c")
    stores.done()
    scheduler.retry_waiting()
    assert run(scheduler, 1) == [[1]]
    assert second.num_cached_tokens == 0  # nothing before "c" has come


def test_what_is_fetched_has_to_fit_and_is_not_written_again() -> None:
    stores = FakeStores("abc")
    host = TieredBlocks(2, SIZE, store_after=1, stores=stores)
    scheduler, one = engine(host), request(0, "abc")
    scheduler.add(one)
    run(scheduler, 1)
    stores.arrive("abc")
    stores.done()
    assert host.num_used == 2
    assert not host.num_stored
    scheduler.retry_waiting()
    run(scheduler, 1)
    assert one.num_cached_tokens == 0  # "a" has made way for "c"
