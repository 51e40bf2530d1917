"""Goodput under limits as people state them: readers, gaps, lower speeds, prompts that may take longer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.engine import Request
from perfmodel.engine.token_watch import TokenWatch
from perfmodel.errors import SpecError
from perfmodel.sim import RunResult, simulate
from perfmodel.sim.records.columns import RequestColumns, meets_slo
from perfmodel.specs import load_scenario


def run(*overrides: str, name: str = "llama-3.1-8b-a100") -> RunResult:
    return simulate(load_scenario(name, ["traffic.num_requests=200", *overrides]))


def columns(result: RunResult) -> RequestColumns:
    assert result.requests is not None
    return result.requests


def test_even_tokens_are_read_in_time_by_whoever_needs_longer_for_one() -> None:
    """One request alone: gaps grow from g to G. A reader of 1 / G tokens a second never waits, one of 1 / g and more
    waits for what the last token is late."""
    alone = (
        "traffic.num_requests=1",
        "traffic.input_tokens={distribution: fixed, value: 100}",
        "traffic.output_tokens={distribution: fixed, value: 500}",
    )
    gaps = run(*alone, "slo.max_itl_ms=1000").summary
    shortest, longest = gaps["median_itl_ms"], gaps["mean_max_itl_ms"]
    slow = run(*alone, f"slo={{reading_tokens_per_s: {999 / longest}}}")
    assert (slow.summary["mean_reader_wait_ms"], slow.summary["slo_attainment"]) == (0.0, 1.0)
    fast = run(*alone, f"slo={{reading_tokens_per_s: {2e3 / shortest}}}")
    late_ms = 1e3 * (columns(fast).finished_s - columns(fast).first_token_s)[0] - 499 * shortest / 2
    assert fast.summary["mean_reader_wait_ms"] == pytest.approx(late_ms, rel=0.02)  # streaming is not the engine's
    assert fast.summary["slo_attainment"] == 0.0


def test_a_reader_who_never_waits_has_that_tpot_and_a_patient_one_is_served_too() -> None:
    """Of every request that is read in time at v tokens a second TPOT is at most 1 / v, not the other way round."""
    result = run("slo.reading_tokens_per_s=45", "traffic.arrivals.rate=6")
    requests = columns(result)
    assert requests.reader_wait_s is not None
    in_time = requests.reader_wait_s == 0
    assert 0 < in_time.sum() < len(requests)
    late_s = (requests.finished_s - requests.first_token_s) - (requests.num_output_tokens - 1) / 45
    assert (late_s[in_time] < 1e-3).all()  # the time to stream a larger batch
    assert ((requests.tpot_s < 1 / 45) & ~in_time).any()
    patient = run("slo.reading_tokens_per_s=45", "slo.reading_wait_ms=300", "traffic.arrivals.rate=6")
    share = (requests.reader_wait_s <= 0.3).mean()
    assert patient.summary["slo_attainment"] == pytest.approx(share)
    assert share > in_time.mean()


def test_so_many_words_a_minute_are_so_many_tokens_a_second() -> None:
    """240 words a minute: 4 a second, of 0.75 words a token: 16/3."""
    words, tokens = run("slo.reading_words_per_minute=240"), run("slo.reading_tokens_per_s=5.333333333333333")
    assert words.summary == tokens.summary
    both = ("slo.reading_words_per_minute=240", "slo.reading_tokens_per_s=5")
    with pytest.raises(SpecError, match="give one of them"):
        run(*both)


def test_a_lowest_speed_is_a_tpot() -> None:
    assert (
        run("slo={min_tokens_per_s: 50}").summary["slo_attainment_by"]
        == run("slo={tpot_ms: 20}").summary["slo_attainment_by"]
    )
    assert run("slo={min_tokens_per_s: 100, tpot_ms: 10}").summary == run("slo={tpot_ms: 10}").summary


def test_a_speed_that_contradicts_the_tpot_is_refused() -> None:
    """100 tokens a second are 10 ms a token: with 50 ms beside it, which of the two is meant?"""
    with pytest.raises(SpecError, match=r"tpot_ms 50, which is 20 tokens/s, beside min_tokens_per_s 100"):
        run("slo={min_tokens_per_s: 100, tpot_ms: 50}")


def test_long_prompts_may_take_longer() -> None:
    result = run("slo={ttft_ms: 50, ttft_ms_per_input_token: 0.1}", "traffic.arrivals.rate=6")
    requests = columns(result)
    met = requests.ttft_s * 1e3 <= 50 + 0.1 * requests.num_prompt_tokens
    assert 0 < met.sum() < len(requests)
    assert result.summary["slo_attainment"] == pytest.approx(met.mean())


def test_each_limit_has_its_share_and_all_together_at_most_the_least() -> None:
    result = run("slo={ttft_ms: 150, tpot_ms: 20, max_itl_ms: 130, reading_tokens_per_s: 45}")
    shares = result.summary["slo_attainment_by"]
    assert set(shares) == {"ttft", "tpot", "max_itl", "reader_wait"}
    assert all(0 < share < 1 for share in shares.values())
    assert 0 < result.summary["slo_attainment"] <= min(shares.values())
    assert result.summary["request_goodput"] == pytest.approx(
        result.summary["slo_attainment"] * 200 / result.summary["duration"]
    )


def test_classes_have_readers_of_their_own_and_lost_requests_are_not_good() -> None:
    kinds = "traffic.classes=[{name: person, share: 0.5, slo: {reading_tokens_per_s: 60}}, {name: job, share: 0.5}]"
    settings = ("slo={}", "cluster.gateway={max_outstanding: 24}", "traffic.arrivals.rate=30")
    summary = run(kinds, *settings, name="llama-3.1-8b-a100").summary
    person, job = summary["classes"]
    assert "slo_attainment" not in job
    assert person["mean_reader_wait_ms"] > 0 == job["mean_reader_wait_ms"]
    sent = sum(person[name] for name in ("completed", "failed", "timed_out"))
    assert person["slo_attainment"] * sent == pytest.approx(person["request_goodput"] * summary["duration"])
    good = person["slo_attainment"] * sent + job["completed"]
    assert summary["slo_attainment"] == pytest.approx(good / 200)


def test_prompts_on_engines_of_their_own_leave_readers_nothing_to_wait_for() -> None:
    """Decodes that no prompt holds up: the first two tokens come together, and later ones faster than they are read."""
    result = run("slo={reading_tokens_per_s: 20}", name="llama-3.1-70b-h100-disaggregated")
    assert result.summary["slo_attainment"] == 1.0
    assert np.all(columns(result).reader_wait_s == 0)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 60), st.integers(0, 40))
def test_a_leap_is_its_steps(durations: list[int], pace: int, idle: int) -> None:
    """Whether they grow, as the simulator's do, or not."""
    found = []
    for leaps in (False, True):
        watch, request, now = TokenWatch(lambda _: pace), Request(0, 0, 1, 50), 100
        request.num_output_tokens = 1
        watch.take(request, now)
        request.last_token_at = now
        watch.join(request, 0)
        if leaps:
            watch.begin_leap(now + idle, durations)
            watch.pass_leap(1, now, {request: 0})
        for age, duration in enumerate(() if leaps else durations, start=1):
            last, now = now, now + duration + (idle if age == 1 else 0)
            watch.pass_step(age, last, now, {request: 0})
        watch.leave(request, 0, len(durations))
        assert request.token_times is not None
        found.append((request.token_times.reader_wait, request.token_times.longest_gap))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "settings",
    [
        ("engine.pipeline_parallel_size=2",),
        ("engine.data_parallel_size=2", "traffic.arrivals.rate=16"),
        ("cluster.gateway={max_outstanding: 60, max_queue: 20, timeout_s: 8, retries: {max: 2, backoff_s: 0.2}}",),
        ("cluster.replicas=2", "cluster.failures={events: [{at_s: 4, pool: 0, replica: 1, down_s: 3}], start_s: 1}"),
    ],
    ids=["stages", "ranks", "gateway", "failure"],
)
def test_leaps_change_nothing_for_readers_wherever_requests_go(settings: tuple[str, ...]) -> None:
    overrides = ["traffic.num_requests=120", "traffic.arrivals.rate=12", "slo.reading_tokens_per_s=45", *settings]
    scenario = load_scenario("llama-3.1-8b-a100", overrides)
    leapt, stepped = (columns(simulate(scenario, can_leap=can_leap)) for can_leap in (True, False))
    order, other = np.argsort(leapt.request_id), np.argsort(stepped.request_id)
    assert leapt.reader_wait_s is not None
    assert (leapt.reader_wait_s > 0).any()
    for name in ("request_id", "reader_wait_s", "max_itl_s"):
        assert np.array_equal(getattr(leapt, name)[order], getattr(stepped, name)[other])


@pytest.mark.parametrize(("share", "is_met"), [(0.9, True), (0.899, False), (1.0, True), (None, False)])
def test_an_slo_is_met_at_its_attainment_target(share: float | None, is_met: bool) -> None:
    """At a target of 90 %, by 90 of 100 requests; never if a percentile misses its limit."""
    scenario = load_scenario("llama-3.1-8b-a100")
    assert scenario.attainment == 0.9
    assert meets_slo(scenario, {"slo_attainment": share}) == is_met
    assert not meets_slo(scenario, {"slo_attainment": share, "slo_percentiles_met": {"p99_ttft_ms": False}})
