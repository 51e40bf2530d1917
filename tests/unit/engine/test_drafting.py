"""Drafting requests by hand: depths, judged and accepted tokens, and plans that are made before drafts are judged."""

import pytest
from engine_integrity import check_integrity

from perfmodel.engine import KVBlockManager, Request, Scheduler, SchedulerConfig, ServeLoop, Speculation, StepPlan

CHAIN = (0, 1, 2, 3, 4)


def scheduler(speculation: Speculation, **changes: object) -> Scheduler:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "block_size": 4} | changes
    config = SchedulerConfig(**settings, speculation=speculation)  # type: ignore[arg-type]
    return Scheduler(config, KVBlockManager(100, 4))


def test_a_request_drafts_one_token_less_than_it_lacks() -> None:
    """Of 6 output tokens the prompt brings one. Every draft is wrong, so it lacks 5, 4, 3, 2 and 1."""
    engine = scheduler(Speculation(CHAIN))
    engine.add(Request(0, 0, 4, 6))
    engine.apply(engine.plan(0), 1)
    depths = []
    for now in range(1, 6):
        plan = engine.plan(now)
        depths.append(plan.draft_depths)
        engine.apply(plan, now + 1, [0] * len(plan.draft_depths))
    assert depths == [[4], [3], [2], [1], []]
    assert not engine.has_requests


def test_judged_are_the_right_tokens_of_a_draft_and_the_first_wrong_one() -> None:
    """Three requests draft 4 deep: 1, 4 and 0 tokens are right. 2 + 4 + 1 tokens are judged, 5 of them right, and the
    estimate, which began as 500 judged tokens of which half were right, is 255 of 507."""
    engine = scheduler(Speculation(CHAIN, estimate=0.5))
    for number in range(3):
        engine.add(Request(number, 0, 4, 40))
    engine.apply(engine.plan(0), 1)
    plan = engine.plan(1)
    assert plan.draft_depths == [4, 4, 4]
    engine.apply(plan, 2, [1, 4, 0])
    assert plan.num_accepted_tokens == 5
    assert [request.num_output_tokens for request in plan.decodes] == [3, 6, 2]
    assert engine._running._estimate.value == pytest.approx(255 / 507)  # type: ignore[attr-defined]


def test_a_plan_made_ahead_computes_behind_the_drafts_that_were_right() -> None:
    """The context of a step is, of each request, its prompt and all its output tokens so far: the newest is computed
    in it. Three requests of prompts of 4, 9 and 13 tokens; in each step 0, 2 and 4 drafts are right."""
    loop = ServeLoop(scheduler(Speculation(CHAIN, past_end=True, is_ahead=True)))
    for number, prompt in enumerate((4, 9, 13)):
        loop.add(Request(number, 0, prompt, 30))
    num_right = (0, 2, 4)
    for now in range(6):
        plan = loop.start_step(now)
        assert plan is not None
        known = [request.num_prompt_tokens + request.num_output_tokens for request in plan.decodes]
        assert plan.decode_context == sum(known)
        loop.finish_step(plan, now, now + 1, [num_right[request.request_id] for request in plan.decodes] or None)
        check_integrity(loop.scheduler)


def test_all_that_was_computed_for_a_request_that_had_ended_is_wasted() -> None:
    """A request lacks 3 tokens and drafts 4 deep past its end. All are right, so it ends; the plan that was made ahead
    computes 1 + 4 tokens for it in vain, and as many for the other."""
    loop = ServeLoop(scheduler(Speculation(CHAIN, past_end=True, is_ahead=True)))
    loop.add(Request(0, 0, 4, 4))
    loop.add(Request(1, 0, 4, 40))
    plans: list[StepPlan] = []
    for now in range(3):
        plan = loop.start_step(now)
        assert plan is not None
        plans.append(plan)
        loop.finish_step(plan, now, now + 1, [4] * len(plan.decodes) or None)
    assert [[request.request_id for request in plan.decodes] for plan in plans] == [[], [0, 1], [1]]
    assert [plan.num_wasted_tokens for plan in plans] == [0, 0, 5]
    assert [plan.num_tokens for plan in plans] == [8, 10, 10]
