"""Records -> curves small enough to draw: quantile curves and time-weighted means in equal bins.

A step record says what held from its start to its end, possibly for many equal steps; means over a bin weigh
each record by its time in the bin, so a record that spans several bins is spread over them.
"""

__all__ = [
    "MAX_BINS",
    "MAX_POINTS",
    "Pools",
    "TimeBins",
    "binned_mean",
    "blocks_in_use",
    "engine_names",
    "envelope",
    "pool_names",
    "quantile_curve",
    "rate",
    "replicas_of",
    "summed",
    "time_bins",
]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.sim.records.columns import StepColumns

Floats = NDArray[np.float64]
Pools = Sequence[Mapping[str, Any]]  # rows of a summary

MAX_POINTS = 500  # of a distribution
MAX_BINS = 240  # of a curve over time


@dataclass(frozen=True)
class TimeBins:
    """Equal bins from 0 to the end of the last step; `edges_s` has one more entry than there are bins."""

    edges_s: Floats

    @property
    def centres_s(self) -> Floats:
        return (self.edges_s[:-1] + self.edges_s[1:]) / 2

    @property
    def width_s(self) -> float:
        return float(self.edges_s[1] - self.edges_s[0])


def time_bins(steps: StepColumns) -> TimeBins:
    """At most MAX_BINS bins, and no more than there are records (10 at least, so that short runs have a shape)."""
    num_bins = int(np.clip(len(steps) // 2, 10, MAX_BINS))
    end_s = float(steps.end_s.max()) if len(steps) else 1.0
    return TimeBins(np.linspace(0.0, max(end_s, 1e-9), num_bins + 1))


def replicas_of(steps: StepColumns) -> list[int]:
    """The replicas that ran any step, ascending."""
    return [int(replica) for replica in np.unique(steps.replica)]


def binned_mean(steps: StepColumns, values: Floats, bins: TimeBins, replica: int) -> Floats:
    """Mean over time of a value that holds during each record of `replica` and is 0 between records.

    steps: all records, with `values` of each; bins: of time, each of which gets a mean
    """
    rows = np.flatnonzero(steps.replica == replica)
    rows = rows[np.argsort(steps.start_s[rows], kind="stable")]
    if not len(rows):
        return np.zeros(len(bins.edges_s) - 1)
    start, end = steps.start_s[rows], steps.end_s[rows]
    area = np.cumsum(values[rows] * (end - start))
    times = np.maximum.accumulate(np.column_stack((start, end)).ravel())
    areas = np.column_stack((area - values[rows] * (end - start), area)).ravel()
    return np.diff(np.interp(bins.edges_s, times, areas)) / bins.width_s


def summed(steps: StepColumns, values: Floats, bins: TimeBins) -> Floats:
    """`binned_mean` added up over the replicas."""
    total = np.zeros(len(bins.edges_s) - 1)
    for replica in replicas_of(steps):
        total += binned_mean(steps, values, bins, replica)
    return total


def envelope(steps: StepColumns, values: Floats, bins: TimeBins) -> tuple[Floats, Floats]:
    """Minimum and maximum per bin of the quantity that `summed` averages. They include the run's own extremes."""
    times, at = np.unique(np.concatenate((steps.start_s, steps.end_s)), return_inverse=True)
    changes = np.bincount(at, np.concatenate((values, -values)), len(times))
    levels = np.concatenate(([0.0], np.cumsum(changes)))  # before the first time, then after every time
    first = np.searchsorted(times, bins.edges_s[:-1], "right")
    last = np.searchsorted(times, bins.edges_s[1:], "left")
    spans = np.column_stack((first, np.maximum(last, first) + 1)).ravel()
    padded = np.append(levels, levels[-1])  # `reduceat` needs an index past the last level
    return np.minimum.reduceat(padded, spans)[::2], np.maximum.reduceat(padded, spans)[::2]


def rate(steps: StepColumns, counts: NDArray[np.int64], bins: TimeBins) -> Floats:
    """Things per second, from how many each step of a record handles, over all replicas."""
    duration = np.maximum(steps.end_s - steps.start_s, 1e-12)
    return summed(steps, counts * steps.num_steps / duration, bins)


def blocks_in_use(steps: StepColumns, bins: TimeBins, replica: int) -> Floats:
    """KV blocks in use by running requests of one replica, mean over each bin."""
    return binned_mean(steps, steps.used_blocks.astype(np.float64), bins, replica)


def quantile_curve(values: Floats) -> tuple[Floats, Floats]:
    """(value, share of requests at or below it), at most MAX_POINTS of them, the extremes always included."""
    ordered = values[np.isfinite(values)]
    ordered.sort()
    if len(ordered) == 0:
        return ordered, ordered
    ranks = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), MAX_POINTS)).round().astype(np.int64))
    return ordered[ranks], (ranks + 1) / len(ordered)


def pool_names(pools: Pools) -> list[str]:
    """What each pool is called: its own name, else its deployment and role, with a number where two are alike."""
    names: list[str] = []
    for number, pool in enumerate(pools):
        place = " ".join(str(pool[key]) for key in ("deployment", "role") if pool.get(key))
        name = str(pool.get("name") or place or number) + (" (shadow)" if pool.get("shadow") else "")
        names.append(f"{name} {number}" if name in names else name)
    return names


def engine_names(pools: Pools) -> dict[int, str]:
    """Engine -> what a legend calls it: its pool, with a number where that has several."""
    names: dict[int, str] = {}
    for pool, name in zip(pools, pool_names(pools), strict=True):
        first, count = pool["engines"]
        names |= {first + k: f"{name} {k}" if count > 1 else name for k in range(count)}
    return names
