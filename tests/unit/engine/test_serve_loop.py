"""The serve loop by hand: what is planned ahead, how long a leap is, what a step's record counts."""

import pytest

from perfmodel.engine import KVBlockManager, Request, Scheduler, SchedulerConfig, ServeLoop, Speculation


def loop(is_async: bool, **changes: object) -> ServeLoop:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "block_size": 4} | changes
    return ServeLoop(Scheduler(SchedulerConfig(**settings), KVBlockManager(100, 4)), is_async)  # type: ignore[arg-type]


@pytest.mark.parametrize(("speculation", "is_ahead"), [(None, True), (Speculation((0, 1)), False)])
def test_no_step_is_planned_while_drafts_are_verified(speculation: Speculation | None, is_ahead: bool) -> None:
    """A request that arrives while a step runs is in the step after the next where that one is planned already, and in
    the next where it is not."""
    engine = loop(True, speculation=speculation)
    engine.add(Request(0, 0, 4, 20))
    steps = []
    for now in range(4):
        plan = engine.start_step(now)
        assert plan is not None
        if now == 1:
            engine.add(Request(1, now, 6, 20))
        steps.append([grant.request.request_id for grant in plan.chunks])
        engine.finish_step(plan, now, now + 1, [0] * len(plan.draft_depths) or None)
    assert steps == ([[0], [], [], [1]] if is_ahead else [[0], [], [1], []])


@pytest.mark.parametrize("is_async", [True, False])
def test_a_leap_ends_before_the_step_that_ends_a_request(is_async: bool) -> None:
    """Of 10 output tokens the prompt brings the first, and the 9 that follow come one a step: 8 steps are equal."""
    engine = loop(is_async)
    engine.add(Request(0, 0, 4, 10))
    plan = engine.start_step(0)
    assert plan is not None
    engine.finish_step(plan, 0, 1)
    plan = engine.start_step(1)
    assert plan is not None
    assert plan.is_plain
    assert engine.max_leap(plan) == 8


def test_a_record_counts_requests_tokens_and_blocks_of_its_step() -> None:
    """Three slots, of five requests: two decode at 9 tokens of 3 blocks each, one computes 20 of its prompt."""
    engine = loop(False, max_num_seqs=3, max_num_batched_tokens=22)
    for number in range(2):
        engine.add(Request(number, 0, 8, 30))
    plan = engine.start_step(0)
    assert plan is not None
    engine.finish_step(plan, 0, 1)
    for number in range(2, 5):
        engine.add(Request(number, 1, 40, 30))
    plan = engine.start_step(1)
    assert plan is not None
    _, record = engine.finish_step(plan, 1, 5)
    assert (record.num_tokens, record.num_decodes, record.decode_context, record.num_chunks) == (22, 2, 18, 1)
    assert (record.num_running, record.num_waiting, record.used_blocks) == (3, 2, 3 + 3 + 5)
    assert (record.start, record.end, record.first_duration, record.num_steps) == (1, 5, 4, 1)
