"""What of a scenario's cluster a plan carries: its failures and gateway, under which the choice is simulated with as
many replicas and with more; and what it does not carry, in sentences.
"""

__all__ = ["carried_cluster", "left_out", "requests_with_failures", "under_failures"]

from collections.abc import Mapping
from math import comb
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.planning.deployments.choice import may_have
from perfmodel.planning.deployments.finalist import Finalist
from perfmodel.planning.deployments.result import PlanResult, Resilience
from perfmodel.planning.screening.demand import at_rate
from perfmodel.sim import simulate
from perfmodel.specs.cluster import FailuresSpec
from perfmodel.specs.overrides import as_overrides
from perfmodel.specs.scenario import Scenario

_CARRIED = ("failures", "gateway")
_MOST_SPARE = 2  # replicas beyond those that serve the rate without failures
_FEWEST_REQUESTS, _MOST_REQUESTS = 400, 20_000
_FAILURES_SEEN = 3  # of all replicas together, that a run is to be long enough for
_AFTER_S = 60.0  # of a run, after the last event's replica is back


def carried_cluster(scenario: Scenario) -> dict[str, Any]:
    """The fields of the scenario's cluster that go with a plan's choice, as a file has them."""
    given = scenario.cluster.model_dump(mode="json", include=set(_CARRIED), exclude_unset=True)
    return {name: value for name, value in given.items() if value is not None}


def under_failures(result: PlanResult, winner: Finalist) -> Resilience | None:
    """The choice as it serves the rate under what the scenario says of failures and of its gateway, with up to two
    more replicas where it misses the SLO so; None where the scenario says nothing."""
    carried = carried_cluster(result.scenario)
    if not carried:
        return None
    tried: dict[int, float] = {}
    serving: list[int] = []
    problem = ""
    for replicas in range(winner.replicas, winner.replicas + 1 + _MOST_SPARE):
        if tried and not may_have(winner.deployment.screened, result.spec, replicas):
            break
        try:
            tried[replicas], is_met = _attained(result, winner, replicas, carried)
        except SpecError as error:  # an event of a replica that the choice does not have
            problem = str(error)
            break
        if is_met:
            serving.append(replicas)
            break
    return Resilience(
        tried, next(iter(serving), None), _all_up(result.scenario.cluster.failures, winner.replicas), problem
    )


def left_out(scenario: Scenario) -> list[str]:
    """What the scenario has, and neither a plan nor what it exports."""
    cluster, found = scenario.cluster, []
    if cluster.autoscaling is not None or any(pool.autoscaling for pool in cluster.pools):
        found.append("cluster.autoscaling: replicas are fixed here, as many as the highest rate takes")
    if cluster.pools:
        found.append("cluster.pools: the plan chooses its own engines, without shares, shadows and other models")
    if scenario.traffic.arrivals.stages:
        found.append("traffic.arrivals.stages: the plan is for the highest rate of them")
    if any(kind.slo is not None for kind in scenario.traffic.classes):
        found.append("slo of single traffic.classes: the closed form screens by the scenario's own; runs have both")
    return found


def _attained(result: PlanResult, winner: Finalist, replicas: int, carried: Mapping[str, Any]) -> tuple[float, bool]:
    """The share of requests within the SLO over all seeds, and whether the SLO is met."""
    choices = winner.deployment.screened.candidate.choices(replicas)
    choices = {**choices, "cluster": {**choices["cluster"], **carried}}
    requests = requests_with_failures(result, replicas)
    shares, percentiles = [], []
    for seed in range(result.scenario.seed, result.scenario.seed + result.spec.seeds):
        whole = {**choices, **at_rate(result.scenario, result.rate, requests), "seed": seed}
        run = simulate(result.base.load(as_overrides(whole)), keep_steps=False)
        shares.append(float(run.summary["slo_attainment"]))
        percentiles.append(all(run.summary.get("slo_percentiles_met", {}).values()))
    share, is_of_requests = sum(shares) / len(shares), result.scenario.slo.is_of_requests
    return share, all(percentiles) and (share >= result.spec.attainment or not is_of_requests)


def requests_with_failures(result: PlanResult, replicas: int) -> int:
    """Requests of a run that sees the scenario's events, or some failures at their mean time between them."""
    failures, duration_s = result.scenario.cluster.failures, 0.0
    if failures is not None:
        away_s = failures.repair_s + failures.start_s
        ends = [event.at_s + (event.down_s or failures.repair_s) + failures.start_s for event in failures.events]
        duration_s = max(ends, default=0.0) + _AFTER_S
        if failures.mtbf_s is not None:
            duration_s = max(duration_s, _FAILURES_SEEN * failures.mtbf_s / replicas + away_s)
    return int(min(max(result.rate * duration_s, _FEWEST_REQUESTS), _MOST_REQUESTS))


def _all_up(failures: FailuresSpec | None, needed: int) -> dict[int, float]:
    """P(at least `needed` of n replicas are up), each up a share mtbf / (mtbf + repair + start) of the time, apart."""
    if failures is None or failures.mtbf_s is None:
        return {}
    up = failures.mtbf_s / (failures.mtbf_s + failures.repair_s + failures.start_s)
    return {
        count: sum(comb(count, k) * up**k * (1 - up) ** (count - k) for k in range(needed, count + 1))
        for count in range(needed, needed + 1 + _MOST_SPARE)
    }
