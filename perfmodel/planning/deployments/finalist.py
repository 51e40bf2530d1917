"""A deployment that a plan may choose: with its cost, its simulated records against the SLO, and common draws."""

__all__ = [
    "Deployment",
    "Finalist",
    "FrontPoint",
    "Interval",
    "attained",
    "interval_of",
    "mean",
    "meets",
    "seed_draws",
    "tightness",
]

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf, log

import numpy as np
from numpy.typing import NDArray

from perfmodel.planning.screening.screen import Screened
from perfmodel.planning.screening.surfaces import NUM_DRAWS, Drawn
from perfmodel.planning.sweeps.points import Record
from perfmodel.specs.slo import SLO

_LIMITED = ("ttft", "tpot", "max_itl", "e2el")


def meets(records: Sequence[Record], slo: SLO, attainment: float) -> bool:
    """Whether the share `attainment` of the requests of all seeds meets all limits on single requests, and the seeds'
    mean of each limited statistic is within its limit."""
    if slo.is_of_requests and attained(records) < attainment:
        return False
    return all(limit.is_met(mean(records, limit.metric)) for limit in slo.statistics)


def attained(records: Sequence[Record]) -> float:
    """Share of all requests sent that met the SLO, over the seeds."""
    return mean(records, "slo_attainment") or 0.0


def mean(records: Sequence[Record], metric: str) -> float | None:
    """A metric over the seeds."""
    values = [record.values.get(metric) for record in records]
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def tightness(records: Sequence[Record], slo: SLO, quantile: str) -> float:
    """The limit of the SLO that comes nearest, as latency over limit; 1 is just met. Where the only limit differs from
    request to request, the requests that miss it over those that may."""
    shares = []
    for name in _LIMITED:
        value, limit = mean(records, f"{quantile}_{name}_ms"), slo.planned_ms(name)
        if limit is not None and value is not None:
            shares.append(value / limit)
    for statistic in slo.statistics:
        value = mean(records, statistic.metric)
        if value is not None:
            shares.append(value / statistic.limit_ms)
    may_miss = {"median": 0.5, "p90": 0.1, "p95": 0.05, "p99": 0.01}
    return max(shares) if shares else (1.0 - attained(records)) / may_miss[quantile] if records else inf


Floats = NDArray[np.float64]
Interval = tuple[float, float]
Records = tuple[Record, ...]


@dataclass(frozen=True)
class Deployment:
    """So many groups (replicas, unless disaggregated) of a candidate.

    tightness: the limit of the SLO that is nearest, as latency over limit at the rate; 1 is just met
    """

    screened: Screened
    replicas: int
    tightness: float = 1.0

    @property
    def num_devices(self) -> int:
        return self.replicas * self.screened.candidate.num_devices

    @property
    def usd_per_hour(self) -> float | None:
        price = self.screened.usd_per_hour
        return None if price is None else price * self.replicas

    @property
    def capacity(self) -> float:
        """Requests per second that all of it serves under the SLO."""
        return self.screened.rate * self.replicas


@dataclass(frozen=True)
class Finalist:
    """A deployment that was simulated as a whole.

    replicas: groups of its candidate
    rates:    its highest rate under the SLO, for each seed
    records:  what it does at the wanted rate, for each seed
    drawn:    factors on both under draws of what the calibration leaves unexplained
    spare:    of its replicas those that it has for doubt, beyond the fewest that were simulated to serve; its highest
              rates are then in proportion to the replicas
    """

    deployment: Deployment
    replicas: int
    rates: tuple[float, ...] = ()
    records: tuple[Record, ...] = ()
    drawn: Drawn = field(default_factory=Drawn.none)
    spare: int = 0

    @property
    def fewest(self) -> int:
        """Replicas that were simulated to serve the rate."""
        return self.replicas - self.spare

    def sized(self, replicas: int, records: Sequence[Record]) -> "Finalist":
        """The same with so many replicas, at least `fewest`, and `records` of what these do at the wanted rate."""
        rates = tuple(rate * replicas / self.replicas for rate in self.rates)
        return replace(self, replicas=replicas, rates=rates, records=tuple(records), spare=replicas - self.fewest)

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
    def has_unconfirmed_price(self) -> bool:
        return self.deployment.screened.candidate.has_unconfirmed_price

    @property
    def cost(self) -> float:
        """USD per hour; devices where no price is known."""
        return float(self.num_devices) if self.usd_per_hour is None else self.usd_per_hour

    @property
    def rate(self) -> float:
        """Requests per second that it serves under the SLO: the geometric mean over seeds; 0 where none is served."""
        return exp(sum(map(log, self.rates)) / len(self.rates)) if self.rates else 0.0

    @property
    def rate_per_device(self) -> float:
        return self.rate / self.num_devices

    @property
    def rate_draws(self) -> Floats:
        """`rate` under each draw, of the calibration's errors and of which requests come by chance."""
        found: Floats = self.rate * self.drawn.rate * np.exp(seed_draws(self.rates))
        return found

    @property
    def rate_interval(self) -> Interval:
        """80 %."""
        return interval_of(self.rate_draws, self.rate)

    @property
    def attained(self) -> float:
        return attained(self.records)

    def serves(self, slo: SLO, attainment: float) -> bool:
        """Whether it meets the SLO at the wanted rate."""
        return meets(self.records, slo, attainment)

    def mean(self, metric: str) -> float | None:
        return mean(self.records, metric)

    def latency_draws(self, quantile: str, name: str) -> Floats | None:
        """A latency at the wanted rate, as `rate_draws`; None where the run has none."""
        metric = f"{quantile}_{name}_ms"
        values = [record.values.get(metric) for record in self.records]
        there = [value for value in values if value]
        if not there or len(there) < len(values):
            return None
        found: Floats = (sum(there) / len(there)) * self.drawn.latencies[name] * np.exp(seed_draws(there))
        return found

    def latency_interval(self, quantile: str, name: str) -> Interval | None:
        """80 %."""
        draws, value = self.latency_draws(quantile, name), self.mean(f"{quantile}_{name}_ms")
        return None if draws is None or value is None else interval_of(draws, value)


@dataclass(frozen=True)
class FrontPoint:
    """A deployment beside its cost, simulated at the wanted rate.

    tightness: the limit that comes nearest, as latency over limit; `screened_tightness`: as the screen had it
    attained:  the share of requests within the SLO
    """

    label: str
    num_devices: int
    usd_per_hour: float | None
    tightness: float
    attained: float
    screened_tightness: float

    @property
    def cost(self) -> float:
        """What the front is over: USD per hour, or devices where there is no price."""
        return float(self.num_devices) if self.usd_per_hour is None else self.usd_per_hour


def seed_draws(values: Sequence[float]) -> Floats:
    """How far the logarithm of a mean over seeds may be off because requests come by chance: Student's t about 0.

    Equal seeds have equal weights in every finalist's draws (common random numbers), so that what a seed does to all of
    them alike cancels in their difference. With one seed nothing is known of it: 0.
    """
    count = len(values)
    if count < 2 or min(values) <= 0:
        return np.zeros(NUM_DRAWS)
    rng = np.random.default_rng(count)
    half = NUM_DRAWS // 2
    weights = rng.standard_normal((half, count)) / (count * (count - 1)) ** 0.5
    weights *= np.sqrt((count - 1) / rng.chisquare(count - 1, (half, 1)))
    # In another order than the calibration's draws, whose second half is the first with the signs turned, too.
    weights = rng.permutation(np.concatenate([weights, -weights]))
    logs = np.log(values)
    found: Floats = weights @ (logs - logs.mean())
    return found


def interval_of(draws: Floats, value: float) -> Interval:
    """80 % of the draws lie within, and the value without any."""
    low, high = np.quantile(draws, [0.1, 0.9], method="nearest")
    return min(float(low), value), max(float(high), value)
