"""`make_plan`: from a scenario with an SLO to the deployment that is best by the plan's objective.

    stage one    every candidate in closed form (`screen`)
    stage two    finalists on the simulator: their highest rate (`trials`), then a run of the whole at the wanted rate

All that stage two evaluates is in a store on disk: a plan that was stopped goes on where it was.
"""

__all__ = ["Stages", "make_plan", "wanted_rate"]

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from perfmodel.errors import SpecError
from perfmodel.plan.candidates import Base, at_rate
from perfmodel.plan.choice import Deployment, deployed, finalists, objective_key, pick_replicas, shortfalls
from perfmodel.plan.findings import TIE, pareto_front
from perfmodel.plan.plan_result import Finalist, FrontPoint, PlanResult
from perfmodel.plan.points import Record
from perfmodel.plan.screen import Screen, Screened
from perfmodel.plan.space import enumerate_space
from perfmodel.plan.store import default_store
from perfmodel.plan.trials import Check, Checked, Trial, Tried, check, try_rates
from perfmodel.plan.workers import Progress, spread
from perfmodel.sim import simulate
from perfmodel.specs.plan import PlanSpec
from perfmodel.specs.prices import price_lines, stale_price_notes
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.study_file import as_overrides

Stages = Callable[[str], AbstractContextManager[Progress | None]]  # a stage's name -> what shows how far it is

_FEWEST_REQUESTS, _MOST_REQUESTS = 400, 8000
_LIVES = 5  # of the largest batch that a run lasts
_WAITS = 20  # longest waits that the SLO allows, that its arrivals last
_MOST_ON_FRONT = 60


def make_plan(
    path: str,
    overrides: Sequence[str] = (),
    store: Path | None = None,
    workers: int | None = None,
    engine: str = "local",
    stages: Stages | None = None,
) -> PlanResult:
    """The plan of the scenario at `path` (a name or a file), with its `plan` block or the defaults of one.

    store:   file with points that are already known, and for those evaluated now; default: the user's
    workers, engine: as for `perfmodel.plan.sweep`

    Raises SpecError for a scenario without an SLO or a rate, or with a mistake in it.
    """
    base, shown = Base(path, tuple(overrides)), stages or (lambda _: nullcontext())
    scenario = base.load()
    spec = scenario.plan or PlanSpec()
    rate = wanted_rate(scenario, spec)
    with shown("screening"):
        space = enumerate_space(base, spec)
        screen = Screen(space.candidates, scenario, spec.attainment)
        screened = screen.all()
        serving = _deployments(screen, screened, spec, rate)
        chosen = _with_ends(screen, finalists(serving, spec), rate)
    run = _Runs(base, scenario, spec, rate, str(store or default_store()), workers, engine)
    with shown("highest rates") as progress:
        simulated = run.highest_rates(chosen, progress)
    with shown("at the rate") as progress:
        done = run.at_the_rate(simulated, progress)
    result = PlanResult(
        base,
        scenario,
        spec,
        rate,
        space.num_all,
        len(serving),
        dict(space.ruled_out) | shortfalls(screened, spec, rate),
        [each for each in done if each.attained >= spec.attainment],
        [each for each in done if each.attained < spec.attainment],
        _front(screen, serving, spec, rate),
        nearest=_nearest(screened, rate) if not serving else "",
    )
    return _completed(result)


def _completed(result: PlanResult) -> PlanResult:
    """With finalists in order, and what bounds the winner."""
    sign = 1.0 if result.is_better_low else -1.0
    ranked = sorted(result.ranked, key=lambda each: (sign * result.figure(each), -each.rate))
    if ranked:  # of those that are about as good as the best, who has most in reserve goes first
        alike = [each for each in ranked if abs(result.figure(each) / result.figure(ranked[0]) - 1) <= TIE]
        ranked = sorted(alike, key=lambda each: -each.rate) + ranked[len(alike) :]
    result = replace(result, ranked=ranked)
    if result.winner is None:
        return result
    choices = result.winner.deployment.screened.candidate.choices(result.winner.replicas)
    traffic = at_rate(result.scenario, result.rate, _FEWEST_REQUESTS)
    run = simulate(result.base.load(as_overrides({**choices, **traffic})), keep_steps=False)
    origin = result.winner.deployment.screened.origin
    notes = [*run.notes, *(["Step times are the datasheet's, nobody measured this device."] * (origin == "datasheet"))]
    notes = list(dict.fromkeys([*notes, *_prices(result)]))
    return replace(result, bound_share=run.summary["bound_share"], notes=notes)


def _prices(result: PlanResult) -> Iterator[str]:
    """Which prices the finalists are compared by, of which source and date, and which of them are old."""
    finalists = (*result.ranked, *result.missed)
    scenarios = [each.deployment.screened.candidate.layout.scenario for each in finalists]
    for sentences in (price_lines, stale_price_notes):
        for scenario in scenarios:
            yield from sentences(scenario)


def wanted_rate(scenario: Scenario, spec: PlanSpec) -> float:
    """Requests per second that the plan is for. Raises SpecError where nothing says so."""
    arrivals = scenario.traffic.arrivals
    if spec.rate is not None:
        return spec.rate
    if arrivals.stages:
        return max(stage.rate for stage in arrivals.stages)
    if arrivals.rate is None:
        raise SpecError(
            f"a plan needs a rate to serve; arrivals of process {arrivals.process} have none, give plan.rate in "
            f"requests per second, as in --set plan.rate=10."
        )
    return arrivals.rate


def _deployments(screen: Screen, screened: Sequence[Screened], spec: PlanSpec, rate: float) -> list[Deployment]:
    """What serves the rate, with how near its limits come, best first."""
    found = deployed(screened, spec, rate)
    near = (
        screen.tightness([each.screened for each in found], [rate / each.replicas for each in found]) if found else []
    )
    found = [replace(each, tightness=value) for each, value in zip(found, near, strict=True)]
    return sorted(found, key=lambda deployment: objective_key(deployment, spec))


def _with_ends(screen: Screen, chosen: Sequence[Deployment], rate: float) -> list[Deployment]:
    """The finalists with what the calibration's interval means for their rates and latencies."""
    known = screen.with_intervals([each.screened for each in chosen])
    rates = [rate / each.replicas for each in chosen]
    ends = [screen.tightness(known, rates, end) for end in ("fast", "slow")] if known else [[], []]
    return [
        replace(each, screened=screened, tightness_ends=(fast / each.tightness, slow / each.tightness))
        for each, screened, fast, slow in zip(chosen, known, *ends, strict=True)
    ]


def _front(screen: Screen, serving: Sequence[Deployment], spec: PlanSpec, rate: float) -> list[FrontPoint]:
    """Cost against latency, of the best candidates with as many replicas as are allowed."""
    points: dict[str, FrontPoint] = {}
    more: list[Deployment] = []
    for each in serving[:_MOST_ON_FRONT]:
        most = pick_replicas(each.screened, spec.model_copy(update={"objective": "lowest_latency"}), rate) or 0
        counts = spec.space.replicas or range(each.replicas, most + 1)
        more += [replace(each, replicas=count) for count in counts if count >= each.replicas]
    near = screen.tightness([each.screened for each in more], [rate / each.replicas for each in more]) if more else []
    for each, tightness in zip(more, near, strict=True):
        label = f"{each.replicas} x {each.screened.candidate.label}"
        points[label] = FrontPoint(label, each.num_devices, each.usd_per_hour, tightness)
    cheapest: dict[float, str] = {}  # of equal cost only the one with the shortest latencies can be on the front
    for label, point in points.items():
        cost = _cost(point)
        if cost not in cheapest or point.tightness < points[cheapest[cost]].tightness:
            cheapest[cost] = label
    values = {label: (_cost(points[label]), points[label].tightness) for label in cheapest.values()}
    return sorted((points[label] for label in pareto_front(values, (True, True))), key=_cost)


def _cost(point: FrontPoint) -> float:
    return float(point.num_devices) if point.usd_per_hour is None else point.usd_per_hour


def _nearest(screened: Sequence[Screened], rate: float) -> str:
    """What would serve the rate with the fewest devices, were they allowed."""
    able = [each for each in screened if each.rate > 0]
    if not able:
        return "No candidate meets the SLO for a single user: allow more time in it, or faster devices in the space."
    best = max(able, key=lambda each: each.rate_per_device)
    count = math.ceil(rate / best.rate - 1e-9)
    return (
        f"Most for its devices serves {best.candidate.label}, {best.rate:.3g} requests/s on "
        f"{best.candidate.num_devices}; {count} of them, {count * best.candidate.num_devices} GPUs, would do."
    )


@dataclass(frozen=True)
class _Runs:
    """Stage two: finalists on the simulator, in processes, their points in the store."""

    base: Base
    scenario: Scenario
    spec: PlanSpec
    rate: float
    store: str
    workers: int | None
    engine: str

    def highest_rates(self, chosen: Sequence[Deployment], progress: Progress | None) -> list[Finalist]:
        """Each with its highest rates, and the replicas that these ask for; without those that are not allowed."""
        spec, seeds = self.spec, range(self.scenario.seed, self.scenario.seed + self.spec.seeds)
        trials = [
            Trial(
                self.base,
                each.screened.candidate.overrides(1),
                seed,
                each.screened.rate,
                spec.attainment,
                self._requests(each, 1),
                self.store,
            )
            for each in chosen
            for seed in seeds
        ]
        tried = spread(try_rates, trials, _lost_trial, progress, self.workers, self.engine)
        found = []
        for index, each in enumerate(chosen):
            rates = [one.rate for one in tried[index * len(seeds) : (index + 1) * len(seeds)]]
            finalist = Finalist(each, tuple(rate for rate in rates if rate is not None), 0)
            if None in rates:
                continue
            replicas = pick_replicas(each.screened, spec, self.rate, finalist.group_rate)
            if replicas is not None:
                found.append(replace(finalist, replicas=replicas))
        return found

    def at_the_rate(self, simulated: Sequence[Finalist], progress: Progress | None) -> list[Finalist]:
        """Each run as a whole at the wanted rate; with one more replica, if allowed, where it misses the SLO."""
        done = self._checked(simulated, progress)
        short = [each for each in done if each.attained < self.spec.attainment]
        more = [
            replace(each, replicas=each.replicas + 1) for each in short if self._is_allowed(each, each.replicas + 1)
        ]
        return [*done, *self._checked(more, progress)]

    def _is_allowed(self, finalist: Finalist, replicas: int) -> bool:
        least = self.rate / replicas * (1 + 1e-6)
        return pick_replicas(finalist.deployment.screened, self.spec, self.rate, least) == replicas

    def _checked(self, simulated: Sequence[Finalist], progress: Progress | None) -> list[Finalist]:
        seeds = range(self.scenario.seed, self.scenario.seed + self.spec.seeds)
        checks = [
            Check(
                self.base,
                each.deployment.screened.candidate.overrides(each.replicas),
                seed,
                self.rate,
                self._requests(each.deployment, each.replicas),
                self.store,
            )
            for each in simulated
            for seed in seeds
        ]
        found = spread(check, checks, _lost_check, progress, self.workers, self.engine) if checks else []
        return [
            replace(each, records=tuple(one.record for one in found[i * len(seeds) : (i + 1) * len(seeds)]))
            for i, each in enumerate(simulated)
        ]

    def _requests(self, deployment: Deployment, replicas: int) -> int:
        """Requests of a run: enough for its batch to come and go a few times, and for a queue to show: a run that is
        over before anybody has waited as long as is allowed would meet the SLO at any rate."""
        if self.spec.num_requests is not None:
            return self.spec.num_requests
        candidate, slo = deployment.screened.candidate, self.scenario.slo
        engines = candidate.ratio[1] if candidate.ratio else candidate.layout.scenario.engine.data_parallel_size
        in_flight = deployment.screened.batch * engines * replicas
        patience_s = max(slo.ttft_ms or 0.0, slo.e2el_ms or 0.0) / 1e3
        wanted = max(_LIVES * in_flight, _WAITS * patience_s * deployment.screened.rate * replicas, _FEWEST_REQUESTS)
        return int(min(wanted, _MOST_REQUESTS))


def _lost_trial(_: Trial, reason: str) -> Tried:
    return Tried(None, 0, reason)


def _lost_check(_: Check, reason: str) -> Checked:
    return Checked(Record(problem=reason))
