"""Figures of load tests as a function of an engine's few numbers, and where both agree best.

A number may move as far as engines differ in it, a figure be off by as much as is believed of it: least squares of
both, in logarithms, less strict with what is far off.
"""

__all__ = ["Figures", "Prior"]

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_LEAST_OF = 0.2  # of a figure, where a linear function of the numbers has run out of sense
_LOSS_SCALE = 2.0  # standard deviations from which on an error counts by its size, not its square


@dataclass(frozen=True)
class Prior:
    """A number of the profile: where it begins, how far it may well be from there (the standard deviation of its
    logarithm), and its plausible range; seconds."""

    field: str  # "host.serial_step_s"
    start: float
    least: float
    most: float
    spread: float


@dataclass(frozen=True)
class Figures:
    """Figures (metric by metric, run by run) as a linear function of the numbers around `here`: what is spent in
    another place adds up in seconds, which a function of logarithms would overshoot."""

    priors: Sequence[Prior]
    measured: Floats
    here: Floats
    at_here: Floats
    slopes: Floats

    def errors(self, values: Floats) -> Floats:
        """log(predicted / measured)"""
        predicted = self.at_here + self.slopes @ (values - self.here)
        return np.log(np.maximum(predicted, _LEAST_OF * self.at_here) / self.measured)

    def optimum(self, spreads: Floats, keep: NDArray[np.bool_] | None = None) -> Floats:
        """The numbers at which the (kept) errors, in units of their `spreads`, and how far each number has moved, in
        units of its own, are least together."""
        from scipy.optimize import least_squares

        chosen = np.ones(len(spreads), dtype=bool) if keep is None else keep
        start, spread = (np.array([getattr(each, name) for each in self.priors]) for name in ("start", "spread"))
        ends = [np.log([getattr(each, name) for each in self.priors]) for name in ("least", "most")]

        def misses(logs: Floats) -> Floats:
            return np.append(self.errors(np.exp(logs))[chosen] / spreads[chosen], (logs - np.log(start)) / spread)

        begin = np.clip(np.log(self.here), ends[0] + 1e-6, ends[1] - 1e-6)
        found: Floats = least_squares(misses, begin, bounds=ends, loss="soft_l1", f_scale=_LOSS_SCALE).x
        return np.exp(found)
