"""Summary statistics against their definitions: Python's `statistics`, sums, a list of all gaps."""

import statistics
from dataclasses import replace
from math import isclose

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.engine import Request, StepRecord
from perfmodel.engine.request import TokenTimes
from perfmodel.sim.clock import TICKS_PER_S
from perfmodel.sim.records.collector import Collector, GapHistogram
from perfmodel.sim.records.columns import (
    RequestColumns,
    attained,
    latencies,
    missed,
    num_good,
    percentiles_met,
    tail,
    token_latencies,
)
from perfmodel.sim.records.summary import DeviceTotals, costs, summarize
from perfmodel.sim.traffic.distributions import class_shares
from perfmodel.specs import load_scenario
from perfmodel.specs.slo import SLO

SECONDS = st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=60)
# number, arrival, first scheduled, first token, end, prompt, output, cached, preemptions, replica
ROWS = (
    (0, 0.0, 0.5, 1.0, 3.0, 100, 5, 0, 0, 0),
    (1, 1.0, 1.2, 1.5, 1.5, 300, 1, 60, 2, 1),
    (2, 2.0, 4.0, 5.0, 9.0, 200, 41, 150, 1, 0),
)


def columns(rows=ROWS) -> RequestColumns:
    names = RequestColumns.__dataclass_fields__
    return RequestColumns(**dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=False)))


@given(SECONDS)
@settings(max_examples=50, deadline=None)
def test_latency_statistics_are_over_all_requests_in_ms(seconds: list[float]) -> None:
    statistics_ms = latencies("x", np.array(seconds))
    expected = {"mean": statistics.fmean(seconds), "std": statistics.pstdev(seconds)}
    expected["median"] = statistics.median(seconds)
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    expected |= {f"p{percent}": cuts[percent - 1] for percent in (90, 95, 99)}
    assert statistics_ms.keys() == {f"{name}_x_ms" for name in expected}
    for name, value in expected.items():
        assert statistics_ms[f"{name}_x_ms"] == pytest.approx(1e3 * value, rel=1e-9, abs=1e-6), name


@given(st.lists(st.tuples(st.floats(1e-4, 10), st.integers(1, 50)), min_size=1, max_size=30))
@settings(max_examples=50, deadline=None)
def test_a_gap_histogram_matches_the_list_of_all_gaps(entries: list[tuple[float, int]]) -> None:
    """Mean and deviation exactly, each percentile within half a bin of 0.2 % of the gap with that rank."""
    gaps, all_gaps = GapHistogram(), sorted(gap for gap, times in entries for _ in range(times))
    for gap, times in entries:
        gaps.add(gap, times)
    assert gaps.count == len(all_gaps)
    assert gaps.mean == pytest.approx(statistics.fmean(all_gaps))
    assert gaps.std == pytest.approx(statistics.pstdev(all_gaps), abs=1e-6 * gaps.mean)
    for share in (0.1, 0.5, 0.9, 1.0):
        rank = max(int(np.ceil(share * len(all_gaps) - 1e-9)), 1)
        assert gaps.quantile(share) == pytest.approx(all_gaps[rank - 1], rel=0.00101)


@pytest.mark.parametrize(("first_s", "slope_s", "num_steps"), [(0.01, 0.0, 7), (0.01, 0.001, 40), (0.02, 1e-5, 400)])
def test_a_run_of_evenly_growing_steps_matches_its_single_steps(first_s: float, slope_s: float, num_steps: int) -> None:
    run, single = GapHistogram(), GapHistogram()
    durations = [first_s + slope_s * number for number in range(num_steps)]
    run.add_run(first_s, sum(durations), num_steps, 3)
    for duration in durations:
        single.add(duration, 3)
    assert run.count == single.count
    assert run.mean == pytest.approx(single.mean)
    assert run.std == pytest.approx(single.std, rel=0.01, abs=1e-9)
    for share in (0.25, 0.5, 0.99):
        assert run.quantile(share) == pytest.approx(single.quantile(share), rel=0.003)


def test_times_of_a_request_by_hand() -> None:
    """TTFT and E2E count from the arrival; TPOT = (E2E - TTFT) / (output tokens - 1), undefined for one token."""
    requests = columns()
    assert requests.ttft_s.tolist() == [1.0, 0.5, 3.0]
    assert requests.e2el_s.tolist() == [3.0, 0.5, 7.0]
    assert requests.tpot_s[[0, 2]].tolist() == [0.5, 0.1]
    assert np.isnan(requests.tpot_s[1])


def test_a_request_is_good_if_it_meets_every_limit_inclusively() -> None:
    """TTFT limit 1 s: the third misses. TPOT limit 0.1 s: the first misses; one token has no TPOT. E2E limit 3 s."""
    for slo, bad in (
        (SLO(ttft_ms=1000), {2}),
        (SLO(tpot_ms=100.0), {0}),
        (SLO(e2el_ms=3000), {2}),
        (SLO(ttft_ms=600, tpot_ms=500), {0, 2}),
        (SLO(ttft_ms=2999, tpot_ms=400), {0, 2}),
    ):
        misses = missed(slo, columns())
        assert num_good(misses) == 3 - len(bad), slo
        assert attained(misses, 5)["slo_attainment"] == pytest.approx((3 - len(bad)) / 8)
    by = attained(missed(SLO(ttft_ms=1000, tpot_ms=100), columns()), 1)["slo_attainment_by"]
    assert by == {"ttft": pytest.approx(2 / 4), "tpot": pytest.approx(2 / 4)}


def test_lost_requests_count_as_slower_than_every_percentile() -> None:
    """Of 100 sent, 10 are lost: 90 are within the limit, so the p90 is, and the p91 is not."""
    summary = {"completed": 90, **{f"p{percent}_ttft_ms": 1.0 for percent in (90, 95, 99)}, "median_ttft_ms": 1.0}
    for percent, num_lost, is_met in ((50, 10, True), (90, 10, True), (90, 11, False), (99, 1, True), (99, 2, False)):
        slo = SLO.model_validate({f"ttft_p{percent}_ms": 100})
        (met,) = percentiles_met(slo, summary | {"completed": 100 - num_lost}, num_lost)["slo_percentiles_met"].values()
        assert met is is_met, (percent, num_lost)


def test_answers_of_one_token_have_no_gap_but_a_reader_wait() -> None:
    requests = replace(columns(), max_itl_s=np.array([4.0, 99.0, 2.0]), reader_wait_s=np.array([1.0, 0.0, 5.0]))
    statistics_ms = token_latencies(requests)
    assert (statistics_ms["mean_max_itl_ms"], statistics_ms["median_max_itl_ms"]) == (3000.0, 3000.0)
    assert (statistics_ms["mean_reader_wait_ms"], statistics_ms["median_reader_wait_ms"]) == (2000.0, 1000.0)
    assert token_latencies(columns()) == {}


def test_a_job_drains_from_the_last_start_of_each_engine() -> None:
    """Engines start their last requests at 4 and 1.2 s; the job ends at 9 s."""
    drain = tail(columns(), 9.0)
    assert drain["tail_s"] == pytest.approx(9 - (4 + 1.2) / 2)
    assert drain["tail_share"] == pytest.approx((9 - 2.6) / 9)


def record(start: int, end: int, **fields: int) -> StepRecord:
    row = dict.fromkeys(StepRecord._fields, 0) | {"num_steps": 1, "first_duration": end - start} | fields
    return StepRecord(**(row | {"start": start * TICKS_PER_S, "end": end * TICKS_PER_S}))  # type: ignore[arg-type]


def finished(
    number: int, arrival: float, scheduled: float, first: float, end: float, prompt: int, output: int, *counts: int
) -> Request:
    """A finished request; times in seconds; `counts` are cached tokens and preemptions."""
    request = Request(number, round(arrival * TICKS_PER_S), prompt, output)
    request.first_scheduled_at, request.first_token_at = round(scheduled * TICKS_PER_S), round(first * TICKS_PER_S)
    request.finished_at, request.num_output_tokens = round(end * TICKS_PER_S), output
    request.num_cached_tokens, request.num_preemptions, *_ = counts
    return request


def test_request_columns_hold_the_field_of_their_name() -> None:
    collector = Collector(has_turns=True, has_token_times=True)
    for row in ROWS:
        request = finished(*row)
        request.session, request.turn = 70 + row[0], 3
        request.token_times = TokenTimes(request.first_token_at or 0, None)
        request.token_times.longest_gap = 2 * TICKS_PER_S
        request.token_times.reader_wait = 5 * TICKS_PER_S
        collector.add_request(request, row[-1])
    recorded = collector.requests()
    for number, name in enumerate(list(RequestColumns.__dataclass_fields__)[:10]):
        assert getattr(recorded, name).tolist() == pytest.approx([row[number] for row in ROWS]), name
    assert recorded.session is not None
    assert recorded.turn is not None
    assert (recorded.session.tolist(), recorded.turn.tolist()) == ([70, 71, 72], [3, 3, 3])
    assert recorded.max_itl_s is not None
    assert recorded.reader_wait_s is not None
    assert (recorded.max_itl_s.tolist(), recorded.reader_wait_s.tolist()) == ([2.0] * 3, [5.0] * 3)


def test_step_columns_hold_the_field_of_their_name() -> None:
    """Every field of the record has a distinct number; times are in seconds."""
    collector = Collector(keep_steps=True)
    row = {name: 100 + number for number, name in enumerate(StepRecord._fields)}
    row |= {"start": 3 * TICKS_PER_S, "end": 7 * TICKS_PER_S, "first_duration": TICKS_PER_S}
    collector.add_step(StepRecord(**row), 9)
    steps = collector.steps()
    assert steps is not None
    assert (steps.start_s[0], steps.end_s[0], steps.first_duration_s[0]) == (3.0, 7.0, 1.0)
    assert (steps.replica[0], steps.index[0]) == (9, row["step"])
    for name in StepRecord._fields:
        if hasattr(steps, name):
            assert getattr(steps, name)[0] == row[name], name


def collected() -> Collector:
    collector, names = Collector(), ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    for start, end, gaps, used, *drafts in ((0, 2, 3, 5, 4, 12, 6), (2, 3, 1, 9, 2, 8, 1)):
        counts = dict(zip(names, drafts, strict=True))
        collector.add_step(record(start, end, num_gaps=gaps, used_blocks=used, **counts))
    first = TICKS_PER_S
    collector.add_step(record(4, 10, num_steps=3, num_gaps=2, used_blocks=7)._replace(first_duration=first), 1)
    return collector


def test_a_collector_sums_steps_and_keeps_the_peak_blocks_per_engine() -> None:
    """Steps of 2 and 1 s, and three of 1, 2 and 3 s: a step adds a gap for every token that ends with it."""
    collector = collected()
    assert (collector.num_steps, collector.busy_ticks, collector.end_tick) == (5, 9 * TICKS_PER_S, 10 * TICKS_PER_S)
    assert collector.used_blocks_peak == {0: 9, 1: 7}
    assert (collector.num_drafts, collector.num_draft_tokens, collector.num_accepted_tokens) == (6, 20, 7)
    assert collector.gaps.count == 3 + 1 + 3 * 2
    assert collector.gaps.mean == pytest.approx((3 * 2 + 1 + 2 * (1 + 2 + 3)) / 10)


def test_summary_rates_are_ratios_of_sums() -> None:
    collector = collected()
    for row in ROWS:
        collector.add_request(finished(*row), row[-1])
    collector.lost += [(3, "failed"), (4, "timed_out"), (5, "failed")]
    totals = DeviceTotals(4, num_preemptions=3, prefix_tokens_asked=800, prefix_tokens_hit=210)
    scenario = load_scenario("llama-3.1-8b-a100", ("slo={ttft_ms: 1000, tpot_ms: 600}",))
    summary = summarize(scenario, collector, totals)
    assert (summary["duration"], summary["completed"], summary["failed"], summary["timed_out"]) == (10.0, 3, 2, 1)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (600, 47)
    assert summary["request_throughput"] == pytest.approx(0.3)
    assert summary["output_throughput"] == pytest.approx(4.7)
    assert summary["total_token_throughput"] == pytest.approx(64.7)
    assert summary["request_goodput"] == pytest.approx(0.2)
    assert summary["slo_attainment"] == pytest.approx(2 / 6)
    assert summary["prefix_cache_hit_rate"] == pytest.approx(210 / 800)
    assert summary["acceptance_rate"] == pytest.approx(7 / 20)
    assert summary["mean_acceptance_length"] == pytest.approx(1 + 7 / 6)
    assert summary["mean_itl_ms"] == pytest.approx(1900)
    assert summary["median_itl_ms"] == pytest.approx(2000, rel=0.002)
    assert summary["p99_itl_ms"] == pytest.approx(3000, rel=0.002)


def test_each_class_is_judged_by_its_own_requests_and_losses() -> None:
    """40 requests with TTFTs of 0.1 to 4 s in 100 s; every fifth is lost, the others end with their first token."""
    classes = "[{name: fast, share: 0.5, priority: 0, slo: {ttft_ms: 1500}}, {name: slow, share: 0.5, priority: 1}]"
    settings = (f"traffic.classes={classes}", "slo={ttft_ms: 3000}")
    scenario = load_scenario("llama-3.1-8b-a100", settings)
    shares, collector = class_shares(scenario), Collector()
    for number in range(40):
        if number % 5:
            collector.add_request(finished(number, 0, 0, 0.1 * (number + 1), 0.1 * (number + 1), 10, 1, 0, 0))
        else:
            collector.lost.append((number, "timed_out" if number % 2 else "failed"))
    collector.add_step(record(0, 100))
    rows = summarize(scenario, collector, DeviceTotals(1))["classes"]
    assert [row["name"] for row in rows] == ["fast", "slow"]
    for kind, (row, limit_s) in enumerate(zip(rows, (1.5, 3.0), strict=True)):
        numbers = [number for number in range(40) if shares.of(number) == kind]
        done = [0.1 * (number + 1) for number in numbers if number % 5]
        good = sum(ttft <= limit_s + 1e-9 for ttft in done)
        assert 0 < good < len(done) < len(numbers)
        assert row["completed"] == len(done)
        assert row["failed"] == sum(number % 10 == 0 for number in numbers)
        assert row["timed_out"] == sum(number % 10 == 5 for number in numbers)
        assert row["request_throughput"] == pytest.approx(len(done) / 100)
        assert row["request_goodput"] == pytest.approx(good / 100)
        assert row["slo_attainment"] == pytest.approx(good / len(numbers))
        assert row["mean_ttft_ms"] == pytest.approx(1e3 * statistics.fmean(done))


def test_a_bill_by_hand() -> None:
    """Two devices, one of them for half of 1,800 s, at 12 USD/h in all on average, 300 W each, 40 % for prompts."""
    totals = DeviceTotals(2, device_s=2700.0, usd_per_hour=12.0, energy_j=2700.0 * 300, prompt_cost_share=0.4)
    bill = costs(totals, 1800.0, 4_000_000, 500_000)
    assert bill["gpu_hours"] == pytest.approx(0.75)
    assert bill["mean_num_devices"] == pytest.approx(1.5)
    assert bill["usd_total"] == pytest.approx(6.0)
    assert bill["usd_per_million_tokens"] == pytest.approx(6 / 4.5)
    assert bill["usd_per_million_output_tokens"] == pytest.approx(12.0)
    assert bill["usd_per_million_input_tokens_split"] == pytest.approx(6 * 0.4 / 4)
    assert bill["usd_per_million_output_tokens_split"] == pytest.approx(6 * 0.6 / 0.5)
    assert bill["output_throughput_per_gpu"] == pytest.approx(500_000 / 2700)
    assert bill["total_token_throughput_per_gpu"] == pytest.approx(4_500_000 / 2700)
    assert bill["mean_power_w"] == pytest.approx(300)
    assert bill["energy_wh"] == pytest.approx(225)
    assert isclose(bill["joules_per_output_token"], 810_000 / 500_000)


def test_a_run_ends_when_its_last_step_ends() -> None:
    """Two engines: steps of 0 to 5 s and of 1 to 3 s, in the order of their ends or not."""
    for order in (((0, 5), (1, 3)), ((1, 3), (0, 5))):
        collector = Collector()
        for number, (start, end) in enumerate(order):
            collector.add_step(record(start, end), number)
        assert collector.end_tick == 5 * TICKS_PER_S
        assert collector.busy_ticks == 7 * TICKS_PER_S
