"""How many replicas a plan ends with, with a simulator whose answer is known."""

from types import SimpleNamespace
from typing import Any

import pytest

from perfmodel.planning.finalist import Deployment, Finalist, Screened
from perfmodel.planning.points import Record
from perfmodel.planning.runs import Runs
from perfmodel.planning.space import Base
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.sweep import StoredSweep
from perfmodel.specs import load_scenario
from perfmodel.specs.slo import SLO

WANTED = 30.0


class Known(Runs):
    """Instead of simulating: `capacity` of so many replicas, and all deployments that were asked for."""

    asked: list[int]
    capacity: Any

    def _highest(self, whole: Any, starts: Any) -> Any:
        return [(self.capacity(replicas),) for _, replicas in whole]

    def at_rate(self, whole: Any) -> Any:
        self.asked.extend(replicas for _, replicas in whole)
        return [(Record({"slo_attainment": min(self.capacity(n) / WANTED, 1.0) * 0.9}),) for _, n in whole]


def finalize(capacity: Any, screened_rate: float, **spec: Any) -> tuple[Finalist | None, list[int]]:
    base = Base("llama-3.1-8b-a100")
    plan = PlanSpec.model_validate({"seeds": 1, **spec})
    run = Known(base, load_scenario(base.path), plan, WANTED, StoredSweep("", 1))
    object.__setattr__(run, "asked", [])
    object.__setattr__(run, "capacity", capacity)
    candidate: Any = SimpleNamespace(num_devices=1, num_engines=1, ratio=None, label="one", kind=1, usd_per_hour=2.0)
    deployment = Deployment(Screened(candidate, screened_rate, "ttft", 1.0, ""), -(-30 // int(screened_rate)))
    done = run.settled([deployment])
    return (done[0] if done else None), run.asked


@pytest.mark.parametrize("screened_rate", [5.0, 7.0, 8.0, 10.0, 15.0])
def test_as_few_replicas_as_the_simulator_finds_to_serve(screened_rate: float) -> None:
    """Whatever the screen took one to serve: 8 each, a router's pooling adds nothing, so four."""
    found, _ = finalize(lambda count: 8.0 * count, screened_rate)
    assert found is not None
    assert (found.replicas, found.rate) == (4, 32.0)


def test_one_fewer_is_tried_where_pooling_may_make_it_do() -> None:
    """Four would serve 7.2 each, 28.8 in proportion; simulated as a whole three of them do, since fewer share better
    (as no router does: the law is only that what was simulated counts)."""
    found, asked = finalize(lambda count: {5: 37.5, 4: 30.5, 3: 25.0}[count], 6.0)
    assert found is not None
    assert (found.replicas, found.rate) == (4, 30.5)
    assert 5 not in asked or 4 in asked


def test_one_fewer_that_misses_is_not_taken() -> None:
    found, asked = finalize(lambda count: 8.0 * count - (3 if count == 3 else 0), 10.0)
    assert found is not None
    assert found.replicas == 4
    near, asked = finalize(lambda count: {4: 39.0, 3: 29.0}[count], 8.0)
    assert near is not None
    assert near.replicas == 4
    assert 3 in asked


def test_one_replica_fewer_is_not_tried_far_below_the_rate() -> None:
    """Four replicas serve 32 requests/s, three would serve 24; only from 27 on is 30 near enough."""
    finalist, asked = finalize(lambda count: 8.0 * count, 8.0)
    assert finalist is not None
    assert (finalist.replicas, asked) == (4, [4])


@pytest.mark.parametrize(
    ("slo", "rate", "batch", "replicas", "requests"),
    [
        ({"ttft_ms": 100}, 1.0, 10, 1, 400),  # the minimum
        ({"ttft_ms": 100}, 1.0, 50, 3, 1500),  # five full batches of six engines
        ({"ttft_ms": 100, "e2e_p99_ms": 20_000}, 5.0, 10, 2, 4000),  # twenty times the limit on latency
        ({"ttft_ms": 100}, 1.0, 500, 8, 8000),
    ],
)
def test_a_run_is_long_enough_for_its_batch_and_for_a_queue(
    slo: dict[str, Any], rate: float, batch: int, replicas: int, requests: int
) -> None:
    base = Base("llama-3.1-8b-a100")
    scenario = load_scenario(base.path).model_copy(update={"slo": SLO(**slo)})
    run = Runs(base, scenario, PlanSpec(), WANTED, StoredSweep("", 1))
    candidate: Any = SimpleNamespace(num_engines=2 if batch == 50 else 1)
    deployment = Deployment(Screened(candidate, rate, "ttft", float(batch), ""), replicas)
    assert run._requests(deployment, replicas) == requests


def test_requests_to_come_are_those_of_all_deployments_under_all_seeds() -> None:
    base = Base("llama-3.1-8b-a100")
    plan = PlanSpec.model_validate({"seeds": 3, "num_requests": 500})
    deployment = Deployment(Screened(SimpleNamespace(num_engines=1), 8.0, "ttft", 1.0, ""), 2)  # type: ignore[arg-type]
    run = Runs(base, load_scenario(base.path), plan, WANTED, StoredSweep("", 1))
    assert run.num_requests([(deployment, 2), (deployment, 3)]) == 2 * 500 * 3


def test_the_highest_rate_of_other_replicas_is_looked_for_from_what_they_serve_in_proportion(monkeypatch: Any) -> None:
    """The screen takes six replicas to serve 30. Six serve 48, so four are enough: of these the search begins at 32."""
    begun = []

    def highest(run: Known, whole: Any, starts: Any) -> Any:
        begun.extend((replicas, start) for (_, replicas), start in zip(whole, starts, strict=True))
        return [(run.capacity(replicas),) for _, replicas in whole]

    monkeypatch.setattr(Known, "_highest", highest)
    finalize(lambda count: 8.0 * count, 5.0)
    assert begun == [(6, pytest.approx(30)), (4, pytest.approx(32))]


def test_one_more_is_tried_where_the_whole_misses() -> None:
    """Three serve 30 by their highest rate in proportion to two, as a whole they do not."""
    found, asked = finalize(lambda count: {2: 20.5, 3: 29.5, 4: 40.0}[count], 15.0)
    assert found is not None
    assert found.replicas == 4
    assert asked[0] == 3


def test_not_more_than_is_allowed() -> None:
    found, asked = finalize(lambda count: 6.0 * count, 8.0, max_gpus=4)
    assert found is not None
    assert found.attained < 0.9
    assert max(asked) == 4


def test_only_as_many_as_the_space_lists() -> None:
    """Two, four or eight: four miss the SLO as a whole, so eight; six would do."""
    found, asked = finalize(lambda count: 7.0 * count, 8.0, space={"replicas": (2, 4, 8)})
    assert found is not None
    assert found.replicas == 8
    assert set(asked) <= {2, 4, 8}


def test_for_the_lowest_latency_all_that_are_allowed_stay() -> None:
    found, asked = finalize(lambda count: 10.0 * count, 10.0, objective="lowest_latency", max_gpus=6)
    assert found is not None
    assert found.replicas == 6
    assert asked == [6]
