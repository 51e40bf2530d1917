"""The front end: what it adds shows in TTFT and end-to-end latency, never in the time between tokens."""

import numpy as np
import pytest

from perfmodel.cost import EngineProfile, HostFit, ServerFit
from perfmodel.sim import RunResult, simulate
from perfmodel.specs import load_scenario


def run(server: ServerFit, *overrides: str, host: HostFit | None = None) -> RunResult:
    settings = ["traffic.num_requests=50", "traffic.arrivals={process: constant, rate: 0.05}", *overrides]
    profile = EngineProfile(engine="test", server=server, host=host or HostFit())
    return simulate(load_scenario("llama-3.1-8b-a100", settings), profile=profile)


def test_a_lone_request_pays_the_way_in_and_the_way_out_once() -> None:
    plain = run(ServerFit())
    served = run(ServerFit(in_s=5e-3, in_per_prompt_token_s=1e-6, out_s=1e-3, out_per_sequence_s=6e-5))
    assert plain.requests is not None
    assert served.requests is not None
    expected = 5e-3 + 1e-6 * plain.requests.num_prompt_tokens + 1e-3 + 6e-5
    np.testing.assert_allclose(served.requests.ttft_s - plain.requests.ttft_s, expected, rtol=1e-9)
    np.testing.assert_allclose(served.requests.e2el_s - plain.requests.e2el_s, expected, rtol=1e-9)
    np.testing.assert_allclose(served.requests.tpot_s, plain.requests.tpot_s, rtol=1e-9)


def test_prompts_are_tokenised_one_after_another() -> None:
    """50 prompts of 1,000 tokens at once at 10 us a token: one reaches the engine every 10 ms, the last after 500 ms.

    A step has room for all prompts, so that only tokenisation delays them.
    """
    prompts = ("traffic.arrivals={process: burst}", "traffic.input_tokens={distribution: fixed, value: 1000}")
    room = ("engine.max_num_batched_tokens=65536", "engine.max_num_seqs=64")
    requests = run(ServerFit(in_per_prompt_token_s=1e-5), *prompts, *room).requests
    assert requests is not None
    scheduled_s = np.sort(requests.first_scheduled_s)
    assert scheduled_s[0] == pytest.approx(0.01)
    assert (scheduled_s >= 0.01 * np.arange(1, 51) - 1e-9).all()
    at_once = run(ServerFit(), *prompts, *room).requests
    assert at_once is not None
    assert at_once.first_scheduled_s.max() == 0


def test_a_closed_loop_waits_for_the_answer_to_arrive() -> None:
    loop = "traffic.arrivals={process: closed_loop, concurrency: 1}"
    requests = run(ServerFit(out_s=10e-3), loop).requests
    assert requests is not None
    np.testing.assert_allclose(requests.arrival_s[1:], requests.finished_s[:-1], atol=1e-11)


def test_host_time_that_shows_is_added_to_every_step() -> None:
    plain, slow = run(ServerFit()), run(ServerFit(), host=HostFit(serial_step_s=1e-3))
    assert plain.requests is not None
    assert slow.requests is not None
    np.testing.assert_allclose(slow.requests.tpot_s - plain.requests.tpot_s, 1e-3, rtol=1e-6)
