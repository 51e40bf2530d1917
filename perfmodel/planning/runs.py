"""Stage two of a plan: simulate finalists as whole deployments, in parallel, with points cached in the store. Highest
rates are searched on a fixed lattice of rates, 2 % apart, so that plans with other starting points share points. Equal
seeds give all finalists the same requests (common random numbers)."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb, log
from typing import Any, TypeVar

from perfmodel.errors import SpecError
from perfmodel.planning.choice import may_have, pick_replicas
from perfmodel.planning.encoders import encode_pool
from perfmodel.planning.finalist import Deployment, Finalist, Records, meets
from perfmodel.planning.metrics import ALTERNATIVES
from perfmodel.planning.points import Point, Record
from perfmodel.planning.result import PlanResult, Resilience
from perfmodel.planning.service import at_rate
from perfmodel.planning.space import Base
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.sweep import Forecast, StoredSweep
from perfmodel.planning.workers import Progress
from perfmodel.sim.driver import simulate
from perfmodel.specs.cluster import FailuresSpec
from perfmodel.specs.overrides import as_overrides
from perfmodel.specs.scenario import Scenario

Step = TypeVar("Step")
Answer = TypeVar("Answer")

_LATENCIES = ("ttft", "tpot", "itl", "max_itl", "e2el")
METRICS = (
    *("slo_attainment", "queue_growth", "request_goodput", "request_throughput", "output_throughput"),
    *(f"{statistic}_{name}_ms" for name in _LATENCIES for statistic in ("mean", "median", "p90", "p95", "p99")),
    *("usd_per_million_output_tokens", "usd_per_million_input_tokens_split", "usd_per_million_output_tokens_split"),
    *("site_joules_per_output_token", "gco2_per_million_output_tokens", "gco2_per_million_tokens", *ALTERNATIVES),
    *("joules_per_output_token", "kv_cache_usage_peak", "preemptions", "mfu", "mbu"),
)
_RATIO = 1.02  # between rates of the lattice
FIRST_STRIDE = 4
# Mean runs of a trial: 2 to enclose the rate and 1 or 2 to halve the stride, more where it begins far off.
_RUNS_FIRST, _RUNS_NEAR = 6, 4
_MAX_STRIDES = 6  # doublings of the stride: down to a ten-thousandth of the first rate
_FEWEST_REQUESTS, _MAX_REQUESTS = 400, 8000
_LIVES = 5  # turnovers of the largest batch that a run lasts
_MAX_IN_FLIGHT = 4  # over the requests of a run, by Little's law, up to which it shows a rate
_WAITS = 20  # longest waits that the SLO allows, that its arrivals last
_NEARLY = 0.9  # of the wanted rate, in proportion to the replicas: then one fewer is tried
_NEAR_STRIDE = 2  # steps of the lattice of rates, from where another seed's highest rate lies
_CHECKS = 2  # runs at the wanted rate of each finalist and seed, on average: with more and with fewer replicas, too
_OTHER_SEEDS, _AT_THE_RATE = "other seeds", "at the rate"  # tasks of a forecast that have not begun
_MAX_MORE = 2  # replicas added where the simulator finds that the SLO is missed


@dataclass(frozen=True)
class Trial:
    """Search for a deployment's highest rate under one seed. choices: overrides of the base scenario; start: rate to
    begin at; stride: lattice steps to the next rate"""

    base: Base
    choices: tuple[str, ...]
    seed: int
    start: float
    attainment: float
    num_requests: int
    stride: int = FIRST_STRIDE


def _point(base: Base, scenario: Scenario, choices: Sequence[str], traffic: tuple[float, int], seed: int) -> Point:
    """`scenario` (that of `base`) with `choices` under a seed. traffic: (rate, number of requests)"""
    arrivals = as_overrides({**at_rate(scenario, *traffic), "seed": seed})
    return Point(base.path, METRICS, (*base.overrides, *choices, *arrivals))


def try_rates(trial: Trial) -> Generator[Point, Record, float | None]:
    """The highest rate of a trial, in requests/s; None if no rate is served."""
    scenario = trial.base.load()

    def is_met(place: int) -> Generator[Point, Record, bool]:
        traffic = _RATIO**place, trial.num_requests
        record = yield _point(trial.base, scenario, trial.choices, traffic, trial.seed)
        # All at once is no rate: how fast so many arrive makes no difference, and any rate would be met.
        in_flight = traffic[0] * (record.values.get("mean_e2el_ms") or 0.0) / 1e3
        if in_flight > _MAX_IN_FLIGHT * trial.num_requests:
            return False
        return meets([record], scenario.slo, trial.attainment)

    place = yield from highest_on_lattice(is_met, lattice(trial.start), trial.stride)
    return None if place is None else _RATIO**place


def lattice(rate: float) -> int:
    """Lattice index nearest to `rate`."""
    return round(log(rate) / log(_RATIO))


def highest_on_lattice(
    is_met: Callable[[int], Generator[Step, Answer, bool]], start: int, stride: int = FIRST_STRIDE
) -> Generator[Step, Answer, int | None]:
    """The highest integer that `is_met`, assumed monotonic; None if none. Doubles the `stride` away from `start`, then
    bisects: few evaluations if `start` is near."""
    longest = stride << _MAX_STRIDES
    if (yield from is_met(start)):
        low, high = start, start + stride
        while (yield from is_met(high)):
            stride *= 2
            low, high = high, high + stride
            if stride > longest:
                return low
    else:
        low, high = start - stride, start
        while not (yield from is_met(low)):
            stride *= 2
            low, high = low - stride, low
            if stride > longest:
                return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if (yield from is_met(middle)) else (low, middle)
    return low


Whole = Sequence[tuple[Deployment, int]]  # deployments, each with so many replicas


@dataclass(frozen=True)
class Runs:
    """The simulations of a plan, run by `sweep`. rate: requests/s to serve; 0 for an offline job"""

    base: Base
    scenario: Scenario
    spec: PlanSpec
    rate: float
    sweep: StoredSweep

    @property
    def seeds(self) -> range:
        return range(self.scenario.seed, self.scenario.seed + self.spec.seeds)

    def counted(self, progress: Progress | None) -> "Runs":
        """A copy whose simulated requests are counted on `progress`."""
        return replace(self, sweep=replace(self.sweep, forecast=Forecast(progress)))

    def settled(self, chosen: Sequence[Deployment]) -> list[Finalist]:
        """Simulate each deployment at the target rate with the fewest replicas that serve it, and find its highest
        rate. Those that serve no rate are dropped.

        1. the highest rate with the screened number of replicas gives the number needed
        2. runs at the target rate with these; with more if it misses the SLO, with one fewer if that may suffice:
           capacity behind a router is not quite proportional to replicas
        3. the highest rate again if the number changed"""
        starts, whole = [one.capacity for one in chosen], [(one, one.replicas) for one in chosen]
        self.sweep.forecast.expect(_AT_THE_RATE, _CHECKS * self.num_requests(whole))
        finalists = []
        for deployment, rates in zip(chosen, self._highest(whole, starts), strict=True):
            if rates:
                first = deployment.replicas
                one = Finalist(deployment.screened, first, deployment.tightness, rates, first=first)
                needed = pick_replicas(one.screened, self.spec, self.rate, one.rate / first)
                finalists.append(replace(one, replicas=needed or one.replicas))
        self.sweep.forecast.expect(_AT_THE_RATE, 0)
        pending = list(range(len(finalists)))
        while pending:
            records = self.at_rate([(finalists[place], finalists[place].replicas) for place in pending])
            for place, known in zip(pending, records, strict=True):
                one = finalists[place]
                finalists[place] = self._next(replace(one, runs={**one.runs, one.replicas: known}))
            pending = [place for place in pending if finalists[place].replicas not in finalists[place].runs]
        finalists = [replace(one, records=one.runs[one.replicas]) for one in finalists]
        changed = [place for place, one in enumerate(finalists) if one.replicas != one.first]
        moved = [finalists[place] for place in changed]
        starts = [one.rate * one.replicas / one.first for one in moved]
        again = self._highest([(one, one.replicas) for one in moved], starts)
        for place, one, known_rates in zip(changed, moved, again, strict=True):
            finalists[place] = replace(one, rates=known_rates or one.rates)
        return finalists

    def num_requests(self, whole: Whole) -> int:
        """Requests of a run of each deployment, over all seeds."""
        return sum(self._requests(deployment, replicas) for deployment, replicas in whole) * len(self.seeds)

    def at_rate(self, whole: Whole) -> list[Records]:
        """Records of each deployment at the target rate, per seed."""
        runs = [
            (deployment.candidate.overrides(replicas), self._requests(deployment, replicas), seed)
            for deployment, replicas in whole
            for seed in self.seeds
        ]
        points = [_point(self.base, self.scenario, made_of, (self.rate, count), seed) for made_of, count, seed in runs]
        return _grouped(self.sweep.records(points, [count for _, count, _ in runs]), len(whole))

    def _next(self, one: Finalist) -> Finalist:
        """`one` with the replica count to try next, or to keep if that has run."""
        tried, first, spec = one.runs, next(iter(one.runs)), self.spec

        def serves(count: int) -> bool:
            # Fewer replicas than the highest rate asks for have to do in each seed, not only in all together.
            parts = [(record,) for record in tried[count]] if count < first else [tried[count]]
            return all(meets(part, self.scenario.slo, spec.attainment) for part in parts)

        counts = sorted(spec.space.replicas) or range(1, spec.max_gpus + 1)
        others = [count for count in counts if may_have(one.candidate, spec, count)]
        if spec.objective == "lowest_latency":
            others = []
        fewest = min((count for count in tried if serves(count)), default=None)
        if fewest is None:
            more = [count for count in others if count > one.replicas]
            return one if not more or len(tried) > _MAX_MORE else replace(one, replicas=more[0])
        fewer = [count for count in others if count < fewest][-1:]
        group_rate = one.rate / one.first
        might_do = [count for count in fewer if count * group_rate >= _NEARLY * self.rate and count not in tried]
        return replace(one, replicas=might_do[0] if might_do else fewest)

    def _highest(self, whole: Whole, starts: Sequence[float]) -> list[tuple[float, ...] | None]:
        """Highest rates per seed from `starts`, later seeds from the first one's rate; None if a seed has none."""
        self.sweep.forecast.expect(_OTHER_SEEDS, _RUNS_NEAR * self.num_requests(whole) * (1 - 1 / len(self.seeds)))
        first = [rates[0] for rates in self._tried(whole, self.seeds[:1], starts, FIRST_STRIDE, _RUNS_FIRST)]
        near = {index: rate for index, rate in enumerate(first) if rate is not None}
        self.sweep.forecast.expect(_OTHER_SEEDS, 0)
        others = self._tried([whole[i] for i in near], self.seeds[1:], list(near.values()), _NEAR_STRIDE, _RUNS_NEAR)
        highest: list[tuple[float, ...] | None] = [None] * len(whole)
        for (index, rate), rates in zip(near.items(), others, strict=True):
            there = tuple(rate for rate in (rate, *rates) if rate is not None)
            highest[index] = there if len(there) == len(self.seeds) else None
        return highest

    def _tried(
        self, whole: Whole, seeds: Sequence[int], starts: Sequence[float], stride: int, num_runs: int
    ) -> list[tuple[float | None, ...]]:
        trials = [
            Trial(
                self.base,
                deployment.candidate.overrides(replicas),
                seed,
                start,
                self.spec.attainment,
                self._requests(deployment, replicas),
                stride,
            )
            for (deployment, replicas), start in zip(whole, starts, strict=True)
            for seed in seeds
        ]
        counts = {trial: trial.num_requests for trial in trials}
        rates = dict(zip(counts, self.sweep.run(try_rates, counts, lambda *_: None, num_runs), strict=True))
        return _grouped([rates[trial] for trial in trials], len(whole))

    def _requests(self, deployment: Deployment, replicas: int) -> int:
        """Requests of a run: enough for the batch to turn over a few times and for queues to show. Beyond a capacity C
        the wait grows as (rate / C - 1) t, so arrivals over T overstate the rate at which a share a of requests waits
        up to W by W / (a T): by 6 % where they last 20 W, by up to a tenth (`queue_growth`) where T is cut."""
        if self.spec.num_requests is not None:
            return self.spec.num_requests
        slo, screened = self.scenario.slo, deployment.screened
        in_flight = screened.batch * screened.candidate.num_engines * replicas
        beyond = [limit.limit_ms for limit in slo.statistics if limit.latency in ("ttft", "e2el")]
        patience_s = max(slo.ttft_ms or 0.0, slo.e2el_ms or 0.0, *beyond) / 1e3
        wanted = max(_LIVES * in_flight, _WAITS * patience_s * screened.rate * replicas, _FEWEST_REQUESTS)
        return int(min(wanted, _MAX_REQUESTS))


def _grouped(results: Sequence[Answer], num_groups: int) -> list[tuple[Answer, ...]]:
    size = len(results) // max(num_groups, 1)
    return [tuple(results[index * size : (index + 1) * size]) for index in range(num_groups)]


_CARRIED = {"failures", "gateway"}
_MAX_SPARE = 2  # replicas beyond those that serve the rate without failures
_FEWEST_WITH_FAILURES, _MAX_WITH_FAILURES = 400, 20_000
_FAILURES_SEEN = 3  # of all replicas together, that a run is to be long enough for
_AFTER_S = 60.0  # of a run, after the last event's replica is back


def carried_cluster(scenario: Scenario) -> dict[str, Any]:
    """Cluster fields of the scenario that apply to a plan's choice, as a file has them."""
    given = scenario.cluster.model_dump(mode="json", include=_CARRIED, exclude_unset=True)
    return {name: value for name, value in given.items() if value is not None}


def under_failures(result: PlanResult, winner: Finalist) -> Resilience | None:
    """The choice at the target rate under the scenario's failures and gateway, with up to two more replicas if it
    misses the SLO; None if the scenario has neither."""
    carried = carried_cluster(result.scenario)
    if not carried:
        return None
    tried: dict[int, float] = {}
    enough, problem = None, ""
    for replicas in range(winner.replicas, winner.replicas + 1 + _MAX_SPARE):
        if tried and not may_have(winner.candidate, result.spec, replicas):
            break
        try:
            tried[replicas], is_met = _attained_under_failures(result, winner, replicas, carried)
        except SpecError as error:  # an event names a replica beyond the choice's
            problem = str(error)
            break
        if is_met:
            enough = replicas
            break
    return Resilience(tried, enough, _all_up(result.scenario.cluster.failures, winner.replicas), problem)


def left_out(scenario: Scenario) -> list[str]:
    """Features of the scenario that neither the plan nor its export has."""
    cluster, sentences = scenario.cluster, []
    if cluster.autoscaling is not None or any(pool.autoscaling for pool in cluster.pools):
        sentences.append("cluster.autoscaling: replicas are fixed here, as many as the highest rate takes")
    if cluster.pools:
        kept = "," if encode_pool(scenario) is None else ", but for the encode pool's,"
        sentences.append(
            f"cluster.pools: the plan chooses its own engines{kept} without shares, shadows and other models"
        )
    if scenario.traffic.arrivals.stages:
        sentences.append("traffic.arrivals.stages: the plan is for the highest rate of them")
    if any(kind.slo is not None for kind in scenario.traffic.classes):
        sentences.append("slo of single traffic.classes: the closed form screens by the scenario's own; runs have both")
    return sentences


def _attained_under_failures(
    result: PlanResult, winner: Finalist, replicas: int, carried: Mapping[str, Any]
) -> tuple[float, bool]:
    """Share of requests within the SLO over all seeds, and whether the SLO is met."""
    choices = winner.candidate.choices(replicas)
    traffic = at_rate(result.scenario, result.rate, requests_with_failures(result, replicas))
    whole = {**choices, "cluster": {**choices["cluster"], **carried}, **traffic}
    shares, are_met = [], []
    for seed in range(result.scenario.seed, result.scenario.seed + result.spec.seeds):
        summary = simulate(result.base.load(as_overrides({**whole, "seed": seed})), keep_steps=False).summary
        shares.append(float(summary["slo_attainment"]))
        are_met.append(all(summary.get("slo_percentiles_met", {}).values()))
    share, is_of_requests = sum(shares) / len(shares), result.scenario.slo.is_of_requests
    return share, all(are_met) and (share >= result.spec.attainment or not is_of_requests)


def requests_with_failures(result: PlanResult, replicas: int) -> int:
    """Requests of a run that spans the scenario's events, or several mean times between failures."""
    failures, duration_s = result.scenario.cluster.failures, 0.0
    if failures is not None:
        away_s = failures.repair_s + failures.start_s
        ends = [event.at_s + (event.down_s or failures.repair_s) + failures.start_s for event in failures.events]
        duration_s = max(ends, default=0.0) + _AFTER_S
        if failures.mtbf_s is not None:
            duration_s = max(duration_s, _FAILURES_SEEN * failures.mtbf_s / replicas + away_s)
    return int(min(max(result.rate * duration_s, _FEWEST_WITH_FAILURES), _MAX_WITH_FAILURES))


def _all_up(failures: FailuresSpec | None, needed: int) -> dict[int, float]:
    """P(at least `needed` of n independent replicas are up), each up mtbf / (mtbf + repair + start) of the time."""
    if failures is None or failures.mtbf_s is None:
        return {}
    up = failures.mtbf_s / (failures.mtbf_s + failures.repair_s + failures.start_s)
    return {
        count: sum(comb(count, k) * up**k * (1 - up) ** (count - k) for k in range(needed, count + 1))
        for count in range(needed, needed + 1 + _MAX_SPARE)
    }
