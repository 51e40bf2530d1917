"""`make_plan`: from a scenario with an SLO to the deployment that is best by the plan's objective.

    stage one    every candidate in closed form (`screen`)
    stage two    finalists on the simulator (`runs`): their highest rates, and the whole at the wanted rate; candidates
                 that the screen may have cut wrongly (`overlooked`); then what more money buys (`front`), and how sure
                 the order is (`draws`)

All that stage two evaluates is in a store on disk: a plan that was stopped goes on where it was.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path

from perfmodel.errors import SpecError
from perfmodel.files.blocks import block_as
from perfmodel.planning.choice import (
    Ratios,
    compared_prices,
    deployed,
    device_answers,
    finalists,
    label_of,
    may_have,
    objective_key,
    origin_notes,
    overlooked,
    ratios_of,
    screened_front,
    shortfalls,
    simulated_front,
    with_every_device,
)
from perfmodel.planning.finalist import (
    Deployment,
    Finalist,
    Job,
    Preliminary,
    PreliminaryJob,
    Records,
    Screened,
    attained,
    certainty_of,
    pick,
)
from perfmodel.planning.points import Point, Record, device_shares
from perfmodel.planning.result import JobPlan, PlanResult, quantile_name
from perfmodel.planning.runs import Runs, Settled, left_out, under_failures
from perfmodel.planning.screen import JobScreen, Screen
from perfmodel.planning.service import at_rate, wanted_rate
from perfmodel.planning.space import Base, enumerate_space
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.sweep import Forecast, Store, StoredSweep, default_store
from perfmodel.planning.workers import Progress
from perfmodel.sim.driver import simulate
from perfmodel.specs.overrides import as_overrides
from perfmodel.specs.scenario import Scenario

Tell = Callable[[Preliminary | PreliminaryJob], None]
Stages = Callable[[str], AbstractContextManager[Progress | None]]  # a stage's name -> what shows how far it is

_FRONT = "front"  # a task of the forecast
_REQUESTS = 400  # of the run that says what bounds the winner


def make_plan(
    path: str,
    overrides: Sequence[str] = (),
    store: Path | None = None,
    workers: int | None = None,
    engine: str = "local",
    stages: Stages | None = None,
    tell: Tell | None = None,
) -> PlanResult | JobPlan:
    """The plan of the scenario at `path` (a name or a file), with its `plan` block or the defaults of one; of an
    offline job where its objective says so.

    overrides: as `--set` takes them
    store:     file with points that are already known, and for those evaluated now; default: the user's
    workers, engine: as for `perfmodel.planning.sweep`
    stages:    a stage's name -> what shows its progress
    tell:      called with what the screen has found, before anything is simulated

    Raises SpecError for a scenario without an SLO or a rate, or with a mistake in it.
    """
    base, shown = Base(path, tuple(overrides)), stages or (lambda _: nullcontext())
    scenario = base.load()
    spec = block_as(scenario.plan, PlanSpec) or PlanSpec()
    file = store or default_store()
    Store(file).close()  # a file that cannot be used is refused before the search
    sweep = StoredSweep(str(file), workers, engine)
    if spec.is_offline:
        return plan_job(base, scenario, spec, sweep, shown, tell)
    return _plan_rate(base, scenario, spec, sweep, shown, tell)


def _plan_rate(
    base: Base,
    scenario: Scenario,
    spec: PlanSpec,
    sweep: StoredSweep,
    shown: Stages,
    tell: Tell | None,
) -> PlanResult:
    """The plan that serves a rate. sweep: does the simulations; the rest as there."""
    rate = wanted_rate(scenario, spec)
    with shown("screening"):
        space = enumerate_space(base, spec)
        screen = Screen(space.candidates, scenario, spec.attainment)
        screened = screen.all()
        serving = _deployments(screen, screened, spec, rate)
        front = screened_front(screen, serving, spec, rate)
    chosen = with_every_device(finalists(serving, spec), serving, spec)
    if tell is not None:
        tell(Preliminary(rate, spec, len(space.candidates), tuple(chosen)))
    known = {id(deployment.screened) for deployment in serving}
    too_slow = [Deployment(candidate, 0) for candidate in screened if id(candidate) not in known]
    with shown("simulating the finalists' requests") as progress:
        run = Runs(base, scenario, spec, rate, replace(sweep, forecast=Forecast(progress)))
        stage_two = _simulated(run, screen, chosen, front, [*serving, *too_slow])
    simulated = stage_two.at_rate
    serve, do_not = simulated_front(simulated, front, spec, scenario.slo, quantile_name(spec.attainment))
    reasons = dict(space.ruled_out) | shortfalls(screened, spec, rate)
    nearest = "" if serving else _nearest(screened, rate)
    counts = space.num_all, len(serving)
    good, bad = _judged(stage_two.finalists, scenario, spec)
    result = PlanResult(base, scenario, spec, rate, *counts, reasons, good, bad, serve, do_not, nearest=nearest)
    result = replace(result, searched=space.searched, ratios=stage_two.ratios, num_overlooked=stage_two.num_left)
    result = _completed(_ordered(result), simulated)
    judged = result.ranked, result.missed
    result = replace(result, devices=device_answers(spec, rate, judged, serving, screened, space.by_device))
    with shown("under failures"):
        resilience = under_failures(result, result.winner) if result.winner is not None else None
    return replace(result, resilience=resilience, left_out=left_out(scenario))


@dataclass(frozen=True)
class _Simulated:
    """The results of the simulator.

    finalists: at the wanted rate
    at_rate:   all that was simulated there, those of the front included, by label
    ratios:    simulated figures over those of the screen
    num_left:  candidates that the screen has cut by less than the spread of these ratios, and that were not simulated
    """

    finalists: list[Finalist]
    at_rate: dict[str, tuple[Deployment, Records]]
    ratios: Ratios
    num_left: int


def _simulated(
    run: Runs, screen: Screen, chosen: Sequence[Deployment], front: Sequence[Deployment], cut: Sequence[Deployment]
) -> _Simulated:
    """`chosen`, `front`, and those of `cut` that may be better; what does not serve by the screen has no replicas."""
    run.sweep.forecast.expect(_FRONT, run.num_requests([(deployment, deployment.replicas) for deployment in front]))
    settled = run.settled(chosen)
    done = run.at_the_rate(settled)
    tried = {id(deployment.screened) for deployment in chosen}
    room = ceil(run.spec.finalists / 2)
    while near := _overlooked(run, done, [deployment for deployment in cut if id(deployment.screened) not in tried]):
        more, room = near[:room], room - len(near[:room])
        if not more:
            break
        tried |= {id(deployment.screened) for deployment in more}
        newly_settled = run.settled(more)
        settled, done = settled + newly_settled, done + run.at_the_rate(newly_settled)
    drawn = _sized(run, _drawn(screen, done, run.rate))
    return _Simulated(drawn, _with_front(run, screen, settled, front), _ratios(run, done), len(near))


def _overlooked(run: Runs, done: Sequence[Finalist], cut: Sequence[Deployment]) -> list[Deployment]:
    """Those of `cut` that may be better than the best of `done`."""
    draft = PlanResult(
        run.base, run.scenario, run.spec, run.rate, 0, 0, {}, _judged(done, run.scenario, run.spec)[0], ()
    )
    sign = 1.0 if draft.is_better_low else -1.0
    best = min((sign * draft.figure(finalist) for finalist in draft.ranked), default=None)
    return overlooked(cut, best, _ratios(run, done), run.spec, run.rate)


def _ratios(run: Runs, done: Sequence[Finalist]) -> Ratios:
    return ratios_of(done, run.scenario.slo, quantile_name(run.spec.attainment))


def _judged(done: Sequence[Finalist], scenario: Scenario, spec: PlanSpec) -> tuple[list[Finalist], list[Finalist]]:
    """Those that serve within the SLO, and those that do not."""
    good = [each for each in done if each.serves(scenario.slo, spec.attainment)]
    return good, [each for each in done if each not in good]


def _sized(run: Runs, done: Sequence[Finalist]) -> list[Finalist]:
    """The finalists with as many replicas as suffice in the wanted share of draws, simulated with these at the rate; as
    many as are allowed where more are needed."""
    draft = PlanResult(run.base, run.scenario, run.spec, run.rate, 0, 0, {}, [], done)
    counts = [_enough(draft, finalist) for finalist in done]
    more = [place for place, finalist in enumerate(done) if counts[place] != finalist.replicas]
    records = run.at_rate([(done[place].deployment, counts[place]) for place in more])
    sized = list(done)
    for place, known in zip(more, records, strict=True):
        sized[place] = sized[place].sized(counts[place], known)
    return sized


def _enough(result: PlanResult, finalist: Finalist) -> int:
    """Replicas that suffice in the wanted share of draws; the most that are allowed where these do not."""
    if result.spec.objective == "lowest_latency":
        return finalist.replicas
    option, screened = result.option(finalist), finalist.deployment.screened
    counts = range(finalist.replicas, option.most + 1)
    return option.enough([count for count in counts if may_have(screened, result.spec, count)], result.spec.confidence)


def _ordered(result: PlanResult) -> PlanResult:
    """The choice first; then what else is sure enough, best first by expected cost, or by the objective where that is
    no cost."""
    if not result.ranked:
        return result
    options = [result.option(each) for each in result.ranked]
    choice = pick(options, result.spec.confidence)
    everyone = [*options, *(result.option(each) for each in result.missed)]
    expected = certainty_of(everyone, choice, result.spec.confidence).expected

    def key(place: int) -> tuple[bool, bool, float, float]:
        each = options[place]
        figure = expected[each.name] if each.figure is None else each.figure
        return place != choice, each.share < result.spec.confidence, figure, -result.ranked[place].rate

    return replace(result, ranked=[result.ranked[place] for place in sorted(range(len(options)), key=key)])


def _drawn(screen: Screen, done: Sequence[Finalist], rate: float) -> list[Finalist]:
    """The finalists with what common draws of the calibration's errors make of them, of their latencies as near to
    the highest rate of the closed form as the wanted rate is to the simulated one."""
    rates = [rate * each.deployment.screened.rate / max(each.rate, 1e-9) for each in done]
    drawn = screen.under_draws([each.deployment.screened for each in done], rates)
    return [replace(each, drawn=factors) for each, factors in zip(done, drawn, strict=True)]


def _with_front(
    run: Runs, screen: Screen, settled: Sequence[Settled], front: Sequence[Deployment]
) -> dict[str, tuple[Deployment, Records]]:
    """All deployments that were simulated at the rate, and those of the front now; by label."""
    by_label: dict[str, tuple[Deployment, Records]] = {}
    for one in settled:
        for count, records in one.runs.items():
            deployment = replace(one.deployment, replicas=count)
            by_label[label_of(deployment)] = deployment, records
    missing = [deployment for deployment in front if label_of(deployment) not in by_label]
    run.sweep.forecast.expect(_FRONT, 0)
    records_of = run.at_rate([(deployment, deployment.replicas) for deployment in missing])
    by_label |= {
        label_of(deployment): (deployment, known) for deployment, known in zip(missing, records_of, strict=True)
    }
    whole = [deployment for deployment, _ in by_label.values()]
    near = screen.tightness(
        [deployment.screened for deployment in whole], [run.rate / deployment.replicas for deployment in whole]
    )
    return {
        label: (replace(deployment, tightness=value), known)
        for (label, (deployment, known)), value in zip(by_label.items(), near, strict=True)
    }


def _completed(result: PlanResult, simulated: Mapping[str, tuple[Deployment, Records]]) -> PlanResult:
    """The result with what bounds the winner."""
    if result.winner is None:
        return result
    choices = result.winner.deployment.screened.candidate.choices(result.winner.replicas)
    traffic = at_rate(result.scenario, result.rate, _REQUESTS)
    run = simulate(result.base.load(as_overrides({**choices, **traffic})), keep_steps=False)
    notes = [
        *run.notes,
        *origin_notes(result.winner.deployment.screened.origin),
    ]
    if result.scenario.traffic.arrivals.process == "trace":
        notes.append("Arrivals are the trace's own, at other rates the same with longer or shorter gaps.")
    notes = list(dict.fromkeys([*notes, *_prices(result)]))
    fewer = {
        label: attained(records)
        for label, (each, records) in simulated.items()
        if each.screened is result.winner.deployment.screened and each.replicas < result.winner.fewest
    }
    return replace(result, bound_share=device_shares(run.summary), notes=notes, fewer=fewer)


def _prices(result: PlanResult) -> Iterator[str]:
    """The prices that finalists are compared by, with source and date, and which of them are old."""
    finalists = (*result.ranked, *result.missed)
    layouts = [layout for finalist in finalists for layout, _ in finalist.deployment.screened.candidate.counts]
    scenarios = [layout.scenario for layout in layouts]
    devices = dict.fromkeys(scenario.hardware.name for scenario in scenarios)
    price = result.scenario.price
    if price is not None and not isinstance(price.usd_per_gpu_hour, dict) and len(devices) > 1:
        yield (
            f"price.usd_per_gpu_hour {price.usd_per_gpu_hour:g} of the scenario is that of every device here, "
            f"{', '.join(devices)}; give each its own, as in --price {next(iter(devices))}=2.50."
        )
    yield from compared_prices(scenarios)


def _deployments(screen: Screen, screened: Sequence[Screened], spec: PlanSpec, rate: float) -> list[Deployment]:
    """What serves the rate, with how near its limits come, best first."""
    found = deployed(screened, spec, rate)
    near = (
        screen.tightness([each.screened for each in found], [rate / each.replicas for each in found]) if found else []
    )
    found = [replace(each, tightness=value) for each, value in zip(found, near, strict=True)]
    return sorted(found, key=lambda deployment: objective_key(deployment, spec))


def _nearest(screened: Sequence[Screened], rate: float) -> str:
    """What would serve the rate with the fewest devices, were they allowed."""
    if not screened:
        return "None of the candidates can run, for the reasons below; widen plan.space accordingly."
    able = [candidate for candidate in screened if candidate.rate > 0]
    if not able:
        return "No candidate meets the SLO even for a single user; relax it, or add faster devices to plan.space."
    best = max(able, key=lambda candidate: candidate.rate_per_device)
    count = ceil(rate / best.rate - 1e-9)
    return (
        f"The highest rate per device is that of {best.candidate.label}, {best.rate:.3g} requests/s on "
        f"{best.candidate.num_devices}; {count} of them, {count * best.candidate.num_devices} GPUs, would suffice."
    )


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
        sized = _sized_jobs(plan, run, screen, settled)
    late_reason = "late or over budget with max_gpus" if spec.deadline_s is not None else "over budget"
    ruled_out = Counter({_APART: len(space.candidates) - len(unified), late_reason: len(unified) - len(in_time)})
    ruled_out = +(ruled_out + Counter(dict(space.ruled_out)))
    plain = min((job for job in settled if _is_in_time(job.seconds, spec)), key=plan.figure, default=None)
    late = sorted((job for job in sized if not _is_in_time(job.seconds, spec)), key=plan.figure)
    plan = replace(plan, ruled_out=dict(ruled_out.most_common()), plain=plain)
    return _completed_job(replace(plan, ranked=_ordered_jobs(plan, sized), late=late), screen)


def _sized_jobs(plan: JobPlan, run: "_Runs", screen: JobScreen, settled: Sequence[Job]) -> list[Job]:
    """Each job with as many replicas as are done in time in the wanted share of draws, as far as these are allowed."""
    jobs, spec = list(settled), plan.spec
    if spec.deadline_s is None or spec.objective != "cheapest_job":
        return jobs
    for _ in range(_MOST_MOVES):
        more = {
            place: count
            for place, job in enumerate(jobs)
            if (count := _enough_replicas(plan, screen, job)) > job.replicas
        }
        if not more:
            break
        asked = [_with_replicas(jobs[place], count) for place, count in more.items()]
        done = screen.under_draws(run.of(asked))
        for place, job in zip(more, done, strict=True):
            jobs[place] = job
    return jobs


def _enough_replicas(plan: JobPlan, screen: JobScreen, job: Job) -> int:
    """Replicas that are enough, in proportion; the most that are allowed where these are not; its own of a late job."""
    if not _is_in_time(job.seconds, plan.spec):
        return job.replicas
    return plan.option(job).enough(screen.allowed(job.candidate), plan.spec.confidence)


def _ordered_jobs(plan: JobPlan, jobs: Sequence[Job]) -> list[Job]:
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


def _completed_job(plan: JobPlan, screen: JobScreen) -> JobPlan:
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
