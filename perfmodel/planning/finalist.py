"""Deployments a plan may choose: cost, records against the SLO, calibration draws, the choice under uncertainty."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, exp, inf, log

import numpy as np

from perfmodel.planning.points import MAX_GROWTH, Record
from perfmodel.planning.space import Candidate
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.surfaces import NUM_DRAWS, Drawn, Floats
from perfmodel.specs.slo import SLO

Interval = tuple[float, float]
Records = tuple[Record, ...]
_LIMITED = ("ttft", "tpot", "max_itl", "e2el")
_FAR = 3  # a highest rate of runs beyond so many times the closed form's is no steady one
_MAY_MISS = {"median": 0.5, "p90": 0.1, "p95": 0.05, "p99": 0.01}


def gpus_text(count: int) -> str:
    """`1 GPU`, `4 GPUs`"""
    return "1 GPU" if count == 1 else f"{count} GPUs"


def mean(records: Sequence[Record], metric: str) -> float | None:
    """Mean of a metric over the seeds."""
    values = [value for record in records if (value := record.values.get(metric)) is not None]
    return sum(values) / len(values) if values else None


def attained(records: Sequence[Record]) -> float:
    """Share of all requests sent that met the SLO, over the seeds."""
    return mean(records, "slo_attainment") or 0.0


def meets(records: Sequence[Record], slo: SLO, attainment: float) -> bool:
    """Whether the share `attainment` of all seeds' requests meets every per-request limit, and the seeds' mean of each
    limited statistic is within its limit, in a queue that does not grow (`points.is_kept`)."""
    if (mean(records, "queue_growth") or 0.0) > MAX_GROWTH:
        return False
    if slo.is_of_requests and attained(records) < attainment:
        return False
    return all(limit.is_met(mean(records, limit.metric)) for limit in slo.statistics)


def tightness(records: Sequence[Record], slo: SLO, quantile: str) -> float:
    """Largest latency / limit over the SLO's limits; 1 is just met. If the only limit varies by request: requests that
    miss it / requests allowed to miss it."""
    limits = [(f"{quantile}_{name}_ms", slo.planned_ms(name)) for name in _LIMITED]
    limits += [(statistic.metric, statistic.limit_ms) for statistic in slo.statistics]
    known = [(mean(records, metric), limit) for metric, limit in limits]
    shares = [value / limit for value, limit in known if limit is not None and value is not None]
    return max(shares) if shares else (1.0 - attained(records)) / _MAY_MISS[quantile] if records else inf


@dataclass(frozen=True)
class Screened:
    """The screen's result for one group of a candidate (one replica, unless disaggregated).

    rate:         requests/s at which the required share meets the SLO; 0 if none
    binds:        what is missed first above `rate`: ttft, tpot, itl, max_itl, reading, e2el; or what limits the batch:
                  KV cache, max_num_seqs; or where images wait: encoders, image processing
    batch:        mean decoding sequences per engine at `rate`
    origin:       of the step times"""

    candidate: Candidate
    rate: float
    binds: str
    batch: float
    origin: str

    @property
    def rate_per_device(self) -> float:
        return self.rate / self.candidate.num_devices


class Replicas:
    """Properties of a candidate with a number of groups (replicas, unless disaggregated)."""

    replicas: int
    records: Records = ()

    @property
    def candidate(self) -> Candidate:
        raise NotImplementedError

    @property
    def label(self) -> str:
        """`3 x h100-sxm-80gb TP2 ...`"""
        return f"{self.replicas} x {self.candidate.label}"

    @property
    def num_devices(self) -> int:
        return self.replicas * self.candidate.num_devices

    @property
    def usd_per_hour(self) -> float | None:
        price = self.candidate.usd_per_hour
        return None if price is None else price * self.replicas

    @property
    def cost(self) -> float:
        """USD per hour; number of devices without a price."""
        return float(self.num_devices) if self.usd_per_hour is None else self.usd_per_hour

    def mean(self, metric: str) -> float | None:
        return mean(self.records, metric)

    @property
    def power_w(self) -> float:
        """Watts of all devices: simulated at the target rate, or half of TDP, what serving H100s and B200s draw at
        least, so that the screen overlooks none."""
        joules, rate = self.mean("joules_per_output_token"), self.mean("output_throughput")
        return self.replicas * self.candidate.tdp_w / 2 if joules is None or rate is None else joules * rate

    @property
    def gco2_per_hour(self) -> float:
        """Gram of CO2 per hour, with servers, cooling and grid of the scenario's `site`; infinite without a grid."""
        site = self.candidate.layout.scenario.site
        grid = None if site is None else site.grid_gco2_per_kwh
        return inf if site is None or grid is None else self.power_w * site.factor * grid / 1000


@dataclass(frozen=True)
class Deployment(Replicas):
    """A number of groups of a candidate. tightness: largest latency / limit at the rate in closed form; 1: just met"""

    screened: Screened
    replicas: int
    tightness: float = 1.0

    @property
    def candidate(self) -> Candidate:
        return self.screened.candidate

    @property
    def capacity(self) -> float:
        """Requests/s that all groups serve under the SLO in closed form."""
        return self.screened.rate * self.replicas


@dataclass(frozen=True)
class Finalist(Deployment):
    """A deployment simulated as a whole.

    rates:    its highest rate under the SLO, per seed
    records:  at the target rate, per seed; `runs`: the same for each replica count tried
    drawn:    factors on rate and latencies under draws of the calibration error
    spare:    replicas added for uncertainty, beyond the fewest simulated to serve; `rates` then scale with replicas
    first:    replicas that the closed form chose, with which `tightness` goes"""

    rates: tuple[float, ...] = ()
    records: Records = ()
    drawn: Drawn = field(default_factory=Drawn)
    spare: int = 0
    runs: Mapping[int, Records] = field(default_factory=dict)
    first: int = 0

    @property
    def fewest(self) -> int:
        """The fewest replicas simulated to serve the rate."""
        return self.replicas - self.spare

    def sized(self, replicas: int, records: Sequence[Record]) -> "Finalist":
        """A copy with so many replicas, at least `fewest`, and their `records` at the target rate."""
        rates = tuple(rate * replicas / self.replicas for rate in self.rates)
        return replace(self, replicas=replicas, rates=rates, records=tuple(records), spare=replicas - self.fewest)

    @property
    def rate(self) -> float:
        """Requests/s under the SLO, geometric mean over seeds; 0 if none is served."""
        return exp(sum(map(log, self.rates)) / len(self.rates)) if self.rates else 0.0

    @property
    def notes(self) -> list[str]:
        """That its runs were too short to show a rate, if they were."""
        if self.rate <= _FAR * self.capacity:
            return []
        return [
            f"The highest rate, {self.rate:,.1f} requests/s, is beyond {_FAR} times the closed form's "
            f"{self.capacity:,.1f}: runs of so few requests end before a queue grows; raise plan.num_requests."
        ]

    @property
    def rate_per_device(self) -> float:
        return self.rate / self.num_devices

    @property
    def rate_draws(self) -> Floats:
        """`rate` under each draw of calibration and sampling error."""
        return self.rate * self.drawn.rate * np.exp(seed_draws(self.rates))

    @property
    def rate_interval(self) -> Interval:
        """80 % interval of `rate`."""
        return interval_of(self.rate_draws, self.rate)

    @property
    def attained(self) -> float:
        return attained(self.records)

    def latency_draws(self, quantile: str, name: str) -> Floats | None:
        """A latency at the target rate under each draw; None if a run lacks it."""
        values = [record.values.get(f"{quantile}_{name}_ms") for record in self.records]
        there = [value for value in values if value]
        if not there or len(there) < len(values):
            return None
        return (sum(there) / len(there)) * self.drawn.latencies[name] * np.exp(seed_draws(there))

    def latency_interval(self, quantile: str, name: str) -> Interval | None:
        """80 % interval of a latency."""
        draws, value = self.latency_draws(quantile, name), self.mean(f"{quantile}_{name}_ms")
        return None if draws is None or value is None else interval_of(draws, value)


@dataclass(frozen=True)
class Job(Replicas):
    """An offline job on a number of replicas of the candidate `group`.

    screened_s: duration in closed form
    records:    simulated, per seed
    drawn:      factors on its duration under draws of the calibration error, in closed form"""

    group: Candidate
    replicas: int
    screened_s: float
    records: Records = ()
    drawn: Floats = field(default_factory=lambda: np.ones(NUM_DRAWS))

    @property
    def candidate(self) -> Candidate:
        return self.group

    @property
    def _times(self) -> list[float]:
        return [value for record in self.records if (value := record.values.get("duration"))]

    @property
    def seconds(self) -> float:
        """Simulated duration, geometric mean over seeds, else closed form. Infinite if it cannot be simulated."""
        if not self.records:
            return self.screened_s
        times = self._times
        return exp(sum(map(log, times)) / len(times)) if len(times) == len(self.records) else inf

    @property
    def bill(self) -> float:
        """USD of the whole job; device hours without a price."""
        return self.cost * self.seconds / 3600

    @property
    def seconds_draws(self) -> Floats:
        """`seconds` under each draw of calibration and sampling error."""
        return self.seconds * self.drawn * np.exp(seed_draws(self._times))

    @property
    def seconds_interval(self) -> Interval:
        """80 % interval of `seconds`."""
        return interval_of(self.seconds_draws, self.seconds)


@dataclass(frozen=True)
class FrontPoint:
    """A deployment's cost and latency, simulated at the target rate. tightness: largest latency / limit;
    `screened_tightness`: the screen's; attained: share of requests within the SLO"""

    label: str
    num_devices: int
    usd_per_hour: float | None
    tightness: float
    attained: float
    screened_tightness: float

    @property
    def cost(self) -> float:
        """The cost axis of the front: USD per hour, or devices without a price."""
        return float(self.num_devices) if self.usd_per_hour is None else self.usd_per_hour


@dataclass(frozen=True)
class Preliminary:
    """The closed-form answer, shown until simulations are done. rate: requests/s to serve; None for a job of
    `num_requests`; finalists: about to be simulated, best first; empty if nothing serves; the fastest ones if no job
    meets its deadline"""

    spec: PlanSpec
    num_candidates: int
    finalists: Sequence[Deployment | Job]
    rate: float | None = None
    num_requests: int = 0


def seed_draws(values: Sequence[float]) -> Floats:
    """Log error of a mean over seeds due to random traffic: Student's t about 0; 0 with one seed. Equal seeds get equal
    weights in every finalist's draws (common random numbers), so errors that a seed causes in all finalists cancel in
    their differences."""
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
    result: Floats = weights @ (logs - logs.mean())
    return result


def interval_of(draws: Floats, value: float) -> Interval:
    """The 80 % interval of the draws, widened to include the value without a draw."""
    low, high = np.quantile(draws, [0.1, 0.9], method="nearest")
    return min(float(low), value), max(float(high), value)


@dataclass(frozen=True)
class Option:
    """A deployment to choose from.

    name:     without replicas
    device:   that a measurement would have to run on
    price:    per replica: USD per hour, or devices without a price
    fewest:   replicas that serve if predictions are exact
    replicas: planned; most: allowed
    needed:   replicas that serve, per draw; infinite if none do
    figure:   to compare by, smaller is better; default: its cost
    load:     replicas the rate takes, fractional"""

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
        """Share of draws in which its replicas suffice."""
        return float(np.mean(self.needed <= self.replicas))

    def enough(self, allowed: Sequence[int], confidence: float) -> int:
        """The fewest replicas of `allowed`, at least its own, that suffice in the share `confidence`; else the most."""
        counts = [count for count in allowed if count >= self.replicas]
        wanted = replicas_for(self.needed, self.replicas, confidence)
        return next((count for count in counts if count >= wanted), max(counts, default=self.replicas))

    def bills(self, cap: float) -> Floats:
        """Cost per draw, including replicas to be added: at most `cap` for these."""
        missing = np.maximum(self.needed - self.replicas, 0.0)
        return self.cost + np.minimum(missing * self.price, cap)

    def expected(self, cap: float) -> float:
        """Mean of `bills`."""
        return float(self.bills(cap).mean())

    def known_bills(self, cap: float) -> Floats:
        """Cost per draw if the needed replicas are known before buying."""
        exact = np.where(self.needed <= self.most, np.maximum(self.needed, 1.0) * self.price, inf)
        return np.minimum(exact, self.bills(cap))


@dataclass(frozen=True)
class Measurement:
    """Value of measuring one replica on a device before buying. value: reduction in expected cost; price: of one
    replica, for as long; short: share of draws in which replicas are insufficient after following the measurement"""

    device: str
    value: float
    price: float
    short: float


@dataclass(frozen=True)
class Certainty:
    """Confidence in a choice, and its cost.

    share:      of draws in which its replicas suffice; `confidence`: the requested share
    expected:   name -> expected cost of each option, with the cost of missing the SLO, at most `cap`
    plain:      the choice if predictions were exact: name, replicas, cost, share of draws in which it suffices
    measurements: most valuable first"""

    confidence: float
    share: float
    cost: float
    expected: dict[str, float]
    cap: float
    plain: tuple[str, int, float, float]
    measurements: Sequence[Measurement]

    @property
    def is_reached(self) -> bool:
        """Whether the requested confidence is reached."""
        return self.share >= self.confidence

    @property
    def extra_cost(self) -> float:
        """Extra cost over the choice if predictions were exact."""
        return self.cost - self.plain[2]


def replicas_for(needed: Floats, fewest: int, confidence: float) -> float:
    """The fewest replicas, at least `fewest`, that suffice in the share `confidence` of draws; may be infinite."""
    rank = ceil(confidence * len(needed) - 1e-9)
    enough = -inf if rank <= 0 else float(np.sort(needed)[rank - 1])
    return max(float(fewest), enough)


def _surest(options: Sequence[Option]) -> int:
    return min(range(len(options)), key=lambda place: (-options[place].share, options[place].cost))


def pick(options: Sequence[Option], confidence: float) -> int:
    """Index of the choice: of options that suffice in the share `confidence` of draws the best by figure, expected
    cost, then headroom; the one that suffices most often if none reaches it."""
    cap = options[_surest(options)].cost
    sure = [place for place, option in enumerate(options) if option.share >= confidence]

    def key(place: int) -> tuple[float, float, float]:
        option = options[place]
        figure = option.cost if option.figure is None else option.figure
        return figure, option.expected(cap), option.load / option.replicas

    return min(sure, key=key, default=_surest(options))


def certainty_of(options: Sequence[Option], choice: int, confidence: float) -> Certainty:
    """The confidence in the option at index `choice`."""
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
    expected = {option.name: option.expected(cap) for option in options}
    exact = plain.name, plain.fewest, plain.fewest * plain.price, plain_share
    measurements.sort(key=lambda measurement: -measurement.value)
    return Certainty(confidence, chosen.share, chosen.cost, expected, cap, exact, measurements)
