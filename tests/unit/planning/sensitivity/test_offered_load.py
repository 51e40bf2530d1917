"""What varied rates say: queueing theory gives the knee of an M/M/1 queue, and Little's law the users."""

import pytest

from perfmodel.planning.load import knee_of
from perfmodel.planning.points import Point, load_point, max_request_rate
from perfmodel.planning.whatif import ask_whatif

_SCENARIO = "llama-3.1-8b-a100"
_SETS = ("traffic.num_requests=120", "traffic.arrivals.process=poisson", "traffic.arrivals.rate=2", "slo.ttft_ms=400")
_METRICS = ("mean_e2el_ms", "request_throughput", "request_goodput")


@pytest.fixture(scope="module")
def load():
    sets = (*_SETS, "traffic.arrivals.think_time_s=20")
    return ask_whatif(_SCENARIO, ("traffic.arrivals.rate=0.5..64:7",), sets, _METRICS, workers=1)


def test_the_knee_of_a_single_server_queue_is_at_half_of_what_it_can_serve():
    """Mean time in an M/M/1 queue is 1 / (m - l): power l (m - l) is largest at l = m / 2 (Kleinrock 1979)."""
    rates = [0.4 * 1.25**number for number in range(14)]
    rates = [rate for rate in rates if rate < 7.5]
    found = knee_of(rates, rates, [1 / (8 - rate) for rate in rates])
    assert found == pytest.approx(4, rel=0.05)


def test_no_knee_is_claimed_where_the_rates_end_before_it():
    rates = [1.0, 1.5, 2.0]
    assert knee_of(rates, rates, [1 / (8 - rate) for rate in rates]) is None
    assert knee_of([], [], []) is None
    assert knee_of([1.0, 2.0], [1.0, None], [0.1, None]) is None


def test_users_are_those_of_the_interactive_response_time_law(load):
    """N = X (R + Z): each user is either waiting for an answer (R) or pausing (Z)."""
    assert load.load.think_time_s == 20
    records = load.answers.by_axis["traffic.arrivals.rate"]
    for rate, users, record in zip(load.load.rates, load.load.users, records, strict=True):
        assert users == pytest.approx(rate * (20 + record.values["mean_e2el_ms"] / 1e3))
    kept = load.load.within_slo
    cycle_s = 20 + kept.mean_e2el_ms / 1e3
    assert kept.users == pytest.approx(kept.max_rate * cycle_s)
    assert kept.requests_per_user_per_minute == pytest.approx(60 / cycle_s)


def test_the_largest_rate_is_that_of_the_metric_of_the_same_name(load):
    """Both look for the last rate that is kept, within 2 %, one among the axis' rates and one by doubling."""
    scenario, _ = load_point(Point(_SCENARIO, (), _SETS))
    assert load.load.within_slo.max_rate == pytest.approx(max_request_rate(scenario), rel=0.05)
    assert not load.load.within_slo.is_all


def test_multiples_are_told_as_rates():
    found = ask_whatif(_SCENARIO, ("traffic.arrivals.rate=0.5x..2x:3",), _SETS, ("mean_ttft_ms",), workers=1).load
    assert found.rates == pytest.approx((1, 2, 4))
    assert found.rate == 2
    assert found.users == (None, None, None)
    assert found.limits_ms == {"ttft": 400, "tpot": 50}  # the second of the scenario itself


def test_a_limit_that_no_rate_keeps_has_no_rate_and_one_that_all_keep_says_so():
    strict, loose = (
        ask_whatif(
            _SCENARIO,
            ("traffic.arrivals.rate=0.5..2:2",),
            (*_SETS, f"slo.ttft_ms={limit}", "slo.tpot_ms=1e6"),
            _METRICS,
            workers=1,
        ).load.within_slo
        for limit in (0.1, 1e6)
    )
    assert (strict.max_rate, strict.users, strict.is_all) == (None, None, False)
    assert (loose.max_rate, loose.is_all) == (2, True)


def test_arrivals_that_follow_no_rate_have_none():
    sets = ("traffic.num_requests=20", "traffic.arrivals.process=closed_loop", "traffic.arrivals.concurrency=2")
    found = ask_whatif(_SCENARIO, ("engine.max_num_seqs=2,4",), sets, ("mean_ttft_ms",), workers=1)
    assert found.load is None
    assert "load" not in found.to_json()
