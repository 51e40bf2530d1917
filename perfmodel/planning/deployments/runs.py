"""Stage two of a plan: finalists on the simulator, whole deployments, in processes, their points in the store.

1. the highest rate of each with as many replicas as the screen takes it to need; from it the replicas that it needs
2. a run at the wanted rate with these; with one more where it misses the SLO; with one fewer where that may do,
   since several replicas behind a router serve a little more, or less, than so many times what one does
3. the highest rate again, where the replicas have changed
"""

__all__ = ["Runs", "Settled"]

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from perfmodel.cores import num_processes
from perfmodel.planning.deployments.choice import Deployment, may_have, pick_replicas
from perfmodel.planning.deployments.finalist import Finalist
from perfmodel.planning.deployments.judged import meets
from perfmodel.planning.deployments.trials import (
    FIRST_STRIDE,
    NUM_RUNS_FIRST,
    NUM_RUNS_NEAR,
    Check,
    Checked,
    Trial,
    Tried,
    check,
    try_rates,
)
from perfmodel.planning.screening.candidates import Base
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.sweeps.forecast import Forecast
from perfmodel.planning.sweeps.points import Record
from perfmodel.planning.sweeps.workers import engine_of, spread
from perfmodel.specs.scenario import Scenario

_FEWEST_REQUESTS, _MOST_REQUESTS = 400, 8000
_LONG_REQUESTS = 5000  # of several tasks, which take seconds: more than processes take to start
_LIVES = 5  # of the largest batch that a run lasts
_WAITS = 20  # longest waits that the SLO allows, that its arrivals last
_NEARLY = 0.9  # of the wanted rate, in proportion to the replicas: then one fewer is tried
_NEAR_STRIDE = 2  # steps of the lattice of rates, from where another seed's highest rate lies
_CHECKS = 2  # runs at the wanted rate of each finalist and seed, on average: with more and with fewer replicas, too
_OTHER_SEEDS, _AT_THE_RATE = "other seeds", "at the rate"  # tasks of a forecast that have not begun
_MOST_MORE = 2  # replicas added where the simulator finds that the SLO is missed

Records = tuple[Record, ...]


@dataclass
class Settled:
    """What runs at the wanted rate have shown of one candidate.

    runs:     replicas -> records of each seed
    replicas: the fewest that serve; the most that were tried where none does
    """

    deployment: Deployment
    rates: tuple[float, ...]
    tried_with: int
    replicas: int
    runs: dict[int, Records] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return Finalist(self.deployment, self.tried_with, self.rates).rate


@dataclass(frozen=True)
class Runs:
    """The simulations of a plan. forecast: counts their requests."""

    base: Base
    scenario: Scenario
    spec: PlanSpec
    rate: float
    store: str
    workers: int | None
    engine: str
    forecast: Forecast = field(default_factory=Forecast)

    @property
    def seeds(self) -> range:
        return range(self.scenario.seed, self.scenario.seed + self.spec.seeds)

    def settled(self, chosen: Sequence[Deployment]) -> list[Settled]:
        """Each with its highest rates, and the replicas that these ask for: at most as many as are allowed. Without
        those that serve no rate at all."""
        starts = [deployment.capacity for deployment in chosen]
        self.forecast.expect(
            _AT_THE_RATE, _CHECKS * self.num_requests([(deployment, deployment.replicas) for deployment in chosen])
        )
        rates = self._highest([(deployment, deployment.replicas) for deployment in chosen], starts)
        settled = []
        for deployment, known in zip(chosen, rates, strict=True):
            if known:
                one = Settled(deployment, known, deployment.replicas, deployment.replicas)
                needed = pick_replicas(deployment.screened, self.spec, self.rate, one.rate / deployment.replicas)
                settled.append(replace(one, replicas=deployment.replicas if needed is None else needed))
        return settled

    def at_the_rate(self, settled: Sequence[Settled]) -> list[Finalist]:
        """Each as a whole at the wanted rate, with the fewest replicas that the simulator finds to serve it."""
        self.forecast.expect(_AT_THE_RATE, 0)
        pending = list(settled)
        while pending:
            records = self.at_rate([(deployed.deployment, deployed.replicas) for deployed in pending])
            for deployed, known in zip(pending, records, strict=True):
                deployed.runs[deployed.replicas] = known
            pending = [deployed for deployed in pending if self._moved(deployed)]
        changed = [deployed for deployed in settled if deployed.replicas != deployed.tried_with]
        starts = [deployed.rate * deployed.replicas / deployed.tried_with for deployed in changed]
        again = self._highest([(deployed.deployment, deployed.replicas) for deployed in changed], starts)
        for deployed, rates in zip(changed, again, strict=True):
            deployed.rates = rates or deployed.rates
        return [
            Finalist(deployed.deployment, deployed.replicas, deployed.rates, deployed.runs[deployed.replicas])
            for deployed in settled
        ]

    def num_requests(self, whole: Sequence[tuple[Deployment, int]]) -> int:
        """Requests of a run of each deployment with so many replicas, for all seeds."""
        return sum(self._requests(deployment, replicas) for deployment, replicas in whole) * len(self.seeds)

    def at_rate(self, whole: Sequence[tuple[Deployment, int]]) -> list[Records]:
        """Records of each deployment with so many replicas at the wanted rate, for each seed."""
        checks = [
            Check(
                self.base,
                deployment.screened.candidate.overrides(replicas),
                seed,
                self.rate,
                self._requests(deployment, replicas),
                self.store,
                self.forecast,
            )
            for deployment, replicas in whole
            for seed in self.seeds
        ]
        for task in checks:
            self.forecast.expect(task, task.num_requests)
        checked = spread(check, checks, _lost_check, None, self._num_workers(checks), self.engine) if checks else []
        count = len(self.seeds)
        return [tuple(one.record for one in checked[i * count : (i + 1) * count]) for i in range(len(whole))]

    def _moved(self, one: Settled) -> bool:
        """Change the replicas of `one` to the next that are to be tried; False where it has what it is to have."""
        first = next(iter(one.runs))
        serving = [count for count, records in one.runs.items() if self._serves(records, count < first)]
        others = [] if self.spec.objective == "lowest_latency" else self._allowed(one)
        if not serving:
            more = [count for count in others if count > one.replicas]
            if not more or len(one.runs) > _MOST_MORE:
                return False
            one.replicas = more[0]
            return True
        one.replicas = min(serving)
        fewer = [count for count in others if count < one.replicas][-1:]
        might_do = [count for count in fewer if count * one.rate / one.tried_with >= _NEARLY * self.rate]
        if not might_do or might_do[0] in one.runs:
            return False
        one.replicas = might_do[0]
        return True

    def _allowed(self, one: Settled) -> list[int]:
        """The numbers of replicas that the plan allows, in order."""
        screened, spec = one.deployment.screened, self.spec
        counts = sorted(spec.space.replicas) or range(1, spec.max_gpus + 1)
        return [count for count in counts if may_have(screened, spec, count)]

    def _serves(self, records: Records, in_all_seeds: bool) -> bool:
        """Fewer replicas than the highest rate asks for have to do in each seed, not only in all together."""
        parts = [(record,) for record in records] if in_all_seeds else [records]
        return all(meets(part, self.scenario.slo, self.spec.attainment) for part in parts)

    def _highest(
        self, whole: Sequence[tuple[Deployment, int]], starts: Sequence[float]
    ) -> list[tuple[float, ...] | None]:
        """The highest rates of each deployment, for each seed, looked for from `starts` on; None where a seed has none.

        The first seed's is where the others begin: theirs are near.
        """
        self.forecast.expect(_OTHER_SEEDS, NUM_RUNS_NEAR * self.num_requests(whole) * (1 - 1 / len(self.seeds)))
        first = self._tried(whole, self.seeds[:1], starts, FIRST_STRIDE)
        known = [index for index, (rate,) in enumerate(first) if rate is not None]
        near = [first[index][0] or 0.0 for index in known]
        self.forecast.expect(_OTHER_SEEDS, 0)
        others = self._tried([whole[index] for index in known], self.seeds[1:], near, _NEAR_STRIDE)
        highest: list[tuple[float, ...] | None] = [None] * len(whole)
        for index, rates in zip(known, others, strict=True):
            there = tuple(rate for rate in (*first[index], *rates) if rate is not None)
            highest[index] = there if len(there) == len(self.seeds) else None
        return highest

    def _tried(
        self,
        whole: Sequence[tuple[Deployment, int]],
        seeds: Sequence[int],
        starts: Sequence[float],
        stride: int,
    ) -> list[list[float | None]]:
        """The highest rate of each deployment under each of `seeds`."""
        trials = [
            Trial(
                self.base,
                deployment.screened.candidate.overrides(replicas),
                seed,
                start,
                self.spec.attainment,
                self._requests(deployment, replicas),
                self.store,
                stride,
                self.forecast,
            )
            for (deployment, replicas), start in zip(whole, starts, strict=True)
            for seed in seeds
        ]
        for task in trials:
            self.forecast.expect(task, task.num_requests * (NUM_RUNS_FIRST if stride > _NEAR_STRIDE else NUM_RUNS_NEAR))
        workers = self._num_workers(trials)
        tried = spread(try_rates, trials, _lost_trial, None, workers, self.engine) if trials else []
        count = len(seeds)
        return [[one.rate for one in tried[i * count : (i + 1) * count]] for i in range(len(whole))]

    def _num_workers(self, tasks: Sequence[Trial | Check]) -> int | None:
        """Processes for `tasks`; of this machine as many as it has cores, also for a few tasks that take long."""
        is_long = sum(task.num_requests for task in tasks) >= _LONG_REQUESTS
        if self.workers is None and is_long and engine_of(self.engine).name == "local":
            return num_processes(len(tasks))
        return self.workers

    def _requests(self, deployment: Deployment, replicas: int) -> int:
        """Requests of a run: enough for its batch to come and go a few times, and for a queue to show: a run that is
        over before anybody has waited as long as is allowed would meet the SLO at any rate."""
        if self.spec.num_requests is not None:
            return self.spec.num_requests
        slo = self.scenario.slo
        in_flight = deployment.screened.batch * deployment.screened.candidate.num_engines * replicas
        beyond = [limit.limit_ms for limit in slo.statistics if limit.latency in ("ttft", "e2el")]
        patience_s = max(slo.ttft_ms or 0.0, slo.e2el_ms or 0.0, *beyond) / 1e3
        wanted = max(_LIVES * in_flight, _WAITS * patience_s * deployment.screened.rate * replicas, _FEWEST_REQUESTS)
        return int(min(wanted, _MOST_REQUESTS))


def _lost_trial(_: Trial, reason: str) -> Tried:
    return Tried(None, 0, reason)


def _lost_check(_: Check, reason: str) -> Checked:
    return Checked(Record(problem=reason))
