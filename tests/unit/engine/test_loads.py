"""KV from elsewhere: when it begins to come, what is given for it, and what is left when it does not."""

from engine_integrity import check_integrity

from perfmodel.engine import KVBlockManager, Request, Scheduler, SchedulerConfig

SIZE = 4


def scheduler(num_blocks: int, **changes: object) -> Scheduler:
    config = SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": SIZE, **changes})
    return Scheduler(config, KVBlockManager(num_blocks, SIZE))


def remote(number: int, prompt: int, output: int, known: int, priority: int = 0) -> Request:
    request = Request(number, number, prompt, output, priority=priority)
    request.num_transferred_tokens = known
    return request


def test_a_load_takes_blocks_and_neither_slot_nor_budget():
    engine = scheduler(8)
    request = remote(0, 10, 3, 10)
    engine.add(request)
    plan = engine.plan(0)
    assert (plan.loads, bool(plan)) == ((request,), False)
    assert (engine.blocks.num_used, engine.num_running, engine.num_waiting) == (3, 0, 0)
    check_integrity(engine)
    engine.finish_load(request)
    plan = engine.plan(1)
    assert [(r.request_id, r.num_computed_tokens) for r in plan.singles] == [(0, 10)]  # the last token again
    check_integrity(engine)


def test_what_does_not_come_is_computed():
    """Of ten tokens two blocks have come, so two are left; or none, and the blocks are given back first."""
    for num_come, chunk in ((8, (0, 8, 2)), (0, (0, 0, 10))):
        engine = scheduler(8)
        request = remote(0, 10, 3, 10)
        engine.add(request)
        engine.plan(0)
        engine.finish_load(request, num_come)
        assert [(g.request.request_id, *g[1:]) for g in engine.plan(1).chunks] == [chunk]
        check_integrity(engine)


def test_a_load_leaves_blocks_for_prompts_that_have_begun():
    """Nine blocks: a prompt of 24 has four after its second chunk of 8 and lacks two, so there is room for a load of
    three, not of four."""
    for known, begins in ((12, [1]), (16, [])):
        engine = scheduler(9, long_prefill_token_threshold=8, scheduler_reserve_full_isl=False)
        engine.add(Request(0, 0, 24, 2))
        engine.plan(0)
        engine.add(remote(1, known + 1, 2, known))
        assert [request.request_id for request in engine.plan(1).loads] == begins


def test_blocks_of_whoever_has_come_are_not_waited_for_by_someone_more_urgent():
    """Four blocks; two hold KV that has come for a prompt of 12, which lacks one. The more urgent prompt of 12 needs
    three: in vLLM both would wait for ever."""
    engine = scheduler(4, scheduling_policy="priority")
    first = remote(0, 12, 2, 8, priority=1)
    engine.add(first)
    engine.plan(0)
    engine.add(Request(1, 1, 12, 2, priority=0))
    engine.finish_load(first)
    assert [grant.request.request_id for grant in engine.plan(1).chunks] == [0]
    check_integrity(engine)


def test_whoever_is_in_a_plan_under_way_is_not_preempted_while_kv_may_come():
    """Two requests of 7 tokens in four blocks of 4: both need a third block for token 9. The second, whose token 8 is
    under way, keeps its blocks for a step; without KV of others it is preempted at once."""
    for defers, preempted in ((True, [[], [1]]), (False, [[1], []])):
        engine = scheduler(4, defers_frees=defers)
        for number in range(2):
            engine.add(Request(number, 0, 7, 4))
        plans = [engine.plan(0), engine.plan(1)]
        engine.apply(plans[0], 1)
        for step in (2, 3):
            plans.append(engine.plan(step))
            engine.apply(plans[step - 1], step)
        assert [[r.request_id for r in plan.preempted] for plan in plans[2:]] == preempted
