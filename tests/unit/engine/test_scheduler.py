"""The scheduler's rules, by hand: vLLM v1's order of granting, admission, chunking, preemption."""

import pytest
from engine_integrity import check_integrity

from perfmodel.engine import KVBlockManager, Request, Scheduler, SchedulerConfig, ServeLoop, StepPlan
from perfmodel.errors import WorkloadError


def scheduler(num_blocks: int = 100, **config: object) -> Scheduler:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 256, "block_size": 4} | config
    return Scheduler(SchedulerConfig(**settings), KVBlockManager(num_blocks, 4))  # type: ignore[arg-type]


def grants(plan: StepPlan) -> dict[int, int]:
    return {r.request_id: 1 for r in plan.decodes} | {g.request.request_id: g.num_new_tokens for g in plan.chunks}


def turn(engine: Scheduler, now: int) -> dict[int, int]:
    """Plan and apply one step."""
    plan = engine.plan(now)
    engine.apply(plan, now + 1)
    check_integrity(engine)
    return grants(plan)


def test_a_long_prompt_is_chunked_by_the_budget_and_decodes_come_first() -> None:
    engine = scheduler()
    engine.add(Request(0, 0, 10, 8))
    assert turn(engine, 0) == {0: 10}
    engine.add(Request(1, 1, 40, 2))
    assert turn(engine, 1) == {0: 1, 1: 15}
    assert turn(engine, 2) == {0: 1, 1: 15}
    assert turn(engine, 3) == {0: 1, 1: 10}
    assert turn(engine, 4) == {0: 1, 1: 1}


def test_what_is_left_of_the_budget_goes_to_the_next_prompt() -> None:
    engine = scheduler()
    for i in range(3):
        engine.add(Request(i, i, 7, 3))
    assert turn(engine, 3) == {0: 7, 1: 7, 2: 2}
    assert turn(engine, 4) == {0: 1, 1: 1, 2: 5}


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_whole() -> None:
    engine = scheduler(enable_chunked_prefill=False)
    engine.add(Request(0, 0, 10, 3))
    engine.add(Request(1, 0, 10, 3))
    assert turn(engine, 0) == {0: 10}
    assert turn(engine, 1) == {0: 1, 1: 10}


@pytest.mark.parametrize("reserves", [True, False])
def test_scheduler_reserve_full_isl_keeps_out_whom_there_is_no_room_for_in_whole(reserves: bool) -> None:
    """10 blocks of 4. The first request holds 7, so three are free: room for 12 tokens of a prompt of 16. vLLM v1 waits
    until all of it would fit; told not to reserve, it begins with what the budget and the blocks have room for."""
    engine = scheduler(num_blocks=10, max_num_batched_tokens=13, scheduler_reserve_full_isl=reserves)
    engine.add(Request(0, 0, 26, 2))
    assert [turn(engine, 0), turn(engine, 1)] == [{0: 13}, {0: 13}]
    engine.add(Request(1, 2, 16, 1))
    assert turn(engine, 2) == ({0: 1} if reserves else {0: 1, 1: 12})
    assert turn(engine, 3) == ({1: 13} if reserves else {1: 4})


def test_long_prefill_token_threshold_caps_a_chunk() -> None:
    engine = scheduler(long_prefill_token_threshold=6)
    engine.add(Request(0, 0, 10, 2))
    engine.add(Request(1, 0, 10, 2))
    assert turn(engine, 0) == {0: 6, 1: 6}


def test_running_prompts_share_the_budget_left_by_decodes_in_order() -> None:
    """Chunks of at most 10 of 16 tokens: 10 and 6 in every step; with a decode, 10 and 5."""
    engine = scheduler(long_prefill_token_threshold=10)
    engine.add(Request(0, 0, 30, 9))
    engine.add(Request(1, 0, 30, 9))
    assert [turn(engine, now) for now in range(3)] == [{0: 10, 1: 6}] * 3
    engine.add(Request(2, 3, 30, 9))
    assert turn(engine, 3) == {0: 1, 1: 10, 2: 5}
    assert turn(engine, 4) == {0: 1, 1: 2, 2: 10}


def test_slots_limit_admission_in_policy_order() -> None:
    engine = scheduler(max_num_seqs=1, scheduling_policy="shortest-first")
    engine.add(Request(0, 0, 9, 1))
    engine.add(Request(1, 0, 3, 1))
    assert turn(engine, 0) == {1: 3}
    assert turn(engine, 1) == {0: 9}


def test_priority_serves_the_lowest_number_first() -> None:
    engine = scheduler(max_num_seqs=1, scheduling_policy="priority")
    engine.add(Request(0, 0, 3, 1, (), 5))
    engine.add(Request(1, 9, 3, 1, (), 1))
    assert turn(engine, 9) == {1: 3}


def test_out_of_blocks_the_last_arrived_is_preempted_and_recomputed_in_whole() -> None:
    """4 blocks of 4 tokens. Two requests of 6 tokens hold two blocks each; at 9 tokens the first needs a third."""
    engine = scheduler(num_blocks=4)
    engine.add(Request(0, 0, 6, 10))
    engine.add(Request(1, 1, 6, 10))
    assert turn(engine, 1) == {0: 6, 1: 6}
    assert turn(engine, 2) == {0: 1, 1: 1}
    assert turn(engine, 3) == {0: 1, 1: 1}
    plan = engine.plan(4)
    assert [r.request_id for r in plan.preempted] == [1]
    assert grants(plan) == {0: 1}
    victim = plan.preempted[0]
    assert (victim.num_computed_tokens, victim.num_output_tokens, victim.block_ids) == (0, 3, [])
    engine.apply(plan, 5)
    for now in range(5, 11):
        assert turn(engine, now) == {0: 1}
    # The first request is done and frees its blocks; the other is recomputed: 6 prompt and 3 output tokens at once.
    assert turn(engine, 11) == {1: 9}
    assert victim.num_preemptions == 1


@pytest.mark.parametrize(("stays", "num_tokens"), [("all", 5), ("prompt", 9), ("nothing", 13)])
def test_who_is_preempted_finds_what_is_left_of_its_own_blocks(stays: str, num_tokens: int) -> None:
    """6 blocks of 4. At 13 tokens the first request needs a fourth, and gets the last of the three that the other has
    to give up. The other's first two are still there when it comes back with 6 prompt and 7 output tokens, so 5 are
    computed; where its prompt's alone stay, as with SGLang, one block is."""
    engine = scheduler(num_blocks=6, stays_of_preempted=stays)
    engine.add(Request(0, 0, 6, 10))
    engine.add(Request(1, 1, 6, 10))
    assert turn(engine, 1) == {0: 6, 1: 6}
    for now in range(2, 8):
        assert turn(engine, now) == {0: 1, 1: 1}
    for now in range(8, 11):
        assert turn(engine, now) == {0: 1}
    assert turn(engine, 11) == {1: num_tokens}
    assert engine.num_preemptions == 1


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", 1), ("priority", 0), ("shortest-first", 0)])
def test_the_last_request_of_the_policy_is_preempted(policy: str, victim: int) -> None:
    """The first is less urgent, and its prompt is longer. Both hold two of 4 blocks, and one needs a third."""
    engine = scheduler(num_blocks=4, scheduling_policy=policy)
    engine.add(Request(0, 0, 6, 10, (), 5))
    turn(engine, 0)
    engine.add(Request(1, 1, 5, 10, (), 1))
    preempted: list[int] = []
    for now in range(1, 6):
        plan = engine.plan(now)
        preempted += [request.request_id for request in plan.preempted]
        engine.apply(plan, now + 1)
    assert preempted == [victim]


def test_the_budget_of_a_preempted_request_goes_to_later_requests() -> None:
    """8 blocks of 4, 16 tokens a step, 8 a prompt. In the third step the first, least urgent, has been given 8 tokens
    and the last two blocks when the second, which decodes, needs one: the 8 are free again, so the third prompt gets
    all of its 8 and not the 16 - 8 - 1 = 7 that were left."""
    rules = {"scheduling_policy": "priority", "long_prefill_token_threshold": 8, "scheduler_reserve_full_isl": False}
    engine = scheduler(num_blocks=8, **rules)
    engine.add(Request(0, 0, 24, 2, (), 5))
    assert turn(engine, 0) == {0: 8}
    engine.add(Request(1, 1, 4, 8, (), 1))
    engine.add(Request(2, 1, 20, 2, (), 2))
    assert turn(engine, 1) == {0: 8, 1: 4, 2: 4}
    assert turn(engine, 2) == {1: 1, 2: 8}
    assert engine.num_preemptions == 1


def test_a_request_preempted_before_its_first_token_resumes_with_its_cached_prompt() -> None:
    """5 blocks of 4; planning overlaps the previous step. The third request computes 7 and then 1 of its 8 prompt
    tokens, two blocks that are hashed when they are granted. It needs a third and is preempted before its first token
    is known. It resumes with 9 tokens, 8 of them cached."""
    engine = scheduler(num_blocks=5, long_prefill_token_threshold=7, scheduler_reserve_full_isl=False)
    for number, (prompt, outputs) in enumerate(((3, 3), (2, 2), (8, 9), (4, 9))):
        engine.add(Request(number, 0, prompt, outputs))
    seen, under_way = [], engine.plan(0)
    for now in range(1, 4):
        plan = engine.plan(now)
        seen.append((grants(plan), [request.request_id for request in plan.preempted]))
        engine.apply(under_way, now)
        under_way = plan
    assert seen == [({0: 1, 1: 1, 2: 1}, [3]), ({0: 1}, [2]), ({2: 1}, [])]


def test_without_a_prefix_cache_who_is_preempted_finds_nothing() -> None:
    settings = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=256, block_size=4)
    engine = Scheduler(settings, KVBlockManager(6, 4, enable_prefix_caching=False))
    engine.add(Request(0, 0, 6, 10))
    engine.add(Request(1, 1, 6, 10))
    assert [turn(engine, now) for now in range(1, 12)][-1] == {1: 13}


def test_static_batch_keeps_its_slots_until_all_are_done() -> None:
    engine = scheduler(batching="static", max_num_seqs=2, max_model_len=20)
    for i, outputs in enumerate((1, 3, 1)):
        engine.add(Request(i, i, 4, outputs))
    assert [turn(engine, now) for now in range(2, 6)] == [{0: 4, 1: 4}, {1: 1}, {1: 1}, {2: 4}]


def test_dynamic_batch_starts_full_or_after_its_timeout() -> None:
    engine = scheduler(batching="dynamic", max_num_seqs=2, max_model_len=20, batch_timeout=10)
    engine.add(Request(0, 5, 4, 1))
    assert not engine.plan(5)
    assert engine.next_wakeup(5) == 15
    assert turn(engine, 15) == {0: 4}
    engine.add(Request(1, 20, 4, 1))
    engine.add(Request(2, 21, 4, 1))
    assert turn(engine, 21) == {1: 4, 2: 4}


def test_iteration_level_batching_reserves_the_longest_sequence() -> None:
    """Orca: 10 blocks hold two requests of max_model_len 20 (5 blocks each), however short they are."""
    engine = scheduler(num_blocks=10, batching="iteration", max_model_len=20)
    for i in range(3):
        engine.add(Request(i, 0, 4, 2))
    assert turn(engine, 0) == {0: 4, 1: 4}
    assert engine.blocks.num_free == 0


def test_a_known_prefix_is_not_computed_again_and_its_last_token_always_is() -> None:
    engine = scheduler()
    hashes = ("a", "b", "c")
    engine.add(Request(0, 0, 12, 2, hashes))
    assert turn(engine, 0) == {0: 12}
    engine.add(Request(1, 1, 12, 2, hashes))
    engine.add(Request(2, 1, 14, 2, hashes))
    # 12 tokens hit two of three blocks (one token must remain to compute), 14 tokens hit all three.
    assert turn(engine, 1) == {0: 1, 1: 4, 2: 2}


@pytest.mark.parametrize(
    ("config", "request_", "words"),
    [
        ({}, Request(7, 0, 300, 1), "above max_model_len=256"),
        ({"num_blocks": 3}, Request(7, 0, 10, 10), "the pool has 3 blocks"),
        ({"enable_chunked_prefill": False}, Request(7, 0, 40, 2), "set enable_chunked_prefill"),
    ],
)
def test_a_request_that_could_never_run_is_refused_with_a_reason(
    config: dict[str, object], request_: Request, words: str
) -> None:
    with pytest.raises(WorkloadError, match=words):
        scheduler(**config).add(request_)  # type: ignore[arg-type]


def test_asynchronously_a_finished_request_holds_its_blocks_one_plan_longer() -> None:
    """Two blocks, both taken; the third request gets the first one's, which a plan made during step 0 cannot know."""
    expected = {False: [{0: 4, 1: 2}, {1: 1, 2: 4}], True: [{0: 4, 1: 2}, {1: 1}, {2: 4}]}
    for is_async, steps in expected.items():
        loop = ServeLoop(scheduler(num_blocks=2), is_async)
        for number, (prompt, outputs) in enumerate(((4, 1), (2, 2), (4, 1))):
            loop.add(Request(number, number, prompt, outputs))
        seen = []
        while plan := loop.start_step(len(seen)):
            seen.append(grants(plan))
            loop.finish_step(plan, len(seen) - 1, len(seen))
        assert seen == steps


def test_exclusive_prefill_lets_decodes_wait_while_prompts_are_computed() -> None:
    """SGLang: a step is all prompts or all decodes, prompts first, in chunks of the budget."""
    engine = scheduler(prefill_exclusive=True)
    engine.add(Request(0, 0, 10, 4))
    assert turn(engine, 0) == {0: 10}
    assert turn(engine, 1) == {0: 1}
    engine.add(Request(1, 1, 30, 2))
    assert [turn(engine, now) for now in range(2, 6)] == [{1: 16}, {1: 14}, {0: 1, 1: 1}, {0: 1}]


def test_reserving_the_answer_admits_fewer_and_never_preempts() -> None:
    """TRT-LLM's guaranteed no-evict: 6 + 10 - 1 tokens take 4 blocks of the 4, so the second request waits."""
    engine = scheduler(num_blocks=4, reserves_output=True)
    engine.add(Request(0, 0, 6, 10))
    engine.add(Request(1, 0, 6, 10))
    assert turn(engine, 0) == {0: 6}
    for now in range(1, 10):
        assert turn(engine, now) == {0: 1}
    assert turn(engine, 10) == {1: 6}
    assert engine.num_preemptions == 0


def test_arrivals_are_polled_every_so_many_decodes_and_after_prompts() -> None:
    engine = scheduler(poll_every=4)
    engine.add(Request(0, 0, 4, 20))
    assert turn(engine, 0) == {0: 4}
    assert turn(engine, 1) == {0: 1}  # looked, since prompts were computed, and found nothing
    engine.add(Request(1, 1, 4, 2))
    assert [turn(engine, now) for now in range(2, 6)] == [{0: 1}, {0: 1}, {0: 1}, {0: 1, 1: 4}]
    engine.add(Request(2, 6, 4, 2))
    assert turn(engine, 6) == {0: 1, 1: 1, 2: 4}


def test_fingerprints_tell_plans_apart() -> None:
    first, second = scheduler(), scheduler()
    for engine, length in ((first, 10), (second, 11)):
        engine.add(Request(0, 0, length, 2))
    assert first.plan(0).fingerprint() != second.plan(0).fingerprint()


def test_without_a_cache_a_sequence_that_fills_the_budget_is_computed_and_a_longer_one_waits() -> None:
    """Each step computes all tokens of whom it advances: 9 of the prompt, then 10 with the first of the answer, which
    is all of the budget. A second request finds room for its 5 only once the first is done."""
    engine = scheduler(keeps_kv=False, max_num_batched_tokens=10)
    engine.add(Request(0, 0, 9, 2))
    assert turn(engine, 0) == {0: 9}
    engine.add(Request(1, 1, 5, 1))
    assert turn(engine, 1) == {0: 10}
    assert turn(engine, 2) == {1: 5}


def test_of_more_ready_requests_than_a_plan_takes_those_admitted_first_are_granted() -> None:
    """Two stages, two sequences a plan. Request 0 ends with its prompt, so 4 joins 1 in the third plan. When both plans
    under way are back, 2 and 3 have been ready for longer than 1, but 1 was admitted before them."""
    engine = scheduler(pipeline_parallel_size=2, max_plan_seqs=2, max_num_seqs=8)
    for number in range(5):
        engine.add(Request(number, 0, 4, 1 if number == 0 else 9))
    first, second = engine.plan(0), engine.plan(0)
    engine.apply(first, 1)
    third = engine.plan(1)
    assert [grants(plan) for plan in (first, second, third)] == [{0: 4, 1: 4}, {2: 4, 3: 4}, {1: 1, 4: 4}]
    engine.apply(second, 2)
    engine.apply(third, 3)
    assert [grants(engine.plan(3)), grants(engine.plan(3))] == [{1: 1, 2: 1}, {3: 1, 4: 1}]
