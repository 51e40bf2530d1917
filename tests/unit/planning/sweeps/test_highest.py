"""The search for the highest value that passes: as near as it says, from wherever it begins."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import SpecError
from perfmodel.planning.points import highest, max_request_rate
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario


@given(st.floats(1e-2, 1e2), st.floats(1e-2, 1e2))
def test_the_edge_is_found_within_two_per_cent(edge: float, start: float) -> None:
    looks: list[float] = []

    def passes(value: float) -> bool:
        looks.append(value)
        return value <= edge

    found = highest(passes, start)
    assert found is not None
    assert found <= edge <= found * 1.02
    assert found in looks
    assert len(looks) < 30


def test_where_nothing_passes_there_is_none_and_where_all_does_no_end() -> None:
    assert highest(lambda _: False, 5.0) is None
    assert highest(lambda _: True, 5.0) == inf


def test_a_capacity_that_no_rate_shows_is_refused() -> None:
    """Four requests at once are four in a batch, whose latencies are those of any higher rate."""
    few = ("traffic.num_requests=4", "slo.ttft_ms=60000", "slo.tpot_ms=null")
    with pytest.raises(SpecError, match="all 4 meet the slo even at 262,144 requests/s, which is all at once"):
        max_request_rate(load_scenario("llama-3.1-8b-a100", few))
    with pytest.raises(SpecError, match="missed even at 6e-05 requests/s; relax it"):
        max_request_rate(load_scenario("llama-3.1-8b-a100", ("traffic.num_requests=4", "slo.ttft_ms=0.001")))


def test_a_queue_that_grows_is_no_capacity_however_long_requests_may_wait() -> None:
    """Limits that a run is too short to miss: the rate is bounded by what the server serves of a burst."""
    many = ("traffic.num_requests=400", "traffic.arrivals={process: poisson, rate: 4}")
    patient = load_scenario("llama-3.1-8b-a100", (*many, "slo={ttft_ms: 60000, e2el_ms: 600000}"))
    burst = load_scenario("llama-3.1-8b-a100", (many[0], "traffic.arrivals={process: burst}"))
    assert max_request_rate(patient) < 1.5 * simulate(burst).summary["request_throughput"]
