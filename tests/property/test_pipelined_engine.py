"""Laws of an engine with several plans under way: nothing is lost, nothing computed twice, one stage is no pipeline."""

from dataclasses import replace

from engine_integrity import check_integrity
from hypothesis import example, given, settings

from perfmodel.engine import DISCIPLINES, SchedulerConfig, ServeLoop, Speculation, StepPlan
from workloads import (
    Case,
    Served,
    cases,
    pipelined_cases,
    serve_in_stages,
    serve_stepwise,
    speculating_cases,
    stages_of,
)


@given(pipelined_cases())
@settings(max_examples=100, deadline=None)
def test_every_request_ends_with_its_tokens_and_blocks_go_free(case: Case) -> None:
    granted: dict[int, int] = {}

    def after_step(loop: ServeLoop, plan: StepPlan) -> None:
        check_integrity(loop.scheduler)
        for request in plan.decodes:
            granted[request.request_id] = granted.get(request.request_id, 0) + 1
        for grant in plan.chunks:
            granted[grant.request.request_id] = granted.get(grant.request.request_id, 0) + grant.num_new_tokens

    served = serve_in_stages(case, after_step)
    assert sorted(request.request_id for request in served.requests) == list(range(len(case.rows)))
    for request in served.requests:
        assert request.num_output_tokens == request.max_output_tokens
        once = request.num_prompt_tokens + request.max_output_tokens - 1 - request.num_cached_tokens
        assert granted[request.request_id] == once or request.num_preemptions
        assert granted[request.request_id] >= once
        assert request.first_scheduled_at is not None
        assert request.first_token_at is not None
        assert request.finished_at is not None
        assert request.arrival <= request.first_scheduled_at < request.first_token_at <= request.finished_at


@given(pipelined_cases())
@settings(max_examples=100, deadline=None)
def test_nobody_has_two_tokens_under_way_and_limits_hold_for_each_plan(case: Case) -> None:
    config, discipline = case.config, DISCIPLINES[case.config.batching]
    loops: list[ServeLoop] = []

    def after_step(loop: ServeLoop, plan: StepPlan) -> None:
        loops.append(loop)
        for request in loop.scheduler._running.requests:
            assert request.num_promised_tokens - request.num_output_tokens <= 1 + (config.pipeline_parallel_size == 1)
        ids = [r.request_id for r in plan.decodes] + [g.request.request_id for g in plan.chunks]
        assert len(set(ids)) == len(ids)
        assert len(ids) <= min(config.max_num_seqs, discipline.max_batch or config.max_num_seqs)
        if config.max_plan_seqs and config.pipeline_parallel_size > 1:
            assert len(ids) <= config.max_plan_seqs
        if discipline.uses_budget:
            assert plan.num_tokens <= config.max_num_batched_tokens

    serve_in_stages(case, after_step)


@given(cases())
@settings(max_examples=100, deadline=None)
def test_one_stage_makes_the_plans_of_an_engine_without(case: Case) -> None:
    staged = serve_in_stages(case)
    plain = serve_stepwise(case, duration=lambda plan: stages_of(plan, 1)[0])
    assert staged.fingerprints == plain.fingerprints
    assert staged.end == plain.end


# Of a request that was preempted, a chunk leaves one token to recompute: granted like a decode in the plan after next,
# it ends a gap as long as the request was away, not one of a step.
_PREEMPTED_BEFORE_ITS_LAST_TOKEN = Case(
    SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=8,
        max_model_len=160,
        block_size=4,
        scheduler_reserve_full_isl=False,
        prefill_exclusive=True,
        pipeline_parallel_size=2,
    ),
    num_blocks=40,
    has_prefix_cache=False,
    is_async=False,
    rows=tuple(
        (0, prompt, output, (), 0)
        for prompt, output in [(13, 55), (39, 55), (36, 25), (1, 5), (1, 5), (1, 2), *[(1, 1)] * 11]
    ),
)

# Whoever drafts stands still while a prompt is computed.
_HELD_UP_BY_A_PROMPT = Case(
    SchedulerConfig(
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=160,
        block_size=4,
        scheduler_reserve_full_isl=False,
        prefill_exclusive=True,
        speculation=Speculation((0, 1)),
    ),
    num_blocks=40,
    has_prefix_cache=False,
    is_async=False,
    rows=((0, 1, 2, (), 0), (0, 1, 1, (), 0), (0, 1, 1, (), 0)),
)


def _with_stages(case: Case, num_stages: int) -> Case:
    return replace(case, config=replace(case.config, pipeline_parallel_size=num_stages))


@given(pipelined_cases())
@example(_PREEMPTED_BEFORE_ITS_LAST_TOKEN)
@settings(max_examples=100, deadline=None)
def test_gaps_between_tokens_are_counted_once_each_and_are_as_long_as_they_were(case: Case) -> None:
    """A plan's own time for those who follow up on it, others' by themselves: all gaps make up all decoding."""
    uneven: list[tuple[int, int]] = []
    served = serve_in_stages(replace(case, is_async=False), lambda loop, _: _collect(loop, uneven))
    _check_gaps(served, uneven)


@given(cases() | speculating_cases())
@example(_with_stages(_PREEMPTED_BEFORE_ITS_LAST_TOKEN, 1))
@example(_HELD_UP_BY_A_PROMPT)
@settings(max_examples=100, deadline=None)
def test_without_stages_gaps_are_counted_alike(case: Case) -> None:
    """Drafted tokens that are right come with the one that they follow, and end no gap of their own."""
    uneven: list[tuple[int, int]] = []
    served = serve_stepwise(case, lambda loop, _: _collect(loop, uneven))
    _check_gaps(served, uneven)


def _collect(loop: ServeLoop, uneven: list[tuple[int, int]]) -> None:
    uneven.extend(loop.scheduler.irregular_gaps)
    loop.scheduler.irregular_gaps.clear()


def _check_gaps(served: Served, uneven: list[tuple[int, int]]) -> None:
    gaps = [(record.end - record.start, record.num_gaps) for record in served.records] + uneven
    num_together = sum(record.num_accepted_tokens for record in served.records)
    num_later = sum(request.max_output_tokens - 1 for request in served.requests)
    assert sum(times for _, times in gaps) == num_later - num_together
    decoding = [(r.finished_at or 0) - (r.first_token_at or 0) for r in served.requests]
    assert sum(ticks * times for ticks, times in gaps) == sum(decoding)
