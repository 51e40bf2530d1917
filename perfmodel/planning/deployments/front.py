"""What a higher budget buys: deployments that none beats in cost and latency both, as the simulator has them.

The screen says which are worth simulating; those that miss the SLO when simulated are marked.
"""

__all__ = ["label_of", "screened_front", "simulated_front"]

from collections.abc import Mapping, Sequence
from dataclasses import replace

from perfmodel.planning.deployments.choice import Deployment, pick_replicas
from perfmodel.planning.deployments.finalist import FrontPoint
from perfmodel.planning.deployments.judged import attained, meets, tightness
from perfmodel.planning.deployments.runs import Records
from perfmodel.planning.screening.screen import Screen
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.sweeps.findings import pareto_front
from perfmodel.specs.slo import SLO

_MOST_LOOKED_AT = 60
_MOST_POINTS = 8


def screened_front(screen: Screen, serving: Sequence[Deployment], spec: PlanSpec, rate: float) -> list[Deployment]:
    """Pareto front of cost and latency at `rate` (requests/s): the best of `serving` with all numbers of replicas that
    `spec` allows, by `screen`; thinned out evenly where there are many."""
    more: list[Deployment] = []
    for each in serving[:_MOST_LOOKED_AT]:
        most = pick_replicas(each.screened, spec.model_copy(update={"objective": "lowest_latency"}), rate) or 0
        counts = spec.space.replicas or range(each.replicas, most + 1)
        more += [replace(each, replicas=count) for count in counts if each.replicas <= count <= most]
    if not more:
        return []
    near = screen.tightness([each.screened for each in more], [rate / each.replicas for each in more])
    found = [replace(each, tightness=value) for each, value in zip(more, near, strict=True)]
    best: dict[float, Deployment] = {}  # of equal cost only the one with the shortest latencies can be on the front
    for each in found:
        if _cost(each) not in best or each.tightness < best[_cost(each)].tightness:
            best[_cost(each)] = each
    values = {label_of(each): (_cost(each), each.tightness) for each in best.values()}
    front = set(pareto_front(values, (True, True)))
    ordered = [best[cost] for cost in sorted(best) if label_of(best[cost]) in front]
    last = len(ordered) - 1
    count = min(last + 1, _MOST_POINTS)
    return [ordered[round(index * last / max(count - 1, 1))] for index in range(count)]


def simulated_front(
    simulated: Mapping[str, tuple[Deployment, Records]],
    screened: Sequence[Deployment],
    spec: PlanSpec,
    slo: SLO,
    quantile: str,
) -> tuple[list[FrontPoint], list[FrontPoint]]:
    """(the front of all that was simulated at the rate and meets the SLO, what the screen had on it and does not).

    simulated: by label, at the target rate
    screened:  the front by the screen
    spec, slo: the plan's objective and limits
    quantile:  that latencies are compared by, as in "p90"
    """
    points = {
        label: FrontPoint(
            label,
            each.num_devices,
            each.usd_per_hour,
            tightness(records, slo, quantile),
            attained(records),
            each.tightness,
        )
        for label, (each, records) in simulated.items()
    }
    able = {label for label, (_, records) in simulated.items() if meets(records, slo, spec.attainment)}
    serving = sorted((each for each in points.values() if each.label in able), key=lambda each: each.cost)
    best: dict[float, FrontPoint] = {}
    for each in serving:
        if each.cost not in best or each.tightness < best[each.cost].tightness:
            best[each.cost] = each
    front = set(pareto_front({each.label: (each.cost, each.tightness) for each in best.values()}, (True, True)))
    labels = [label_of(each) for each in screened]
    not_serving = [points[label] for label in labels if label in points and points[label] not in serving]
    return [each for each in best.values() if each.label in front], not_serving


def label_of(deployment: Deployment) -> str:
    """`3 x h100-sxm-80gb TP2 ...`"""
    return f"{deployment.replicas} x {deployment.screened.candidate.label}"


def _cost(deployment: Deployment) -> float:
    return float(deployment.num_devices) if deployment.usd_per_hour is None else deployment.usd_per_hour
