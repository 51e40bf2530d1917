"""Overload from given arrivals and TTFTs: at offered rate a and served rate s, TTFT grows by a / s - 1 s per second."""

import numpy as np
import pytest

from perfmodel.sim.records.columns import RequestColumns
from perfmodel.sim.records.summary import overload
from perfmodel.specs import load_scenario


def columns(arrivals, ttft) -> RequestColumns:
    """Requests in a random order, which must not matter."""
    order = np.random.default_rng(3).permutation(len(arrivals))
    arrivals, zeros = np.asarray(arrivals, float)[order], np.zeros(len(order), np.int64)
    first = arrivals + np.asarray(ttft, float)[order]
    return RequestColumns(zeros, arrivals, arrivals, first, first, zeros + 9, zeros + 1, zeros, zeros, zeros)


def scenario(arrivals: str):
    ends = ("traffic.num_requests=null",) if "stages" in arrivals else ()
    return load_scenario("llama-3.1-8b-a100", (f"traffic.arrivals={arrivals}", *ends))


@pytest.mark.parametrize(("offered", "served"), [(10, 5), (10, 8), (3, 1)])
@pytest.mark.parametrize("num_lost", [0, 7])
def test_the_sustained_rate_is_the_service_rate_of_a_growing_queue(
    offered: float, served: float, num_lost: int
) -> None:
    times = np.arange(400) / offered
    requests = columns(times, 0.02 + times * (offered / served - 1))
    estimate = overload(scenario(f"{{process: poisson, rate: {offered}}}"), requests, num_lost)
    assert estimate is not None
    assert estimate["offered_req_s"] == offered
    assert estimate["sustained_req_s"] == pytest.approx(served, rel=0.01)


@pytest.mark.parametrize(("offered", "served"), [(10, 9.5), (10, 10), (10, 40)])
def test_a_slowly_growing_queue_is_no_overload(offered: float, served: float) -> None:
    times = np.arange(400) / offered
    ttft = 0.02 + np.maximum(times * (offered / served - 1), 0)
    assert overload(scenario(f"{{process: poisson, rate: {offered}}}"), columns(times, ttft), 0) is None


def test_rejected_requests_indicate_overload_without_a_growing_queue() -> None:
    """100 answered in 99 s and 50 lost, a third. A loss of one in twenty is no overload."""
    steady = columns(np.arange(100.0), np.full(100, 0.1))
    estimate = overload(scenario("{process: poisson, rate: 1.5}"), steady, 50)
    assert estimate == {"offered_req_s": 1.5, "sustained_req_s": pytest.approx(100 / 99)}
    assert overload(scenario("{process: poisson, rate: 1.5}"), steady, 5) is None


def test_stages_are_judged_by_the_busiest_one() -> None:
    """2 per s for 100 s, 8 for 50 s, of which 4 are served, then 1 for 100 s, in which the queue empties."""
    stages = "[{rate: 2, duration_s: 100}, {rate: 8, duration_s: 50}, {rate: 1, duration_s: 100}]"
    times = np.concatenate((np.arange(200) / 2, 100 + np.arange(400) / 8, 150 + np.arange(100.0)))
    inside = (times >= 100) & (times < 150)
    ttft = np.where(inside, 0.02 + (times - 100) * (8 / 4 - 1), 0.02)
    estimate = overload(scenario(f"{{process: poisson, stages: {stages}}}"), columns(times, ttft), 0)
    assert estimate is not None
    assert estimate["offered_req_s"] == 8
    assert estimate["sustained_req_s"] == pytest.approx(4, rel=0.02)
    assert overload(scenario(f"{{process: poisson, stages: {stages}}}"), columns(times, 0 * ttft + 0.02), 0) is None


def test_the_offered_rate_of_a_trace_includes_lost_requests() -> None:
    """300 answered and 100 lost in 100 s: 4 per s were offered."""
    trace = scenario("{process: poisson, rate: 1}")
    arrivals = trace.traffic.arrivals.model_copy(update={"process": "trace", "rate": None})
    replayed = trace.model_copy(update={"traffic": trace.traffic.model_copy(update={"arrivals": arrivals})})
    times = np.linspace(0, 100, 300)
    estimate = overload(replayed, columns(times, 0.02 + times), 100)
    assert estimate is not None
    assert estimate["offered_req_s"] == pytest.approx(4.0)
    assert estimate["sustained_req_s"] == pytest.approx(3 / 2, rel=0.01)


@pytest.mark.parametrize("process", ["{process: burst}", "{process: closed_loop, concurrency: 4}"])
def test_arrivals_without_a_rate_are_never_overloaded(process: str) -> None:
    times = np.arange(400) / 10
    assert overload(scenario(process), columns(times, times), 0) is None
