"""Draws against their definitions: shares of requests, tails and deviations of lengths, order of jobs."""

from math import exp

import numpy as np
import pytest

from perfmodel.sim.traffic.distributions import Shares, lognormal_parameters, prefix_plan, share_above
from perfmodel.sim.traffic.workload import Workload, think_time_of
from perfmodel.specs import Arrivals, Lengths, Prefix, load_scenario


@pytest.mark.parametrize("shares", [(0.2, 0.5, 0.3), (0.1, 0.2), (1.0,), (0.6, 0.4)])
def test_draws_match_the_shares_and_the_last_kind_has_the_rest(shares: tuple[float, ...]) -> None:
    kinds = Shares(shares, 5, "a test").of_all(np.arange(4000))
    for kind, share in enumerate((*shares, 1 - sum(shares))):
        assert np.mean(kinds == kind) == pytest.approx(share, abs=0.035)
    assert Shares(shares, 5, "a test").of(17) == kinds[17]


@pytest.mark.parametrize(("mean", "std"), [(100.0, 50.0), (100.0, 300.0), (7.0, 1.0)])
def test_a_lognormal_has_the_requested_deviation(mean: float, std: float) -> None:
    """Of exp(N(mu, s^2)): mean exp(mu + s^2/2), variance (exp(s^2) - 1) mean^2."""
    mu, sigma = lognormal_parameters(mean, None, std)
    assert exp(mu + sigma**2 / 2) == pytest.approx(mean)
    assert ((exp(sigma**2) - 1) ** 0.5) * mean == pytest.approx(std)


@pytest.mark.parametrize("limit", [50, 100, 400])
def test_the_tail_of_an_exponential_length(limit: int) -> None:
    assert share_above(Lengths(distribution="exponential", mean=100), limit) == pytest.approx(exp(-limit / 100))


def test_think_times_are_drawn_per_request() -> None:
    """No two of 6,000 request numbers have the same gamma draw."""
    times = {"think_time_s": 2.0, "think_time_stddev_s": 1.0}
    draw = think_time_of(Arrivals.model_validate({"process": "closed_loop", "concurrency": 2} | times), 3)
    draws = [draw(number) for number in range(6000)]
    assert len(set(draws)) == 6000
    assert np.mean(draws) / 1e12 == pytest.approx(2.0, rel=0.05)
    assert np.std(draws) / 1e12 == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("order", ["longest_prompt_first", "longest_answer_first"])
def test_a_sorted_job_begins_with_the_longest(order: str) -> None:
    arrivals = f"traffic.arrivals={{process: burst, order: {order}}}"
    requests = list(Workload(load_scenario("llama-3.1-8b-a100", (arrivals, "traffic.num_requests=50"))).requests())
    name = {"longest_prompt_first": "num_prompt_tokens", "longest_answer_first": "max_output_tokens"}[order]
    lengths = [getattr(request, name) for request in requests]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]


def test_prompts_of_a_group_share_the_blocks_of_its_prefix_only() -> None:
    """16 tokens per block, 64 shared: 4 blocks of a long prompt, 1 of a prompt of 30 tokens; a prompt above the limit
    has the blocks of the longest allowed one."""
    prefix = Prefix(num_groups=3, shared_tokens=64)
    plan = prefix_plan(prefix, iter([200, 30, 65, 64] * 50), np.random.default_rng(1), 16, longest=300)
    shared = [(length, content) for length, content in plan]
    assert [(length, len(content)) for length, content in shared] == [(200, 4), (30, 1), (65, 4), (64, 4)] * 50
    assert len({content for length, content in shared if length == 200}) == 3
    cut = prefix_plan(prefix, iter([200]), np.random.default_rng(1), 16, longest=40)
    assert [len(content) for _, content in cut] == [40 // 16]
