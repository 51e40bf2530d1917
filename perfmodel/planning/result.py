"""Results of a plan, for a rate or an offline job: ranked finalists, reasons against others, confidence."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil, inf, isfinite
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.calibrations.provenance import provenance_of, resolved
from perfmodel.planning import finalist as fin
from perfmodel.planning.choice import DeviceAnswer, Ratios, most_replicas
from perfmodel.planning.finalist import Finalist, FrontPoint, Interval, Job, Option
from perfmodel.planning.findings import TIE
from perfmodel.planning.metrics import ALTERNATIVES
from perfmodel.planning.mixes import MixAnswer
from perfmodel.planning.space import Base, Layout
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.surfaces import Floats
from perfmodel.renderable import Renderable, columns_of
from perfmodel.specs.scenario import Scenario
from perfmodel.trust import LEVELS, Trust, trust_of

Row = TypeVar("Row", Finalist, Job)

_AT_THE_RATE = (
    "usd_per_million_input_tokens_split",
    "usd_per_million_output_tokens_split",
    "usd_per_million_output_tokens",
    "joules_per_output_token",
    *("site_joules_per_output_token", "gco2_per_million_output_tokens", "gco2_per_million_tokens"),
    *ALTERNATIVES,
)
_QUANTILES = {0.5: "median", 0.9: "p90", 0.95: "p95", 0.99: "p99"}


def quantile_name(share: float) -> str:
    """The percentile, as metrics name it, for a share of requests: the nearest that is not lower."""
    return next((name for known, name in _QUANTILES.items() if known >= share - 1e-9), "p99")


@dataclass(frozen=True)
class Resilience:
    """The choice under the scenario's failures and gateway.

    attained:   replicas -> simulated share of requests within the SLO, from the count that serves without failures
    replicas:   the fewest of those that serve; None if none does
    all_up:     replicas -> closed-form share of time in which enough are up; empty without a mean time between failures
    problem:    why the failures cannot be simulated on the choice"""

    attained: Mapping[int, float]
    replicas: int | None
    all_up: Mapping[int, float]
    problem: str = ""


@dataclass(frozen=True)
class FleetRun:
    """The choice through the scenario's own course of load.

    target:     threshold of the autoscaling; None: replicas are fixed
    attained:   share of requests within the SLO; `is_met`: the SLO is met
    replicas_over_time: (second, replicas that serve, those in use), each time that they change"""

    target: float | None
    attained: float
    is_met: bool
    device_hours: float
    usd: float | None
    replicas_peak: int
    replicas_over_time: Sequence[Sequence[float]]
    duration_s: float


@dataclass(frozen=True)
class Elasticity:
    """Replicas that follow the load against the fixed ones of the plan; problem: why they were not simulated"""

    fixed: FleetRun | None = None
    scaled: Sequence[FleetRun] = ()
    problem: str = ""

    @property
    def best(self) -> FleetRun | None:
        """The scaled fleet with the fewest device hours of those that meet the SLO; None if none does."""
        return min((run for run in self.scaled if run.is_met), key=lambda run: run.device_hours, default=None)


@dataclass(frozen=True, repr=False)
class _Plan(Renderable, Generic[Row]):
    """Common to both kinds of plan.

    num_candidates: of the space; `num_able`: those that do what is asked for in closed form
    ruled_out:   reason -> number of candidates
    ranked:      finalists that do what is asked for, best first; `missed`: those that fail in simulation
    bound_share: share of the winner's busy time by bound"""

    base: Base
    scenario: Scenario
    spec: PlanSpec
    num_candidates: int = 0
    num_able: int = 0
    ruled_out: Mapping[str, int] = field(default_factory=dict)
    ranked: Sequence[Row] = ()
    missed: Sequence[Row] = ()
    bound_share: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()
    _is_good: ClassVar[str]  # the column of whether a row does what is asked for

    def _row(self, row: Row) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def winner(self) -> Row | None:
        return next(iter(self.ranked), None)

    @property
    def everyone(self) -> list[Row]:
        """All finalists: best first, failing ones last."""
        return list(self.ranked) + list(self.missed)

    def columns(self) -> dict[str, NDArray[Any]]:
        """The finalists' figures, best first, failing ones last; nan without a value."""
        rows = enumerate(self.everyone)
        return columns_of([{**self._row(row), self._is_good: place < len(self.ranked)} for place, row in rows])

    @property
    def trust(self) -> Trust | None:
        """How near the winner is to measured setups; None without a winner."""
        return None if self.winner is None else _trust(self.winner)

    def _ends(self, kind: str, **inputs: Any) -> dict[str, Any]:
        layouts: list[Layout] = [layout for row in self.everyone for layout, _ in row.candidate.counts]
        provenance = provenance_of([self.scenario, *(layout.scenario for layout in layouts)])
        return {
            "trust": None if self.trust is None else self.trust.to_json(),
            "provenance": provenance.to_json(kind, {"scenario": resolved(self.scenario), **inputs}),
        }

    def _base_row(self, row: Row) -> dict[str, Any]:
        return {
            "label": row.label,
            "choices": row.candidate.choices(row.replicas),
            "replicas": row.replicas,
            "gpus": row.num_devices,
            "usd_per_hour": row.usd_per_hour,
            "has_unconfirmed_price": row.candidate.has_unconfirmed_price,
        }


@dataclass(frozen=True, repr=False)
class PlanResult(_Plan[Finalist]):
    """The plan for a rate.

    rate:        requests/s to serve
    front:       simulated cost-latency front; `not_serving`: screened front points that fail in simulation
    fewer:       label -> simulated share of requests within the SLO, of winners with fewer replicas
    nearest:     if nothing serves the rate: the nearest deployment, as a sentence
    devices:     an answer for each requested device, if several
    resilience:  the winner under failures; left_out: scenario features that the plan omits
    searched:    choices with several values in the space -> the values, in words
    ratios:      simulated over screened figures of the finalists
    num_overlooked: candidates that could be better by these ratios but were not simulated
    mixes:       what a choice with prefill and decode replicas serves when lengths change
    elasticity:  the winner through the scenario's course of load, its replicas fixed and following it"""

    _is_good = "serves"
    rate: float = 0.0
    front: Sequence[FrontPoint] = ()
    not_serving: Sequence[FrontPoint] = ()
    fewer: Mapping[str, float] = field(default_factory=dict)
    nearest: str = ""
    devices: Sequence[DeviceAnswer] = ()
    resilience: Resilience | None = None
    left_out: Sequence[str] = ()
    searched: Mapping[str, str] = field(default_factory=dict)
    ratios: Ratios | None = None
    num_overlooked: int = 0
    mixes: Sequence[MixAnswer] = ()
    elasticity: Elasticity | None = None

    @property
    def replicas(self) -> int:
        """The winner's replicas, including those for failures if a count was found."""
        enough = self.resilience.replicas if self.resilience is not None else None
        return enough or (self.winner.replicas if self.winner is not None else 0)

    @property
    def quantile(self) -> str:
        """The SLO's percentile, as metrics name it."""
        return quantile_name(self.spec.attainment)

    @property
    def is_better_low(self) -> bool:
        return self.spec.objective != "goodput_per_gpu"

    def figure(self, finalist: Finalist) -> float:
        """The objective's value; smaller is better except for goodput_per_gpu."""
        match self.spec.objective:
            case "cheapest":
                return inf if finalist.usd_per_hour is None else finalist.usd_per_hour
            case "fewest_gpus":
                return float(finalist.num_devices)
            case "goodput_per_gpu":
                return finalist.rate_per_device
            case "joules":
                return finalist.power_w
            case "carbon":
                return finalist.gco2_per_hour
        return self.tightness(finalist)

    def figure_draws(self, finalist: Finalist) -> Floats:
        """`figure` under each draw; for cost and devices, with the replicas that the draw needs."""
        if self.spec.objective == "goodput_per_gpu":
            return finalist.rate_draws / finalist.num_devices
        if self.spec.objective != "lowest_latency":
            return self.figure(finalist) / finalist.replicas * self.replicas_needed(finalist)
        slo = self.scenario.slo
        limits = [(self.quantile, name, slo.planned_ms(name)) for name in ("ttft", "tpot", "e2el")]
        limits += [(limit.metric.split("_")[0], limit.latency, limit.limit_ms) for limit in slo.statistics]
        shares = [
            draws / limit
            for quantile, name, limit in limits
            if limit is not None and (draws := finalist.latency_draws(quantile, name)) is not None
        ]
        return np.max(shares, axis=0) if shares else np.full(len(finalist.rate_draws), inf)

    def interval(self, finalist: Finalist) -> Interval:
        """80 % interval of `figure`."""
        return fin.interval_of(self.figure_draws(finalist), self.figure(finalist))

    def replicas_needed(self, finalist: Finalist) -> Floats:
        """Replicas needed under each draw, scaled from the simulated count, and above that count minus one, which fails
        without a draw."""
        needed = max(self._load(finalist), finalist.fewest - 1 + 1e-9)
        with np.errstate(divide="ignore"):
            return np.ceil(needed * finalist.rate / finalist.rate_draws - 1e-9)

    def sufficient(self, finalist: Finalist) -> float:
        """Share of draws in which the finalist's replicas serve the rate."""
        return float(np.mean(self.replicas_needed(finalist) <= finalist.replicas)) if finalist.rate else 0.0

    def _load(self, finalist: Finalist) -> float:
        """Replicas the rate takes, fractional; at most the simulated count, since the highest rate scatters."""
        if not finalist.rate:
            return inf
        serves = fin.meets(finalist.records, self.scenario.slo, self.spec.attainment)
        return min(self.rate * finalist.replicas / finalist.rate, finalist.fewest if serves else inf)

    def option(self, finalist: Finalist) -> Option:
        """The finalist as an option; its cost is in devices if it has no hourly price."""
        candidate, spec = finalist.candidate, self.spec
        usd, size = candidate.usd_per_hour, candidate.num_devices
        is_bought, load = spec.objective in ("cheapest", "fewest_gpus"), self._load(finalist)
        return Option(
            candidate.label,
            candidate.devices,
            float(size) if usd is None or spec.objective == "fewest_gpus" else usd,
            finalist.fewest if not isfinite(load) else max(finalist.fewest, ceil(load - 1e-9)),
            finalist.replicas,
            max(most_replicas(candidate, spec), finalist.replicas),
            self.replicas_needed(finalist),
            None if is_bought else (1.0 if self.is_better_low else -1.0) * self.figure(finalist),
            load,
        )

    @property
    def certainty(self) -> fin.Certainty | None:
        """Confidence in the choice and its cost; None without a choice."""
        options = [self.option(finalist) for finalist in self.everyone]
        return None if self.winner is None else fin.certainty_of(options, 0, self.spec.confidence)

    def better_share(self, one: Finalist, other: Finalist) -> float:
        """Share of common draws in which `one` beats `other` by the objective, or by headroom if the objective ties."""
        sign = 1.0 if self.is_better_low else -1.0
        first, second = sign * self.figure_draws(one), sign * self.figure_draws(other)
        with np.errstate(invalid="ignore"):
            is_alike = (first == second) | (np.abs(first - second) <= TIE * np.abs(second))
        by_figure = np.sign(np.nan_to_num(second) - np.nan_to_num(first))
        score = np.where(is_alike, np.sign(one.rate_draws - other.rate_draws), by_figure)
        return float(np.mean((score + 1) / 2))

    def tightness(self, finalist: Finalist) -> float:
        """Largest latency / limit at the target rate; 1 is just met."""
        return fin.tightness(finalist.records, self.scenario.slo, self.quantile)

    def to_json(self) -> dict[str, Any]:
        """Everything but sentences: the plan and each finalist's simulations."""
        certainty = self.certainty
        return {
            "scenario": self.scenario.name,
            "objective": self.spec.objective,
            "attainment": self.spec.attainment,
            "rate": self.rate,
            "candidates": self.num_candidates,
            "serving": self.num_able,
            "searched": dict(self.searched),
            "ruled_out": dict(self.ruled_out),
            "simulated_over_screened": None if self.ratios is None else asdict(self.ratios),
            "overlooked": self.num_overlooked,
            "confidence": self.spec.confidence,
            "certainty": None if certainty is None else asdict(certainty) | {"extra_cost": certainty.extra_cost},
            "winner": None if self.winner is None else self._row(self.winner),
            "ranked": [self._row(finalist) for finalist in self.ranked],
            "missed": [self._row(finalist) for finalist in self.missed],
            "fewer_replicas": dict(self.fewer),
            "front": [vars(point) for point in self.front],
            "screened_on_the_front_but_not_serving": [vars(point) for point in self.not_serving],
            "bound_share": dict(self.bound_share),
            "devices": [vars(device) for device in self.devices],
            "under_failures": None if self.resilience is None else vars(self.resilience),
            "mixes": [mix._asdict() for mix in self.mixes],
            "over_the_load": None if self.elasticity is None else asdict(self.elasticity),
            "left_out": list(self.left_out),
            "notes": list(self.notes),
            **self._ends("plan", rate=self.rate),
        }

    def _row(self, finalist: Finalist) -> dict[str, Any]:
        winner, names = self.winner, {name: f"{self.quantile}_{name}" for name in ("ttft", "tpot")}
        better = None if winner is None or finalist is winner else self.better_share(winner, finalist)
        return {
            **self._base_row(finalist),
            **{metric: finalist.mean(metric) for metric in _AT_THE_RATE},
            "max_rate": finalist.rate,
            "max_rate_interval": list(finalist.rate_interval),
            "max_rate_by_seed": list(finalist.rates),
            "screened_rate": finalist.capacity,
            "rate_per_gpu": finalist.rate_per_device,
            "figure": self.figure(finalist),
            "interval": list(self.interval(finalist)),
            "serves_the_rate_in_share_of_draws": self.sufficient(finalist),
            "winner_better_in_share_of_draws": better,
            "attained": finalist.attained,
            "tightness": self.tightness(finalist),
            "latencies_ms": {key: finalist.mean(f"{key}_ms") for key in names.values()},
            "latency_intervals_ms": {
                key: finalist.latency_interval(self.quantile, name) for name, key in names.items()
            },
            "binds": finalist.screened.binds,
            "origin": finalist.screened.origin,
            "trust": _trust(finalist).level,
        }


def _trust(row: Finalist | Job) -> Trust:
    """The lowest trust among its engines, since disaggregated pools have layouts of their own."""
    levels = (trust_of(layout.scenario) for layout, _ in row.candidate.counts)
    return max(levels, key=lambda trust: LEVELS.index(trust.level))


@dataclass(frozen=True, repr=False)
class JobPlan(_Plan[Job]):
    """The plan for an offline job: finalists that are not late do what is asked. plain: if predictions were exact"""

    _is_good = "in_time"
    plain: Job | None = None

    @property
    def num_requests(self) -> int:
        return self.scenario.traffic.num_requests or 0

    def figures(self, job: Job) -> tuple[float, float]:
        """The objective's value and what breaks its ties, bill or seconds; smaller is better."""
        both = job.bill, job.seconds
        return both if self.spec.objective == "cheapest_job" else both[::-1]

    def figure(self, job: Job) -> float:
        """The objective's value; smaller is better."""
        return self.figures(job)[0]

    def better_share(self, one: Job, other: Job) -> float:
        """Share of common draws in which `one` is better."""
        first, second = (job.seconds_draws * (self.figure(job) / job.seconds) for job in (one, other))
        return float(np.mean(first < second))

    def in_time(self, job: Job) -> float:
        """Share of draws in which the job meets its deadline."""
        deadline = self.spec.deadline_s
        return 1.0 if deadline is None else float(np.mean(job.seconds_draws <= deadline))

    def option(self, job: Job) -> Option:
        """The job as an option, with the replicas that meet the deadline in each draw, in proportion."""
        times, deadline = job.seconds_draws, self.spec.deadline_s
        needed = np.zeros(len(times)) if deadline is None else np.ceil(job.replicas * times / deadline - 1e-9)
        most = self.spec.max_gpus // job.candidate.num_devices
        figure, device = self.figure(job), job.candidate.layout.scenario.hardware.name
        share = figure / job.replicas
        return Option(job.label, device, share, job.replicas, job.replicas, most, needed, None if deadline else figure)

    def replicas_for_sure(self, job: Job, share: float) -> int:
        """Replicas, in proportion, that meet the deadline in the given share of draws."""
        return round(fin.replicas_for(self.option(job).needed, job.replicas, share))

    def to_json(self) -> dict[str, Any]:
        """Everything but sentences."""
        return {
            "scenario": self.scenario.name,
            "objective": self.spec.objective,
            "deadline_s": self.spec.deadline_s,
            "confidence": self.spec.confidence,
            "num_requests": self.num_requests,
            "candidates": self.num_candidates,
            "in_time": self.num_able,
            "ruled_out": dict(self.ruled_out),
            "ranked": [self._row(job) for job in self.ranked],
            "late": [self._row(job) for job in self.missed],
            "if_predictions_were_exact": None if self.plain is None else self._row(self.plain),
            "bound_share": dict(self.bound_share),
            "notes": list(self.notes),
            **self._ends("job"),
        }

    def _row(self, job: Job) -> dict[str, Any]:
        return {
            **self._base_row(job),
            "duration_s": job.seconds,
            "duration_interval_s": list(job.seconds_interval),
            "screened_duration_s": job.screened_s,
            "usd_total": None if job.usd_per_hour is None else job.bill,
            "in_time_in_share_of_draws": self.in_time(job),
            "metrics": {name: job.mean(name) for name in (job.records[0].values if job.records else ())},
            "problems": [record.problem for record in job.records if record.problem],
        }
