"""Stage one of a job's plan: its time on each number of replicas of each candidate, in closed form.

Steady state. All slots are taken, so that a step of b sequences brings b e tokens (e: tokens a step brings each), and
b e / o answers of o tokens leave room for as many prompts of m tokens. Where the budget B has no room for both, prompts
hold sequences back:

    c = b e m / o    prompt tokens a step;    b = slots, or o B / (m e + o) if b + c exceeds B
    X = b e / (o T)  requests a second, T the step's time with its prompts

Tail. When the last prompt is let in, answers under way have a rest r left, distributed as the age of a renewal process
(density P(answer > r) / mean); they end one after the other, in ever smaller batches. Of n requests on a replica

    t = n / X - rests at the full batch + integral over r of decode(b P(rest > r)) / e

A job that has no more requests than slots computes all prompts, then the same with whole answers for rests. Equal
requests go in rounds instead, which the last term overstates by at most half a round (the simulator has them right).

Of k engines the last counts. Its longest answer is the longest of all; and the tokens that its n answers happen to have
exceed the mean by as many standard deviations, s n^(1/2), as the largest of k normal scores (Blom 1958).
"""

__all__ = ["JobScreen"]

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from perfmodel.planning.jobs.result import Job
from perfmodel.planning.screening.candidates import Candidate
from perfmodel.planning.screening.demand import Demand, demand_of
from perfmodel.planning.screening.service import mean_context
from perfmodel.planning.screening.surfaces import NUM_DRAWS, SharedScores, Surfaces, drawn_surfaces, step_surface
from perfmodel.planning.spec import PlanSpec
from perfmodel.specs.scenario import Scenario

Floats = NDArray[np.float64]

_PARTS = 48  # of the tail
_AT_ONCE = 400  # rows: as many as stay in a processor's cache


@dataclass(frozen=True)
class _JobTimes:
    """A row of one column for each candidate. seconds: of the job; pace: requests a second of an engine while its slots
    are taken; batch: sequences that decode then."""

    seconds: Floats
    pace: Floats
    batch: Floats


def _job_times(
    surfaces: Surfaces, slots: Floats, budget: Floats, engines: Floats, requests: Floats, demand: Demand
) -> _JobTimes:
    """Times of a job of `requests` on each of `engines` engines, with `slots` sequences and `budget` tokens in a step.

    surfaces: step times of the candidates; demand: lengths of the job's prompts and answers
    """
    prompt, answer = demand.mean_prompt, demand.mean_outputs
    full, step = _steady(surfaces, slots, budget, demand)
    brought = surfaces.tokens(full)
    pace = full * brought / (answer * step)
    batch = np.minimum(full, requests)
    alone = surfaces.decode(np.maximum(batch, 1.0)) / surfaces.tokens(np.maximum(batch, 1.0))
    rests = _rests(demand.outputs)
    mean_rest = float((demand.outputs**2).sum() / (2 * demand.outputs.sum()))
    ahead = ndtri((engines - 0.375) / (engines + 0.25)) * np.sqrt(requests) * float(demand.outputs.std())
    many = requests / pace - mean_rest * alone + _drained(surfaces, batch, engines, *rests)
    many = many + np.maximum(ahead, 0.0) * alone / batch
    room = np.maximum(budget - batch / 2, 1.0)
    steps = np.maximum(requests * prompt / room, 1.0)
    context = mean_context(surfaces, demand, room)
    prompts = steps * surfaces.beside(batch / 2, np.minimum(requests * prompt, room)) + requests * context
    few = prompts + _drained(surfaces, batch, engines, *_whole(demand.outputs))
    return _JobTimes(np.where(requests > full, many, few), pace, full)


def _steady(surfaces: Surfaces, slots: Floats, budget: Floats, demand: Demand) -> tuple[Floats, Floats]:
    """Sequences that decode, and seconds of a step."""
    prompt, answer = demand.mean_prompt, demand.mean_outputs
    brought = surfaces.tokens(slots)
    held_back = answer * budget / (prompt * brought + answer)
    batch = np.maximum(np.minimum(slots, held_back), 1.0)
    tokens = np.minimum(batch * brought * prompt / answer, np.maximum(budget - batch, 1.0))
    size = np.minimum(np.maximum(tokens, prompt), np.maximum(budget - batch, 1.0))
    share = tokens / size  # of steps that have prompts: whole ones, where a step's share is less than one
    step = (1 - share) * surfaces.decode(batch) + share * surfaces.beside(batch, size)
    return batch, step + tokens / prompt * mean_context(surfaces, demand, np.maximum(budget - batch, 1.0))


def _whole(outputs: Floats) -> tuple[Floats, Floats]:
    """(share of answers that are at most so long, so long)."""
    lengths = np.sort(outputs)
    return (np.arange(len(lengths)) + 1.0) / len(lengths), lengths


def _rests(outputs: Floats) -> tuple[Floats, Floats]:
    """(share of answers under way that have at most so much left, so much)."""
    lengths = np.concatenate([[0.0], np.sort(outputs)])
    longer = 1.0 - np.arange(len(outputs)) / len(outputs)  # share of answers above lengths[i]
    shares = np.concatenate([[0.0], np.cumsum(longer * np.diff(lengths))])
    return shares / shares[-1], lengths


def _drained(surfaces: Surfaces, batch: Floats, engines: Floats, shares: Floats, lengths: Floats) -> Floats:
    """Seconds until the last of `batch` answers on each engine ends, of lengths distributed so."""
    last = 0.5 / np.maximum(batch * engines, 1.0)
    left = last ** (np.arange(_PARTS + 1)[None, :] / _PARTS)  # from all to the last
    ends = np.interp(1.0 - left, shares, lengths)
    ends[:, 0] = 0.0
    between = np.maximum(batch * np.sqrt(left[:, 1:] * left[:, :-1]), 1.0)
    step = surfaces.decode(between) / surfaces.tokens(between)
    found: Floats = (np.diff(ends, axis=1) * step).sum(axis=1, keepdims=True)
    return found


class JobScreen:
    """Times and costs of unified candidates for the offline job of `scenario`, in closed form."""

    def __init__(self, candidates: Sequence[Candidate], scenario: Scenario, spec: PlanSpec) -> None:
        self._candidates, self._spec = candidates, spec
        self._num_requests = scenario.traffic.num_requests or 0
        self._demand = demand = demand_of(scenario)
        batches = max((each.max_num_seqs for each in candidates), default=1)
        chunk = max(map(_budget, candidates), default=1)
        self._grid = demand.context, demand.mean_prompt, batches, chunk
        engines = {_key(each): each.layout.scenario for each in candidates}
        self._surfaces = {key: step_surface(engine, *self._grid, key[1]) for key, engine in engines.items()}

    def jobs(self) -> list[Job]:
        """The job on every number of replicas that is allowed of every candidate."""
        rows = [(each, count) for each in self._candidates for count in self.allowed(each)]
        found: list[Job] = []
        for start in range(0, len(rows), _AT_ONCE):
            part = rows[start : start + _AT_ONCE]
            seconds = self._seconds(part, self._read(part))
            found += [Job(each, count, float(s)) for (each, count), s in zip(part, seconds[:, 0], strict=True)]
        return found

    def origin(self, candidate: Candidate) -> str:
        """Origin of the candidate's step times."""
        return self._surfaces[_key(candidate)].origin

    def allowed(self, candidate: Candidate) -> list[int]:
        """Numbers of replicas within what may be spent, no more than there are requests."""
        spec, price = self._spec, candidate.usd_per_hour
        most = min(spec.max_gpus // candidate.num_devices, self._num_requests)
        if spec.budget_usd_per_hour is not None and price:
            most = min(most, int(spec.budget_usd_per_hour / price))
        return [count for count in spec.space.replicas or range(1, most + 1) if count <= most]

    def under_draws(self, jobs: Sequence[Job]) -> list[Job]:
        """The same jobs with their spread under common draws of the calibration's errors."""
        known, found = SharedScores(), []
        engines = {_key(job.candidate): job.candidate.layout.scenario for job in jobs}
        read = {
            key: Surfaces(
                drawn_surfaces(engine, (*self._grid, key[1]), known.of(engine), False)[0], np.arange(NUM_DRAWS)
            )
            for key, engine in engines.items()
        }
        for job in jobs:
            row = [(job.candidate, job.replicas)]
            base = self._seconds(row, self._read(row))
            drawn = self._seconds(row * NUM_DRAWS, read[_key(job.candidate)])
            found.append(replace(job, drawn=drawn[:, 0] / base[0, 0]))
        return found

    def _read(self, rows: Sequence[tuple[Candidate, int]]) -> Surfaces:
        used = list(dict.fromkeys(_key(each) for each, _ in rows))
        place = {key: index for index, key in enumerate(used)}
        which = np.array([place[_key(each)] for each, _ in rows], np.intp)
        return Surfaces([self._surfaces[key] for key in used], which)

    def _seconds(self, rows: Sequence[tuple[Candidate, int]], surfaces: Surfaces) -> Floats:
        def column(values: list[float]) -> Floats:
            return np.array(values, np.float64)[:, None]

        context = max(int(self._demand.context), 1)
        slots = column([max(1, min(each.max_num_seqs, each.memory.max_batch(context))) for each, _ in rows])
        budget = column([float(_budget(each)) for each, _ in rows])
        engines = column([float(count * each.num_engines) for each, count in rows])
        requests = np.ceil(self._num_requests / engines)
        return _job_times(surfaces, slots, budget, engines, requests, self._demand).seconds


def _key(candidate: Candidate) -> tuple[int, int]:
    """What a candidate's step times depend on; the size of a step matters only on pipeline stages."""
    has_stages = candidate.layout.scenario.engine.pipeline_parallel_size > 1
    return id(candidate.layout), candidate.max_num_batched_tokens if has_stages else 0


def _budget(candidate: Candidate) -> int:
    """Tokens of a step: of a plan for each stage."""
    return candidate.layout.scenario.engine.pipeline_parallel_size * candidate.max_num_batched_tokens
