"""`PlanResult`: the finalists in order, the front, why the winner wins and how sure that is. It prints itself."""

__all__ = ["Finalist", "FrontPoint", "PlanResult"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, hypot, inf, log
from typing import Any

from perfmodel.plan.candidates import Base
from perfmodel.plan.choice import Deployment
from perfmodel.plan.points import Record
from perfmodel.specs.plan import PlanSpec
from perfmodel.specs.scenario import Scenario

Interval = tuple[float, float]

# Student's t for 80 % of a mean, by the number of seeds less one; the normal's from there on.
_T80 = {1: 3.078, 2: 1.886, 3: 1.638, 4: 1.533, 5: 1.476, 6: 1.440, 7: 1.415, 8: 1.397, 9: 1.383}
_Z80 = 1.2816
_QUANTILES = {0.5: "median", 0.9: "p90", 0.95: "p95", 0.99: "p99"}


@dataclass(frozen=True)
class Finalist:
    """A deployment that was simulated.

    rates:    highest rate of one group under the SLO, for each seed
    replicas: groups that serve the wanted rate
    records:  of the whole at the wanted rate, for each seed
    """

    deployment: Deployment
    rates: tuple[float, ...]
    replicas: int
    records: tuple[Record, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.replicas} x {self.deployment.screened.candidate.label}"

    @property
    def num_devices(self) -> int:
        return self.replicas * self.deployment.screened.candidate.num_devices

    @property
    def usd_per_hour(self) -> float | None:
        price = self.deployment.screened.usd_per_hour
        return None if price is None else price * self.replicas

    @property
    def group_rate(self) -> float:
        """Geometric mean over seeds of the highest rate of one group; 0 where none is served."""
        return exp(sum(map(log, self.rates)) / len(self.rates)) if self.rates else 0.0

    @property
    def scatter(self) -> float:
        """How far the logarithm of `group_rate` may be off because requests are drawn by chance (80 %)."""
        count = len(self.rates)
        if count < 2:
            return 0.0
        mean = log(self.group_rate)
        deviation = (sum((log(rate) - mean) ** 2 for rate in self.rates) / (count - 1)) ** 0.5
        return float(_T80.get(count - 1, _Z80) * deviation / count**0.5)

    @property
    def group_rate_interval(self) -> Interval:
        """80 %: what the calibration leaves unexplained and the scatter of seeds, as independent."""
        screened, rate = self.deployment.screened, self.group_rate
        low, high = screened.low, screened.high
        down = log(screened.rate / low) if low else (inf if low == 0 else 0.0)
        up = log(high / screened.rate) if high else 0.0
        return rate * exp(-hypot(down, self.scatter)), rate * exp(hypot(up, self.scatter))

    @property
    def rate(self) -> float:
        """Requests per second that all groups serve under the SLO."""
        return self.replicas * self.group_rate

    @property
    def rate_per_device(self) -> float:
        return self.group_rate / self.deployment.screened.candidate.num_devices

    @property
    def attained(self) -> float:
        """Share of the requests of all seeds that met the SLO at the wanted rate."""
        good = sum(record.values.get("request_goodput") or 0.0 for record in self.records)
        whole = sum(record.values.get("request_throughput") or 0.0 for record in self.records)
        return good / whole if whole else 0.0

    def mean(self, metric: str) -> float | None:
        """A metric at the wanted rate, over the seeds."""
        values = [record.values.get(metric) for record in self.records]
        there = [value for value in values if value is not None]
        return sum(there) / len(there) if there else None


@dataclass(frozen=True)
class FrontPoint:
    """Of all deployments that serve the rate, as the screen sees them: none is cheaper and has shorter latencies."""

    label: str
    num_devices: int
    usd_per_hour: float | None
    tightness: float


@dataclass(frozen=True)
class PlanResult:
    """What came of a plan.

    ranked:      finalists that serve the rate, best first; `missed`: those that the simulator found not to
    ruled_out:   candidates by why they are none
    bound_share: of the winner's busy time, by what bounds it
    nearest:     where nothing serves the rate: what comes nearest, in words
    """

    base: Base
    scenario: Scenario
    spec: PlanSpec
    rate: float
    num_candidates: int
    num_serving: int
    ruled_out: Mapping[str, int]
    ranked: Sequence[Finalist]
    missed: Sequence[Finalist]
    front: Sequence[FrontPoint]
    bound_share: Mapping[str, float] = field(default_factory=dict)
    nearest: str = ""
    notes: Sequence[str] = ()

    @property
    def winner(self) -> Finalist | None:
        return self.ranked[0] if self.ranked else None

    @property
    def runner_up(self) -> Finalist | None:
        """The next one that is another kind of deployment, or else the next one."""
        if len(self.ranked) < 2:
            return None
        first = self.ranked[0].deployment.screened.candidate
        for each in self.ranked[1:]:
            candidate = each.deployment.screened.candidate
            if candidate.layout is not first.layout or candidate.ratio != first.ratio:
                return each
        return self.ranked[1]

    @property
    def quantile(self) -> str:
        """The percentile that the SLO asks for, as metrics name it: the nearest that is not lower."""
        return next((name for share, name in _QUANTILES.items() if share >= self.spec.attainment - 1e-9), "p99")

    def figure(self, finalist: Finalist) -> float:
        """What the objective compares; smaller is better except for goodput_per_gpu."""
        if self.spec.objective == "cheapest":
            return inf if finalist.usd_per_hour is None else finalist.usd_per_hour
        if self.spec.objective == "fewest_gpus":
            return float(finalist.num_devices)
        if self.spec.objective == "goodput_per_gpu":
            return finalist.rate_per_device
        return self.tightness(finalist)

    def interval(self, finalist: Finalist) -> Interval:
        """80 % of `figure`."""
        low, high = finalist.group_rate_interval
        candidate = finalist.deployment.screened.candidate
        if self.spec.objective == "goodput_per_gpu":
            return low / candidate.num_devices, high / candidate.num_devices
        if self.spec.objective == "lowest_latency":
            found, (fast, slow) = self.tightness(finalist), finalist.deployment.tightness_ends
            return found * fast, found * slow
        each = self.figure(finalist) / finalist.replicas
        few, many = (ceil(self.rate / end - 1e-9) if end > 0 else inf for end in (high, low))
        return each * few, each * many

    def tightness(self, finalist: Finalist) -> float:
        """The limit that comes nearest at the wanted rate, as latency over limit; 1 is just met."""
        slo = self.scenario.slo
        found = []
        for name, limit in (("ttft", slo.ttft_ms), ("tpot", slo.tpot_ms), ("e2el", slo.e2el_ms)):
            value = finalist.mean(f"{self.quantile}_{name}_ms")
            if limit is not None and value is not None:
                found.append(value / limit)
        return max(found, default=inf)

    @property
    def is_better_low(self) -> bool:
        return self.spec.objective != "goodput_per_gpu"

    def margin(self, other: Finalist) -> float:
        """By what share the winner's figure is better than the other's."""
        assert self.winner is not None
        mine, its = self.figure(self.winner), self.figure(other)
        worse, better = (its, mine) if self.is_better_low else (mine, its)
        return worse / better - 1.0 if better else 0.0

    def is_doubtful(self, other: Finalist) -> bool:
        """Whether the intervals of the winner and the other overlap."""
        assert self.winner is not None
        (a, b), (c, d) = self.interval(self.winner), self.interval(other)
        return a <= d and c <= b

    def to_json(self) -> dict[str, Any]:
        """Everything, for `--json`."""
        from perfmodel.plan.plan_words import plan_words

        return {
            "scenario": self.scenario.name,
            "objective": self.spec.objective,
            "attainment": self.spec.attainment,
            "rate": self.rate,
            "candidates": self.num_candidates,
            "serving": self.num_serving,
            "ruled_out": dict(self.ruled_out),
            "answer": plan_words(self),
            "winner": self._row(self.winner) if self.winner is not None else None,
            "ranked": [self._row(each) for each in self.ranked],
            "missed": [self._row(each) for each in self.missed],
            "front": [vars(point) for point in self.front],
            "bound_share": dict(self.bound_share),
            "notes": list(self.notes),
        }

    def _row(self, finalist: Finalist) -> dict[str, Any]:
        screened = finalist.deployment.screened
        return {
            "label": finalist.label,
            "choices": screened.candidate.choices(finalist.replicas),
            "replicas": finalist.replicas,
            "gpus": finalist.num_devices,
            "usd_per_hour": finalist.usd_per_hour,
            "usd_per_million_output_tokens": finalist.mean("usd_per_million_output_tokens"),
            "joules_per_output_token": finalist.mean("joules_per_output_token"),
            "max_rate": finalist.rate,
            "max_rate_interval": [finalist.replicas * end for end in finalist.group_rate_interval],
            "max_rate_by_seed": [finalist.replicas * rate for rate in finalist.rates],
            "screened_rate": finalist.replicas * screened.rate,
            "rate_per_gpu": finalist.rate_per_device,
            "figure": self.figure(finalist),
            "interval": list(self.interval(finalist)),
            "attained": finalist.attained,
            "latencies_ms": {
                f"{self.quantile}_{name}": finalist.mean(f"{self.quantile}_{name}_ms") for name in ("ttft", "tpot")
            },
            "binds": screened.binds,
            "origin": screened.origin,
        }

    def __str__(self) -> str:
        from perfmodel.plan.plan_words import plan_text

        return plan_text(self)
