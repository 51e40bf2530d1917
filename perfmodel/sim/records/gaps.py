"""`GapHistogram`: the distribution of inter-token gaps, in constant memory.

A run has one gap per output token, too many for a list. Gaps are counted in bins 0.2 % wide on a logarithmic
scale, so a percentile is within 0.1 % of the exact one; mean and standard deviation do not use the bins.
"""

__all__ = ["GapHistogram"]

from collections import defaultdict
from math import exp, floor, log, nan, sqrt

_WIDTH = log(1.002)


class GapHistogram:
    """Gaps in seconds."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0
        self._sum_squares = 0.0
        self._bins: defaultdict[int, int] = defaultdict(int)

    def add(self, gap_s: float, times: int = 1) -> None:
        """`times` gaps of `gap_s`."""
        if times and gap_s > 0:
            self.count += times
            self._sum += times * gap_s
            self._sum_squares += times * gap_s * gap_s
            self._bins[floor(log(gap_s) / _WIDTH)] += times

    def add_run(self, first_s: float, total_s: float, num_steps: int, times: int) -> None:
        """`num_steps` steps, growing evenly from `first_s` to `total_s` in all, each the gap of `times` tokens."""
        slope = 0.0 if num_steps == 1 else 2 * (total_s / num_steps - first_s) / (num_steps - 1)
        parts = min(num_steps, 1 + int(abs(slope) * num_steps / (_WIDTH * first_s)))  # each about as wide as a bin
        done = 0
        for part in range(1, parts + 1):
            upto = num_steps * part // parts
            steps = upto - done
            self.add(first_s + slope * (done + (steps - 1) / 2), steps * times)
            done = upto

    @property
    def mean(self) -> float:
        return self._sum / self.count if self.count else nan

    @property
    def std(self) -> float:
        if not self.count:
            return nan
        return sqrt(max(self._sum_squares / self.count - self.mean**2, 0.0))

    def quantile(self, q: float) -> float:
        """The gap below which a share `q` of all gaps lie."""
        if not self.count:
            return nan
        wanted, seen, bins = q * self.count, 0, sorted(self._bins)
        for index in bins:
            seen += self._bins[index]
            if seen >= wanted:
                return exp((index + 0.5) * _WIDTH)
        return exp((bins[-1] + 0.5) * _WIDTH)
