"""How many users a deployment carries: a closed loop's largest concurrency within the SLO."""

import pytest

from perfmodel.errors import SpecError
from perfmodel.planning.points import Point, evaluate, max_concurrency
from perfmodel.sim import simulate
from perfmodel.sim.records.columns import meets_slo
from perfmodel.specs import Scenario, load_scenario


def loop(*more: str) -> Scenario:
    changes = (
        "traffic.arrivals={process: closed_loop, concurrency: 4}",
        "traffic.num_requests=60",
        "slo={tpot_p99_ms: 16}",
    )
    return load_scenario("llama-3.1-8b-a100", (*changes, *more))


def test_one_user_more_would_miss_the_slo() -> None:
    scenario = loop()
    most = int(max_concurrency(scenario))
    assert most > 1
    kept, missed = (
        meets_slo(scenario, simulate(scenario.with_({"traffic.arrivals.concurrency": users})).summary)
        for users in (most, most + 1)
    )
    assert (kept, missed) == (True, False)


def test_it_does_not_depend_on_where_the_search_begins() -> None:
    assert max_concurrency(loop()) == max_concurrency(loop("traffic.arrivals.concurrency=13"))


def test_users_with_several_answers_count_all_of_them() -> None:
    """Concurrency counts answers: the metric is a multiple of the answers of a prompt."""
    most = max_concurrency(loop("traffic.samples_per_prompt=2"))
    assert most % 2 == 0
    assert most > 0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("slo={tpot_p99_ms: 0.001}", "missed even with one user; relax it"),
        ("slo={tpot_p99_ms: 100000}", r"met with all 3 requests at once; raise traffic\.num_requests"),
        ("traffic.arrivals={process: poisson, rate: 1}", "needs an `slo`, .* and users to begin with"),
    ],
)
def test_what_has_no_answer_says_why(change: str, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        max_concurrency(loop("traffic.num_requests=3", change))


def test_it_is_a_metric_of_points() -> None:
    sets = (
        "traffic.arrivals={process: closed_loop, concurrency: 4}",
        "traffic.num_requests=40",
        "slo={tpot_p99_ms: 16}",
    )
    record = evaluate(Point("llama-3.1-8b-a100", ("max_concurrency",), sets))
    assert record.values["max_concurrency"] == max_concurrency(load_scenario("llama-3.1-8b-a100", sets))
