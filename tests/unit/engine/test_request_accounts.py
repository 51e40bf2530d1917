"""The scheduler's counters by hand: waiting, blocks, prefix hits, and the times of preempted requests."""

import pytest
from engine_integrity import check_integrity

from perfmodel.engine import (
    Estimates,
    HostBlocks,
    KVBlockManager,
    RadixKVBlocks,
    Request,
    Scheduler,
    SchedulerConfig,
    Speculation,
    StepPlan,
    scheduler_for,
)

SIZE = 4


def scheduler(num_blocks: int = 100, host: HostBlocks | None = None, **changes: object) -> Scheduler:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 256, "block_size": SIZE} | changes
    return Scheduler(SchedulerConfig(**settings), KVBlockManager(num_blocks, SIZE, host=host))  # type: ignore[arg-type]


def turn(engine: Scheduler, now: int) -> dict[int, int]:
    """Computed tokens per request in one step, from `now` to `now + 1`."""
    plan = engine.plan(now)
    engine.apply(plan, now + 1)
    check_integrity(engine)
    return {r.request_id: 1 for r in plan.decodes} | {g.request.request_id: g.num_new_tokens for g in plan.chunks}


def test_the_batch_timeout_counts_from_the_oldest_request() -> None:
    engine = scheduler(batching="dynamic", max_num_seqs=3, max_model_len=20, batch_timeout=10)
    engine.add(Request(0, 5, 4, 1))
    engine.add(Request(1, 9, 4, 1))
    assert engine.next_wakeup(9) == 15
    assert turn(engine, 14) == {}
    assert turn(engine, 15) == {0: 4, 1: 4}


def test_counts_are_running_waiting_and_used_blocks() -> None:
    engine = scheduler(max_num_seqs=1)
    assert engine.counts() == (0, 0, 0)
    for number in range(3):
        engine.add(Request(number, 0, 10, 2))
    assert engine.counts() == (0, 3, 0)
    turn(engine, 0)
    assert engine.counts() == (1, 2, 3)


@pytest.mark.parametrize(("stays", "num_hit"), [("nothing", 0), ("all", 8)])
def test_a_preempted_request_keeps_its_first_times_and_queries_all_of_its_tokens(stays, num_hit) -> None:
    """Two requests of 6 + 10 tokens in 6 blocks of 4: the second resumes with 13 tokens, of which 8 may be cached."""
    engine = scheduler(6, stays_of_preempted=stays)
    requests = [Request(number, 0, 6, 10) for number in range(2)]
    for request in requests:
        engine.add(request)
    steps = []
    while engine.has_requests:
        steps.append(turn(engine, len(steps)))
    assert [(r.first_scheduled_at, r.first_token_at, r.num_cached_tokens) for r in requests] == [(0, 1, 0)] * 2
    assert [request.num_preemptions for request in requests] == [0, 1]
    assert engine.num_preemptions == 1
    assert (engine.num_prefix_tokens_asked, engine.num_prefix_tokens_hit) == (6 + 6 + 13, num_hit)
    assert requests[1].finished_at == len(steps)
    assert (
        sum(step.get(1, 0) for step in steps) == 6 + 6 + (13 - num_hit) + 2
    )  # prompt, 6 decodes, recomputation, 2 decodes


def test_prefix_hits_include_blocks_restored_from_the_host() -> None:
    """Two of three blocks are in host memory: 8 of 13 tokens are not computed."""
    host = HostBlocks(10)
    engine = scheduler(host=host)
    for content in ("a", "b"):
        host.keep(content, 0)
    engine.add(Request(0, 0, 13, 1, ("a", "b", "c")))
    plan = engine.plan(0)
    assert [(grant.num_computed_tokens, grant.num_new_tokens) for grant in plan.chunks] == [(8, 5)]
    assert (plan.num_restored_tokens, plan.num_restored_blocks) == (8, 2)
    assert (engine.num_prefix_tokens_asked, engine.num_prefix_tokens_hit) == (13, 8)


@pytest.mark.parametrize(("num_received", "num_computed"), [(None, 10), (12, 10), (10, 10), (9, 9)])
def test_received_kv_is_capped_at_the_expected_tokens(num_received: int | None, num_computed: int) -> None:
    """A sender counts whole blocks: 12 tokens for 10. The last token of the prompt is still computed."""
    engine, request = scheduler(8), Request(0, 0, 10, 3)
    request.num_transferred_tokens = 10
    engine.add(request)
    engine.plan(0)
    engine.finish_load(request, num_received)
    assert request.num_computed_tokens == num_computed
    assert turn(engine, 1) == {0: 1}
    assert engine.num_computed(request) == 10
    check_integrity(engine)


def test_first_and_last_token_batches_are_the_sizes_of_their_steps() -> None:
    """Two of three requests get their first token in step 1, the third in step 2. The first ends in a batch of three,
    the second in one of two, the third alone."""
    engine = scheduler(max_num_batched_tokens=8)
    requests = [Request(0, 0, 4, 2), Request(1, 0, 4, 3), Request(2, 0, 4, 5)]
    for request in requests:
        engine.add(request)
    steps = []
    while engine.has_requests:
        steps.append(turn(engine, len(steps)))
    assert steps[:3] == [{0: 4, 1: 4}, {0: 1, 1: 1, 2: 4}, {1: 1, 2: 1}]
    assert [r.first_token_batch for r in requests] == [2, 2, 3]
    assert [r.last_token_batch for r in requests] == [3, 2, 1]


def test_aborting_during_a_kv_transfer_frees_the_blocks() -> None:
    engine, request = scheduler(8), Request(0, 0, 10, 3)
    request.num_transferred_tokens = 10
    engine.add(request)
    engine.plan(0)
    assert engine.counts() == (0, 0, 3)
    assert engine.abort(request)
    assert engine.counts() == (0, 0, 0)
    assert not engine.detached
    assert not engine.abort(Request(1, 0, 10, 3))
    check_integrity(engine)


def test_admission_by_estimates_queries_whole_prompts() -> None:
    """Two blocks of 4 tokens of the second prompt of 13 are cached."""
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256, block_size=SIZE, estimates=Estimates()
    )
    engine = scheduler_for(config, RadixKVBlocks(100, SIZE))
    for number, contents in enumerate((("a", "b"), ("a", "b", "c"))):
        engine.add(Request(number, number, 9 + 4 * number, 1, contents))
        plan = engine.plan(number)
        engine.apply(plan, number + 1)
        check_integrity(engine)
    assert (engine.num_prefix_tokens_asked, engine.num_prefix_tokens_hit) == (9 + 13, 8)


def test_a_prompt_is_in_flight_while_any_stage_computes_its_chunk() -> None:
    """Two stages: chunks of 16 and 14 tokens follow each other; once the second returns, none is in flight."""
    engine, request = scheduler(pipeline_parallel_size=2), Request(0, 0, 30, 2)
    engine.add(request)
    plans = [engine.plan(0), engine.plan(1)]
    assert [plan.num_chunk_tokens for plan in plans] == [16, 14]
    for number, plan in enumerate(plans):
        assert engine._running.is_under_way(request)
        engine.apply(plan, 2 + number)
    assert not engine._running.is_under_way(request)


def test_a_plan_counts_decodes_chunks_drafts_padding_and_wasted_tokens() -> None:
    plan = StepPlan(0)
    plan.decodes = [Request(number, 0, 4, 4) for number in range(3)]
    plan.num_chunk_tokens, plan.num_draft_tokens, plan.num_padding_tokens, plan.num_wasted_tokens = 100, 20, 7, 5
    assert plan.num_tokens == 3 + 100 + 20 + 7 + 5


def test_requests_admitted_for_one_token_are_padded() -> None:
    """One request runs; two prompts with all but one token cached are padded as if they had 3 draft tokens."""
    config = SchedulerConfig(
        *(4, 64, 256, SIZE), speculation=Speculation((0, 1, 2, 3)), pads_lone_tokens="beside_running"
    )
    engine = Scheduler(config, KVBlockManager(100, SIZE))
    engine.add(Request(0, 0, 9, 40, ("a", "b")))
    engine.apply(engine.plan(0), 1)
    for number in (1, 2):
        engine.add(Request(number, 1, 9, 4, ("a", "b")))
    plan = engine.plan(1)
    assert [request.request_id for request in plan.padded] == [1, 2]
    assert plan.num_padding_tokens == 6
    assert plan.num_tokens == 3 + plan.num_draft_tokens + 6
