"""Laws of speculation, over all policies, disciplines and shapes of drafts: tokens are conserved, limits hold, all end;
what is gained is what the closed forms say."""

from dataclasses import replace
from itertools import pairwise

import pytest
from engine_integrity import check_integrity
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.engine import DISCIPLINES, KVBlockManager, Request, Scheduler, SchedulerConfig, ServeLoop, Speculation
from perfmodel.engine import StepPlan as Plan
from perfmodel.sim.replica.acceptance import SimulatedAcceptance
from perfmodel.specs.engine.speculation import SpeculativeConfig
from workloads import BLOCK_SIZE, Case, Served, cases, serve_stepwise, speculating_cases


@given(speculating_cases())
@settings(max_examples=200, deadline=None)
def test_every_step_conserves_tokens_and_blocks_and_every_request_ends(case: Case) -> None:
    kept: dict[int, int] = {}
    outputs: dict[int, int] = {}

    def after_step(loop: ServeLoop, plan: Plan) -> None:
        check_integrity(loop.scheduler)
        assert len(plan.draft_depths) in (0, len(plan.decodes))
        for request in plan.decodes:
            gained = request.num_output_tokens - outputs.get(request.request_id, 0)
            assert gained >= 1
            kept[request.request_id] = kept.get(request.request_id, 0) + gained
        for grant in plan.chunks:
            kept[grant.request.request_id] = kept.get(grant.request.request_id, 0) + grant.num_new_tokens
        for request in (*plan.decodes, *plan.samples):
            outputs[request.request_id] = request.num_output_tokens

    served = serve_stepwise(case, after_step)
    assert sorted(request.request_id for request in served.requests) == list(range(len(case.rows)))
    for request in served.requests:
        assert request.num_output_tokens == request.max_output_tokens
        # What was drafted in vain aside, every token but the last is computed once, as without speculation.
        once = request.num_prompt_tokens + request.max_output_tokens - 1 - request.num_cached_tokens
        assert kept[request.request_id] == once or (request.num_preemptions and kept[request.request_id] > once)


@given(speculating_cases())
@settings(max_examples=100, deadline=None)
def test_drafts_stay_within_budget_blocks_and_what_each_request_lacks(case: Case) -> None:
    config, speculation = case.config, case.config.speculation
    assert speculation is not None

    def after_step(loop: ServeLoop, plan: Plan) -> None:
        if DISCIPLINES[config.batching].uses_budget:
            assert plan.num_tokens <= config.max_num_batched_tokens
        assert plan.num_draft_tokens == sum(speculation.nodes[depth] for depth in plan.draft_depths)
        assert plan.num_accepted_tokens <= sum(plan.draft_depths)
        limit = speculation.disable_by_batch_size
        if limit is not None and len(plan.decodes) - len(plan.singles) > limit:
            assert not plan.num_draft_tokens
        for request, depth in zip(plan.decodes, plan.draft_depths, strict=False):
            assert depth < request.max_output_tokens
            if request.block_ids and case.rolling_span is None:  # not yet done
                held = len(request.block_ids) * BLOCK_SIZE
                assert held >= request.num_computed_tokens - depth + speculation.nodes[depth]

    serve_stepwise(case, after_step)


@given(cases())
@settings(max_examples=100, deadline=None)
def test_drafts_of_no_length_change_nothing(case: Case) -> None:
    plain = replace(case, is_async=False)
    off = replace(plain, config=replace(case.config, speculation=Speculation((0, 1), depths=((0,),))))
    one, other = serve_stepwise(plain), serve_stepwise(off)
    assert times_of(one) == times_of(other)
    assert (len(one.fingerprints), one.end) == (len(other.fingerprints), other.end)


def times_of(served: Served) -> list[tuple[int | None, ...]]:
    requests = sorted(served.requests, key=lambda request: request.request_id)
    return [(r.first_scheduled_at, r.first_token_at, r.finished_at, r.num_preemptions) for r in requests]


# ---------------------------------------------------------------- what is gained


def configured(**fields: object) -> SpeculativeConfig:
    return SpeculativeConfig.model_validate({"method": "eagle"} | fields)


def run(config: SpeculativeConfig, outputs: list[int], seed: int = 0, step: int = 10) -> tuple[list[Request], int, int]:
    """Serve requests of one-token prompts side by side, each step taking `step`; also the steps and their drafts."""
    settings_ = SchedulerConfig(
        len(outputs), 10**6, 10**7, 16, speculation=Speculation(config.nodes_by_depth, pipelined=config.pipelined)
    )
    loop = ServeLoop(Scheduler(settings_, KVBlockManager(10**7, 16)))
    acceptance, now, num_steps, num_drafts = SimulatedAcceptance(config, seed), 0, 0, 0
    for i, count in enumerate(outputs):
        loop.add(Request(i, 0, 1, count))
    finished: list[Request] = []
    while (plan := loop.start_step(now)) is not None:
        ended, record = loop.finish_step(plan, now, now + step, acceptance.judge(plan))
        finished += ended
        now, num_steps, num_drafts = now + step, num_steps + 1, num_drafts + record.num_drafts
    return finished, num_steps, num_drafts


SHAPES = [
    {"num_speculative_tokens": 1, "acceptance": {"rate": 0.8}},
    {"num_speculative_tokens": 4, "acceptance": {"rate": 0.7}},
    {"num_speculative_tokens": 8, "acceptance": {"rate": 0.95}},
    {"num_speculative_tokens": 5, "acceptance": {"per_position": [0.9, 0.7, 0.5]}},
    {"tree": [3, 2, 1], "acceptance": {"per_rank": [[0.5, 0.2, 0.1], [0.5, 0.2], [0.6]]}},
]


@pytest.mark.parametrize("fields", SHAPES)
def test_tokens_per_step_are_those_of_the_closed_form(fields: dict[str, object]) -> None:
    config = configured(**fields)
    _, num_steps, _ = run(config, [60_000])
    assert 60_000 / num_steps == pytest.approx(config.expected_tokens(), rel=0.015)


@pytest.mark.parametrize("fields", SHAPES[:3])
def test_a_request_takes_as_long_as_its_steps(fields: dict[str, object]) -> None:
    (request,), num_steps, _ = run(configured(**fields), [500], step=7)
    assert request.first_token_at == 7
    assert request.finished_at == 7 * num_steps


@given(st.floats(0, 1), st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_deeper_drafts_never_take_more_steps(rate: float, outputs: list[int], seed: int) -> None:
    """Whether a token's draft is right is drawn for the token, whatever the draft length."""
    ends = []
    for depth in (1, 2, 3, 6):
        finished, _, _ = run(configured(num_speculative_tokens=depth, acceptance={"rate": rate}), outputs, seed)
        ends.append([r.finished_at for r in sorted(finished, key=lambda r: r.request_id)])
    for shallow, deep in pairwise(ends):
        assert all((b or 0) <= (a or 0) for a, b in zip(shallow, deep, strict=True))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(0, 10**6), st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_certain_drafts_bring_all_their_tokens_and_hopeless_ones_none(outputs: list[int], seed: int, k: int) -> None:
    for rate, gained in ((1.0, 1 + k), (0.0, 1)):
        finished, _, _ = run(configured(num_speculative_tokens=k, acceptance={"rate": rate}), outputs, seed, step=1)
        for request in finished:
            assert request.finished_at == 1 + -(-(request.max_output_tokens - 1) // gained)


def test_whoever_runs_beside_it_a_request_gets_the_same_tokens() -> None:
    config = configured(num_speculative_tokens=4, acceptance={"rate": 0.7})
    alone, _, _ = run(config, [300])
    beside, _, _ = run(config, [300, 40, 200, 7])
    assert alone[0].finished_at == next(r.finished_at for r in beside if r.request_id == 0)


@pytest.mark.parametrize(("rate", "depth"), [(0.6, 3), (0.8, 4), (0.9, 6)])
def test_pipelined_rounds_roll_back_as_often_as_a_draft_is_wrong(rate: float, depth: int) -> None:
    """A sequence has a draft to verify with probability p = p a^(k+1) + (1 - p) a, and then gets what a chain gets."""
    chain = configured(num_speculative_tokens=depth, acceptance={"rate": rate})
    pipelined = chain.model_copy(update={"pipelined": True})
    _, num_steps, num_drafts = run(pipelined, [60_000])
    has_draft = rate / (1 + rate - rate ** (depth + 1))
    assert num_drafts / num_steps == pytest.approx(has_draft, rel=0.02)
    tokens = has_draft * chain.expected_tokens() + 1 - has_draft
    assert 60_000 / num_steps == pytest.approx(tokens, rel=0.015)
