"""`plan_job`: the cheapest or fastest deployment for an offline job.

Stage one, closed form: the job on each replica count of each candidate. Stage two, simulation: the best run the whole
job, with neighbouring replica counts, then with as many as the requested confidence needs.

Closed form, steady state. All slots are taken: a step of b sequences yields b e tokens (e per sequence), and b e / o
answers of o tokens finish, which admits as many prompts of m tokens. If budget B does not fit both, prompts limit b:

    c = b e m / o    prompt tokens a step;    b = slots, or o B / (m e + o) if b + c exceeds B
    X = b e / (o T)  requests/s, T the step time with its prompts

Tail. When the last prompt is admitted, running answers have a residual r, distributed as the age of a renewal process
(density P(answer > r) / mean); they finish one by one, in ever smaller batches. For n requests on a replica

    t = n / X - residuals at the full batch + integral over r of decode(b P(residual > r)) / e

A job with no more requests than slots computes all prompts, then the same with whole answers as residuals. Equal
requests run in rounds instead, which the last term overstates by at most half a round (the simulator is exact).

The slowest of k engines counts. Its longest answer is the longest of all, and the total tokens of its n answers exceed
the mean by s n^(1/2) times the expected largest of k normal scores (Blom 1958).

A long job is extrapolated from two runs with the first n/2 and n requests of the same traffic. Ramp-up and drain take
constant time, so quantities that grow with work are linear in the number of requests N:

    x(N) = x(n) + (N - n) (x(n) - x(n/2)) / (n/2)        x: seconds, USD, joules, tokens, preemptions

Shares of time (MFU) are extrapolated as their product with time, costs per token as their product with tokens. The
slope scatters by c (n/2)^(-1/2), with c the coefficient of variation of a request's work."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import product
from math import inf, prod

import numpy as np
from scipy.special import ndtri

from perfmodel.errors import SpecError
from perfmodel.planning.choice import compared_prices, most_replicas, origin_notes
from perfmodel.planning.finalist import Job, Preliminary, pick
from perfmodel.planning.points import Point, Record, device_shares
from perfmodel.planning.result import JobPlan
from perfmodel.planning.runs import Runs
from perfmodel.planning.screen import ClosedForm, engines_of
from perfmodel.planning.service import Demand, Service, mean_context
from perfmodel.planning.space import Candidate, enumerate_space
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.surfaces import NUM_DRAWS, Floats, Surfaces
from perfmodel.planning.workers import Watch
from perfmodel.sim import simulate
from perfmodel.specs.overrides import as_overrides
from perfmodel.specs.scenario import Scenario

OnPreliminary = Callable[[Preliminary], None]

METRICS = (
    *("duration", "usd_total", "usd_per_million_tokens", "usd_per_million_output_tokens", "output_throughput_per_gpu"),
    *("total_token_throughput_per_gpu", "tail_share", "joules_per_output_token", "kv_cache_usage_peak", "preemptions"),
    *("mfu", "mbu"),
)
# Metrics that grow with the work, and those that do when multiplied by others.
_FACTORS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("duration", "usd_total", "preemptions"), ()),
    **dict.fromkeys(("mfu", "mbu", "output_throughput_per_gpu", "total_token_throughput_per_gpu"), ("duration",)),
    "usd_per_million_tokens": ("total_token_throughput_per_gpu", "duration"),
    "usd_per_million_output_tokens": ("output_throughput_per_gpu", "duration"),
    "joules_per_output_token": ("output_throughput_per_gpu", "duration"),
}
_DRAIN = "tail_share"
_PARTS = 48  # of the tail
_AT_ONCE = 400  # rows: as many as stay in a processor's cache
_FEWEST_REQUESTS = 20_000  # of the longer run
_BATCHES = 8  # full batches of every engine that the longer run lasts at least
_MAX_OF_LAYOUT = 2  # finalists that differ in scheduling only
_NEARLY = 1.1  # times the deadline in closed form, or with one replica fewer: the simulator may find it met
_MAX_MOVES = 3  # replicas more or fewer that are tried
_OTHER_REPLICAS = "other replicas"  # a task of the forecast
_APART = "with prefill and decode apart, which plans of jobs leave out"


def plan_job(run: Runs, stages: Watch, on_preliminary: OnPreliminary) -> JobPlan:
    """Plan the job of the scenario of `run`. stages: stage name -> progress display; on_preliminary: called with the
    closed-form result before simulating. Raises SpecError for traffic that does not arrive all at once."""
    scenario, spec = run.scenario, run.spec
    if not scenario.traffic.is_offline:
        raise SpecError(
            f"plan.objective={spec.objective} is for a job that is there at once, and arrivals of process "
            f"{scenario.traffic.arrivals.process} are not; give traffic.arrivals={{process: burst}}."
        )
    if scenario.traffic.rollouts is not None:
        raise SpecError("plans of jobs are for one burst; leave traffic.rollouts out to plan one iteration.")
    with stages("screening"):
        space = enumerate_space(run.base, spec)
        unified = [candidate for candidate in space.candidates if candidate.ratio is None]
        screen = JobScreen(unified, scenario, spec)
        jobs = screen.jobs()
    in_time = {id(job.candidate) for job in jobs if _is_in_time(job.screened_s, spec)}
    plan = JobPlan(run.base, scenario, spec, space.num_all, len(in_time))
    chosen = _finalists(jobs, plan)
    on_preliminary(Preliminary(spec, len(unified), chosen, None, plan.num_requests))
    with stages("simulating the job's requests") as progress:
        run = run.counted(progress)
        # Jobs near the deadline in closed form are also tried with other replica counts.
        moved = [job for job in chosen if _next({job.replicas: job}, screen, plan) is not None]
        lengths = [sum(run_lengths(job, scenario)) for job in moved]
        run.sweep.forecast.expect(_OTHER_REPLICAS, spec.seeds * sum(lengths))
        settled = screen.under_draws(_settled(run, screen, chosen, plan))
        sized = _sized(plan, run, screen, settled)
    late_reason = "late or over budget with max_gpus" if spec.deadline_s is not None else "over budget"
    ruled_out = Counter({_APART: len(space.candidates) - len(unified), late_reason: len(unified) - len(in_time)})
    ruled_out = +(ruled_out + Counter(dict(space.ruled_out)))
    late = sorted((job for job in sized if not _is_in_time(job.seconds, spec)), key=plan.figure)
    plain = min((job for job in settled if _is_in_time(job.seconds, spec)), key=plan.figure, default=None)
    reasons = dict(ruled_out.most_common())
    plan = replace(plan, ruled_out=reasons, plain=plain, ranked=_ordered(plan, sized), missed=late)
    return _completed(plan, screen) if plan.winner is not None else plan


# In closed form.


def _job_seconds(service: Service, demand: Demand, engines: Floats, num_requests: int) -> Floats:
    """Seconds of a job of `num_requests` on so many `engines` of a service, (rows, 1)."""
    surfaces, budget = service.surfaces, service.budget
    prompt, answer, requests = demand.mean_prompt, demand.mean_outputs, np.ceil(num_requests / engines)
    full, step = _steady(surfaces, service.slots, budget, demand)
    pace = full * surfaces.tokens(full) / (answer * step)
    batch = np.minimum(full, requests)
    alone = surfaces.decode(np.maximum(batch, 1.0)) / surfaces.tokens(np.maximum(batch, 1.0))
    mean_rest = float((demand.outputs**2).sum() / (2 * demand.outputs.sum()))
    ahead = ndtri((engines - 0.375) / (engines + 0.25)) * np.sqrt(requests) * float(demand.outputs.std())
    many = requests / pace - mean_rest * alone + _drained(surfaces, batch, engines, *_rests(demand.outputs))
    many = many + np.maximum(ahead, 0.0) * alone / batch
    room = np.maximum(budget - batch / 2, 1.0)
    steps = np.maximum(requests * prompt / room, 1.0)
    prompts = steps * surfaces.mixed_step_time(batch / 2, np.minimum(requests * prompt, room))
    prompts = prompts + requests * mean_context(surfaces, demand, room)
    few = prompts + _drained(surfaces, batch, engines, *_whole(demand.outputs))
    return np.where(requests > full, many, few)


def _steady(surfaces: Surfaces, slots: Floats, budget: Floats, demand: Demand) -> tuple[Floats, Floats]:
    """Decoding sequences, and seconds of a step."""
    prompt, answer, brought = demand.mean_prompt, demand.mean_outputs, surfaces.tokens(slots)
    held_back = answer * budget / (prompt * brought + answer)
    batch = np.maximum(np.minimum(slots, held_back), 1.0)
    room = np.maximum(budget - batch, 1.0)
    tokens = np.minimum(batch * brought * prompt / answer, room)
    size = np.minimum(np.maximum(tokens, prompt), room)
    share = tokens / size  # of steps that have prompts: whole ones, where a step's share is less than one
    step = (1 - share) * surfaces.decode(batch) + share * surfaces.mixed_step_time(batch, size)
    return batch, step + tokens / prompt * mean_context(surfaces, demand, room)


def _whole(outputs: Floats) -> tuple[Floats, Floats]:
    """(cumulative share of answers, length)"""
    lengths = np.sort(outputs)
    return (np.arange(len(lengths)) + 1.0) / len(lengths), lengths


def _rests(outputs: Floats) -> tuple[Floats, Floats]:
    """(cumulative share of running answers, residual length)"""
    lengths = np.concatenate([[0.0], np.sort(outputs)])
    longer = 1.0 - np.arange(len(outputs)) / len(outputs)  # share of answers above lengths[i]
    shares = np.concatenate([[0.0], np.cumsum(longer * np.diff(lengths))])
    return shares / shares[-1], lengths


def _drained(surfaces: Surfaces, batch: Floats, engines: Floats, shares: Floats, lengths: Floats) -> Floats:
    """Seconds until the last of `batch` answers per engine finishes; shares, lengths: their length distribution."""
    last = 0.5 / np.maximum(batch * engines, 1.0)
    left = last ** (np.arange(_PARTS + 1)[None, :] / _PARTS)  # from all to the last
    ends = np.interp(1.0 - left, shares, lengths)
    ends[:, 0] = 0.0
    between = np.maximum(batch * np.sqrt(left[:, 1:] * left[:, :-1]), 1.0)
    step = surfaces.decode(between) / surfaces.tokens(between)
    seconds: Floats = (np.diff(ends, axis=1) * step).sum(axis=1, keepdims=True)
    return seconds


class JobScreen(ClosedForm):
    """Closed-form durations and costs of unified candidates for the offline job of `scenario`."""

    def __init__(self, candidates: Sequence[Candidate], scenario: Scenario, spec: PlanSpec) -> None:
        super().__init__(candidates, scenario)
        self._spec, self._num_requests = spec, scenario.traffic.num_requests or 0

    def jobs(self) -> list[Job]:
        """The job on every allowed replica count of every candidate."""
        rows = [(candidate, count) for candidate in self._candidates for count in self.allowed(candidate)]
        jobs: list[Job] = []
        for start in range(0, len(rows), _AT_ONCE):
            part = rows[start : start + _AT_ONCE]
            jobs += [Job(*row, float(taken)) for row, taken in zip(part, self._seconds(part), strict=True)]
        return jobs

    def allowed(self, candidate: Candidate) -> list[int]:
        """Replica counts within the limits, at most the number of requests."""
        most = min(most_replicas(candidate, self._spec), self._num_requests)
        return [count for count in self._spec.space.replicas or range(1, most + 1) if count <= most]

    def under_draws(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs with their factors under common calibration draws."""
        drawn = {id(job.candidate): self._engines.drawn(engines_of(job.candidate)[0])[0] for job in jobs}
        rows = [[(job.candidate, job.replicas)] for job in jobs]
        return [
            replace(job, drawn=self._seconds(row * NUM_DRAWS, drawn[id(job.candidate)]) / self._seconds(row)[0])
            for job, row in zip(jobs, rows, strict=True)
        ]

    def _seconds(self, rows: Sequence[tuple[Candidate, int]], surfaces: Surfaces | None = None) -> Floats:
        """Duration per (candidate, replicas), by the engine's surface unless `surfaces` are given."""
        service = self._service([candidate for candidate, _ in rows])
        service = service if surfaces is None else replace(service, surfaces=surfaces)
        engines = service.decodes * np.array([count for _, count in rows], np.float64)[:, None]
        return _job_seconds(service, self.demand, engines, self._num_requests)[:, 0]


# Simulated.


def run_lengths(job: Job, scenario: Scenario) -> tuple[int] | tuple[int, int]:
    """Requests of the runs that a job takes: all, or n/2 and n for a long job. scenario: its traffic; traces and
    conversations have no steady middle and are simulated whole"""
    traffic, whole = scenario.traffic, scenario.traffic.num_requests or 0
    slots = job.candidate.max_num_seqs * job.candidate.num_engines * job.replicas
    count = max(_FEWEST_REQUESTS, _BATCHES * slots)
    if whole <= 2 * count or traffic.trace is not None or traffic.has_conversations:
        return (whole,)
    return count // 2, count


def extrapolate(short: Record, long: Record, lengths: tuple[int, int], num_requests: int) -> Record:
    """The record of a job of `num_requests`, extrapolated from `short` and `long`, its first `lengths` requests."""
    if short.problem or long.problem:
        return short if short.problem else long

    def multiplied(record: Record, names: tuple[str, ...]) -> float | None:
        values = [value for name in names if (value := record.values.get(name)) is not None]
        return prod(values) if len(values) == len(names) else None

    further = (num_requests - lengths[1]) / (lengths[1] - lengths[0])
    values = dict(long.values)
    for name, factors in _FACTORS.items():
        one, other = (multiplied(record, (name, *factors)) for record in (short, long))
        if one is None or other is None:
            continue
        value = other + further * max(other - one, 0.0)
        for factor in factors:
            value /= values[factor] or 1.0
        values[name] = value
    if long.values.get(_DRAIN) is not None:
        values[_DRAIN] = (multiplied(long, (_DRAIN, "duration")) or 0.0) / (values["duration"] or 1.0)
    return replace(long, values=values, intervals={})


def _simulated(run: Runs, jobs: Sequence[Job]) -> list[Job]:
    """The jobs simulated under each seed; long ones are extrapolated."""
    whole, lengths = run.scenario.traffic.num_requests or 0, [run_lengths(job, run.scenario) for job in jobs]
    points: list[tuple[Point, int]] = []
    for job, counts in zip(jobs, lengths, strict=True):
        made_of = (*run.base.overrides, *job.candidate.overrides(job.replicas))
        for seed, count in product(run.seeds, counts):
            length = {"traffic.num_requests": count} if count != whole else {}
            points.append((Point(run.base.path, METRICS, (*made_of, *as_overrides({"seed": seed, **length}))), count))
    records = iter(run.sweep.records([point for point, _ in points], [count for _, count in points]))

    def record(counts: tuple[int] | tuple[int, int]) -> Record:
        return next(records) if len(counts) == 1 else extrapolate(next(records), next(records), counts, whole)

    return [
        replace(job, records=tuple(record(counts) for _ in run.seeds))
        for job, counts in zip(jobs, lengths, strict=True)
    ]


def _is_in_time(seconds: float, spec: PlanSpec) -> bool:
    return seconds < inf and (spec.deadline_s is None or seconds <= spec.deadline_s)


def _finalists(jobs: Sequence[Job], plan: JobPlan) -> list[Job]:
    """The best replica count of each of the best candidates nearly in time, few of a layout; else the fastest."""
    spec = plan.spec
    best: dict[int, Job] = {}
    near = [job for job in jobs if _is_in_time(job.screened_s / _NEARLY, spec)]
    order = plan.figures if near else (lambda job: (job.seconds, job.bill))
    for job in near or jobs:
        # One that only nearly is in time is looked at with one replica more, too, by `_settled`.
        known = best.get(id(job.candidate))
        if known is None or order(job) < order(known):
            best[id(job.candidate)] = job
    chosen: list[Job] = []
    per_layout: Counter[Hashable] = Counter()
    for job in sorted(best.values(), key=order):
        if len(chosen) < spec.finalists and per_layout[job.candidate.kind] < _MAX_OF_LAYOUT:
            per_layout[job.candidate.kind] += 1
            chosen.append(job)
    return chosen


def _settled(run: Runs, screen: JobScreen, chosen: Sequence[Job], plan: JobPlan) -> list[Job]:
    """Each finalist with the replica count that simulates best."""
    tried: list[dict[int, Job]] = [{} for _ in chosen]
    pending = list(enumerate(chosen))
    while pending:
        for (place, _), job in zip(pending, _simulated(run, [job for _, job in pending]), strict=True):
            tried[place][job.replicas] = job
        run.sweep.forecast.expect(_OTHER_REPLICAS, 0)
        moves = [(place, _next(known, screen, plan)) for place, known in enumerate(tried)]
        pending = [(place, job) for place, job in moves if job is not None]
    return [_best(known, plan) for known in tried]


def _next(tried: dict[int, Job], screen: JobScreen, plan: JobPlan) -> Job | None:
    """The next replica count to try: more if the job is late, fewer if these might suffice; None if done."""
    best, spec = _best(tried, plan), plan.spec
    if spec.deadline_s is None or spec.objective != "cheapest_job" or len(tried) > _MAX_MOVES or best.seconds == inf:
        return None
    is_late = not _is_in_time(best.seconds, spec)
    count = best.replicas + (1 if is_late else -1)
    if count in tried or count not in screen.allowed(best.candidate):
        return None
    might_do = is_late or best.seconds * best.replicas / count <= _NEARLY * spec.deadline_s
    return _with_replicas(best, count) if might_do else None


def _with_replicas(job: Job, count: int) -> Job:
    """`job` on `count` replicas, not yet simulated; its duration, in proportion, is for display only."""
    return Job(job.candidate, count, job.screened_s * job.replicas / count)


def _best(tried: dict[int, Job], plan: JobPlan) -> Job:
    in_time = [job for job in tried.values() if _is_in_time(job.seconds, plan.spec)]
    return min(in_time, key=plan.figures) if in_time else min(tried.values(), key=lambda job: job.seconds)


def _sized(plan: JobPlan, run: Runs, screen: JobScreen, settled: Sequence[Job]) -> list[Job]:
    """Each job with replicas to meet the deadline in the requested share of draws, as far as allowed."""
    jobs, spec = list(settled), plan.spec
    if spec.deadline_s is None or spec.objective != "cheapest_job":
        return jobs
    for _ in range(_MAX_MOVES):
        counts = [_enough(plan, screen, job) for job in jobs]
        more = [place for place, job in enumerate(jobs) if counts[place] > job.replicas]
        if not more:
            break
        done = screen.under_draws(_simulated(run, [_with_replicas(jobs[place], counts[place]) for place in more]))
        for place, job in zip(more, done, strict=True):
            jobs[place] = job
    return jobs


def _enough(plan: JobPlan, screen: JobScreen, job: Job) -> int:
    """Replicas that suffice, in proportion; the most allowed if none do; unchanged for a late job."""
    if not _is_in_time(job.seconds, plan.spec):
        return job.replicas
    return plan.option(job).enough(screen.allowed(job.candidate), plan.spec.confidence)


def _ordered(plan: JobPlan, jobs: Sequence[Job]) -> list[Job]:
    """Jobs in time: the choice, then others that reach the confidence, best first, then the rest by confidence."""
    in_time = [job for job in jobs if _is_in_time(job.seconds, plan.spec)]
    if not in_time:
        return []
    choice = in_time[pick([plan.option(job) for job in in_time], plan.spec.confidence)]

    def key(job: Job) -> tuple[bool, bool, float, float]:
        is_sure = plan.in_time(job) >= plan.spec.confidence
        return job is not choice, not is_sure, 0.0 if is_sure else -plan.in_time(job), plan.figure(job)

    return sorted(in_time, key=key)


def _completed(plan: JobPlan, screen: JobScreen) -> JobPlan:
    winner, whole = plan.everyone[0], plan.num_requests
    lengths = run_lengths(winner, plan.scenario)
    overrides = (*winner.candidate.overrides(winner.replicas), f"traffic.num_requests={lengths[-1]}")
    run = simulate(plan.base.load(overrides), keep_steps=False)
    notes = [*run.notes]
    if lengths[-1] < whole:
        notes.append(
            f"The figures of {whole:,} requests are extrapolated from simulations of {lengths[0]:,} and "
            f"{lengths[-1]:,}, which give the steady pace."
        )
    notes += origin_notes(screen.origin(winner.candidate))
    notes += compared_prices(job.candidate.layout.scenario for job in plan.everyone)
    return replace(plan, bound_share=device_shares(run.summary), notes=list(dict.fromkeys(notes)))
