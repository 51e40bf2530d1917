"""The front of cost and latency: what the simulator has, not what the screen had."""

from types import SimpleNamespace
from typing import Any

from perfmodel.planning.choice import simulated_front
from perfmodel.planning.finalist import Deployment, Screened
from perfmodel.planning.points import Record
from perfmodel.planning.spec import PlanSpec
from perfmodel.specs.slo import SLO

LIMITS = SLO(ttft_ms=1000)


def deployment(label: str, usd: float, tightness: float) -> Deployment:
    candidate: Any = SimpleNamespace(num_devices=1, label=label, usd_per_hour=usd)
    return Deployment(Screened(candidate, 5.0, "ttft", 1.0, ""), 1, tightness)


def served(share: float, ttft_ms: float) -> tuple[Record, ...]:
    return (Record({"slo_attainment": share, "p90_ttft_ms": ttft_ms}),)


def test_what_the_simulator_finds_not_to_serve_is_told_apart() -> None:
    """The cheapest misses the SLO when simulated; the next is on the front with its simulated latency."""
    screened = [deployment("cheap", 1.0, 0.9), deployment("good", 2.0, 0.8), deployment("dear", 9.0, 0.2)]
    records = [served(0.5, 1500.0), served(0.97, 700.0), served(1.0, 100.0)]
    simulated = {each.label: (each, known) for each, known in zip(screened, records, strict=True)}
    front, missed = simulated_front(simulated, screened, PlanSpec(), LIMITS, "p90")
    assert [(point.label, point.tightness) for point in front] == [("1 x good", 0.7), ("1 x dear", 0.1)]
    assert [(point.label, point.attained) for point in missed] == [("1 x cheap", 0.5)]
    assert front[0].screened_tightness == 0.8


def test_what_costs_more_and_takes_longer_is_not_on_the_front() -> None:
    cheap, worse, dear = deployment("a", 1.0, 0.5), deployment("b", 2.0, 0.6), deployment("c", 3.0, 0.3)
    known = {each.label: (each, served(1.0, ms)) for each, ms in ((cheap, 500.0), (worse, 600.0), (dear, 300.0))}
    front, missed = simulated_front(known, [cheap, dear], PlanSpec(), LIMITS, "p90")
    assert [point.label for point in front] == ["1 x a", "1 x c"]
    assert missed == []
    assert simulated_front({}, [], PlanSpec(), LIMITS, "p90") == ([], [])
