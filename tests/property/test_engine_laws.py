"""Laws of the engine, over all policies and disciplines: tokens and blocks are conserved, limits hold, all end."""

from dataclasses import replace
from itertools import pairwise

import pytest
from engine_integrity import check_integrity
from hypothesis import given, settings

from perfmodel.engine import DISCIPLINES, Request, ServeLoop, StepPlan
from workloads import BLOCK_SIZE, Case, cases, serve_stepwise


@given(cases())
@settings(max_examples=150, deadline=None)
def test_every_step_conserves_tokens_and_blocks_and_every_request_ends(case: Case) -> None:
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
        # Every token but the last sampled one is computed once, unless it was cached or had to be computed again.
        once = request.num_prompt_tokens + request.max_output_tokens - 1
        if request.num_preemptions == 0:
            assert granted[request.request_id] == once - request.num_cached_tokens
        else:
            assert granted[request.request_id] >= once - request.num_cached_tokens
        assert_times_in_order(request)


def assert_times_in_order(request: Request) -> None:
    assert request.first_scheduled_at is not None
    assert request.first_token_at is not None
    assert request.finished_at is not None
    assert request.arrival <= request.first_scheduled_at < request.first_token_at <= request.finished_at


@given(cases())
@settings(max_examples=100, deadline=None)
def test_a_plan_stays_within_slots_budget_and_what_each_request_lacks(case: Case) -> None:
    config, discipline = case.config, DISCIPLINES[case.config.batching]

    def after_step(loop: ServeLoop, plan: StepPlan) -> None:
        ids = [r.request_id for r in plan.decodes] + [g.request.request_id for g in plan.chunks]
        assert len(set(ids)) == len(ids), "a request has two grants in one step"
        assert len(ids) <= min(config.max_num_seqs, discipline.max_batch or config.max_num_seqs)
        if discipline.uses_budget:
            assert plan.num_tokens <= config.max_num_batched_tokens
        assert plan.num_samples >= len(plan.decodes)
        assert plan.decode_context >= len(plan.decodes)
        for span, windowed in zip(config.spans, plan.decode_windowed, strict=True):
            assert windowed <= min(span * len(plan.decodes), plan.decode_context)

    serve_stepwise(case, after_step)


@given(cases())
@settings(max_examples=60, deadline=None)
def test_token_gaps_add_up_to_the_time_from_first_to_last_token(case: Case) -> None:
    """Over all requests: the recorded gaps of a step's length, and irregular gaps across skipped steps."""
    irregular: list[tuple[int, int]] = []

    def after_step(loop: ServeLoop, plan: StepPlan) -> None:
        irregular[:] = loop.scheduler.irregular_gaps

    served = serve_stepwise(case, after_step)
    gaps = sum((record.end - record.start) * record.num_gaps for record in served.records)
    gaps += sum(ticks * times for ticks, times in irregular)
    assert gaps == sum((r.finished_at or 0) - (r.first_token_at or 0) for r in served.requests)
    count = sum(record.num_gaps for record in served.records) + sum(times for _, times in irregular)
    assert count == sum(request.max_output_tokens - 1 for request in served.requests)


@given(cases())
@settings(max_examples=100, deadline=None)
def test_first_come_first_served_admits_in_order_of_arrival(case: Case) -> None:
    case = replace(case, config=replace(case.config, scheduling_policy="fcfs"))
    served = serve_stepwise(case)
    first = [r.first_scheduled_at for r in sorted(served.requests, key=lambda r: r.request_id)]
    assert first == sorted(first)  # type: ignore[type-var]


@given(cases())
@settings(max_examples=100, deadline=None)
def test_static_batches_do_not_mix(case: Case) -> None:
    case = replace(case, config=replace(case.config, batching="static"))
    served = serve_stepwise(case)
    by_start: dict[int, list[Request]] = {}
    for request in served.requests:
        assert request.first_scheduled_at is not None
        by_start.setdefault(request.first_scheduled_at, []).append(request)
    batches = sorted(by_start.items())
    for (_, batch), (next_start, _) in pairwise(batches):
        assert max(r.finished_at or 0 for r in batch) <= next_start


@given(cases())
@settings(max_examples=100, deadline=None)
def test_a_request_alone_runs_as_under_no_batching(case: Case) -> None:
    """With one request the disciplines differ in what they reserve, not in what they run (budget permitting)."""
    row = (0, *case.rows[0][1:])
    ends = set()
    for name in ("none", "static", "iteration"):
        alone = replace(case, rows=(row,), config=replace(case.config, batching=name))
        ends.add(serve_stepwise(alone).end)
    assert len(ends) == 1


@given(cases())
@settings(max_examples=100, deadline=None)
def test_prefix_cache_never_hits_more_than_was_asked_and_leaves_a_token_to_compute(case: Case) -> None:
    for request in serve_stepwise(replace(case, has_prefix_cache=True)).requests:
        assert request.num_cached_tokens % BLOCK_SIZE == 0
        assert request.num_cached_tokens < request.num_prompt_tokens


@pytest.mark.parametrize("name", sorted(DISCIPLINES))
def test_every_discipline_is_reachable_from_a_scenario(name: str) -> None:
    from perfmodel.specs.engine.spec import EngineSpec

    assert EngineSpec(batching=name).batching == name  # type: ignore[arg-type]
