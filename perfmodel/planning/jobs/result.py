"""`JobPlan`: deployments that were simulated doing a job, best first, and how sure their order is."""

__all__ = ["Job", "JobPlan", "PreliminaryJob", "batch_command"]

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.calibrations.provenance import provenance_of, resolved
from perfmodel.planning.deployments.doubt import Option, replicas_for
from perfmodel.planning.deployments.finalist import Interval, interval_of, mean, seed_draws
from perfmodel.planning.screening.candidates import Base, Candidate
from perfmodel.planning.screening.surfaces import NUM_DRAWS
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.sweeps.points import Record
from perfmodel.printable import Printable, columns_of
from perfmodel.specs.commands.server import engine_arguments
from perfmodel.specs.scenario import Scenario
from perfmodel.trust import Trust, trust_of

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Job:
    """A job on so many replicas of a candidate.

    screened_s: how long it takes in closed form
    records:    what it comes to when simulated, for each seed
    drawn:      factors on its time under draws of what the calibration leaves unexplained, in closed form
    """

    candidate: Candidate
    replicas: int
    screened_s: float
    records: tuple[Record, ...] = ()
    drawn: Floats = field(default_factory=lambda: np.ones(NUM_DRAWS))

    @property
    def label(self) -> str:
        return f"{self.replicas} x {self.candidate.label}"

    @property
    def num_devices(self) -> int:
        return self.replicas * self.candidate.num_devices

    @property
    def price(self) -> float:
        """USD per hour; device hours per hour where there is no price."""
        each = self.candidate.usd_per_hour
        return float(self.num_devices) if each is None else each * self.replicas

    @property
    def seconds(self) -> float:
        """The geometric mean over seeds, as simulated; else in closed form. Infinite where it cannot be simulated."""
        if not self.records:
            return self.screened_s
        found = [record.values.get("duration") for record in self.records]
        times = [value for value in found if value]
        return exp(sum(map(log, times)) / len(times)) if len(times) == len(found) else inf

    @property
    def bill(self) -> float:
        """USD of the whole job; device hours where there is no price."""
        return self.price * self.seconds / 3600

    @property
    def seconds_draws(self) -> Floats:
        """`seconds` under each draw, of the calibration's errors and of which requests come by chance."""
        times = [value for record in self.records if (value := record.values.get("duration"))]
        found: Floats = self.seconds * self.drawn * np.exp(seed_draws(times))
        return found

    @property
    def seconds_interval(self) -> Interval:
        """80 %."""
        return interval_of(self.seconds_draws, self.seconds)

    def mean(self, metric: str) -> float | None:
        return mean(self.records, metric)


@dataclass(frozen=True)
class PreliminaryJob:
    """What the closed form has found of a job: the answer until the simulator has one.

    finalists: those about to be simulated, best first; where none is in time, those that are done first
    """

    num_requests: int
    spec: PlanSpec
    num_candidates: int
    finalists: tuple[Job, ...]


@dataclass(frozen=True, repr=False)
class JobPlan(Printable):
    """What came of the plan of a job.

    ranked:      finalists that are done before the deadline, the choice first; `late`: those that are not
    plain:       what would be taken if predictions were exact
    ruled_out:   candidates by why they are none; `num_in_time`: those that the closed form has done in time
    bound_share: of the winner's busy time, by what bounds it
    """

    base: Base
    scenario: Scenario
    spec: PlanSpec
    num_candidates: int
    num_in_time: int
    ruled_out: Mapping[str, int]
    ranked: Sequence[Job]
    late: Sequence[Job]
    plain: Job | None = None
    bound_share: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def winner(self) -> Job | None:
        return self.ranked[0] if self.ranked else None

    @property
    def num_requests(self) -> int:
        return self.scenario.traffic.num_requests or 0

    def figure(self, job: Job) -> float:
        """What the objective compares; smaller is better."""
        return job.bill if self.spec.objective == "cheapest_job" else job.seconds

    def figure_draws(self, job: Job) -> Floats:
        scale: Floats = job.seconds_draws * (self.figure(job) / job.seconds)
        return scale

    def better_share(self, one: Job, other: Job) -> float:
        """The share of draws, the same for both, in which `one` is better."""
        return float(np.mean(self.figure_draws(one) < self.figure_draws(other)))

    def in_time(self, job: Job) -> float:
        """The share of draws in which it is done before the deadline."""
        if self.spec.deadline_s is None:
            return 1.0
        return float(np.mean(job.seconds_draws <= self.spec.deadline_s))

    def option(self, job: Job) -> Option:
        """The job as something to decide about: replicas that are done in time in each draw, in proportion."""
        times, deadline = job.seconds_draws, self.spec.deadline_s
        needed = np.zeros(len(times)) if deadline is None else np.ceil(job.replicas * times / deadline - 1e-9)
        device = job.candidate.layout.scenario.hardware.name
        most = self.spec.max_gpus // job.candidate.num_devices
        share = self.figure(job) / job.replicas
        return Option(
            job.label, device, share, job.replicas, job.replicas, most, needed, None if deadline else self.figure(job)
        )

    def replicas_for_sure(self, job: Job, share: float) -> int:
        """Replicas, in proportion, that are done in time in such a share of draws."""
        return round(replicas_for(self.option(job).needed, job.replicas, share))

    def columns(self) -> dict[str, NDArray[Any]]:
        """The finalists, best first, then those that are not done `in_time`."""
        jobs = [*((job, True) for job in self.ranked), *((job, False) for job in self.late)]
        return columns_of([{**self._row(job), "in_time": in_time} for job, in_time in jobs])

    def to_json(self) -> dict[str, Any]:
        """Everything but sentences."""
        return {
            "scenario": self.scenario.name,
            "objective": self.spec.objective,
            "deadline_s": self.spec.deadline_s,
            "confidence": self.spec.confidence,
            "num_requests": self.num_requests,
            "candidates": self.num_candidates,
            "in_time": self.num_in_time,
            "ruled_out": dict(self.ruled_out),
            "ranked": [self._row(job) for job in self.ranked],
            "late": [self._row(job) for job in self.late],
            "if_predictions_were_exact": None if self.plain is None else self._row(self.plain),
            "bound_share": dict(self.bound_share),
            "notes": list(self.notes),
            "trust": None if (trust := self.trust) is None else trust.to_json(),
            "provenance": self._provenance(),
        }

    @property
    def trust(self) -> Trust | None:
        """How near the first of the ranked deployments is to what was measured; None without one."""
        return trust_of(self.ranked[0].candidate.layout.scenario) if self.ranked else None

    def _provenance(self) -> dict[str, Any]:
        used = [job.candidate.layout.scenario for job in (*self.ranked, *self.late)]
        inputs = {"scenario": resolved(self.scenario)}
        return provenance_of([self.scenario, *used]).to_json("job", inputs)

    def _row(self, job: Job) -> dict[str, Any]:
        has_price = job.candidate.usd_per_hour is not None
        return {
            "label": job.label,
            "choices": job.candidate.choices(job.replicas),
            "replicas": job.replicas,
            "gpus": job.num_devices,
            "usd_per_hour": job.price if has_price else None,
            "has_unconfirmed_price": job.candidate.has_unconfirmed_price,
            "duration_s": job.seconds,
            "duration_interval_s": list(job.seconds_interval),
            "screened_duration_s": job.screened_s,
            "usd_total": job.bill if has_price else None,
            "in_time_in_share_of_draws": self.in_time(job),
            "metrics": {name: job.mean(name) for name in (job.records[0].values if job.records else ())},
            "problems": [record.problem for record in job.records if record.problem],
        }


def batch_command(plan: JobPlan, job: Job) -> list[str]:
    """The command of each replica, which takes its share of the requests."""
    scenario = plan.base.load(job.candidate.overrides(job.replicas))
    engine = scenario.pools[0].engine
    name = scenario.model.hf_id or scenario.model.name
    arguments = ["vllm", "run-batch", "-i", "requests.jsonl", "-o", "answers.jsonl", "--model", name]
    where = (
        f"# {job.replicas} x, each with its share of the requests, on {engine.num_devices} x {scenario.hardware.name}"
    )
    return [where, shlex.join([*arguments, *engine_arguments(engine, scenario.model)])]
