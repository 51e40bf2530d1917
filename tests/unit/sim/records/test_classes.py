"""Priority classes: shares of the requests that are told apart in the summary, and served in their order."""

import pytest

from perfmodel.errors import SpecError
from perfmodel.sim.driver import simulate
from perfmodel.specs import load_scenario

CLASSES = "traffic.classes=[{name: chat, share: 0.3, priority: 0}, {name: batch, share: 0.7, priority: 1}]"
BUSY = (
    "traffic.num_requests=600",
    "traffic.arrivals.rate=40",
    "engine.max_num_seqs=16",
    "engine.scheduling_policy=priority",
)


def test_classes_add_up_and_the_urgent_one_waits_less() -> None:
    scenario = load_scenario("llama-3.1-8b-h100-2048-256", (CLASSES, *BUSY))
    summary = simulate(scenario).summary
    chat, batch = summary["classes"]
    assert chat["completed"] + batch["completed"] == summary["completed"] == 600
    assert chat["completed"] / 600 == pytest.approx(0.3, abs=4 * (0.21 / 600) ** 0.5)  # binomial
    assert chat["mean_ttft_ms"] < 0.2 * batch["mean_ttft_ms"]


def test_every_request_ends_completed_failed_or_timed_out() -> None:
    settings = (
        "cluster.gateway={max_outstanding: 24, max_queue: 10, timeout_s: 4, retries: {max: 1, backoff_s: 0.1}}",
    )
    summary = simulate(load_scenario("llama-3.1-8b-h100-2048-256", (CLASSES, *BUSY, *settings))).summary
    ends = [summary[name] for name in ("completed", "failed", "timed_out")]
    assert sum(ends) == 600
    assert all(ends)
    assert summary["rejected"] == summary["retries"] + summary["failed"]
    assert all(sum(row[name] for row in summary["classes"]) == summary[name] for name in ("failed", "timed_out"))
    assert summary["p99_e2el_ms"] <= 4000


def test_shares_that_are_not_the_whole_are_refused() -> None:
    with pytest.raises(SpecError, match=r"shares add up to 0\.8"):
        load_scenario("llama-3.1-8b-h100-2048-256", ("traffic.classes=[{name: chat, share: 0.8}]",))


def test_an_itl_limit_applies_to_all_classes_together() -> None:
    few = ("traffic.num_requests=60", CLASSES)
    summary = simulate(
        load_scenario("llama-3.1-8b-h100-2048-256", (*few, "slo={itl_p99_ms: 1000, ttft_mean_ms: 1e6}"))
    ).summary
    assert summary["slo_percentiles_met"] == {"ttft_mean_ms": True, "itl_p99_ms": True}
    assert all(row["slo_percentiles_met"] == {"ttft_mean_ms": True} for row in summary["classes"])
    own = "traffic.classes=[{name: chat, share: 1, slo: {itl_p99_ms: 10}}]"
    with pytest.raises(SpecError, match="got itl_p99_ms for one class; gaps between tokens are counted for all"):
        load_scenario("llama-3.1-8b-h100-2048-256", (own,))
