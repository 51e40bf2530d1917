"""`plan_job`: from an offline job to the deployment that does it at the lowest cost, or first.

Stage one, in closed form (`screen`): how long the job takes on each number of replicas of each candidate. Stage two, on
the simulator: the best of them do the whole job, with one replica more where it is late, with one fewer where that may
do; then with as many as are done in time in the wanted share of draws (`plan.confidence`). The choice is the best of
those that are so sure, else the surest. Every simulated point is stored, as in other plans.

A long job is extrapolated from two short ones with the first requests of the same traffic. Start and drain take the
same time for any number of requests, and the pace between them is steady. So what grows with the work is linear in the
number of requests N. Two runs, of n/2 and n requests, give the line:

    x(N) = x(n) + (N - n) (x(n) - x(n/2)) / (n/2)        x: seconds, USD, joules, tokens, preemptions

The slope is that of the steady middle, since both runs have the same start and drain. A share of the time (MFU) is
extrapolated as its product with the time, a cost per token as its product with the tokens. The drain is constant. The
slope scatters by c (n/2)^(-1/2), with c the coefficient of variation of a request's work: 1 % for c = 1.
"""

__all__ = ["METRICS", "extrapolate", "plan_job", "run_lengths"]

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import prod

from perfmodel.errors import SpecError
from perfmodel.planning.deployments.choice import compared_prices, origin_notes
from perfmodel.planning.deployments.doubt import pick
from perfmodel.planning.jobs.result import Job, JobPlan, PreliminaryJob
from perfmodel.planning.jobs.screen import JobScreen
from perfmodel.planning.screening.candidates import Base
from perfmodel.planning.screening.space import enumerate_space
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.sweeps.metrics import device_shares
from perfmodel.planning.sweeps.points import Point, Record
from perfmodel.planning.sweeps.sweep import Forecast, StoredSweep
from perfmodel.planning.sweeps.workers import Progress
from perfmodel.sim import simulate
from perfmodel.specs.overrides import as_overrides
from perfmodel.specs.scenario import Scenario

_FEWEST_REQUESTS = 20_000  # of the longer run
_BATCHES = 8  # full batches of every engine that the longer run lasts at least

# Metrics that grow with the work, and those that do when multiplied by others.
_FACTORS: dict[str, tuple[str, ...]] = {
    "duration": (),
    "usd_total": (),
    "preemptions": (),
    "mfu": ("duration",),
    "mbu": ("duration",),
    "output_throughput_per_gpu": ("duration",),
    "total_token_throughput_per_gpu": ("duration",),
    "usd_per_million_tokens": ("total_token_throughput_per_gpu", "duration"),
    "usd_per_million_output_tokens": ("output_throughput_per_gpu", "duration"),
    "joules_per_output_token": ("output_throughput_per_gpu", "duration"),
}
_DRAIN = "tail_share"


def run_lengths(job: Job, scenario: Scenario) -> tuple[int] | tuple[int, int]:
    """Requests of the runs that a job takes: all of them, or of a long job n/2 and n.

    scenario: of this traffic; a trace and conversations are simulated as a whole, since they have no steady middle
    """
    traffic, whole = scenario.traffic, scenario.traffic.num_requests or 0
    slots = job.candidate.max_num_seqs * job.candidate.num_engines * job.replicas
    count = max(_FEWEST_REQUESTS, _BATCHES * slots)
    if whole <= 2 * count or traffic.trace is not None or traffic.has_conversations:
        return (whole,)
    return count // 2, count


def extrapolate(short: Record, long: Record, lengths: tuple[int, int], num_requests: int) -> Record:
    """The record of a job of `num_requests`, from `short` and `long`, those of its first `lengths` requests."""
    if short.problem or long.problem:
        return short if short.problem else long
    further = (num_requests - lengths[1]) / (lengths[1] - lengths[0])
    values = dict(long.values)
    for name, factors in _FACTORS.items():
        one, other = (_product(record, (name, *factors)) for record in (short, long))
        if one is None or other is None:
            continue
        value = other + further * max(other - one, 0.0)
        for factor in factors:
            value /= values[factor] or 1.0
        values[name] = value
    if long.values.get(_DRAIN) is not None:
        values[_DRAIN] = (_product(long, (_DRAIN, "duration")) or 0.0) / (values["duration"] or 1.0)
    return Record(values, "", long.clock, long.origin, long.notes)


def _product(record: Record, names: tuple[str, ...]) -> float | None:
    """None where the record lacks one of `names`."""
    values = [value for name in names if (value := record.values.get(name)) is not None]
    return prod(values) if len(values) == len(names) else None


METRICS = (
    "duration",
    "usd_total",
    "usd_per_million_tokens",
    "usd_per_million_output_tokens",
    "output_throughput_per_gpu",
    "total_token_throughput_per_gpu",
    "tail_share",
    "joules_per_output_token",
    "kv_cache_usage_peak",
    "preemptions",
    "mfu",
    "mbu",
)
_MOST_OF_LAYOUT = 2  # finalists that differ in scheduling only
_NEARLY = 1.1  # times the deadline in closed form, or with one replica fewer: the simulator may find it met
_MOST_MOVES = 3  # replicas more or fewer that are tried
_OTHER_REPLICAS = "other replicas"  # a task of the forecast
_APART = "with prefill and decode apart, which plans of jobs leave out"
Stages = Callable[[str], AbstractContextManager[Progress | None]]


def plan_job(
    base: Base,
    scenario: Scenario,
    spec: PlanSpec,
    sweep: StoredSweep,
    shown: Stages,
    tell: Callable[[PreliminaryJob], None] | None = None,
) -> JobPlan:
    """The plan of the job of `scenario` (`base`: its file and overrides) by `spec`; see the module.

    sweep: does the simulations
    shown: a stage's name -> what shows its progress
    tell:  called with what the closed form has found, before anything is simulated

    Raises SpecError for traffic that is not there at once.
    """
    if not scenario.traffic.is_offline:
        raise SpecError(
            f"plan.objective={spec.objective} is for a job that is there at once, and arrivals of process "
            f"{scenario.traffic.arrivals.process} are not; give traffic.arrivals={{process: burst}}."
        )
    with shown("screening"):
        space = enumerate_space(base, spec)
        unified = [candidate for candidate in space.candidates if candidate.ratio is None]
        screen = JobScreen(unified, scenario, spec)
        jobs = screen.jobs()
    chosen = _finalists(jobs, spec)
    in_time = {id(job.candidate) for job in jobs if _is_in_time(job.screened_s, spec)}
    if tell is not None:
        tell(PreliminaryJob(scenario.traffic.num_requests or 0, spec, len(unified), tuple(chosen)))
    with shown("simulating the job's requests") as progress:
        run = _Runs(base, scenario, spec, replace(sweep, forecast=Forecast(progress)))
        # Where its time in closed form asks for it, a job is also tried with other replicas.
        moved = [job for job in chosen if _next({job.replicas: job}, screen, spec) is not None]
        run.sweep.forecast.expect(_OTHER_REPLICAS, run.num_requests(moved))
        settled = screen.under_draws(_settled(run, screen, chosen, spec))
        plan = JobPlan(base, scenario, spec, space.num_all, len(in_time), {}, (), ())
        sized = _sized(plan, run, screen, settled)
    late_reason = "late or over budget with max_gpus" if spec.deadline_s is not None else "over budget"
    ruled_out = Counter({_APART: len(space.candidates) - len(unified), late_reason: len(unified) - len(in_time)})
    ruled_out = +(ruled_out + Counter(dict(space.ruled_out)))
    plain = min((job for job in settled if _is_in_time(job.seconds, spec)), key=plan.figure, default=None)
    late = sorted((job for job in sized if not _is_in_time(job.seconds, spec)), key=plan.figure)
    plan = replace(plan, ruled_out=dict(ruled_out.most_common()), plain=plain)
    return _completed(replace(plan, ranked=_ordered(plan, sized), late=late), screen)


def _sized(plan: JobPlan, run: "_Runs", screen: JobScreen, settled: Sequence[Job]) -> list[Job]:
    """Each job with as many replicas as are done in time in the wanted share of draws, as far as these are allowed."""
    jobs, spec = list(settled), plan.spec
    if spec.deadline_s is None or spec.objective != "cheapest_job":
        return jobs
    for _ in range(_MOST_MOVES):
        more = {place: count for place, job in enumerate(jobs) if (count := _enough(plan, screen, job)) > job.replicas}
        if not more:
            break
        asked = [_with_replicas(jobs[place], count) for place, count in more.items()]
        done = screen.under_draws(run.of(asked))
        for place, job in zip(more, done, strict=True):
            jobs[place] = job
    return jobs


def _enough(plan: JobPlan, screen: JobScreen, job: Job) -> int:
    """Replicas that are enough, in proportion; the most that are allowed where these are not; its own of a late job."""
    if not _is_in_time(job.seconds, plan.spec):
        return job.replicas
    return plan.option(job).enough(screen.allowed(job.candidate), plan.spec.confidence)


def _ordered(plan: JobPlan, jobs: Sequence[Job]) -> list[Job]:
    """Those in time: the choice, then what else is sure enough, the best first, then the rest, the surest first."""
    found = [job for job in jobs if _is_in_time(job.seconds, plan.spec)]
    if not found:
        return []
    choice = found[pick([plan.option(job) for job in found], plan.spec.confidence)]

    def key(job: Job) -> tuple[bool, bool, float, float]:
        is_sure = plan.in_time(job) >= plan.spec.confidence
        return job is not choice, not is_sure, 0.0 if is_sure else -plan.in_time(job), plan.figure(job)

    return sorted(found, key=key)


def _with_replicas(job: Job, count: int) -> Job:
    """`job` on `count` replicas, not yet simulated; its time in closed form, in proportion, is only shown."""
    return Job(job.candidate, count, job.screened_s * job.replicas / count)


def _is_in_time(seconds: float, spec: PlanSpec) -> bool:
    return seconds < float("inf") and (spec.deadline_s is None or seconds <= spec.deadline_s)


def _figure(job: Job, spec: PlanSpec) -> tuple[float, float]:
    both = job.bill, job.seconds
    return both if spec.objective == "cheapest_job" else both[::-1]


def _finalists(jobs: Sequence[Job], spec: PlanSpec) -> list[Job]:
    """The best number of replicas of the best candidates in time or nearly, few of which differ in scheduling only;
    where none is, those that are done first."""
    best: dict[int, Job] = {}
    near = [job for job in jobs if _is_in_time(job.screened_s / _NEARLY, spec)]
    order = (lambda job: _figure(job, spec)) if near else (lambda job: (job.seconds, job.bill))
    for job in near or jobs:
        # One that only nearly is in time is looked at with one replica more, too, by `_settled`.
        known = best.get(id(job.candidate))
        if known is None or order(job) < order(known):
            best[id(job.candidate)] = job
    chosen: list[Job] = []
    per_layout: Counter[Hashable] = Counter()
    for job in sorted(best.values(), key=order):
        if len(chosen) < spec.finalists and per_layout[job.candidate.kind] < _MOST_OF_LAYOUT:
            per_layout[job.candidate.kind] += 1
            chosen.append(job)
    return chosen


def _settled(run: "_Runs", screen: JobScreen, chosen: Sequence[Job], spec: PlanSpec) -> list[Job]:
    """Each finalist with the replicas that the simulator finds best."""
    tried: list[dict[int, Job]] = [{} for _ in chosen]
    pending = list(enumerate(chosen))
    while pending:
        for (place, _), job in zip(pending, run.of([job for _, job in pending]), strict=True):
            tried[place][job.replicas] = job
        run.sweep.forecast.expect(_OTHER_REPLICAS, 0)
        moves = [(place, _next(known, screen, spec)) for place, known in enumerate(tried)]
        pending = [(place, job) for place, job in moves if job is not None]
    return [_best(known, spec) for known in tried]


def _next(tried: dict[int, Job], screen: JobScreen, spec: PlanSpec) -> Job | None:
    """The number of replicas to try next: more where the job is late, fewer where these might do."""
    if spec.deadline_s is None or spec.objective != "cheapest_job" or len(tried) > _MOST_MOVES:
        return None
    best = _best(tried, spec)
    if best.seconds == float("inf"):
        return None
    is_late = not _is_in_time(best.seconds, spec)
    count = best.replicas + (1 if is_late else -1)
    if count in tried or count not in screen.allowed(best.candidate):
        return None
    might_do = is_late or best.seconds * best.replicas / count <= _NEARLY * spec.deadline_s
    return _with_replicas(best, count) if might_do else None


def _best(tried: dict[int, Job], spec: PlanSpec) -> Job:
    in_time = [job for job in tried.values() if _is_in_time(job.seconds, spec)]
    if in_time:
        return min(in_time, key=lambda job: _figure(job, spec))
    return min(tried.values(), key=lambda job: job.seconds)


@dataclass(frozen=True)
class _Runs:
    """The simulations of a plan, done by `sweep`."""

    base: Base
    scenario: Scenario
    spec: PlanSpec
    sweep: StoredSweep

    def num_requests(self, jobs: Sequence[Job]) -> int:
        """Requests that are simulated for `jobs`, under all seeds."""
        return self.spec.seeds * sum(sum(run_lengths(job, self.scenario)) for job in jobs)

    def of(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs, simulated under each seed; long ones extrapolated."""
        seeds = range(self.scenario.seed, self.scenario.seed + self.spec.seeds)
        runs = [(job, seed, count) for job in jobs for seed in seeds for count in run_lengths(job, self.scenario)]
        points = [self._point(*run) for run in runs]
        records = iter(self.sweep.records(points, [count for _, _, count in runs]))
        return [replace(job, records=tuple(self._whole(job, records) for _ in seeds)) for job in jobs]

    def _point(self, job: Job, seed: int, num_requests: int) -> Point:
        changed: dict[str, object] = {"seed": seed}
        if num_requests != self.scenario.traffic.num_requests:
            changed["traffic.num_requests"] = num_requests
        choices = job.candidate.overrides(job.replicas)
        return Point(self.base.path, METRICS, (*self.base.overrides, *choices, *as_overrides(changed)))

    def _whole(self, job: Job, records: Iterator[Record]) -> Record:
        lengths = run_lengths(job, self.scenario)
        if len(lengths) == 1:
            return next(records)
        return extrapolate(next(records), next(records), lengths, self.scenario.traffic.num_requests or 0)


def _completed(plan: JobPlan, screen: JobScreen) -> JobPlan:
    """The plan with what bounds the winner, and notes."""
    if plan.winner is None:
        return plan
    lengths, whole = run_lengths(plan.winner, plan.scenario), plan.num_requests
    overrides = (*plan.winner.candidate.overrides(plan.winner.replicas), f"traffic.num_requests={lengths[-1]}")
    run = simulate(plan.base.load(overrides), keep_steps=False)
    notes = [*run.notes]
    if lengths[-1] < whole:
        notes.append(
            f"The figures of {whole:,} requests are extrapolated from simulations of {lengths[0]:,} and "
            f"{lengths[-1]:,}, which give the steady pace."
        )
    notes += origin_notes(screen.origin(plan.winner.candidate))
    notes += compared_prices(job.candidate.layout.scenario for job in (*plan.ranked, *plan.late))
    return replace(plan, bound_share=device_shares(run.summary), notes=list(dict.fromkeys(notes)))
