"""How sure a plan is of its order, against closed forms of pairs of log-normal rates."""

from dataclasses import replace
from math import erf, log
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from perfmodel.planning.finalist import Finalist, Screened
from perfmodel.planning.points import Record
from perfmodel.planning.result import PlanResult
from perfmodel.planning.space import Base
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.surfaces import NUM_DRAWS, Drawn
from perfmodel.report.views.plan import plan_sentences
from perfmodel.specs import load_scenario

GOOD = Record({"slo_attainment": 0.95, "p90_ttft_ms": 400.0})


def normal(number: int) -> Any:
    half = np.random.default_rng(number).standard_normal(NUM_DRAWS // 2)
    return np.concatenate([half, -half])


def finalist(rate: float, draws: Any, usd: float = 2.0, replicas: int = 1) -> Finalist:
    candidate: Any = SimpleNamespace(
        num_devices=1, kind=object(), ratio=None, label="one", devices="one", usd_per_hour=usd
    )
    screened = Screened(candidate, rate / replicas, "ttft", 1.0, "calibrated")
    drawn = Drawn(np.exp(draws), dict.fromkeys(("ttft", "tpot", "e2el"), np.exp(-draws)))
    return Finalist(screened, replicas, 1.0, (rate,), (GOOD,), drawn)


def result(objective: str, *ranked: Finalist, rate: float = 10.0) -> PlanResult:
    base = Base("llama-3.1-8b-a100")
    spec = PlanSpec.model_validate({"objective": objective})
    return PlanResult(base, load_scenario(base.path), spec, ranked=ranked, rate=rate)


def test_errors_that_two_have_in_common_leave_no_doubt() -> None:
    """Both 40 % off together, one 5 % better: intervals overlap widely, and the order is sure."""
    errors = 0.4 * normal(1)
    one, other = finalist(10.5, errors), finalist(10.0, errors)
    plan = result("goodput_per_gpu", one, other)
    assert plan.interval(one)[0] < plan.interval(other)[1]
    assert plan.better_share(one, other) == 1.0


@pytest.mark.parametrize("margin", [0.1, 0.5, 1.0])
def test_of_independent_errors_the_share_is_that_of_a_normal_difference(margin: float) -> None:
    """P(x > y) = Phi(log margin / (sigma sqrt 2)); one minus it the other way round."""
    sigma = 0.4
    one, other = finalist(10.0 * (1 + margin), sigma * normal(1)), finalist(10.0, sigma * normal(2))
    plan = result("goodput_per_gpu", one, other)
    expected = (1 + erf(log(1 + margin) / (sigma * 2**0.5) / 2**0.5)) / 2
    assert plan.better_share(one, other) == pytest.approx(expected, abs=0.05)
    assert plan.better_share(other, one) == pytest.approx(1 - plan.better_share(one, other), abs=0.01)


def test_replicas_suffice_as_often_as_the_rate_is_that_much_too_high() -> None:
    """Three serve 30 % more than is wanted: P = Phi(log 1.3 / sigma). Without errors, always."""
    three = finalist(13.0, 0.25 * normal(3), replicas=3)
    plan = result("cheapest", three)
    expected = (1 + erf(log(1.3) / 0.25 / 2**0.5)) / 2
    assert plan.sufficient(three) == pytest.approx(expected, abs=0.05)
    still = finalist(13.0, np.zeros(NUM_DRAWS), replicas=3)
    assert plan.sufficient(still) == 1.0
    assert plan.interval(still) == (6.0, 6.0)


def test_a_deployment_that_was_simulated_to_serve_is_enough_without_errors() -> None:
    """Even where its scattering highest rate lies a little below the wanted one."""
    three = finalist(9.9, np.zeros(NUM_DRAWS), replicas=3)
    assert result("cheapest", three).sufficient(three) == 1.0


def test_equal_cost_goes_to_whoever_has_more_in_reserve() -> None:
    errors = 0.1 * normal(4)
    more, less = finalist(14.0, errors), finalist(13.0, errors)
    assert result("cheapest", more, less).better_share(more, less) == 1.0


def test_a_rate_that_errors_leave_nothing_of_needs_no_number_of_replicas() -> None:
    errors = normal(5)
    lost = replace(finalist(13.0, errors), drawn=Drawn(np.zeros(NUM_DRAWS), {}))
    plan = result("cheapest", lost)
    assert plan.sufficient(lost) == 0.0
    assert plan.interval(lost)[1] == float("inf")


def test_latencies_are_as_far_off_as_their_draws() -> None:
    found = finalist(10.0, 0.3 * normal(6)).latency_interval("p90", "ttft")
    assert found is not None
    assert np.log(np.array(found) / 400.0) == pytest.approx([-0.3 * 1.2816, 0.3 * 1.2816], abs=0.06)


def test_words_lead_with_what_it_costs_to_be_sure() -> None:
    """Three replicas serve 5 % more than is wanted, errors of 20 %: one more does in Phi(log 1.4 / 0.2) = 95 %."""
    three = finalist(10.5, 0.2 * normal(3), replicas=3)
    four = three.sized(4, three.records)
    lines = plan_sentences(result("cheapest", four))
    assert lines[0].startswith("Take 4 x one: 4 GPUs, 8.00 USD per hour")
    share = result("cheapest", four).sufficient(four)
    assert share == pytest.approx((1 + erf(log(1.4) / 0.2 / 2**0.5)) / 2, abs=0.03)
    assert f"suffices in {round(100 * share)} of 100 draws" in lines[1]
    assert "3 x one would do, for 6 USD per hour" in lines[2]
    assert "To be sure costs +2 USD per hour, 1,460 USD per month" in lines[2]
    assert "measure one replica on one (2.00 USD for an hour)" in lines[3]


def test_words_say_where_nothing_is_as_sure_as_asked_for() -> None:
    three = finalist(10.5, 0.2 * normal(3), replicas=3)
    assert "short of the 80% that were asked for" in " ".join(plan_sentences(result("cheapest", three)))


def test_words_say_what_the_simulator_did_not_confirm() -> None:
    """What one replica fewer comes to."""
    dear = finalist(13.0, 0.1 * normal(1), usd=5.0)
    plan = replace(result("cheapest", dear), fewer={"0 x one": 0.7})
    text = " ".join(plan_sentences(plan))
    assert "misses the SLO: 0 x one, simulated, with 70.0% of requests within it" in text
