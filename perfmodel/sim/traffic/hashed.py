"""Draws that are hashes of what they are for, with SplitMix64 (Steele, Lea and Flood 2014): no state, no table.

What falls to a request so depends neither on who came beside it nor on the order of events.
"""

__all__ = ["Shares", "class_shares", "hashed", "hashes", "uniform_draws"]

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from perfmodel.specs.scenario import Scenario

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WHOLE = 1 << 64


def hashed(seed: int, number: int) -> int:
    """64 bits of (`seed`, `number`): the output function of SplitMix64, applied twice."""
    return _mixed(_mixed(seed & _MASK) + number)


def _mixed(x: int) -> int:
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _MIX[0]) & _MASK
    x = ((x ^ (x >> 27)) * _MIX[1]) & _MASK
    return x ^ (x >> 31)


def hashes(start: int, count: int) -> NDArray[np.uint64]:
    """Outputs of SplitMix64 in `count` states, of which `start` is the first."""
    state = np.uint64(start & _MASK) + np.uint64(_GOLDEN) * np.arange(count, dtype=np.uint64)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX[0])
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_MIX[1])
    return state ^ (state >> np.uint64(31))


def uniform_draws(seed: int, request_id: int, count: int) -> NDArray[np.float64]:
    """`count` draws from [0, 1) that belong to this request under `seed`."""
    result: NDArray[np.float64] = (hashes(hashed(seed, request_id) + _GOLDEN, count) >> np.uint64(11)).astype(
        np.float64
    )
    return result * 2.0**-53


class Shares:
    """The kinds 0, 1, ... have `shares` of the requests; what they leave of the whole is of kind len(shares).

    purpose: what is shared out, so that different purposes divide the same requests independently
    """

    def __init__(self, shares: Sequence[float], seed: int, purpose: str) -> None:
        self._ends = [min(round(end * _WHOLE), _WHOLE - 1) for end in accumulate(shares)]
        if shares and abs(sum(shares) - 1) < 1e-9:
            self._ends[-1] = _WHOLE - 1
        self._seed = hashed(seed, int.from_bytes(purpose.encode()[:8]))

    def of(self, number: int) -> int:
        """The kind of request `number`."""
        point = hashed(self._seed, number)
        return next((kind for kind, end in enumerate(self._ends) if point <= end), len(self._ends))

    def of_all(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The kinds of these requests."""
        return np.array([self.of(number) for number in numbers.tolist()], dtype=np.int64)


def class_shares(scenario: Scenario) -> Shares:
    """Assignment of requests to `traffic.classes`."""
    return Shares([kind.share for kind in scenario.traffic.classes], scenario.seed, "classes")
