"""What a plan wants of candidates: how many of each serve the rate, and who is best by the objective, of each device,
and on the front of cost and latency; who was cut by less than the screen's own error (`overlooked`)."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isfinite
from typing import TypeVar

from perfmodel.planning.finalist import Deployment, Finalist, FrontPoint, Records, Screened, attained, meets, tightness
from perfmodel.planning.findings import pareto_front
from perfmodel.planning.screen import Screen
from perfmodel.planning.spec import PlanSpec
from perfmodel.specs.scenario import Scenario, price_lines, price_notes
from perfmodel.specs.slo import SLO


def pick_replicas(screened: Screened, spec: PlanSpec, rate: float, group_rate: float | None = None) -> int | None:
    """Number of groups of `screened` that serve `rate` (requests/s) within the limits of `spec`, if each serves
    `group_rate` (default: what the screen found). None if so many are not allowed, or none serves."""
    each = screened.rate if group_rate is None else group_rate
    if each <= 0:
        return None
    needed = max(1, ceil(rate / each - 1e-9))
    most = most_replicas(screened, spec)
    choices = [count for count in spec.space.replicas or range(1, most + 1) if needed <= count <= most]
    if not choices:
        return None
    return max(choices) if spec.objective == "lowest_latency" else min(choices)


def may_have(screened: Screened, spec: PlanSpec, replicas: int) -> bool:
    """Whether the plan allows so many groups."""
    return replicas <= most_replicas(screened, spec) and (not spec.space.replicas or replicas in spec.space.replicas)


def most_replicas(screened: Screened, spec: PlanSpec) -> int:
    """The most groups that the devices and the budget allow."""
    most = spec.max_gpus // screened.candidate.num_devices
    if spec.budget_usd_per_hour is not None and screened.usd_per_hour:
        most = min(most, int(spec.budget_usd_per_hour / screened.usd_per_hour))
    return most


def deployed(screened: Iterable[Screened], spec: PlanSpec, rate: float) -> list[Deployment]:
    """Deployments that serve the rate within what may be spent."""
    counts = ((candidate, pick_replicas(candidate, spec, rate)) for candidate in screened)
    return [Deployment(candidate, replicas) for candidate, replicas in counts if replicas is not None]


def shortfalls(screened: Iterable[Screened], spec: PlanSpec, rate: float) -> dict[str, int]:
    """How many candidates do not serve the rate, by reason."""
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
    """Smaller is better; ties go to whoever has more in reserve."""
    reserve = -deployment.capacity
    usd = inf if deployment.usd_per_hour is None else deployment.usd_per_hour
    if spec.objective == "cheapest":
        return usd, reserve
    if spec.objective == "fewest_gpus":
        return float(deployment.num_devices), usd, reserve
    if spec.objective == "lowest_latency":
        return deployment.tightness, usd, reserve
    return -deployment.screened.rate_per_device, usd


def _best(deployments: Iterable[Deployment], spec: PlanSpec) -> Deployment:
    return min(deployments, key=lambda deployment: objective_key(deployment, spec))


def finalists(deployments: Sequence[Deployment], spec: PlanSpec) -> list[Deployment]:
    """The best by the objective of each layout (devices, parallelism, formats, split): what differs in scheduling only
    is one choice, of which the screen's best goes on. Where all of them are disaggregated, the best that is not takes
    the last place: what is usual is simulated, too."""
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
    """What a device that was asked for comes to.

    device:      as it was asked for
    label:       its best deployment; empty where nothing on it serves the rate
    usd_per_hour: of all its devices; None without a price
    max_rate:    requests per second within the SLO: simulated, else (`is_simulated`) as the closed form has it
    reason:      why there is none, or none better
    """

    device: str
    label: str = ""
    num_devices: int = 0
    usd_per_hour: float | None = None
    max_rate: float = 0.0
    is_simulated: bool = False
    reason: str = ""


def device_of(screened: Screened) -> str | None:
    """The device as the plan's space names it; None where it is the scenario's own."""
    return screened.candidate.layout.choices.get("hardware")


def with_every_device(chosen: Sequence[Deployment], serving: Sequence[Deployment], spec: PlanSpec) -> list[Deployment]:
    """`chosen`, where the best of a device that has none takes the last place of one that has several.

    serving: all deployments that serve the rate
    """
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
    """An answer for each device of the space, in its order; none where it names fewer than two.

    spec:      what the plan asks for
    rate:      wanted, requests per second
    judged:    finalists that serve it, best first, and those that the simulator found not to
    serving:   deployments that serve it in closed form
    screened:  all candidates; ruled_out: device -> why others are none, and how many
    """

    def answer(device: str) -> DeviceAnswer:
        ranked, missed = (
            [finalist for finalist in finalists if device_of(finalist.screened) == device] for finalists in judged
        )
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
    """The lowest and the highest simulated figure over that of the closed form, among finalists.

    rate:      of the highest rate
    tightness: of the limit that comes nearest, latency over limit
    """

    rate: tuple[float, float]
    tightness: tuple[float, float]


def ratios_of(done: Sequence[Finalist], slo: SLO, quantile: str) -> Ratios:
    """The ratios of `done`; 1 to 1 where nothing served."""
    rates = [finalist.rate / (finalist.replicas * finalist.screened.rate) for finalist in done if finalist.rate]
    near = [
        tightness(finalist.records, slo, quantile) / finalist.deployment.tightness
        for finalist in done
        if finalist.records
        and finalist.deployment.replicas == finalist.replicas
        and isfinite(finalist.deployment.tightness)
    ]
    return Ratios(*((min(values, default=1.0), max(values, default=1.0)) for values in (rates, near)))


def overlooked(
    cut: Sequence[Deployment], best: float | None, ratios: Ratios, spec: PlanSpec, rate: float
) -> list[Deployment]:
    """Those of `cut` that may be better than `best`, the most promising one of each layout first: as good as with the
    highest ratio of simulated and screened figures that a finalist has.

    cut:   deployments at `rate` (requests per second), whether they serve it by the screen or not
    best:  of the simulated ones by `objective_key`, its first figure; None: nothing serves
    ratios: simulated figures over those of the screen; spec: the plan's objective and limits
    """
    best_of_kind: dict[Hashable, tuple[tuple[float, ...], Deployment]] = {}
    for deployment in cut:
        screened = deployment.screened
        likely = replace(screened, rate=screened.rate * ratios.rate[1])
        replicas = pick_replicas(likely, spec, rate)
        if replicas is None:
            continue
        near = ratios.tightness[0] * deployment.tightness
        key = objective_key(Deployment(likely, replicas, near), spec)
        kind = screened.candidate.kind
        if (best is None or key[0] < best - _BETTER * abs(best)) and (
            kind not in best_of_kind or key < best_of_kind[kind][0]
        ):
            best_of_kind[kind] = key, Deployment(screened, replicas, near)
    return [deployment for _, deployment in sorted(best_of_kind.values(), key=lambda pair: pair[0])]


OnFront = TypeVar("OnFront", Deployment, FrontPoint)
_MOST_LOOKED_AT = 60
_MOST_POINTS = 8


def screened_front(screen: Screen, serving: Sequence[Deployment], spec: PlanSpec, rate: float) -> list[Deployment]:
    """Pareto front of cost and latency at `rate` (requests/s): the best of `serving` with all numbers of replicas that
    `spec` allows, by `screen`; thinned out evenly where there are many."""
    more: list[Deployment] = []
    widest = spec.model_copy(update={"objective": "lowest_latency"})
    for deployment in serving[:_MOST_LOOKED_AT]:
        least, most = deployment.replicas, pick_replicas(deployment.screened, widest, rate) or 0
        counts = spec.space.replicas or range(least, most + 1)
        more += [replace(deployment, replicas=count) for count in counts if least <= count <= most]
    near = screen.tightness([one.screened for one in more], [rate / one.replicas for one in more])
    ordered = _front(replace(one, tightness=value) for one, value in zip(more, near, strict=True))
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
    serving: dict[str, FrontPoint] = {}
    others: dict[str, FrontPoint] = {}
    for label, (one, records) in simulated.items():
        near = tightness(records, slo, quantile)
        point = FrontPoint(label, one.num_devices, one.usd_per_hour, near, attained(records), one.tightness)
        (serving if meets(records, slo, spec.attainment) else others)[label] = point
    return _front(serving.values()), [others[one.label] for one in screened if one.label in others]


def _front(points: Iterable[OnFront]) -> list[OnFront]:
    """Those that none of at most their cost beats in latency, by cost; of equal cost the one with the shortest."""
    best: dict[float, OnFront] = {}
    for point in sorted(points, key=lambda point: point.cost):
        if point.cost not in best or point.tightness < best[point.cost].tightness:
            best[point.cost] = point
    labels = set(pareto_front({point.label: (point.cost, point.tightness) for point in best.values()}, (True, True)))
    return [point for point in best.values() if point.label in labels]


def origin_notes(origin: str) -> list[str]:
    """What is to be said of step times of this origin."""
    return ["Step times come from the datasheet: this device was not measured."] if origin == "datasheet" else []


def compared_prices(scenarios: Iterable[Scenario]) -> list[str]:
    """The prices that deployments are compared by, with source and date, and which of them are old."""
    known = list(scenarios)
    return [
        sentence for sentences in (price_lines, price_notes) for scenario in known for sentence in sentences(scenario)
    ]
