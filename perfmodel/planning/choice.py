"""Replica counts that serve the rate, the ranking by objective, the best per device, the cost-latency front, and
candidates cut by less than the screen's own error (`overlooked`)."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isfinite
from typing import TypeVar

from perfmodel.planning.finalist import Deployment, Finalist, FrontPoint, Records, Screened, attained, meets, tightness
from perfmodel.planning.findings import pareto_front
from perfmodel.planning.screen import Screen
from perfmodel.planning.space import Candidate
from perfmodel.planning.spec import PlanSpec
from perfmodel.specs.scenario import Scenario, price_lines, price_notes
from perfmodel.specs.slo import SLO


def pick_replicas(screened: Screened, spec: PlanSpec, rate: float, group_rate: float | None = None) -> int | None:
    """Groups of `screened` that serve `rate` (requests/s) within `spec`, at `group_rate` each (default: the screened
    rate). None if too many are needed or a group serves no rate."""
    rate_of_one = screened.rate if group_rate is None else group_rate
    if rate_of_one <= 0:
        return None
    needed = max(1, ceil(rate / rate_of_one - 1e-9))
    most = most_replicas(screened.candidate, spec)
    choices = [count for count in spec.space.replicas or range(1, most + 1) if needed <= count <= most]
    return None if not choices else max(choices) if spec.objective == "lowest_latency" else min(choices)


def may_have(candidate: Candidate, spec: PlanSpec, replicas: int) -> bool:
    """Whether the plan allows so many groups."""
    return replicas <= most_replicas(candidate, spec) and (not spec.space.replicas or replicas in spec.space.replicas)


def most_replicas(candidate: Candidate, spec: PlanSpec) -> int:
    """The most groups that the device and budget limits allow."""
    most = spec.max_gpus // candidate.num_devices
    if spec.budget_usd_per_hour is not None and candidate.usd_per_hour:
        most = min(most, int(spec.budget_usd_per_hour / candidate.usd_per_hour))
    return most


def deployed(screened: Iterable[Screened], spec: PlanSpec, rate: float) -> list[Deployment]:
    """Deployments that serve `rate` (requests/s) within the limits of `spec`."""
    counts = ((candidate, pick_replicas(candidate, spec, rate)) for candidate in screened)
    return [Deployment(candidate, replicas) for candidate, replicas in counts if replicas is not None]


def shortfalls(screened: Iterable[Screened], spec: PlanSpec, rate: float) -> dict[str, int]:
    """Number of candidates that do not serve `rate`, by reason."""
    counts: Counter[str] = Counter()
    for candidate in screened:
        if candidate.rate <= 0:
            counts["misses the SLO at any rate"] += 1
        elif pick_replicas(candidate, spec, rate) is None:
            needed = ceil(rate / candidate.rate - 1e-9)
            is_dear = needed * candidate.candidate.num_devices <= spec.max_gpus and spec.budget_usd_per_hour is not None
            counts["over budget at the rate" if is_dear else "too slow for the rate with max_gpus"] += 1
    return dict(counts.most_common())


def objective_key(deployment: Deployment, spec: PlanSpec) -> tuple[float, ...]:
    """Sort key, smaller is better; ties go to the deployment with more headroom."""
    reserve = -deployment.capacity
    usd = inf if deployment.usd_per_hour is None else deployment.usd_per_hour
    if spec.objective == "cheapest":
        return usd, reserve
    if spec.objective == "fewest_gpus":
        return float(deployment.num_devices), usd, reserve
    if spec.objective == "lowest_latency":
        return deployment.tightness, usd, reserve
    if spec.objective in ("joules", "carbon"):
        return deployment.power_w if spec.objective == "joules" else deployment.gco2_per_hour, usd, reserve
    return -deployment.screened.rate_per_device, usd


def _best(deployments: Iterable[Deployment], spec: PlanSpec) -> Deployment:
    return min(deployments, key=lambda deployment: objective_key(deployment, spec))


def finalists(deployments: Sequence[Deployment], spec: PlanSpec) -> list[Deployment]:
    """The best deployment of each layout (devices, parallelism, formats, split), ranked by the objective. Candidates
    that differ only in scheduling count as one choice. If all finalists are disaggregated, the best unified one takes
    the last place, as the conventional baseline."""
    best: dict[Hashable, Deployment] = {}
    for deployment in sorted(deployments, key=lambda deployment: objective_key(deployment, spec)):
        best.setdefault(deployment.candidate.kind, deployment)
    chosen = list(best.values())[: spec.finalists]
    usual = [deployment for deployment in deployments if deployment.candidate.ratio is None]
    if usual and len(chosen) > 1 and all(deployment.candidate.ratio is not None for deployment in chosen):
        chosen[-1] = _best(usual, spec)
    return chosen


@dataclass(frozen=True)
class DeviceAnswer:
    """The best deployment on one requested device.

    device:       as requested
    label:        of the best deployment; empty if nothing on the device serves the rate
    usd_per_hour: of all devices; None without a price
    max_rate:     requests/s within the SLO: simulated, or screened if not `is_simulated`
    reason:       why there is no deployment, or no better one"""

    device: str
    label: str = ""
    num_devices: int = 0
    usd_per_hour: float | None = None
    max_rate: float = 0.0
    is_simulated: bool = False
    reason: str = ""


def device_of(screened: Screened) -> str | None:
    """The device as the plan's space names it; None for the scenario's own."""
    return screened.candidate.layout.choices.get("hardware")


def with_every_device(chosen: Sequence[Deployment], serving: Sequence[Deployment], spec: PlanSpec) -> list[Deployment]:
    """`chosen`, in which a device without a finalist, but with deployments that serve (`serving`), replaces the last
    finalist of a device with several."""
    kept = list(chosen)
    for device in spec.space.hardware:
        able = [deployment for deployment in serving if device_of(deployment.screened) == device]
        taken = [device_of(deployment.screened) for deployment in kept]
        spare = [place for place, name in enumerate(taken) if place and taken.count(name) > 1]
        if able and spare and device not in taken:
            kept[spare[-1]] = _best(able, spec)
    return kept


def device_answers(
    spec: PlanSpec,
    rate: float,
    judged: tuple[Sequence[Finalist], Sequence[Finalist]],
    serving: Sequence[Deployment],
    screened: Sequence[Screened],
    ruled_out: Mapping[str, Mapping[str, int]],
) -> list[DeviceAnswer]:
    """One answer for each device of the space, in its order; none if the space names fewer than two.

    rate:      requests/s to serve under `spec`
    judged:    finalists that serve it, best first, and those that failed in simulation
    serving:   deployments that serve it in closed form, out of all `screened` ones
    ruled_out: device -> reason -> number of candidates"""

    def answer(device: str) -> DeviceAnswer:
        ranked, missed = ([one for one in group if device_of(one.screened) == device] for group in judged)
        if ranked:
            best = ranked[0]
            return DeviceAnswer(device, best.label, best.num_devices, best.usd_per_hour, best.rate, True)
        if missed:
            near = max(missed, key=lambda finalist: finalist.attained)
            reason = f"{near.label}, simulated, has {near.attained:.1%} of requests within the SLO"
            return DeviceAnswer(device, reason=reason)
        able = [deployment for deployment in serving if device_of(deployment.screened) == device]
        if able:
            first = _best(able, spec)
            return DeviceAnswer(device, first.label, first.num_devices, first.usd_per_hour, first.capacity)
        short = shortfalls([candidate for candidate in screened if device_of(candidate) == device], spec, rate)
        reasons = {**ruled_out.get(device, {}), **short}
        return DeviceAnswer(device, reason="; ".join(f"{count:,} {reason}" for reason, count in reasons.items()))

    return [answer(device) for device in spec.space.hardware] if len(spec.space.hardware) > 1 else []


_BETTER = 0.001  # of the best figure: what is as good is no better


@dataclass(frozen=True)
class Ratios:
    """Lowest and highest ratio of simulated to screened values over the finalists. rate: of the highest rate;
    tightness: of the nearest limit, latency / limit"""

    rate: tuple[float, float]
    tightness: tuple[float, float]


def ratios_of(done: Sequence[Finalist], slo: SLO, quantile: str) -> Ratios:
    """The ratios over `done`; 1 to 1 if none served."""
    rates = [finalist.rate / finalist.capacity for finalist in done if finalist.rate]
    near = [
        tightness(finalist.records, slo, quantile) / finalist.tightness
        for finalist in done
        if finalist.records and finalist.first == finalist.replicas and isfinite(finalist.tightness)
    ]
    return Ratios(*((min(values, default=1.0), max(values, default=1.0)) for values in (rates, near)))


def overlooked(
    cut: Sequence[Deployment], best: float | None, ratios: Ratios, spec: PlanSpec, rate: float
) -> list[Deployment]:
    """Deployments of `cut` that could beat `best` under the finalists' most favourable simulated/screened ratios. One
    per layout, the most promising first. cut: deployments at `rate` (requests/s), serving by the screen or not; best:
    first figure of `objective_key` of the best simulated one, None if nothing serves; `ratios` are those of the
    finalists, objective and limits those of `spec`."""
    by_kind: dict[Hashable, tuple[tuple[float, ...], Deployment]] = {}
    for deployment in cut:
        screened = deployment.screened
        likely = replace(screened, rate=screened.rate * ratios.rate[1])
        replicas = pick_replicas(likely, spec, rate)
        if replicas is None:
            continue
        near = ratios.tightness[0] * deployment.tightness
        key = objective_key(Deployment(likely, replicas, near), spec)
        kind = screened.candidate.kind
        if (best is None or key[0] < best - _BETTER * abs(best)) and (kind not in by_kind or key < by_kind[kind][0]):
            by_kind[kind] = key, Deployment(screened, replicas, near)
    return [deployment for _, deployment in sorted(by_kind.values(), key=lambda pair: pair[0])]


OnFront = TypeVar("OnFront", Deployment, FrontPoint)
_MAX_LOOKED_AT = 60
_MAX_POINTS = 8


def with_tightness(screen: Screen, deployments: Sequence[Deployment], rate: float) -> list[Deployment]:
    near = screen.tightness([one.screened for one in deployments], [rate / one.replicas for one in deployments])
    return [replace(one, tightness=value) for one, value in zip(deployments, near, strict=True)]


def screened_front(screen: Screen, serving: Sequence[Deployment], spec: PlanSpec, rate: float) -> list[Deployment]:
    """Pareto front of cost and latency at `rate` (requests/s) by `screen`, over `serving` with every replica count that
    `spec` allows; thinned evenly if long."""
    more: list[Deployment] = []
    widest = spec.model_copy(update={"objective": "lowest_latency"})
    for deployment in serving[:_MAX_LOOKED_AT]:
        least, most = deployment.replicas, pick_replicas(deployment.screened, widest, rate) or 0
        counts = spec.space.replicas or range(least, most + 1)
        more += [replace(deployment, replicas=count) for count in counts if least <= count <= most]
    ordered = _front(with_tightness(screen, more, rate))
    last = len(ordered) - 1
    count = min(last + 1, _MAX_POINTS)
    return [ordered[round(index * last / max(count - 1, 1))] for index in range(count)]


def simulated_front(
    simulated: Mapping[str, tuple[Deployment, Records]],
    screened: Sequence[Deployment],
    spec: PlanSpec,
    slo: SLO,
    quantile: str,
) -> tuple[list[FrontPoint], list[FrontPoint]]:
    """(front of the simulated deployments that meet the SLO, screened front points that miss it in simulation).

    simulated: by label, at the target rate
    screened:  the screen's front
    spec, slo: objective and limits; quantile: of the compared latencies, such as "p90"."""
    serving: dict[str, FrontPoint] = {}
    others: dict[str, FrontPoint] = {}
    for label, (one, records) in simulated.items():
        near = tightness(records, slo, quantile)
        point = FrontPoint(label, one.num_devices, one.usd_per_hour, near, attained(records), one.tightness)
        (serving if meets(records, slo, spec.attainment) else others)[label] = point
    return _front(serving.values()), [others[one.label] for one in screened if one.label in others]


def _front(points: Iterable[OnFront]) -> list[OnFront]:
    """Pareto-optimal points, ascending in cost; of equal cost the one with the lowest latency."""
    best: dict[float, OnFront] = {}
    for point in sorted(points, key=lambda point: point.cost):
        if point.cost not in best or point.tightness < best[point.cost].tightness:
            best[point.cost] = point
    labels = set(pareto_front({point.label: (point.cost, point.tightness) for point in best.values()}, (True, True)))
    return [point for point in best.values() if point.label in labels]


def origin_notes(origin: str) -> list[str]:
    """Caveats about step times of this origin."""
    return ["Step times come from the datasheet: this device was not measured."] if origin == "datasheet" else []


def compared_prices(scenarios: Iterable[Scenario]) -> list[str]:
    """Prices used to compare deployments, with source and date, and which are outdated."""
    known = list(scenarios)
    return [line for lines in (price_lines, price_notes) for scenario in known for line in lines(scenario)]
