"""`Ring`: where a rolling cache keeps the token at a position, and which tokens it still has."""

__all__ = ["Ring"]

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Ring(NamedTuple):
    """The first `sinks` tokens stay where they are; the others share `window` places in turn."""

    window: int
    sinks: int = 0

    @property
    def size(self) -> int:
        """Tokens that it holds at most."""
        return self.window + self.sinks

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The places of the tokens at `positions`, in 0 .. size - 1."""
        return np.where(positions < self.sinks, positions, self.sinks + (positions - self.sinks) % self.window)

    def holds(self, positions: NDArray[np.int64], num_tokens: int) -> NDArray[np.bool_]:
        """Which of the tokens at `positions` are still there once a sequence has `num_tokens`."""
        return (positions < self.sinks) | (positions >= num_tokens - self.window)
