"""llama-server's slots, by hand: which slot a request gets, what it computes there, and in which order."""

import pytest
from engine_integrity import check_integrity
from hypothesis import given, settings

from perfmodel.engine import KVBlockManager, Request, Scheduler, SchedulerConfig, ServeLoop, Slots, StepPlan
from perfmodel.sim.replica.serving import scheduler_config
from perfmodel.specs.scenario_file import load_scenario
from workloads import Case, serve_stepwise, slotted_cases

ALIKE = tuple(("shared", row) for row in range(64))


def engine(num_slots: int = 2, budget: int = 16, **slots: object) -> Scheduler:
    """Blocks of one token, so that what is reused is exact."""
    rules = Slots(**({"saves_prompts": False} | slots))  # type: ignore[arg-type]
    config = SchedulerConfig(num_slots, budget, 256, 1, reserves_output=True, slots=rules)
    return Scheduler(config, KVBlockManager(10_000, 1, False))


def request(number: int, prompt: int, output: int, shared: int = 0) -> Request:
    own = tuple(("own", number, row) for row in range(shared, prompt))
    return Request(number, number, prompt, output, ALIKE[:shared] + own)


def turn(engine: Scheduler, now: int = 0) -> dict[int, tuple[int, int]]:
    """Tokens computed before, and granted, to each request of one step."""
    plan = engine.plan(now)
    granted = {r.request_id: (engine.num_computed(r) - 1, 1) for r in plan.decodes}
    granted |= {g.request.request_id: (g.num_computed_tokens, g.num_new_tokens) for g in plan.chunks}
    engine.apply(plan, now + 1)
    check_integrity(engine)
    return granted


def serve(engine: Scheduler, *requests: Request) -> list[dict[int, tuple[int, int]]]:
    """All steps until `requests` are done."""
    for each in requests:
        engine.add(each)
    steps = []
    while engine.has_requests:
        steps.append(turn(engine))
    return steps


def test_slots_never_taken_are_given_from_the_last_and_prompts_go_in_the_order_of_slots() -> None:
    """So of a burst at a fresh server the last to come is computed first. Its decode goes before the other's prompt."""
    first, second = request(0, 20, 2), request(1, 20, 3)
    steps = serve(engine(), first, second)
    assert (first.admission, second.admission) == (1, 0)
    assert steps == [{1: (0, 16)}, {1: (16, 4), 0: (0, 12)}, {1: (20, 1), 0: (12, 8)}, {1: (21, 1), 0: (20, 1)}]


def test_a_new_prompt_in_an_earlier_slot_overtakes_one_that_is_under_way() -> None:
    loop = engine()
    loop.add(request(0, 40, 1))
    assert turn(loop) == {0: (0, 16)}
    loop.add(request(1, 30, 1))
    assert [turn(loop) for _ in range(3)] == [{1: (0, 16)}, {1: (16, 14), 0: (16, 2)}, {0: (18, 16)}]


def test_kv_is_reused_from_a_free_slot_and_not_from_one_that_runs() -> None:
    """Two requests with one prompt at once compute it twice; a third one computes its last token only."""
    loop = engine(budget=64)
    assert serve(loop, request(0, 20, 1, shared=20), request(1, 20, 1, shared=20)) == [{0: (0, 20), 1: (0, 20)}]
    assert serve(loop, request(2, 20, 1, shared=20)) == [{2: (19, 1)}]
    assert (loop.num_prefix_tokens_asked, loop.num_prefix_tokens_hit) == (60, 19)


def test_the_slot_that_holds_most_of_a_prompt_is_taken_if_that_is_enough_else_the_longest_free() -> None:
    loop = engine(num_slots=3, budget=512)
    serve(loop, request(0, 30, 1, shared=30))  # in slot 2
    serve(loop, request(1, 30, 1, shared=5))  # a sixth of it is there: slot 2 again, which keeps 5 of the first
    serve(loop, request(2, 30, 1))
    again, little = request(3, 40, 1, shared=6), request(4, 200, 1, shared=6)
    assert serve(loop, again) == [{3: (5, 35)}]
    assert again.admission == 2
    serve(loop, little)  # 5 of 200 are no tenth
    assert little.admission == 0  # never taken


def test_of_requests_called_by_slots_that_one_step_frees_the_last_called_comes_first() -> None:
    loop = engine(budget=512)
    requests = [request(number, 10, 2) for number in range(4)]
    steps = serve(loop, *requests)
    assert steps[2] == {2: (0, 10), 3: (0, 10)}
    assert [each.admission for each in requests] == [1, 0, 1, 0]


def test_a_saved_prompt_comes_back_where_a_quarter_of_it_is_wanted() -> None:
    """One slot. The first prompt is saved when another takes its slot. Of its 21 tokens (its answer's first is
    computed, too) a request that begins with 6 gets them back, and one that begins with 5 does not."""
    for shared, cached in ((6, 6), (5, 0)):
        loop = engine(num_slots=1, budget=512, saves_prompts=True)
        serve(loop, request(0, 20, 2, shared=20))
        serve(loop, request(1, 30, 1))
        assert serve(loop, request(2, 100, 1, shared=shared)) == [{2: (cached, 100 - cached)}]


@pytest.mark.parametrize(("num_kept", "cached"), [(3, 12), (2, 20), (1, 20)])
def test_a_prompt_is_saved_if_the_next_request_keeps_less_than_half_of_it(num_kept: int, cached: int) -> None:
    """One slot, blocks of 4 tokens; the next request keeps `num_kept` of 5 blocks. When the first prompt is sent
    again, all of it is cached if it was saved; otherwise only the kept blocks are."""
    config = SchedulerConfig(1, 512, 256, 4, reserves_output=True, slots=Slots(saves_prompts=True))
    loop = Scheduler(config, KVBlockManager(10_000, 4, False))
    first = tuple("abcde")
    serve(loop, Request(0, 0, 20, 1, first))
    serve(loop, Request(1, 1, 28, 1, (*first[:num_kept], *(("own", row) for row in range(num_kept, 7)))))
    assert serve(loop, Request(2, 2, 25, 1, (*first, "f"))) == [{2: (cached, 25 - cached)}]


def test_unified_slots_are_emptied_when_a_request_starts() -> None:
    """A slot keeps 4 tokens that a prompt of 25 begins with. Once it is emptied they come back only with a quarter of
    what was saved, which was 20 tokens."""
    for is_unified, shared, cached in ((False, 4, 4), (True, 4, 0), (True, 5, 5)):
        loop = engine(budget=512, saves_prompts=True, is_unified=is_unified)
        serve(loop, request(0, 20, 1, shared=20))
        serve(loop, request(1, 30, 1))
        assert serve(loop, request(2, 25, 1, shared=shared)) == [{2: (cached, 25 - cached)}]


def test_an_executed_run_computes_what_a_slot_would_keep() -> None:
    """Its blocks are new ones, without the slot's KV."""
    scenario = load_scenario("qwen3-30b-a3b-rtx-4090")
    simulated, executed = scheduler_config(scenario).slots, scheduler_config(scenario, record_positions=True).slots
    assert simulated is not None
    assert executed is not None
    assert (simulated.reuses, executed.reuses) == (True, False)


@given(slotted_cases())
@settings(max_examples=150, deadline=None)
def test_every_token_is_computed_once_or_was_in_the_slot_and_nobody_is_preempted(case: Case) -> None:
    granted: dict[int, int] = {}

    def after_step(loop: ServeLoop, plan: StepPlan) -> None:
        check_integrity(loop.scheduler)
        assert plan.num_tokens <= case.config.max_num_batched_tokens
        for each in plan.decodes:
            granted[each.request_id] = granted.get(each.request_id, 0) + 1
        for grant in plan.chunks:
            granted[grant.request.request_id] = granted.get(grant.request.request_id, 0) + grant.num_new_tokens

    for each in serve_stepwise(case, after_step).requests:
        once = each.num_prompt_tokens + each.max_output_tokens - 1
        assert granted[each.request_id] == once - each.num_cached_tokens
        assert each.num_preemptions == 0
