"""`OfferedLoad`: findings along an axis of arrival rates: the knee, the largest rate within the SLO, numbers of users.

The knee maximizes power, throughput over latency (Kleinrock 1979, "Power and deterministic rules of thumb"). Users
follow from the interactive response time law, Little's law for a user's whole cycle: N = rate x (think time + latency).
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log
from typing import Any

from perfmodel import sim
from perfmodel.errors import PerfmodelError
from perfmodel.planning.axes import Axis
from perfmodel.planning.points import Record, at_rate, is_kept, narrowed
from perfmodel.specs.scenario import Scenario

RATE = "traffic.arrivals.rate"
_LATENCIES = ("ttft", "tpot", "e2el")
_GROWING = ("poisson", "constant", "poisson_fixed_count", "gamma")  # processes whose rate is what arrives


@dataclass(frozen=True, slots=True)
class KeptLoad:
    """The largest rate of the axis within the SLO. max_rate: None if not even the lowest; is_all: every rate is within
    it; users, requests_per_user_per_minute and mean latencies are at that rate"""

    max_rate: float | None
    is_all: bool = False
    users: float | None = None
    requests_per_user_per_minute: float | None = None
    mean_ttft_ms: float | None = None
    mean_e2el_ms: float | None = None


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """Load figures of a scenario at `rate` along an axis of `rates`, in requests/s.

    users:        at each rate with a known latency; each pauses `think_time_s` after an answer
    limits_ms:    the SLO's per-request limits, by latency; attainment: share of requests that must meet all
    knee:         rate; None if not inside the axis
    within_slo:   None without an SLO"""

    rate: float | None
    rates: tuple[float, ...]
    think_time_s: float
    users: tuple[float | None, ...]
    limits_ms: Mapping[str, float]
    attainment: float
    knee: float | None
    within_slo: KeptLoad | None


def load_of(scenario: Scenario, axes: Sequence[Axis], by_axis: Mapping[str, Sequence[Record]]) -> OfferedLoad | None:
    """Load findings from the records of the rate axis; None without one, or if arrivals do not follow it."""
    arrivals = scenario.traffic.arrivals
    axis = next((candidate for candidate in axes if candidate.path == RATE and candidate.xs), None)
    if axis is None or arrivals.process not in _GROWING or arrivals.stages:
        return None
    scale = axis.present if axis.is_multiple and axis.present else 1.0
    rates = tuple(x * scale for x in axis.xs)
    records = by_axis[RATE]
    pause = arrivals.think_time_s
    users = tuple(_users(rate, pause, r.values.get("mean_e2el_ms")) for rate, r in zip(rates, records, strict=True))
    kept = _kept(scenario, rates) if scenario.slo.is_given else None
    served, latencies = ([r.values.get(name) for r in records] for name in ("request_throughput", "mean_e2el_ms"))
    knee = knee_of(rates, served, latencies)
    limits = {name: limit for name in _LATENCIES if (limit := scenario.slo.limit_ms(name)) is not None}
    return OfferedLoad(arrivals.rate, rates, pause, users, limits, scenario.attainment, knee, kept)


def _users(rate: float, pause_s: float, mean_e2el_ms: float | None) -> float | None:
    return None if mean_e2el_ms is None else rate * (pause_s + mean_e2el_ms / 1e3)


def knee_of(rates: Sequence[float], served: Sequence[float | None], latencies: Sequence[float | None]) -> float | None:
    """Rate with the largest served / latency: vertex of a parabola through the logarithms at the maximum and its
    neighbours. None at either end."""
    rows = zip(rates, served, latencies, strict=True)
    result = sorted((log(rate), log(output / latency)) for rate, output, latency in rows if output and latency)
    best = max(range(len(result)), key=lambda number: result[number][1], default=0)
    if not 0 < best < len(result) - 1:
        return None
    (x0, y0), (x1, y1), (x2, y2) = result[best - 1 : best + 2]
    below, above = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    return exp((x0 + x1) / 2 + (x2 - x0) / 2 * below / (below - above)) if below > above else exp(x1)


def _kept(scenario: Scenario, rates: Sequence[float]) -> KeptLoad:
    """The largest rate within the SLO, by bisection; assumes that every lower rate meets it, too."""
    ordered = sorted(set(rates))

    @cache
    def summary(rate: float) -> dict[str, Any] | None:
        try:
            return dict(sim.simulate(at_rate(scenario, rate), keep_steps=False).summary)
        except PerfmodelError:  # the points say so
            return None

    def is_kept_at(rate: float) -> bool:
        figures = summary(rate)
        return figures is not None and is_kept(scenario, figures)

    num_kept = bisect_left(ordered, True, key=lambda rate: not is_kept_at(rate))
    if not num_kept:
        return KeptLoad(None)
    low, is_all = ordered[num_kept - 1], num_kept == len(ordered)
    if not is_all:
        low = narrowed(is_kept_at, low, ordered[num_kept])
    figures = summary(low) or {}
    pause, latency = scenario.traffic.arrivals.think_time_s, figures.get("mean_e2el_ms")
    users = _users(low, pause, latency)
    return KeptLoad(low, is_all, users, 60 * low / users if users else None, figures.get("mean_ttft_ms"), latency)
