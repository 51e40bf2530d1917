"""Laws of an engine that admits by estimates over a radix tree: all end, blocks are conserved, leaps change nothing."""

from engine_integrity import check_integrity
from hypothesis import given, settings
from hypothesis import strategies as st
from test_aborts import serve_with_aborts
from test_leaps import run

from perfmodel.engine import ServeLoop, StepPlan
from workloads import Case, estimated_cases, serve_stepwise


@given(estimated_cases())
@settings(max_examples=150, deadline=None)
def test_every_request_ends_and_blocks_are_conserved(case: Case) -> None:
    """Every token but the last sampled one is computed once, unless it was cached, dropped, or computed again."""
    granted: dict[int, int] = {}

    def after_step(loop: ServeLoop, plan: StepPlan) -> None:
        check_integrity(loop.scheduler)
        for request in plan.decodes:
            granted[request.request_id] = granted.get(request.request_id, 0) + 1
        for grant in plan.chunks:
            granted[grant.request.request_id] = granted.get(grant.request.request_id, 0) + grant.num_new_tokens

    served = serve_stepwise(case, after_step)
    assert sorted(r.request_id for r in served.requests) == list(range(len(case.rows)))
    for request in served.requests:
        assert request.num_output_tokens == request.max_output_tokens
        once = request.num_prompt_tokens + request.max_output_tokens - 1 - request.num_cached_tokens
        if request.num_preemptions == 0:
            assert granted[request.request_id] == once


@given(estimated_cases())
@settings(max_examples=100, deadline=None)
def test_prompts_take_no_more_than_the_budget_and_stand_alone_unless_mixed(case: Case) -> None:
    def after_step(loop: ServeLoop, plan: StepPlan) -> None:
        config = loop.scheduler.config
        prompts = plan.num_chunk_tokens + len(plan.singles)
        assert prompts <= config.max_num_batched_tokens
        if config.prefill_exclusive and (plan.chunks or plan.singles):
            assert len(plan.decodes) == len(plan.singles)
        assert len(plan.decodes) + len(plan.chunks) <= config.max_num_seqs

    serve_stepwise(case, after_step)


@given(estimated_cases(), st.sampled_from([None, None, 1, 3]))
@settings(max_examples=150, deadline=None)
def test_leaps_change_nothing(case: Case, concurrency: int | None) -> None:
    assert run(case, True, 1, concurrency)[:2] == run(case, False, 1, concurrency)[:2]


@given(estimated_cases(), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_whoever_gives_up_leaves_nothing_behind(case: Case, seed: int) -> None:
    done, gone, _ = serve_with_aborts(case, seed)
    assert sorted(r.request_id for r in [*done, *gone]) == list(range(len(case.rows)))
