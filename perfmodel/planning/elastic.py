"""A plan's choice through the scenario's own course of load: replicas that follow it by the scenario's autoscaling,
with several thresholds, against as many as the plan fixes for its rate.

A threshold is a load of one replica. In requests in flight it is a share of what a replica is full with at its highest
rate within the SLO (`operations.in_flight_when_full`), in KV usage a share of the cache, in waiting requests a count.
Every fleet begins with the fixed one's replicas and has the same requests."""

from collections.abc import Iterator
from typing import Any

from perfmodel.planning.finalist import Finalist
from perfmodel.planning.operations import in_flight_when_full
from perfmodel.planning.result import Elasticity, FleetRun, PlanResult
from perfmodel.sim.driver import simulate
from perfmodel.sim.records.columns import meets_slo
from perfmodel.specs.autoscaling import AutoscalingSpec
from perfmodel.specs.overrides import as_overrides

_SHARES = (0.5, 0.7, 0.9)  # of a full replica
_WAITING = (1.0, 4.0, 16.0)  # requests
_MAX_REQUESTS = 200_000  # of one fleet's run: a minute


def over_the_load(result: PlanResult, winner: Finalist) -> Elasticity | None:
    """The fixed and the scaled fleets; None where the scenario has no course of load, or no autoscaling."""
    spec, traffic = result.scenario.cluster.autoscaling, result.scenario.traffic
    if spec is None or not (traffic.arrivals.stages or traffic.trace is not None):
        return None
    num_requests = traffic.expected_requests or 0
    if len(winner.candidate.layout.scenario.pools) > 1:
        return Elasticity(problem="the choice has prefill and decode replicas, whose numbers follow no one load")
    if num_requests > _MAX_REQUESTS:
        return Elasticity(
            problem=f"{num_requests:,.0f} requests; at most {_MAX_REQUESTS:,}: shorten the course of load"
        )
    if spec.max_replicas < winner.replicas:
        needed = f"max_replicas {spec.max_replicas} of cluster.autoscaling, and the rate takes {winner.replicas}"
        return Elasticity(problem=f"{needed}; raise it")
    fixed = _run(result, winner, {}, None)
    given = spec.model_dump(mode="json", exclude_unset=True)
    targets = list(dict.fromkeys([spec.target, *_targets(spec, winner)]))
    scaled = [_run(result, winner, {**given, "target": target}, target) for target in targets]
    return Elasticity(fixed, tuple(scaled))


def _targets(spec: AutoscalingSpec, winner: Finalist) -> Iterator[float]:
    if spec.dynamo is not None:
        return
    full = {"queue": 0.0, "kv_cache_usage": 1.0}.get(spec.metric, in_flight_when_full(winner) or 0.0)
    yield from _WAITING if spec.metric == "queue" else (float(f"{share * full:.3g}") for share in _SHARES if full)


def _run(result: PlanResult, winner: Finalist, autoscaling: dict[str, Any], target: float | None) -> FleetRun:
    choices = winner.candidate.choices(winner.replicas)
    cluster = choices["cluster"] | ({"autoscaling": autoscaling} if autoscaling else {})
    scenario = result.base.load(as_overrides({**choices, "cluster": cluster}))
    summary = simulate(scenario, keep_steps=False).summary
    pool = (summary.get("pools") or [{}])[0]
    return FleetRun(
        target,
        float(summary["slo_attainment"] or 0.0),
        meets_slo(scenario, summary),
        float(summary["gpu_hours"]),
        summary.get("usd_total"),
        pool.get("replicas_peak") or winner.replicas,
        pool.get("replicas_over_time") or [[0.0, winner.replicas, winner.replicas]],
        float(summary["duration"]),
    )
