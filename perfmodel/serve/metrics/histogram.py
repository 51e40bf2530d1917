"""`Histogram`: how many values fell where, filled many at a time; and buckets as vLLM makes them."""

__all__ = ["Histogram", "one_two_five"]

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate


class Histogram:
    """Counts of values by `bounds`, ascending: each bucket has the values up to its bound, the last has the rest.

    counts: of each bucket alone; total: the sum of all values
    """

    __slots__ = ("_names", "bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._names = (*(str(float(bound)) for bound in self.bounds), "+Inf")
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """`value` has occurred so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def num_values(self) -> int:
        return sum(self.counts)

    def plus(self, other: "Histogram") -> "Histogram":
        """The values of both, whose bounds are the same."""
        both = Histogram(self.bounds)
        both.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        both.total = self.total + other.total
        return both

    @property
    def buckets(self) -> Iterator[tuple[str, float]]:
        """(bound, values up to it), the last for all values: as Prometheus has them."""
        return zip(self._names, accumulate(self.counts), strict=True)


def one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `most`: the buckets of vLLM's counts of tokens."""
    bounds: list[int] = []
    power = 1
    while power <= most:
        bounds += [digit * power for digit in (1, 2, 5) if digit * power <= most]
        power *= 10
    return tuple(bounds)
