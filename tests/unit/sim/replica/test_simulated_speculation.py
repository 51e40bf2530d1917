"""Simulated speculation, end to end: what records add up to, and what drafts gain where."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfmodel import load_scenario, simulate
from perfmodel.cost import step_costs
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.report.runs import read_steps
from perfmodel.sim import RunResult
from perfmodel.sim.traffic.distributions import uniform_draws
from perfmodel.sim.traffic.draft_lengths import draft_lengths, mean_context
from perfmodel.specs import Scenario

EAGLE = "{method: eagle, num_speculative_tokens: 4, acceptance: {rate: 0.7}}"


def scenario(speculation: str | None, users: int = 1, outputs: int = 400, *more: str) -> Scenario:
    lengths = "{{distribution: fixed, value: {}}}"
    return load_scenario(
        "llama-3.1-8b-a100",
        [
            f"traffic.arrivals={{process: closed_loop, concurrency: {users}}}",
            "engine.max_model_len=4096",  # tiny-moe, which some change to, has no more positions
            f"traffic.num_requests={2 * users}",
            f"traffic.input_tokens={lengths.format(100)}",
            f"traffic.output_tokens={lengths.format(outputs)}",
            f"engine.speculative_config={speculation or 'null'}",
            *more,
        ],
    )


def run(*arguments: Any, **keywords: Any) -> RunResult:
    return simulate(scenario(*arguments), **keywords)


@pytest.mark.parametrize("is_ahead", ["true", "false"])
def test_what_steps_bring_is_what_requests_have(is_ahead: str, tmp_path: Path) -> None:
    """Ahead, a step may verify drafts of a request that has just ended: one more step of each request at most."""
    result = run(EAGLE, 12, 400, f"engine.async_scheduling={is_ahead}", out=tmp_path)
    steps, summary = read_steps(tmp_path / "steps.csv"), result.summary
    assert steps.num_draft_tokens.sum() == summary["num_draft_tokens"]
    assert summary["acceptance_rate"] == pytest.approx(steps.num_accepted_tokens.sum() / steps.num_draft_tokens.sum())
    drafts, right = steps.num_drafts.sum(), steps.num_accepted_tokens.sum()
    assert summary["mean_acceptance_length"] == pytest.approx(1 + right / drafts)
    first_tokens = 24
    assert steps.num_decodes.sum() + right + first_tokens == summary["total_output_tokens"] == 24 * 400
    verified = steps.num_decodes + steps.num_draft_tokens
    wasted = (steps.num_tokens - verified)[steps.num_chunks == 0]
    assert (wasted % (1 + 4) == 0).all()
    assert 0 <= wasted.sum() <= 24 * (1 + 4)
    assert (wasted.sum() > 0) == (is_ahead == "true")


def test_without_speculation_nothing_is_drafted() -> None:
    summary = run(None).summary
    assert (summary["acceptance_rate"], summary["mean_acceptance_length"]) == (None, None)
    assert summary["num_draft_tokens"] == 0


def test_what_a_drafter_does_not_offer_is_not_verified() -> None:
    """N-gram lookup that finds something in four of ten steps, right in three: as many tokens a step, in less time. An
    offer in every step is what there was without the field."""
    lookup = "{{method: ngram, num_speculative_tokens: 4, acceptance: {{rate: 0.3{}}}}}"
    plain, always, seldom = (
        run(lookup.format(offered), 32, 100).summary for offered in ("", ", offered: 1.0", ", offered: 0.4")
    )
    assert plain["mean_tpot_ms"] == always["mean_tpot_ms"]
    assert seldom["mean_acceptance_length"] == pytest.approx(always["mean_acceptance_length"], rel=0.02)
    assert seldom["mean_tpot_ms"] < 0.98 * always["mean_tpot_ms"]


def test_alone_a_request_gains_what_the_closed_form_says() -> None:
    """Tokens per round over the rounds' cost: within the noise of some thousand tokens, and the growing context."""
    with_drafts = scenario(EAGLE, 1, 3000, "engine.async_scheduling=false")
    config = with_drafts.engine.speculative_config
    assert config is not None
    costs = step_costs(with_drafts)
    assert costs.drafts is not None
    cost_model = costs.speculative_cost_model()
    context = mean_context(with_drafts)
    expected = (
        config.expected_tokens() * cost_model.expected_time(1, 0, context) / cost_model.expected_time(1, 4, context)
    )
    gained = run(None, 1, 3000, "engine.async_scheduling=false").summary["mean_tpot_ms"]
    gained /= simulate(with_drafts).summary["mean_tpot_ms"]
    assert gained == pytest.approx(expected, rel=0.03)


def test_a_step_is_one_gap_however_many_tokens_it_brings() -> None:
    summary = run(EAGLE).summary
    assert summary["mean_itl_ms"] / summary["mean_tpot_ms"] == pytest.approx(
        summary["mean_acceptance_length"], rel=0.02
    )


def test_acceptance_is_needed_to_simulate() -> None:
    with pytest.raises(SpecError, match="acceptance"):
        run("{method: eagle, num_speculative_tokens: 4}")


def test_large_batches_draft_nothing_where_so_said() -> None:
    steps = run(EAGLE.replace("acceptance", "disable_by_batch_size: 6, acceptance"), 16).steps
    assert steps is not None
    large = steps.num_decodes > 6
    assert large.any()
    assert not steps.num_draft_tokens[large].any()
    assert steps.num_draft_tokens[(steps.num_decodes > 0) & (steps.num_decodes < 6)].all()


@pytest.mark.parametrize("rate", [0.4, 0.85])
def test_drafts_get_shorter_with_the_batch_and_longer_with_acceptance(rate: float) -> None:
    adaptive = scenario(
        f"{{method: eagle, num_speculative_tokens: 8, adaptive: true, acceptance: {{rate: {rate}}}}}", 8
    )
    costs, config = step_costs(adaptive), adaptive.engine.speculative_config
    assert config is not None
    assert costs.drafts is not None
    table = draft_lengths(adaptive, config, costs.speculative_cost_model())
    by_acceptance = np.array(table)
    assert by_acceptance.shape[1] == adaptive.engine.max_num_seqs
    assert (np.diff(by_acceptance[:, 0]) >= 0).all()
    assert (by_acceptance[:, 0] >= by_acceptance[:, -1]).all()
    assert by_acceptance[-1, 0] > by_acceptance[0, 0]


@pytest.mark.parametrize("users", [1, 64])
def test_adaptive_drafts_keep_up_with_the_best_fixed_ones(users: int) -> None:
    config = "{{method: eagle, num_speculative_tokens: {}, adaptive: {}, acceptance: {{rate: 0.7}}}}"
    fixed = [run(config.format(k, "false"), users).summary["output_throughput"] for k in (1, 2, 4, 6)]
    fixed.append(run(None, users, 400, "engine.async_scheduling=false").summary["output_throughput"])
    adaptive = run(config.format(6, "true"), users).summary["output_throughput"]
    assert adaptive > 0.96 * max(fixed)


def test_ranks_that_share_experts_draft_side_by_side() -> None:
    more = ["model=tiny-moe", "engine.data_parallel_size=2", "engine.enable_expert_parallel=true"]
    summary = run("{method: ngram, num_speculative_tokens: 3, acceptance: {rate: 0.5}}", 6, 50, *more).summary
    assert summary["total_output_tokens"] == 12 * 50
    assert summary["mean_acceptance_length"] > 1.5


def test_preempted_requests_end_with_all_their_tokens() -> None:
    blocks = "engine.num_gpu_blocks_override=120"
    summary = run(EAGLE, 8, 400, blocks).summary
    assert summary["preemptions"]
    assert summary["total_output_tokens"] == 16 * 400


@pytest.mark.parametrize("batching", ["none", "static", "iteration"])
def test_other_disciplines_speculate_too(batching: str) -> None:
    summary = run(EAGLE, 4, 100, f"engine.batching={batching}").summary
    assert summary["total_output_tokens"] == 8 * 100
    assert summary["mean_acceptance_length"] > 2


def test_pools_that_exchange_kv_say_no() -> None:
    pools = "cluster.pools=[{role: prefill, replicas: 1}, {role: decode, replicas: 1}]"
    with pytest.raises(PerfmodelError, match="drafter's KV"):
        run(EAGLE, 2, 10, pools)


def test_draws_are_uniform_and_each_request_has_its_own() -> None:
    draws = uniform_draws(3, 17, 100_000)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert draws.mean() == pytest.approx(0.5, abs=0.005)
    assert np.corrcoef(draws[1:], draws[:-1])[0, 1] == pytest.approx(0, abs=0.01)
    assert np.corrcoef(draws, uniform_draws(3, 18, 100_000))[0, 1] == pytest.approx(0, abs=0.01)
    assert (uniform_draws(3, 17, 50) == draws[:50]).all()
    assert (uniform_draws(4, 17, 50) != draws[:50]).all()
