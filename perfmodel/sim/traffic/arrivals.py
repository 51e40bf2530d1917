"""Arrival processes: seconds at which requests arrive, in order, drawn in chunks and endless unless staged.

`poisson_fixed_count` is what load generators call a constant rate but is not: exponential gaps, rescaled so that
exactly rate x duration requests fill each stage (a Poisson process conditioned on its count).
"""

__all__ = ["arrival_times"]

from collections.abc import Iterator
from itertools import repeat, takewhile
from math import inf

import numpy as np
from numpy.typing import NDArray

from perfmodel.specs.traffic import Arrivals

_CHUNK = 4096


def arrival_times(arrivals: Arrivals, duration_s: float | None, rng: np.random.Generator) -> Iterator[float | None]:
    """Arrival times in seconds; None, endlessly, for a closed loop, whose requests arrive as others are answered."""
    if arrivals.process == "closed_loop":
        return repeat(None)
    if arrivals.process in ("burst", "trace"):
        return repeat(0.0)
    if arrivals.stages:
        return _staged(arrivals, rng)
    assert arrivals.rate is not None  # its validator saw to that
    if arrivals.process == "poisson_fixed_count" and duration_s is not None:
        return iter(_fixed_count(arrivals.rate, duration_s, rng).tolist())
    times = _endless(arrivals, arrivals.rate, rng)
    end = inf if duration_s is None else duration_s
    return takewhile(lambda t: t <= end, times)


def _gaps(arrivals: Arrivals, rate: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """A chunk of gaps with mean 1 / rate."""
    if arrivals.process == "constant":
        return np.full(_CHUNK, 1 / rate)
    if arrivals.process == "gamma":
        shape = 1 / arrivals.cv**2
        return rng.gamma(shape, 1 / (rate * shape), _CHUNK)
    return rng.exponential(1 / rate, _CHUNK)


def _endless(arrivals: Arrivals, rate: float, rng: np.random.Generator) -> Iterator[float]:
    start = 0.0
    while True:
        times = start + np.cumsum(_gaps(arrivals, rate, rng))
        yield from times.tolist()
        start = float(times[-1])


def _fixed_count(rate: float, duration_s: float, rng: np.random.Generator) -> NDArray[np.float64]:
    count = round(rate * duration_s)
    if count == 0:
        return np.empty(0)
    gaps = rng.exponential(1.0, count)
    times: NDArray[np.float64] = np.cumsum(gaps) * (duration_s / gaps.sum())
    return times


def _staged(arrivals: Arrivals, rng: np.random.Generator) -> Iterator[float]:
    start = 0.0
    for stage in arrivals.stages:
        end = stage.duration_s
        if arrivals.process == "poisson_fixed_count":
            times: Iterator[float] = iter(_fixed_count(stage.rate, end, rng).tolist())
            end = inf  # the last one falls on the end itself, give or take a rounding
        else:
            times = _endless(arrivals, stage.rate, rng)
        for time in times:
            if time > end:
                break
            yield start + time
        start += stage.duration_s
