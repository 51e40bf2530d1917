"""More requests than are served: named, with what is sustained, in the first sentence of the answer."""

import pytest

from perfmodel.report.terminal import render_text
from perfmodel.report.views.run import run_view
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario

FIXED = (
    "traffic.input_tokens={distribution: fixed, value: 512}",
    "traffic.output_tokens={distribution: fixed, value: 64}",
)


def run(*overrides: str, requests: int = 800):
    return simulate(load_scenario("llama-3.1-8b-a100", [f"traffic.num_requests={requests}", *FIXED, *overrides]))


def test_what_is_sustained_is_what_a_queue_that_never_empties_is_served_at():
    """All requests at once keep the engine full: so many per second are what it sustains."""
    full = run("traffic.arrivals={process: burst}").summary["request_throughput"]
    for rate in (1.5 * full, 4 * full):
        found = run(f"traffic.arrivals={{process: poisson, rate: {rate}}}").summary["overload"]
        assert found["offered_req_s"] == pytest.approx(rate, rel=0.1)
        assert found["sustained_req_s"] == pytest.approx(full, rel=0.15)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.8])
def test_below_what_is_sustained_nothing_is_said(share):
    full = run("traffic.arrivals={process: burst}").summary["request_throughput"]
    assert "overload" not in run(f"traffic.arrivals.rate={share * full}").summary


def test_closed_loops_and_bursts_offer_no_rate():
    for arrivals in ("{process: burst}", "{process: closed_loop, concurrency: 400}"):
        assert "overload" not in run(f"traffic.arrivals={arrivals}").summary


def test_of_stages_the_busiest_counts():
    stages = "traffic.arrivals={process: poisson, stages: [{rate: 2, duration_s: 30}, {rate: %d, duration_s: 30}]}"
    assert "overload" not in run(stages % 6, "traffic.num_requests=null").summary
    found = run(stages % 80, "traffic.num_requests=null").summary["overload"]
    assert found["offered_req_s"] == 80
    assert found["sustained_req_s"] < 40


def test_it_is_the_first_sentence():
    page = render_text(run_view(run("traffic.arrivals.rate=80")))
    assert page.index("Overloaded: offered 8") < page.index("Successful requests")
    assert "latencies grow with the run" in page
