"""Stage one of a job's plan: its time on each number of replicas of each candidate, without simulating any."""

__all__ = ["JobScreen"]

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from perfmodel.planning.jobs.closed_form import job_times
from perfmodel.planning.jobs.result import Job
from perfmodel.planning.screening.candidates import Candidate
from perfmodel.planning.screening.demand import demand_of
from perfmodel.planning.screening.draws import NUM_DRAWS, SharedScores, drawn_surfaces
from perfmodel.planning.screening.surfaces import Surfaces, step_surface
from perfmodel.planning.spec import PlanSpec
from perfmodel.specs.scenario import Scenario

Floats = NDArray[np.float64]
_AT_ONCE = 400  # rows: as many as stay in a processor's cache


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
        return job_times(surfaces, slots, budget, engines, requests, self._demand).seconds


def _key(candidate: Candidate) -> tuple[int, int]:
    """What a candidate's step times depend on; the size of a step matters only on pipeline stages."""
    has_stages = candidate.layout.scenario.engine.pipeline_parallel_size > 1
    return id(candidate.layout), candidate.max_num_batched_tokens if has_stages else 0


def _budget(candidate: Candidate) -> int:
    """Tokens of a step: of a plan for each stage."""
    return candidate.layout.scenario.engine.pipeline_parallel_size * candidate.max_num_batched_tokens
