"""Deployments that a plan may choose: their costs, their records against the SLO, common draws, the choice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, exp, inf, log

import numpy as np
from numpy.typing import NDArray

from perfmodel.planning.points import Record
from perfmodel.planning.space import Candidate
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.surfaces import NUM_DRAWS, Drawn
from perfmodel.specs.slo import SLO

Floats = NDArray[np.float64]
Interval = tuple[float, float]
Records = tuple[Record, ...]
_LIMITED = ("ttft", "tpot", "max_itl", "e2el")
_MAY_MISS = {"median": 0.5, "p90": 0.1, "p95": 0.05, "p99": 0.01}


def gpus_text(count: int) -> str:
    """`1 GPU`, `4 GPUs`"""
    return "1 GPU" if count == 1 else f"{count} GPUs"


def mean(records: Sequence[Record], metric: str) -> float | None:
    """A metric over the seeds."""
    values = [value for record in records if (value := record.values.get(metric)) is not None]
    return sum(values) / len(values) if values else None


def attained(records: Sequence[Record]) -> float:
    """Share of all requests sent that met the SLO, over the seeds."""
    return mean(records, "slo_attainment") or 0.0


def meets(records: Sequence[Record], slo: SLO, attainment: float) -> bool:
    """Whether the share `attainment` of the requests of all seeds meets all limits on single requests, and the seeds'
    mean of each limited statistic is within its limit."""
    if slo.is_of_requests and attained(records) < attainment:
        return False
    return all(limit.is_met(mean(records, limit.metric)) for limit in slo.statistics)


def tightness(records: Sequence[Record], slo: SLO, quantile: str) -> float:
    """The limit of the SLO that comes nearest, as latency over limit; 1 is just met. Where the only limit differs from
    request to request, the requests that miss it over those that may."""
    limits = [(f"{quantile}_{name}_ms", slo.planned_ms(name)) for name in _LIMITED]
    limits += [(statistic.metric, statistic.limit_ms) for statistic in slo.statistics]
    known = [(mean(records, metric), limit) for metric, limit in limits]
    shares = [value / limit for value, limit in known if limit is not None and value is not None]
    return max(shares) if shares else (1.0 - attained(records)) / _MAY_MISS[quantile] if records else inf


@dataclass(frozen=True)
class Screened:
    """What the screen has found of a candidate: one group of it (a replica, unless disaggregated).

    rate:         requests per second at which the wanted share of them meets the SLO; 0 if there is no such rate
    binds:        what is missed first above `rate`: ttft, tpot, itl, max_itl, reading, e2el, or what holds too few
                  sequences: KV cache, max_num_seqs
    batch:        mean sequences that decode on an engine at `rate`
    usd_per_hour: of its devices; None without a price
    origin:       of the step times
    """

    candidate: Candidate
    rate: float
    binds: str
    batch: float
    usd_per_hour: float | None
    origin: str

    @property
    def rate_per_device(self) -> float:
        return self.rate / self.candidate.num_devices


class Replicas:
    """What follows from so many groups of a candidate (replicas, unless disaggregated)."""

    replicas: int
    records: Records = ()

    @property
    def group(self) -> tuple[Candidate, float | None]:
        """The candidate, and USD per hour of one group; None without a price."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """`3 x h100-sxm-80gb TP2 ...`"""
        return f"{self.replicas} x {self.group[0].label}"

    @property
    def num_devices(self) -> int:
        return self.replicas * self.group[0].num_devices

    @property
    def usd_per_hour(self) -> float | None:
        price = self.group[1]
        return None if price is None else price * self.replicas

    @property
    def cost(self) -> float:
        """USD per hour; devices where no price is known."""
        return float(self.num_devices) if self.usd_per_hour is None else self.usd_per_hour

    def mean(self, metric: str) -> float | None:
        return mean(self.records, metric)


@dataclass(frozen=True)
class Deployment(Replicas):
    """So many groups of a candidate.

    tightness: the limit of the SLO that is nearest, as latency over limit at the rate; 1 is just met
    """

    screened: Screened
    replicas: int
    tightness: float = 1.0

    @property
    def candidate(self) -> Candidate:
        return self.screened.candidate

    @property
    def group(self) -> tuple[Candidate, float | None]:
        return self.candidate, self.screened.usd_per_hour

    @property
    def capacity(self) -> float:
        """Requests per second that all of it serves under the SLO."""
        return self.screened.rate * self.replicas


@dataclass(frozen=True)
class Finalist(Replicas):
    """A deployment that was simulated as a whole.

    replicas: groups of its candidate
    rates:    its highest rate under the SLO, for each seed
    records:  what it does at the wanted rate, for each seed; `runs`: the same for each number of replicas tried
    drawn:    factors on both under draws of what the calibration leaves unexplained
    spare:    of its replicas those that it has for doubt, beyond the fewest that were simulated to serve; its highest
              rates are then in proportion to the replicas
    """

    deployment: Deployment
    replicas: int
    rates: tuple[float, ...] = ()
    records: Records = ()
    drawn: Drawn = field(default_factory=Drawn.none)
    spare: int = 0
    runs: Mapping[int, Records] = field(default_factory=dict)

    @property
    def screened(self) -> Screened:
        return self.deployment.screened

    @property
    def candidate(self) -> Candidate:
        return self.screened.candidate

    @property
    def group(self) -> tuple[Candidate, float | None]:
        return self.candidate, self.screened.usd_per_hour

    @property
    def screened_rate(self) -> float:
        """The highest rate of so many replicas in closed form."""
        return self.replicas * self.screened.rate

    @property
    def fewest(self) -> int:
        """Replicas that were simulated to serve the rate."""
        return self.replicas - self.spare

    def sized(self, replicas: int, records: Sequence[Record]) -> "Finalist":
        """The same with so many replicas, at least `fewest`, and `records` of what these do at the wanted rate."""
        rates = tuple(rate * replicas / self.replicas for rate in self.rates)
        return replace(self, replicas=replicas, rates=rates, records=tuple(records), spare=replicas - self.fewest)

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

    def latency_draws(self, quantile: str, name: str) -> Floats | None:
        """A latency at the wanted rate, as `rate_draws`; None where a run has none."""
        values = [record.values.get(f"{quantile}_{name}_ms") for record in self.records]
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
class Job(Replicas):
    """A job on so many replicas of a candidate.

    screened_s: how long it takes in closed form
    records:    what it comes to when simulated, for each seed
    drawn:      factors on its time under draws of what the calibration leaves unexplained, in closed form
    """

    candidate: Candidate
    replicas: int
    screened_s: float
    records: Records = ()
    drawn: Floats = field(default_factory=lambda: np.ones(NUM_DRAWS))

    @property
    def group(self) -> tuple[Candidate, float | None]:
        return self.candidate, self.candidate.usd_per_hour

    @property
    def _times(self) -> list[float]:
        return [value for record in self.records if (value := record.values.get("duration"))]

    @property
    def seconds(self) -> float:
        """The geometric mean over seeds, as simulated; else in closed form. Infinite where it cannot be simulated."""
        if not self.records:
            return self.screened_s
        times = self._times
        return exp(sum(map(log, times)) / len(times)) if len(times) == len(self.records) else inf

    @property
    def bill(self) -> float:
        """USD of the whole job; device hours where there is no price."""
        return self.cost * self.seconds / 3600

    @property
    def seconds_draws(self) -> Floats:
        """`seconds` under each draw, of the calibration's errors and of which requests come by chance."""
        found: Floats = self.seconds * self.drawn * np.exp(seed_draws(self._times))
        return found

    @property
    def seconds_interval(self) -> Interval:
        """80 %."""
        return interval_of(self.seconds_draws, self.seconds)


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


@dataclass(frozen=True)
class Preliminary:
    """What the closed form has found: the answer until the simulator has one.

    rate:      requests per second to be served; of a job None, and `num_requests` are to be done
    finalists: those about to be simulated, best first; none where nothing serves; of a job where none is in time those
               that are done first
    """

    spec: PlanSpec
    num_candidates: int
    finalists: Sequence[Deployment | Job]
    rate: float | None = None
    num_requests: int = 0


def seed_draws(values: Sequence[float]) -> Floats:
    """How far the logarithm of a mean over seeds may be off because requests come by chance: Student's t about 0. Equal
    seeds have equal weights in every finalist's draws (common random numbers), so that what a seed does to all of them
    alike cancels in their difference. With one seed nothing is known of it: 0."""
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


@dataclass(frozen=True)
class Option:
    """A deployment that may be taken.

    name:     of it without its replicas
    device:   what is to be measured to know it
    price:    of a replica: USD per hour, or devices where there is no price
    fewest:   replicas that serve as long as predictions are exact
    replicas: that it is to have; most: that it may have
    needed:   replicas that serve, for each draw; infinite where none do
    figure:   by which options are compared, smaller is better; its cost unless given
    load:     replicas that the rate takes, as a fraction
    """

    name: str
    device: str
    price: float
    fewest: int
    replicas: int
    most: int
    needed: Floats
    figure: float | None = None
    load: float = 0.0

    @property
    def cost(self) -> float:
        return self.price * self.replicas

    @property
    def share(self) -> float:
        """The share of draws in which its replicas suffice."""
        return float(np.mean(self.needed <= self.replicas))

    def enough(self, allowed: Sequence[int], confidence: float) -> int:
        """The fewest replicas of `allowed`, no fewer than its own, that suffice in the share `confidence` of the draws;
        the most where none do."""
        counts = [count for count in allowed if count >= self.replicas]
        wanted = replicas_for(self.needed, self.replicas, confidence)
        return next((count for count in counts if count >= wanted), max(counts, default=self.replicas))

    def bills(self, cap: float) -> Floats:
        """What it costs in each draw, replicas that have to be added included: of these at most `cap`."""
        missing = np.maximum(self.needed - self.replicas, 0.0)
        found: Floats = self.cost + np.minimum(missing * self.price, cap)
        return found

    def expected(self, cap: float) -> float:
        """The mean of `bills`."""
        return float(self.bills(cap).mean())

    def known_bills(self, cap: float) -> Floats:
        """What it costs in each draw if its needs are known before it is bought."""
        exact = np.where(self.needed <= self.most, np.maximum(self.needed, 1.0) * self.price, inf)
        found: Floats = np.minimum(exact, self.bills(cap))
        return found


@dataclass(frozen=True)
class Measurement:
    """What it is worth to measure one replica on a device before anything is bought.

    value: by which the expected cost falls; price: of one replica, for as long
    short: the share of draws in which the replicas do not suffice, once the measurement has been heeded
    """

    device: str
    value: float
    price: float
    short: float


@dataclass(frozen=True)
class Certainty:
    """How sure a choice is, and what that costs.

    share:      of draws in which its replicas suffice; `confidence`: what was wanted
    expected:   cost of each option, the price of missing the SLO included, by name; `cap`: the most that missing costs
    plain:      what would be taken if predictions were exact: name, replicas, cost, and the share in which it suffices
    measurements: by their value, the highest first
    """

    confidence: float
    share: float
    cost: float
    expected: dict[str, float]
    cap: float
    plain: tuple[str, int, float, float]
    measurements: Sequence[Measurement]

    @property
    def is_reached(self) -> bool:
        """Whether the choice is as sure as was wanted."""
        return self.share >= self.confidence

    @property
    def extra_cost(self) -> float:
        """What being so sure costs beyond what would be taken if predictions were exact."""
        return self.cost - self.plain[2]


def replicas_for(needed: Floats, fewest: int, confidence: float) -> float:
    """The fewest replicas, at least `fewest`, that suffice in the share `confidence` of the draws; may be infinite."""
    rank = ceil(confidence * len(needed) - 1e-9)
    enough = -inf if rank <= 0 else float(np.sort(needed)[rank - 1])
    return max(float(fewest), enough)


def _surest(options: Sequence[Option]) -> int:
    return min(range(len(options)), key=lambda place: (-options[place].share, options[place].cost))


def pick(options: Sequence[Option], confidence: float) -> int:
    """The place of the choice: of those that suffice in the share `confidence` of the draws the best by its figure,
    then by its expected cost, then by its headroom; the surest where none suffices so often."""
    cap = options[_surest(options)].cost
    sure = [place for place, option in enumerate(options) if option.share >= confidence]

    def key(place: int) -> tuple[float, float, float]:
        option = options[place]
        figure = option.cost if option.figure is None else option.figure
        return figure, option.expected(cap), option.load / option.replicas

    return min(sure, key=key, default=_surest(options))


def certainty_of(options: Sequence[Option], choice: int, confidence: float) -> Certainty:
    """How sure the option at place `choice` is, beside the others."""
    cap, chosen = options[_surest(options)].cost, options[choice]
    plain = min(options, key=lambda option: option.fewest * option.price if option.figure is None else option.figure)
    plain_share = float(np.mean(plain.needed <= plain.fewest))
    measurements = []
    for device in dict.fromkeys(option.device for option in options):
        on_it = [option for option in options if option.device == device]
        others = [option for option in options if option.device != device]
        best = min(others, key=lambda option: option.expected(cap), default=None)
        elsewhere = inf if best is None else best.expected(cap)
        known = np.min([option.known_bills(cap) for option in on_it], axis=0)
        value = float(chosen.bills(cap).mean() - np.minimum(known, elsewhere).mean())
        never = np.min([np.where(option.needed <= option.most, 0.0, 1.0) for option in on_it], axis=0)
        short = np.where(known <= elsewhere, never, 1.0 - best.share if best is not None else never)
        measurements.append(Measurement(device, value, min(option.price for option in on_it), float(short.mean())))
    return Certainty(
        confidence,
        chosen.share,
        chosen.cost,
        {option.name: option.expected(cap) for option in options},
        cap,
        (plain.name, plain.fewest, plain.fewest * plain.price, plain_share),
        sorted(measurements, key=lambda measurement: -measurement.value),
    )
