"""Invariants of an engine at rest between two calls: its counts, sums and calendars against its requests and blocks.

They look into the parts, which nothing but tests needs to.
"""

from collections.abc import Iterable, Sequence

from perfmodel.engine import GroupedKVBlocks, KVBlockManager, RadixKVBlocks, Request, RequestStatus, Scheduler
from perfmodel.engine.decode_cohort import DecodeCohort
from perfmodel.engine.grouped_blocks import NO_BLOCK
from perfmodel.engine.running import PipelinedRequests, RunningRequests
from perfmodel.engine.slots import SlottedRequests
from perfmodel.sim.fleet.disaggregated import DisaggregatedServer
from perfmodel.sim.replica.replica import EngineRank


def check_integrity(scheduler: Scheduler) -> None:
    """Requests, counts and blocks of `scheduler` agree."""
    running = scheduler._running
    assert len(running) <= scheduler._max_batch
    for request in scheduler.waiting:
        assert request not in running.requests, f"{request} waits and runs"
    waiting = [request for _, request in scheduler._waiting]
    for request in waiting:
        assert request.num_transferred_tokens or not request.block_ids, f"{request} waits with blocks"
    check_running(running)
    check_blocks(scheduler.blocks, [*running.requests, *waiting, *scheduler.detached.values()])


def check_idle(server: DisaggregatedServer, engines: Sequence[EngineRank]) -> None:
    """No request, KV block or transfer is left in `server` and `engines`."""
    assert not server._passages
    assert not server._moving
    for engine in engines:
        scheduler = engine.loop.scheduler
        check_integrity(scheduler)
        assert not scheduler.has_requests
        assert not scheduler.detached
        assert scheduler.blocks.num_free == scheduler.blocks.num_blocks


# ---------------------------------------------------------------- running requests


def check_running(running: RunningRequests) -> None:
    """Grants, lists and the cohort of `running` agree."""
    cohort = running.cohort
    check_cohort(cohort)
    members = set(cohort.members)
    assert members <= running.requests.keys()
    assert members.isdisjoint(running._prompts)
    assert members.isdisjoint(running._joining)
    for request in running.requests:
        assert 0 <= request.num_output_tokens <= request.num_promised_tokens <= request.max_output_tokens, request
        in_flight = request.num_promised_tokens - request.num_output_tokens
        assert request in members or in_flight <= 2, f"{request} has too much in flight"
        assert request.num_computed_tokens <= request.num_tokens, request
        num_needed = running._blocks.num_needed(request, request.num_computed_tokens)
        assert request in members or num_needed <= 0, request
    if isinstance(running, PipelinedRequests):
        check_ready(running)
    if isinstance(running, SlottedRequests):
        check_slots(running)


def check_ready(running: PipelinedRequests) -> None:
    """Every request is either under way or ready for a grant."""
    assert running._ready.keys() <= running.requests.keys()
    for request in running.requests:
        if request.status is not RequestStatus.RUNNING or not request.num_remaining_tokens:
            assert request not in running._ready, f"{request} has nothing left to be granted"
        else:
            is_under_way = request.num_promised_tokens > request.num_output_tokens
            assert is_under_way != (request in running._ready), f"{request} is lost, or granted twice"


def check_slots(running: SlottedRequests) -> None:
    """Every slot is free or has one request."""
    taken = [request.admission for request in running.requests]
    assert len(set(taken)) == len(taken), "two requests have one slot"
    assert running._free.isdisjoint(taken), "a request has a free slot"
    assert len(running._free) + len(taken) == len(running._held), "a slot is lost"


def check_cohort(cohort: DecodeCohort) -> None:
    """Sums and calendars of `cohort` match its members."""
    blocks = cohort._blocks
    computed = {request: cohort.num_computed(request) for request in cohort.joined}
    assert cohort.context == sum(computed.values())
    for i, span in enumerate(cohort._spans):
        assert cohort.windowed[i] == sum(min(tokens, span) for tokens in computed.values())
        assert cohort.growing[i] == sum(tokens < span for tokens in computed.values())
    num_needed = {request: blocks.num_due(request, tokens) for request, tokens in computed.items()}
    assert sum(max(count, 0) for count in num_needed.values()) == num_aside(blocks)
    assert cohort._phase.keys() <= computed.keys(), "a block is due to someone who left"
    due = [0] * blocks.block_size
    for request, phase in cohort._phase.items():
        due[phase] += blocks.weight(len(request.block_ids))
    assert cohort._due == due
    ending = {request for requests in cohort._ending.values() for request in requests}
    assert computed.keys() <= ending, "a member has no end"
    for request in computed:
        joined = cohort.joined[request]
        assert cohort._dissolved <= joined <= cohort.age
        assert cohort.age - joined <= request.num_remaining_tokens
        assert num_needed[request] <= 0 or request in cohort._phase, f"{request} has too few blocks"


# ---------------------------------------------------------------- blocks


def num_aside(blocks: KVBlockManager) -> int:
    """Blocks set aside and not handed out yet."""
    return len(blocks._aside) + blocks._num_to_pop


def blocks_of(blocks: KVBlockManager, request: Request) -> list[int]:
    """All block ids of `request`."""
    if not isinstance(blocks, GroupedKVBlocks):
        return [*request.block_ids, *request.buffer_ids]
    if request.tables is None:
        assert not request.block_ids
        return []
    block_ids: list[int] = []
    assert request.tables.blocks[0] is request.block_ids
    for first, rows in zip(request.tables.firsts, request.tables.blocks, strict=True):
        assert len(rows) == len(request.block_ids), f"{request}: a group has {len(rows)} rows"
        assert set(rows[:first]) <= {NO_BLOCK}
        assert NO_BLOCK not in rows[first:]
        block_ids += rows[first:]
    return block_ids


def check_blocks(blocks: KVBlockManager, requests: Iterable[Request]) -> None:
    """`requests` (all holders), the queue and a tree account for every block."""
    blocks.catch_up()
    if isinstance(blocks, RadixKVBlocks):
        check_tree(blocks, list(requests))
        return
    owners: dict[int, int] = {}
    for request in requests:
        block_ids = blocks_of(blocks, request)
        assert len(set(block_ids)) == len(block_ids), f"{request} holds a block twice"
        for block in block_ids:
            owners[block] = owners.get(block, 0) + 1
    lots = [(block, lot) for lot in blocks._queue for block in lot.blocks]
    waiting = [*blocks._partial, *range(blocks.num_blocks - blocks._num_fresh, blocks.num_blocks)]
    waiting += [block for block, lot in lots if not lot.has_hashed or blocks._is_waiting_in(block, lot)]
    assert len(waiting) == blocks.num_free, f"{len(waiting)} blocks wait but num_free is {blocks.num_free}"
    assert len(set(waiting)) == len(waiting), "a block waits twice"
    assert set(waiting).isdisjoint(owners), "a block is free and owned"
    assert len(set(blocks._aside)) == len(blocks._aside), "a block is set aside twice"
    known = owners.keys() | blocks._hash_of.keys() | set(waiting)
    assert known.isdisjoint(blocks._aside), "a block set aside is owned, cached or free"
    assert len(waiting) + len(owners) + len(blocks._aside) == blocks.num_blocks, "a block is lost"
    for block, count in owners.items():
        known_count = blocks._owners.get(block, 1)
        assert count == known_count, f"block {block} has {count} owners, not {known_count}"
    copies = [(content, block) for content, further in blocks._copies.items() for block in further]
    for content, block in [*blocks._block_of.items(), *copies]:
        assert blocks._hash_of[block] == content
        assert blocks._owners[block] == owners.get(block, 0)
    assert len(blocks._hash_of) == len(blocks._block_of) + len(copies), "a block with content cannot be found"


def check_tree(blocks: RadixKVBlocks, requests: Sequence[Request]) -> None:
    """As `check_blocks`, with a radix tree."""
    in_tree: set[int] = set()
    nodes = [blocks.root]
    for node in nodes:
        nodes += node.children.values()
        assert in_tree.isdisjoint(node.blocks), "a block is in the tree twice"
        in_tree.update(node.blocks)
        assert node is blocks.root or len(node.contents) == len(node.blocks)
    unheld = sum(len(node.blocks) for node in nodes if not node.num_locks)
    assert unheld == blocks.num_evictable, f"{unheld} blocks can be evicted, not {blocks.num_evictable}"
    private = [block for request in requests for block in request.block_ids[request.num_hashed_blocks :]]
    for request in requests:
        assert set(request.block_ids[: request.num_hashed_blocks]) <= in_tree, f"{request} lost blocks of the tree"
    fresh = range(blocks.num_blocks - blocks._num_fresh, blocks.num_blocks)
    waiting = [*fresh, *(block for lot in blocks._queue for block in lot.blocks)]
    assert len(waiting) + blocks.num_evictable == blocks.num_free, "free blocks are not those that can be had"
    everything = [*waiting, *private, *blocks._aside, *in_tree]
    assert len(everything) == len(set(everything)) == blocks.num_blocks, "a block is lost, or there twice"
