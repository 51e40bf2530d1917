"""The choice of a plan, its uncertainty and batch jobs, on deployments with known rate, price and records. Nothing is
simulated."""

from dataclasses import replace
from math import ceil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.planning.choice import (
    finalists,
    may_have,
    most_replicas,
    objective_key,
    pick_replicas,
    screened_front,
    shortfalls,
    simulated_front,
    with_every_device,
)
from perfmodel.planning.export import server_arguments
from perfmodel.planning.finalist import (
    Deployment,
    Finalist,
    Job,
    Option,
    Screened,
    attained,
    certainty_of,
    interval_of,
    mean,
    meets,
    pick,
    replicas_for,
    seed_draws,
    tightness,
)
from perfmodel.planning.jobs import _enough, _finalists, _next, _ordered, _with_replicas
from perfmodel.planning.points import Record
from perfmodel.planning.result import JobPlan, PlanResult, quantile_name
from perfmodel.planning.runs import _all_up, requests_with_failures
from perfmodel.planning.search import _sized
from perfmodel.planning.space import Base
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.surfaces import NUM_DRAWS, Drawn
from perfmodel.specs import load_scenario
from perfmodel.specs.cluster import FailuresSpec
from perfmodel.specs.slo import SLO

SCENARIO = load_scenario("llama-3.1-8b-a100")
LIMITS = SLO(ttft_ms=1000)


def screened(
    rate: float, devices: int = 1, usd: float | None = 2.0, kind: object = None, ratio: object = None, device: str = "x"
) -> Screened:
    layout = SimpleNamespace(choices={"hardware": device}, scenario=SCENARIO)
    candidate: Any = SimpleNamespace(
        num_devices=devices,
        kind=object() if kind is None else kind,
        ratio=ratio,
        label=f"{device}-{rate}-{usd}",
        devices=device,
        layout=layout,
        usd_per_hour=usd,
    )
    return Screened(candidate, rate, "ttft", 1.0, "calibrated")


def spec(**fields: Any) -> PlanSpec:
    return PlanSpec.model_validate(fields)


def record(share: float = 1.0, throughput: float = 1.0, **values: float) -> Record:
    goodput = {"request_goodput": share * throughput, "slo_attainment": share}
    return Record(goodput | {"request_throughput": throughput, **values})


def finalist(one: Screened, replicas: int, rates: tuple[float, ...], factors: Any = 1.0, *records: Record) -> Finalist:
    drawn = Drawn(np.full(NUM_DRAWS, 1.0) * factors, dict.fromkeys(("ttft", "tpot", "e2el"), np.ones(NUM_DRAWS)))
    return Finalist(one, replicas, 1.0, rates, records or (record(p90_ttft_ms=400.0),), drawn)


def plan(objective: str, *ranked: Finalist, rate: float = 10.0) -> PlanResult:
    base = Base("llama-3.1-8b-a100")
    return PlanResult(base, SCENARIO, spec(objective=objective), ranked=ranked, rate=rate)


RATES, COUNTS = st.floats(0.1, 50.0), st.integers(1, 8)


@given(RATES, RATES, COUNTS, st.sampled_from([None, 10.0, 40.0]))
def test_fewest_sufficient_replicas_are_chosen_and_for_latency_all_allowed_ones(rate, replica_rate, devices, budget):
    """Devices and budget limit the number of replicas; the rate of one replica does not depend on it."""
    one, wanted = screened(replica_rate, devices, usd=4.0), spec(max_gpus=32, budget_usd_per_hour=budget)
    allowed = [n for n in range(1, 33) if n * devices <= 32 and (budget is None or n * 4.0 <= budget)]
    able = [n for n in allowed if n * replica_rate >= rate * (1 - 1e-9)]
    assert most_replicas(one.candidate, wanted) == max(allowed, default=0)
    assert pick_replicas(one, wanted, rate) == min(able, default=None)
    fastest = wanted.model_copy(update={"objective": "lowest_latency"})
    assert pick_replicas(one, fastest, rate) == max(able, default=None)
    assert pick_replicas(one, wanted, rate, 2 * replica_rate) == min(
        (n for n in allowed if 2 * n * replica_rate >= rate), default=None
    )
    assert all(may_have(one.candidate, wanted, n) == (n in allowed) for n in (1, 2, 9, 33))


def test_shortfalls_count_candidates_by_their_reason():
    candidates = [screened(0.0), screened(1.0, usd=1.0), screened(1.0, 8, usd=1.0), screened(10.0)]
    wanted = spec(max_gpus=16, budget_usd_per_hour=5.0)
    assert shortfalls(candidates, wanted, 10.0) == {
        "misses the SLO at any rate": 1,
        "over budget at the rate": 1,
        "too slow for the rate with max_gpus": 1,
    }


@pytest.mark.parametrize(
    ("objective", "best"),
    [("cheapest", "cheap"), ("fewest_gpus", "small"), ("lowest_latency", "quick"), ("goodput_per_gpu", "fast")],
)
def test_each_objective_picks_its_best_deployment(objective, best):
    """Four deployments, one the best by each objective; one without a price counts as the most expensive."""
    deployments = {
        "cheap": Deployment(screened(5.0, 4, usd=1.0), 2, 0.9),
        "small": Deployment(screened(10.0, 1, usd=9.0), 1, 0.8),
        "quick": Deployment(screened(10.0, 4, usd=9.0), 3, 0.1),
        "fast": Deployment(screened(90.0, 4, usd=9.0), 1, 0.7),
        "unpriced": Deployment(screened(10.0, 4, usd=None), 1, 0.9),
    }
    assert deployments["cheap"].num_devices == 8
    assert (deployments["cheap"].usd_per_hour, deployments["cheap"].capacity) == (2.0, 10.0)
    wanted = spec(objective=objective)
    assert min(deployments, key=lambda name: objective_key(deployments[name], wanted)) == best


@pytest.mark.parametrize("objective", ["cheapest", "fewest_gpus", "lowest_latency"])
def test_ties_go_to_the_deployment_with_more_headroom(objective):
    more, less = Deployment(screened(20.0), 1), Deployment(screened(10.0), 1)
    wanted = spec(objective=objective, finalists=1)
    assert finalists([less, more], wanted) == finalists([more, less], wanted) == [more]


def test_finalists_are_the_best_of_each_layout_in_order():
    kind = object()
    worse, better = Deployment(screened(10.0, usd=3.0, kind=kind), 1), Deployment(screened(10.0, usd=2.0, kind=kind), 1)
    other = Deployment(screened(10.0, usd=2.5), 1)
    assert finalists([worse, other, better], spec(finalists=3)) == [better, other]
    apart = [Deployment(screened(10.0, usd=usd, ratio=(1, 1)), 1) for usd in (1.0, 1.5)]
    assert finalists([*apart, worse, better], spec(finalists=2)) == [apart[0], better]


def test_every_requested_device_has_its_best_deployment_among_the_finalists():
    """It replaces the last finalist of a device that has several, never the first finalist or the only one of a
    device."""
    ranked = [Deployment(screened(10.0, usd=usd, device="a"), 1) for usd in (1.0, 1.1, 1.2)]
    others = [Deployment(screened(10.0, usd=usd, device="b"), 1) for usd in (3.0, 2.0)]
    wanted = spec(space={"hardware": ["a", "b"]})
    assert with_every_device(ranked, [*ranked, *others], wanted) == [ranked[0], ranked[1], others[1]]
    assert with_every_device(ranked[:2], [*ranked, *others], wanted) == [ranked[0], others[1]]
    assert with_every_device(ranked[:1], [*ranked, *others], wanted) == ranked[:1]


NEEDS = [1.0, 2.0, 2.0, 3.0, 3.0, 3.0, 4.0, 4.0, 5.0, 9.0]


def test_replicas_for_a_confidence_are_the_fewest_that_suffice_in_that_share_of_draws():
    for confidence in np.arange(0.0, 1.01, 0.05):
        count = replicas_for(np.array(NEEDS), 2, float(confidence))
        suffices = [n for n in range(2, 10) if np.mean(np.array(NEEDS) <= n) >= confidence - 1e-9]
        assert count == suffices[0]


def test_a_shortage_costs_the_replicas_added_up_to_the_cap():
    """Three replicas of 10 USD where 1 to 9 are needed: of ten draws two are short by one, one by two and one by
    six."""
    one = Option("a", "a", 10.0, 2, 3, 12, np.array(NEEDS))
    assert one.share == 0.6
    assert one.bills(25.0).tolist() == [30.0] * 6 + [40.0, 40.0, 50.0, 55.0]
    assert one.known_bills(25.0).tolist() == [10.0, 20.0, 20.0, 30.0, 30.0, 30.0, 40.0, 40.0, 50.0, 55.0]


def test_the_best_of_the_confident_options_is_picked_or_else_the_most_confident():
    needs = np.array(NEEDS)
    dear, cheap = Option("a", "a", 10.0, 2, 9, 12, needs), Option("b", "b", 2.0, 2, 3, 12, needs)
    assert pick([dear, cheap], 0.9) == 0
    assert pick([dear, cheap], 0.5) == 1
    unsure = replace(dear, replicas=4)
    assert pick([cheap, unsure], 0.95) == 1
    by_figure = [replace(dear, figure=1.0), replace(cheap, figure=2.0)]
    assert pick(by_figure, 0.5) == 0
    certainty = certainty_of([dear, cheap], 0, 0.9)
    assert certainty.plain == ("b", 2, 4.0, 0.3)
    assert (certainty.extra_cost, certainty.is_reached) == (86.0, True)
    assert certainty_of([dear, cheap], 0, certainty.share).is_reached
    assert not certainty_of([cheap], 0, 0.61).is_reached


@pytest.mark.parametrize(("count", "quantile"), [(2, 3.078), (3, 1.886), (5, 1.533), (10, 1.383)])
def test_the_spread_of_a_mean_over_seeds_is_students_t(count, quantile):
    """80 % of the draws lie within t(0.9, n - 1) s / sqrt(n) (tables of Student's distribution)."""
    logs = np.random.default_rng(count).normal(0.0, 0.1, count)
    high = np.quantile(seed_draws(tuple(np.exp(logs))), 0.9)
    assert high == pytest.approx(quantile * logs.std(ddof=1) / count**0.5, rel=0.25)
    assert not seed_draws((3.0,)).any()


def test_an_interval_holds_80_percent_of_the_draws_and_the_value():
    draws = np.arange(101.0)
    assert interval_of(draws, 50.0) == (10.0, 90.0)
    assert interval_of(draws, 95.0) == (10.0, 95.0)
    assert interval_of(draws, 2.0) == (2.0, 90.0)


def test_rate_scales_with_replicas_and_the_margin_is_counted_separately():
    three = finalist(screened(10.0, 2, usd=5.0), 3, (30.0, 120.0))
    assert three.rate == pytest.approx(60.0)
    five = three.sized(5, three.records)
    assert (five.replicas, five.fewest, five.spare) == (5, 3, 2)
    assert five.rate == pytest.approx(100.0)
    assert (five.num_devices, five.usd_per_hour, five.cost) == (10, 25.0, 25.0)
    assert five.rate_per_device == pytest.approx(three.rate_per_device)
    assert five.sized(4, ()).fewest == 3
    assert finalist(screened(10.0, 2, usd=None), 3, (30.0,)).cost == 6.0


def test_attainment_is_over_the_requests_of_all_seeds():
    """0.8 and 1.0 of equally many requests are 0.9 of all, lost requests included, whatever the throughput. An
    attainment equal to the wanted one is enough."""
    records = [record(0.8, 3.0, p90_ttft_ms=900.0, p99_ttft_ms=1300.0), record(1.0, 1.0, p90_ttft_ms=500.0)]
    assert attained(records) == pytest.approx(0.9)
    exact = [record(0.75, 4.0)]
    assert meets(exact, LIMITS, 0.75)
    assert not meets(exact, LIMITS, 0.76)
    assert mean(records, "p90_ttft_ms") == 700.0
    assert mean(records, "p99_ttft_ms") == 1300.0
    assert mean(records, "p50_tpot_ms") is None


def test_tightness_is_the_largest_ratio_to_a_limit():
    slo = SLO(ttft_ms=1000, tpot_ms=50)
    records = [record(1.0, p90_ttft_ms=300.0, p90_tpot_ms=40.0)]
    assert tightness(records, slo, "p90") == 0.8
    assert tightness([record(0.95)], slo, "p90") == pytest.approx(0.5)  # half of the allowed misses


def test_the_percentile_shown_is_at_least_the_wanted_attainment():
    assert [quantile_name(share) for share in (0.4, 0.5, 0.7, 0.9, 0.92, 0.99, 0.999)] == [
        "median", "median", "p90", "p90", "p95", "p99", "p99",
    ]  # fmt: skip


def test_replicas_needed_in_a_draw_are_inversely_proportional_to_its_rate():
    """Three replicas serve 12 requests/s where 10 are wanted: 2.5 suffice. At half of the rate five, at twice the rate
    1.25, rounded up to two."""
    factors = np.where(np.arange(NUM_DRAWS) % 2, 0.5, 2.0)
    three = finalist(screened(4.0, usd=2.0), 3, (12.0,), factors)
    result = plan("cheapest", three)
    assert result.replicas_needed(three).tolist()[:2] == [2.0, 5.0]
    assert result.sufficient(three) == 0.5
    assert result.figure_draws(three).tolist()[:2] == [4.0, 10.0]
    option = result.option(three)
    assert (option.price, option.fewest, option.replicas, option.figure) == (2.0, 3, 3, None)
    by_devices = plan("fewest_gpus", finalist(screened(4.0, 8, usd=2.0), 3, (12.0,)))
    assert by_devices.option(by_devices.ranked[0]).price == 8.0
    assert plan("goodput_per_gpu", three).option(three).figure == -4.0


@pytest.mark.parametrize("objective", ["cheapest", "goodput_per_gpu"])
def test_shares_of_draws_in_which_one_is_better_add_up_to_one(objective):
    one, other = finalist(screened(10.0, usd=2.0), 1, (20.0,)), finalist(screened(10.0, usd=3.0), 1, (10.0,))
    result = plan(objective, one, other)
    assert result.better_share(one, other) + result.better_share(other, one) == pytest.approx(1.0)
    assert result.better_share(one, one) == 0.5


def test_the_front_has_every_replica_count_from_the_fewest_up():
    """More replicas share the rate: latency falls, cost rises."""
    asked: list[float] = []

    class Screen:
        def tightness(self, _: Any, rates: list[float]) -> list[float]:
            asked.extend(rates)
            return [rate / 10.0 for rate in rates]

    two = Deployment(screened(6.0, usd=1.0), 2)
    screen: Any = Screen()
    front = screened_front(screen, [two], spec(max_gpus=4), 12.0)
    assert asked == [6.0, 4.0, 3.0]
    assert [(point.replicas, point.tightness) for point in front] == [(2, 0.6), (3, 0.4), (4, 0.3)]


def test_a_slower_deployment_of_equal_cost_is_not_on_the_front():
    slow, quick = (Deployment(screened(10.0, usd=2.0, device=name), 1, 0.5) for name in ("slow", "quick"))
    known = {
        name: (deployment, (record(1.0, p90_ttft_ms=ms),))
        for name, deployment, ms in (("s", slow, 900.0), ("q", quick, 300.0))
    }
    front, missed = simulated_front(known, [], spec(), LIMITS, "p90")
    assert [point.label for point in front] == ["q"]
    assert missed == []


def test_replicas_fail_independently():
    """With an availability of 90 %: one of one 0.9, one of two 1 - 0.1^2, one of three 1 - 0.1^3; both of two 0.81."""
    failures = FailuresSpec(mtbf_s=900.0, repair_s=60.0, start_s=40.0)
    assert _all_up(failures, 1) == pytest.approx({1: 0.9, 2: 0.99, 3: 0.999})
    assert _all_up(failures, 2)[2] == pytest.approx(0.81)
    assert _all_up(None, 2) == {}


def test_a_run_is_long_enough_for_three_failures_of_each_replica():
    """Three replicas with an MTBF of 900 s: 3 x 300 s, and 100 s until the last is back, at 2 requests/s."""
    failures = FailuresSpec(mtbf_s=900.0, repair_s=60.0, start_s=40.0)
    result: Any = SimpleNamespace(scenario=SimpleNamespace(cluster=SimpleNamespace(failures=failures)), rate=2.0)
    assert requests_with_failures(result, 3) == 2000
    assert requests_with_failures(result, 1) == 2 * (2700 + 100)


def test_finalists_are_simulated_with_replicas_for_the_wanted_confidence() -> None:
    """Three replicas serve 12 requests/s where 10 are wanted; half of the draws halve the rate, so five are needed. One
    replica of 100 requests/s remains one."""
    factors = np.where(np.arange(NUM_DRAWS) % 2, 0.5, 2.0)
    three, one = finalist(screened(4.0), 3, (12.0,), factors), finalist(screened(100.0), 1, (100.0,))
    asked: list[tuple[Deployment, int]] = []

    def at_rate(whole: list[tuple[Deployment, int]]) -> list[tuple[Record, ...]]:
        asked.extend(whole)
        return [(record(p90_ttft_ms=100.0 * replicas),) for _, replicas in whole]

    run: Any = SimpleNamespace(
        base=Base("llama-3.1-8b-a100"), scenario=SCENARIO, spec=spec(confidence=0.9), rate=10.0, at_rate=at_rate
    )
    sized = _sized(run, [three, one])
    assert asked == [(three, 5)]
    assert [(finalist.replicas, finalist.fewest) for finalist in sized] == [(5, 3), (1, 1)]
    assert [finalist.mean("p90_ttft_ms") for finalist in sized] == [500.0, 400.0]


def test_prefill_servers_produce_kv_and_decode_servers_consume_it():
    scenario = load_scenario("llama-3.1-8b-a100", ["cluster.pools=[{role: prefill}, {role: decode}]"])
    arguments = [" ".join(server_arguments(scenario, pool)) for pool in scenario.pools]
    assert ["kv_producer" in text for text in arguments] == [True, False]
    assert ["kv_consumer" in text for text in arguments] == [False, True]


# Batch jobs.


def job(
    seconds: float, replicas: int = 2, usd: float | None = 3.0, factors: Any = 1.0, times: Any = (), **own: Any
) -> Job:
    candidate = screened(1.0, usd=usd, **own).candidate
    records = tuple(Record({"duration": duration}) for duration in times)
    return Job(candidate, replicas, seconds, records, np.ones(NUM_DRAWS) * factors)


def job_plan(**fields: Any) -> JobPlan:
    base = Base("llama-3.1-8b-a100")
    return JobPlan(base, SCENARIO, spec(**{"objective": "cheapest_job", **fields}))


def test_a_job_costs_its_devices_times_its_duration():
    """Two replicas of 3 USD an hour for 20 minutes: 2 USD. Without a price, device hours."""
    assert job(1200.0).bill == pytest.approx(2.0)
    assert job(1200.0, usd=None, devices=4).bill == pytest.approx(8 / 3)
    assert job(1.0, times=(100.0, 400.0)).seconds == pytest.approx(200.0)
    assert job(1.0, times=(100.0, 0.0)).seconds == float("inf")


@pytest.mark.parametrize(("objective", "best"), [("cheapest_job", "bill"), ("shortest_job", "seconds")])
def test_job_objectives_minimise_the_bill_or_the_duration(objective, best):
    jobs = [job(100.0, 8), job(300.0, 2), job(900.0, 1)]
    plan = job_plan(objective=objective)
    assert plan.figures(jobs[0])[0] == getattr(jobs[0], best)
    assert _finalists(jobs, plan)[0] == min(jobs, key=lambda job: getattr(job, best))
    assert plan.figure(jobs[0]) == getattr(jobs[0], best)


def test_replicas_for_a_deadline_are_inversely_proportional_to_it():
    """Four replicas take 500 s of 1,000 s: two suffice, and three where the job takes 20 % longer."""
    four = job(500.0, 4, factors=np.where(np.arange(NUM_DRAWS) % 2, 1.2, 1.0))
    option = job_plan(deadline_s=1000.0).option(four)
    assert option.needed.tolist()[:2] == [2.0, 3.0]
    assert option.cost == pytest.approx(four.bill)
    assert job_plan(deadline_s=600.0).in_time(four) == 1.0
    assert job_plan(deadline_s=599.0).in_time(four) == 0.5
    assert job_plan(deadline_s=499.0).in_time(four) == 0.0
    assert _with_replicas(four, 8).screened_s == 250.0
    late = job(1000.0, 2, factors=np.where(np.arange(NUM_DRAWS) % 2, 1.5, 1.0))
    assert job_plan(deadline_s=1000.0).replicas_for_sure(late, 0.9) == ceil(2 * 1.5)


def test_the_next_trial_has_one_replica_more_if_late_and_one_fewer_if_nearly_in_time():
    screen: Any = SimpleNamespace(allowed=lambda _: range(1, 9))
    wanted = job_plan(deadline_s=1000.0)
    late, early = job(1100.0, 4, times=(1100.0,)), job(500.0, 4, times=(500.0,))
    for tried, count in ((late, 5), (early, 3)):
        next_job = _next({4: tried}, screen, wanted)
        assert next_job is not None
        assert next_job.replicas == count
    assert _next({4: job(990.0, 4, times=(990.0,))}, screen, wanted) is None  # three would take a third longer
    assert _next({4: late}, SimpleNamespace(allowed=lambda _: range(1, 5)), wanted) is None  # type: ignore[arg-type]


def test_confident_jobs_rank_first_and_late_ones_are_not_ranked():
    sure, unsure = job(900.0, 4), job(900.0, 1, factors=np.where(np.arange(NUM_DRAWS) % 2, 1.5, 1.0))
    late, plan = job(1100.0, 1), job_plan(deadline_s=1000.0, confidence=0.9)
    assert _ordered(plan, [unsure, late, sure]) == [sure, unsure]
    screen: Any = SimpleNamespace(allowed=lambda _: range(1, 9))
    assert _enough(plan, screen, unsure) == 2
    assert _enough(plan, screen, late) == 1


def test_of_options_that_cost_the_same_and_always_serve_the_one_with_most_headroom_is_chosen() -> None:
    """2.4 of 3 replicas busy leave less than 3.0 of 4 at the same bill: 0.8 against 0.75."""
    always = np.ones(len(NEEDS))
    full = Option("full", "a", 4.0, 2, 3, 12, always, load=2.4)
    roomy = Option("roomy", "a", 3.0, 2, 4, 12, always, load=3.0)
    for options in ((full, roomy), (roomy, full)):
        assert options[pick(options, 0.9)].name == "roomy"
