"""`ContextSpread`: how unequal the contexts are of sequences that decode side by side."""

__all__ = ["ContextSpread"]

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_QUANTILES = 128
_POSITIONS = 8  # in its answer, at which a request may be met


@dataclass(frozen=True, slots=True)
class ContextSpread:
    """Quantiles, in even steps of probability, of a decoding sequence's context over its mean."""

    quantiles: tuple[float, ...]

    @classmethod
    def of(cls, lengths: Iterable[tuple[int, int]]) -> "ContextSpread | None":
        """From (prompt, answer) lengths in tokens; None without any.

        A request is met while it decodes in proportion to its answer's length, anywhere in it.
        """
        pairs = np.array([(prompt, answer) for prompt, answer in lengths if answer > 1], dtype=np.float64)
        if not len(pairs):
            return None
        places = (np.arange(_POSITIONS) + 0.5) / _POSITIONS
        contexts = (pairs[:, :1] + pairs[:, 1:] * places).ravel()
        weights = np.repeat(pairs[:, 1], _POSITIONS)
        order = np.argsort(contexts)
        below = np.cumsum(weights[order]) / weights.sum()
        levels = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
        at_levels = contexts[order][np.searchsorted(below, levels)]
        return cls(tuple((at_levels / at_levels.mean()).tolist()))

    def longest(self, num_seqs: int) -> float:
        """The longest context expected among `num_seqs`, over their mean.

            E max = sum over i of q_i ((i / Q)^n - ((i - 1) / Q)^n)

        Source: distribution of the largest of n independent draws.
        """
        return _expected_largest(self.quantiles, num_seqs)


@lru_cache(maxsize=2048)
def _expected_largest(quantiles: tuple[float, ...], count: int) -> float:
    below = np.arange(len(quantiles) + 1) / len(quantiles)
    return float(max(1.0, np.dot(quantiles, np.diff(below**count))))
