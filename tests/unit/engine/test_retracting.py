"""SGLang's retraction by hand: who is sent back, and how much running requests are expected to need."""

import pytest
from engine_integrity import check_integrity

from perfmodel.engine import Estimates, RadixKVBlocks, Request, SchedulerConfig, scheduler_for
from perfmodel.engine.estimating import EstimatingScheduler

SIZE = 4
_RULES = {"first_ratio": 0.1, "least_ratio": 0.1, "ends_early": True}


def scheduler(num_blocks: int, **rules: object) -> EstimatingScheduler:
    """One that expects few tokens of those that run, so that blocks run out."""
    estimates = Estimates(**_RULES | rules)  # type: ignore[arg-type]
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=64,
        block_size=SIZE,
        estimates=estimates,
        prefill_exclusive=True,
    )
    engine = scheduler_for(config, RadixKVBlocks(num_blocks, SIZE, enable_prefix_caching=False))
    assert isinstance(engine, EstimatingScheduler)
    return engine


def run_until_retraction(engine: EstimatingScheduler, now: int = 0) -> list[int]:
    """Steps until one retracts requests; their numbers."""
    while engine.has_requests:
        plan = engine.plan(now)
        if plan.preempted:
            return [request.request_id for request in plan.preempted]
        engine.apply(plan, now := now + 1)
        check_integrity(engine)
    return []


@pytest.mark.parametrize("prompts", [(4, 8, 12), (12, 8, 4), (4, 12, 8)])
def test_of_equal_answers_the_longest_prompt_is_retracted(prompts: tuple[int, ...]) -> None:
    """Prompts of 1, 2 and 3 blocks, each with a block of its answer, fill 9 blocks; all need another at once."""
    engine = scheduler(9, spared_steps=0, most_output_tokens=1)
    for number, prompt in enumerate(prompts):
        engine.add(Request(number, 0, prompt, 20))
    assert run_until_retraction(engine) == [prompts.index(12)]


@pytest.mark.parametrize("prompt", [4, 8])
def test_the_shortest_answers_so_far_are_retracted_first_whatever_their_prompts(prompt: int) -> None:
    """Two requests of 8 prompt tokens are five tokens ahead of the third, which arrives then."""
    engine = scheduler(10, spared_steps=0, most_output_tokens=1)
    for number in range(2):
        engine.add(Request(number, 0, 8, 24))
    for now in range(5):
        engine.apply(engine.plan(now), now + 1)
    engine.add(Request(2, 5, prompt, 24))
    assert run_until_retraction(engine, 5) == [2]


def test_after_a_retraction_the_ratio_is_the_known_and_spared_tokens_over_the_longest_answers() -> None:
    """Three requests with a prompt of a block and 5 output tokens hold two of 6 blocks each, and the newest token
    needs a third. One is sent back; of those that stay 2 x 5 output tokens are known, 2 x 3 are spared, and the longest
    answers are 2 x 20."""
    engine = scheduler(6, spared_steps=3, most_output_tokens=1)
    for number in range(3):
        engine.add(Request(number, 0, 4, 20))
    assert len(run_until_retraction(engine)) == 1
    assert engine._decoding.ratio == pytest.approx((2 * 5 + 2 * 3) / (2 * 20 + 1))


def test_the_ratio_falls_evenly_to_the_least_in_as_many_steps_of_decodes() -> None:
    engine = scheduler(100, first_ratio=0.7, least_ratio=0.1, decay_steps=4)
    engine.add(Request(0, 0, 4, 20))
    ratios = []
    for now in range(7):
        engine.apply(engine.plan(now), now + 1)
        ratios.append(engine._decoding.ratio)
    assert ratios == pytest.approx([0.7, 0.55, 0.4, 0.25, 0.1, 0.1, 0.1])


@pytest.mark.parametrize(("ends_early", "most", "expected"), [(True, 4096, 0.1 * 17), (False, 4096, 17), (False, 9, 9)])
def test_a_request_is_expected_to_need_what_it_has_not_given(ends_early: bool, most: int, expected: float) -> None:
    """Of an answer of 20 tokens 3 are there."""
    engine = scheduler(100, ends_early=ends_early, most_output_tokens=most)
    request = Request(0, 0, 4, 20)
    engine.add(request)
    for now in range(3):
        engine.apply(engine.plan(now), now + 1)
    assert engine._decoding.num_expected(request) == pytest.approx(expected)
