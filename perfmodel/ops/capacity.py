"""Experts of a fixed capacity: buffers of equal size for every expert, whatever the router says.

    C = ceil(c n k / E) rows for each expert, of n tokens that choose k of E experts under capacity factor c

Every expert multiplies C rows: those that get fewer pad, those that get more drop the rest. No rank waits for a
popular expert, and shapes do not depend on the data; what is paid is the padding and, in quality, the tokens dropped.

Source: Lepikhin et al. 2020 (GShard); Fedus et al. 2021 (Switch Transformer), section 2.2.
"""

__all__ = ["capacity_rows", "dropped_share", "with_capacity"]

from math import ceil

import numpy as np
from numpy.typing import NDArray

from perfmodel.models.architecture import MoEFFN
from perfmodel.ops.routing import TILE_ROWS, ExpertLoad, Routing


def capacity_rows(ffn: MoEFFN, num_tokens: int, factor: float) -> int:
    """C, at most all tokens."""
    return min(num_tokens, ceil(factor * num_tokens * min(ffn.top_k, ffn.num_experts) / ffn.num_experts - 1e-9))


def with_capacity(factor: float) -> Routing:
    """The load of any rank when each of its experts multiplies C rows."""

    def route(ffn: MoEFFN, num_tokens: int, num_ranks: int) -> ExpertLoad:
        local, rows = ceil(ffn.num_experts / num_ranks), capacity_rows(ffn, num_tokens, factor)
        tiles = tuple(float(local * ceil(rows / size)) for size in TILE_ROWS)
        return ExpertLoad(float(local if rows else 0), float(local * rows), tiles)

    return route


def dropped_share(ffn: MoEFFN, num_tokens: int, factor: float, chances: NDArray[np.float64]) -> float:
    """The expected share of (token, expert) pairs beyond the capacity.

    chances: (draws, experts), how likely each expert is among a token's k; the rows of one are binomial. The mean
             of max(X - C, 0) is taken over a normal's quantiles, and exactly 0 where C holds all tokens.
    """
    rows = capacity_rows(ffn, num_tokens, factor)
    if rows >= num_tokens:
        return 0.0
    counts = np.random.default_rng(num_tokens).binomial(num_tokens, np.tile(chances, (64, 1)))
    return float(np.maximum(counts - rows, 0).sum() / counts.sum())
