"""Statistics of latencies, and what of a run was good: over all requests, or over some."""

__all__ = ["finite", "latencies", "num_good", "ratio"]

from math import isfinite

import numpy as np
from numpy.typing import NDArray

from perfmodel.sim.records.columns import RequestColumns
from perfmodel.specs.traffic import SLO

_QUANTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


def ratio(amount: float, base: float) -> float | None:
    """`amount` per `base`; None of nothing."""
    return amount / base if base else None


def finite(value: float) -> float | None:
    """`value` if it is a number that JSON has."""
    return float(value) if isfinite(value) else None


def latencies(name: str, seconds: NDArray[np.float64]) -> dict[str, float | None]:
    """Statistics of `seconds`, which is used up: of a million requests every copy shows in the peak of memory."""
    is_finite = np.isfinite(seconds)
    seconds = seconds if is_finite.all() else seconds[is_finite]
    if not len(seconds):
        return {f"{statistic}_{name}_ms": None for statistic in ("mean", "median", "std", "p90", "p95", "p99")}
    values = {"mean": seconds.mean(), "median": 0.0, "std": seconds.std()}
    quantiles = np.quantile(seconds, list(_QUANTILES.values()), overwrite_input=True)
    values |= dict(zip(_QUANTILES, quantiles, strict=True))
    return {f"{statistic}_{name}_ms": finite(value * 1e3) for statistic, value in values.items()}


def num_good(slo: SLO, requests: RequestColumns) -> int | None:
    """Requests that meet every limit of `slo`; None without one. A one-token answer has no TPOT to miss."""
    limits = {"ttft_s": slo.ttft_ms, "tpot_s": slo.tpot_ms, "e2el_s": slo.e2el_ms}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    if not given:
        return None
    good = np.ones(len(requests), dtype=bool)
    for name, limit in given.items():
        good &= ~(getattr(requests, name) * 1e3 > limit)
    return int(good.sum())
