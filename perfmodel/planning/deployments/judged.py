"""Simulated records of a deployment against its SLO: the share of good requests, statistics, what comes nearest."""

__all__ = ["attained", "mean", "meets", "tightness"]

from collections.abc import Sequence
from math import inf

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
