"""Candidates rejected by the screen within its own error: by hand, and in a plan."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perfmodel.planning.choice import Ratios, overlooked, ratios_of
from perfmodel.planning.finalist import Deployment, Finalist, Screened
from perfmodel.planning.points import Record
from perfmodel.planning.result import PlanResult
from perfmodel.planning.screen import Screen
from perfmodel.planning.search import make_plan
from perfmodel.planning.spec import PlanSpec
from perfmodel.report.terminal import render_text
from perfmodel.report.views.plan import plan_view
from perfmodel.specs.slo import SLO

RATE = 12.0  # wanted, in requests per second


def cut(rate: float, usd: float = 1.0, tightness: float = 1.0) -> Deployment:
    """A layout of one device with this screened rate."""
    candidate: Any = SimpleNamespace(num_devices=1, ratio=None, kind=object(), label="one", usd_per_hour=usd)
    return Deployment(Screened(candidate, rate, "ttft", 1.0, ""), 0, tightness)


def test_candidates_rejected_within_the_screens_error_are_simulated() -> None:
    """The best deployment is four replicas of 1 USD. With a ratio of 1.3, 3.5 requests/s become 4.55, and three
    replicas serve 12; 3 become 3.9, and four are needed."""
    near, far = cut(3.5), cut(3.0)
    kept = overlooked([near, far], 4.0, Ratios((0.9, 1.3), (1.0, 1.0)), PlanSpec(), RATE)
    assert [(candidate.screened, candidate.replicas) for candidate in kept] == [(near.screened, 3)]


def test_an_exact_screen_overlooks_nothing() -> None:
    """At 3.5 requests/s four replicas are needed, no fewer than the best has."""
    assert overlooked([cut(3.5), cut(3.0)], 4.0, Ratios((1.0, 1.0), (1.0, 1.0)), PlanSpec(), RATE) == []


def test_where_no_candidate_serves_all_that_might_are_simulated() -> None:
    """16 devices of 0.7 requests/s serve 11.2; with a ratio of 1.1, 12.3."""
    spec = PlanSpec(max_gpus=16)
    assert overlooked([cut(0.7)], None, Ratios((1.0, 1.0), (1.0, 1.0)), spec, RATE) == []
    (kept,) = overlooked([cut(0.7)], None, Ratios((1.0, 1.1), (1.0, 1.0)), spec, RATE)
    assert kept.replicas == 16
    assert overlooked([cut(0.0)], None, Ratios((1.0, 9.0), (1.0, 1.0)), spec, RATE) == []


def test_a_wider_spread_overlooks_no_less() -> None:
    several = [cut(1.0 + 0.25 * step) for step in range(12)]
    numbers = [
        len(overlooked(several, 4.0, Ratios((0.9, high), (1.0, 1.0)), PlanSpec(), RATE))
        for high in (1.0, 1.2, 1.5, 3.0)
    ]
    assert numbers == sorted(numbers)
    assert numbers[0] < numbers[-1]


def test_one_schedule_of_a_layout_is_simulated_the_most_promising() -> None:
    one, other = cut(4.5), cut(7.0)
    other = replace(other, screened=replace(other.screened, candidate=one.screened.candidate))
    (kept,) = overlooked([one, other], 4.0, Ratios((1.0, 1.0), (1.0, 1.0)), PlanSpec(), RATE)
    assert kept.screened is other.screened


def test_for_latency_the_lowest_ratio_counts() -> None:
    """A screened latency of 0.6 of its limit becomes 0.42 at a ratio of simulated to screened latency of 0.7."""
    spec = PlanSpec(objective="lowest_latency")
    several = [cut(20.0, tightness=0.6), cut(20.0, tightness=0.8)]
    kept = overlooked(several, 0.5, Ratios((1.0, 1.0), (0.7, 1.1)), spec, RATE)
    assert [candidate.screened for candidate in kept] == [several[0].screened]


def test_ratios_are_simulated_over_screened_figures() -> None:
    """Two replicas of 5 requests/s serve 9, one serves 6; p90 TTFT is 40 % of its limit where the screen had 50 %."""
    done = [
        Finalist(cut(5.0).screened, 2, 0.5, (9.0,), (Record({"p90_ttft_ms": 40.0}),), first=2),
        Finalist(cut(5.0).screened, 1, 1.0, (6.0,), (Record({"p90_ttft_ms": 40.0}),), first=2),
    ]
    ratios = ratios_of(done, SLO(ttft_ms=100.0), "p90")
    assert ratios.rate == pytest.approx((0.9, 1.2))
    assert ratios.tightness == pytest.approx((0.8, 0.8))
    assert ratios_of([], SLO(ttft_ms=100.0), "p90") == Ratios((1.0, 1.0), (1.0, 1.0))


@pytest.mark.release
@pytest.mark.parametrize("rejected_rate", [None, 11.0])
def test_a_candidate_that_the_screen_underestimates_is_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rejected_rate: float | None
) -> None:
    """The screen halves all rates, so the ratio of the one finalist is about 2. With that ratio the other device, which
    the screen rejected, may be cheaper, and is simulated: also where four of it, as many as may be, seem to serve 44
    of 50 requests/s."""
    screen = Screen.all

    def halved(one: Screened) -> Screened:
        is_rejected = one.candidate.devices == "l40s" and rejected_rate is not None
        return replace(one, rate=rejected_rate if is_rejected else one.rate / 2)

    monkeypatch.setattr(Screen, "all", lambda self: list(map(halved, screen(self))))
    overrides = (
        *("traffic.input_tokens={distribution: fixed, value: 300}", "traffic.output_tokens.mean=40"),
        *("traffic.output_tokens.p99=90", "traffic.arrivals.rate=50"),
        "plan={finalists: 1, seeds: 1, num_requests: 200, max_gpus: 4, space: {hardware: [a100-sxm-80gb, l40s], "
        "tensor_parallel_size: [1], max_num_seqs: [64], max_num_batched_tokens: [2048]}}",
    )
    plan = make_plan("llama-3.1-8b-a100", overrides, tmp_path / "points.sqlite", workers=1)
    assert isinstance(plan, PlanResult)
    devices = {finalist.screened.candidate.devices for finalist in (*plan.ranked, *plan.missed)}
    assert plan.ratios is not None
    assert plan.ratios.rate[1] > 1.5
    assert len(devices) == 2
    text = render_text(plan_view(plan))
    assert "Maximum rate: closed form and simulation" in text
    assert f"{plan.ratios.rate[1]:.2f}" in text
