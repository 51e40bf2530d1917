"""Pauses of a closed loop: their law, that order does not matter, and that users stay in step as on a real server."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from perfmodel.errors import SpecError
from perfmodel.sim.clock import TICKS_PER_S
from perfmodel.sim.traffic.workload import no_think_time, think_time_of
from perfmodel.specs.scenario_file import load_scenario
from perfmodel.specs.traffic import Arrivals

ROOT = Path(__file__).resolve().parents[4]
RUNS = ROOT / "reports/measured/closed_loop_202611.runs.json"
_spec = importlib.util.spec_from_file_location("closed_loop", ROOT / "benchmarks/closed_loop.py")
assert _spec is not None
assert _spec.loader is not None
closed_loop = importlib.util.module_from_spec(_spec)
sys.modules["closed_loop"] = closed_loop
_spec.loader.exec_module(closed_loop)


def arrivals(mean_s: float, stddev_s: float = 0.0) -> Arrivals:
    return Arrivals(process="closed_loop", concurrency=4, think_time_s=mean_s, think_time_stddev_s=stddev_s)


def test_draws_have_their_mean_and_spread_and_are_never_negative() -> None:
    """Of 20,000 draws the mean is within 4 standard errors, 4 s / sqrt(n) = 0.028 s, of what was asked for."""
    draw = think_time_of(arrivals(2.0, 1.0), seed=7)
    seconds = np.array([draw(number) for number in range(20_000)]) / TICKS_PER_S
    assert seconds.min() > 0
    assert seconds.mean() == pytest.approx(2.0, abs=0.028)
    assert seconds.std() == pytest.approx(1.0, rel=0.03)


def test_a_draw_belongs_to_its_request_whatever_came_before() -> None:
    first, second = (think_time_of(arrivals(2.0, 1.0), seed=7) for _ in range(2))
    numbers = list(range(0, 200_000, 997))
    assert [first(number) for number in numbers] == [second(number) for number in numbers[::-1]][::-1]
    assert think_time_of(arrivals(2.0, 1.0), seed=8)(3) != first(3)


def test_without_spread_all_pauses_are_equal_and_without_any_there_is_none() -> None:
    assert {think_time_of(arrivals(0.25), seed=1)(number) for number in range(9)} == {TICKS_PER_S // 4}
    assert think_time_of(arrivals(0.0), seed=1) is no_think_time


def test_a_spread_of_nothing_is_refused() -> None:
    with pytest.raises(SpecError, match="think_time_stddev_s spreads a pause that is 0; give think_time_s"):
        load_scenario(
            "llama-3.1-8b-a100",
            [
                "traffic.arrivals={process: closed_loop, concurrency: 4, think_time_stddev_s: 1}",
                "traffic.num_requests=8",
            ],
        )


@pytest.mark.parametrize("concurrency", [2, 4])
def test_users_stay_in_step_as_on_a_real_server(concurrency: int) -> None:
    """vLLM on a CPU under equal requests: TTFT of all users is that of all their prompts together, round after round.

    Simulated users without think time are nearer to its distribution than users who pause as long as a prompt takes,
    some of whom find the server without other prompts.
    """
    data = json.loads(RUNS.read_text(encoding="utf-8"))
    assert away(data, str(concurrency), (0.0, 0.0)) < 0.12
    assert away(data, str(concurrency), (0.2, 0.2)) > 3 * away(data, str(concurrency), (0.0, 0.0))


def test_a_load_generators_turnaround_lets_one_of_four_users_be_served_alone() -> None:
    """`vllm bench serve`, round after round: 119, 393, 392, 392 ms."""
    data = json.loads(RUNS.read_text(encoding="utf-8"))
    with_turnaround = away(data, "4, vllm bench serve", closed_loop.THINK_TIMES["think time 0.25 +- 0.07 ms"])
    assert with_turnaround < 0.12
    assert with_turnaround < away(data, "4, vllm bench serve", (0.0, 0.0)) / 2


def away(data: dict, run: str, think: tuple[float, float]) -> float:
    """How far the simulated TTFT lies from that of a recorded run (`closed_loop.distance`)."""
    times, steps = np.array(data["runs"][run]), closed_loop.fit_steps(data, outside_s=0.005)
    ttft, e2el = closed_loop.simulated(data, steps, int(run[0]), think)
    return closed_loop.distance(times[:, 2] - times[:, 1], ttft * np.mean(times[:, 3] - times[:, 1]) / e2el.mean())
