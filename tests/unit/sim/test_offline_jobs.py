"""Offline jobs: rounds of a full batch, even splits, tails, the order of submission."""

from math import ceil

import numpy as np
import pytest

from perfmodel.errors import SpecError
from perfmodel.sim import RunResult, simulate
from perfmodel.specs import load_scenario

EQUAL = (
    "traffic.input_tokens={distribution: fixed, value: 64}",
    "traffic.output_tokens={distribution: fixed, value: 200}",
    "engine.enable_prefix_caching=false",
    "cluster.replicas=1",
)


def job(num_requests: int, *settings: str, **options: bool) -> RunResult:
    overrides = [*EQUAL, f"traffic.num_requests={num_requests}", *settings]
    return simulate(load_scenario("summaries-8b-offline", overrides), **options)


@pytest.mark.parametrize("num_requests", [64, 70, 200])
def test_equal_requests_take_as_many_rounds_as_the_batch_does_not_hold(num_requests: int) -> None:
    """n requests over b places, all equal and admitted together: ceil(n / b) rounds of one round's time, of which the
    last may be shorter. Prompts of a round reach the scheduler within a few steps, an answer is 199 more."""
    batch = 32
    of_last, rounds = num_requests % batch or batch, ceil(num_requests / batch)
    round_s, last_s = (job(n, f"engine.max_num_seqs={batch}").summary["duration"] for n in (batch, of_last))
    result = job(num_requests, f"engine.max_num_seqs={batch}")
    assert result.summary["duration"] == pytest.approx((rounds - 1) * round_s + last_s, rel=0.03)
    assert result.summary["num_steps"] == pytest.approx(200 * rounds, abs=4 * rounds)  # one more to hand over places
    assert result.summary["tail_share"] == pytest.approx(last_s / ((rounds - 1) * round_s + last_s), rel=0.03)


@pytest.mark.parametrize("router", ["round_robin", "least_outstanding"])
def test_a_fleet_does_its_even_share(router: str) -> None:
    """R replicas do n requests in the time of one with n / R, for R times the device hours."""
    fleet = job(120, "engine.max_num_seqs=16", "cluster.replicas=4", f"cluster.router={router}").summary
    alone = job(30, "engine.max_num_seqs=16").summary
    assert fleet["duration"] == pytest.approx(alone["duration"], rel=1e-9)
    assert fleet["usd_total"] == pytest.approx(4 * alone["usd_total"], rel=1e-9)
    assert fleet["output_throughput_per_gpu"] == pytest.approx(alone["output_throughput"], rel=1e-9)
    assert fleet["tail_share"] == pytest.approx(alone["tail_share"], rel=1e-9)


LONG_TAIL = (
    "cluster.replicas=1",
    "traffic.num_requests=1500",
    "engine.max_num_seqs=128",
    "traffic.output_tokens={distribution: lognormal, mean: 200, std: 400, max: 5000}",
)


def test_the_longest_answers_first_leave_the_shortest_tail() -> None:
    """As on parallel machines (Graham 1969): the same requests, whose last ones are short."""
    orders = ("given", "longest_prompt_first", "longest_answer_first")
    found = {}
    for order in orders:
        scenario = load_scenario("summaries-8b-offline", [*LONG_TAIL, f"traffic.arrivals.order={order}"])
        found[order] = simulate(scenario)
    for result in found.values():
        assert result.summary["total_output_tokens"] == found["given"].summary["total_output_tokens"]
        assert result.summary["total_input_tokens"] == found["given"].summary["total_input_tokens"]
    given, by_prompt, by_answer = (found[order].summary for order in orders)
    assert by_answer["duration"] < 0.97 * given["duration"]
    assert by_answer["tail_s"] < 0.7 * min(given["tail_s"], by_prompt["tail_s"])
    requests = found["longest_answer_first"].requests
    assert requests is not None
    by_number = requests.num_output_tokens[np.argsort(requests.request_id)]
    assert (np.diff(by_number) <= 0).all()


def test_the_tail_begins_when_the_last_request_is_let_in() -> None:
    result = simulate(load_scenario("summaries-8b-offline", LONG_TAIL), keep_steps=True)
    steps = result.steps
    assert steps is not None
    waiting = steps.start_s[steps.num_waiting > 0].max()
    assert result.summary["duration"] - result.summary["tail_s"] == pytest.approx(waiting, abs=0.1)


def test_the_time_of_the_job_has_an_interval() -> None:
    result = job(64, intervals=True)
    low, high = result.summary["interval"]["duration"]
    assert low <= result.summary["duration"] <= high
    assert 1.02 < high / low < 3


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(SpecError, match="use burst"):
        load_scenario("llama-3.1-8b-a100", ["traffic.arrivals.order=longest_prompt_first"])
    with pytest.raises(SpecError, match="all come at its beginning"):
        load_scenario("summaries-8b-offline", ["traffic.num_requests=null", "traffic.duration_s=60"])
