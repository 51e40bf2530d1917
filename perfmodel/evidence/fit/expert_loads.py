"""Load of the timed rank in a table of experts.

Tables name the collectors' synthetic routing: `balanced`, or `power_law_a` (experts drawn with density x^-a). M tokens
over all ranks choose k of E experts; of R ranks with E / R experts each, the one with most assignments is timed.
Source: MoE collectors of ai-dynamo/aiconfigurator (Apache-2.0), rebuilt from their description; their draws are
unknown, so averages over `_DRAWS` seeded draws are used.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.ops.routing import TILE_ROWS

Counts = NDArray[np.int64]
_DRAWS = 8


class RankLoad(NamedTuple):
    """Distinct experts, assignments, tokens with any local expert, and tiles by tile rows."""

    distinct: float
    assignments: float
    tokens: float
    tiles: tuple[float, ...]


@lru_cache(maxsize=65536)
def rank_load(num_tokens: int, num_experts: int, top_k: int, num_ranks: int, distribution: str) -> RankLoad:
    """Load of the timed rank when `num_tokens` tokens choose `top_k` of `num_experts` experts on `num_ranks` ranks.
    distribution: "balanced" or "power_law_<a>"."""
    if distribution == "balanced":
        # slot j of token i goes to expert i + j ceil(E / k), spread evenly where there are few tokens; rank 0 is timed
        stride = -(-num_experts // top_k)
        token, slot = np.arange(num_tokens)[:, None], np.arange(top_k)
        first = token if num_tokens >= stride else token * stride // num_tokens
        chosen = (first + slot * stride) % num_experts
        local = num_experts // num_ranks
        counts = np.bincount(chosen.ravel(), minlength=num_experts)[:local]
        return _load(_numbers(counts, float((chosen < local).any(axis=1).sum())))
    exponent = float(distribution.rpartition("_")[2])
    rng = np.random.default_rng((num_tokens, num_experts, top_k, num_ranks))
    drawn = np.zeros(3 + len(TILE_ROWS))
    for _ in range(_DRAWS):
        counts = _power_law(num_tokens, num_experts, top_k, exponent, rng, num_ranks)
        heaviest = counts[counts.sum(axis=1).argmax()]
        share = min(1.0, heaviest.sum() / (num_tokens * top_k))
        drawn += _numbers(heaviest, num_tokens * (1.0 - (1.0 - share) ** top_k))
    return _load(drawn / _DRAWS)


def _power_law(tokens: int, experts: int, top_k: int, a: float, rng: np.random.Generator, ranks: int) -> Counts:
    """Tokens per (rank, expert): shares with density x^-a, rounded, at most one slot per token. The rounding remainder
    goes one at a time to the ranks in turn, to the smallest (if negative from the largest) expert: with few tokens that
    is nearly all of them."""
    low, high = (1.0, 0.8 * tokens) if tokens * top_k > experts else (0.01, 2.0)
    share = ((high ** (1 - a) - low ** (1 - a)) * rng.random(experts) + low ** (1 - a)) ** (1 / (1 - a))
    wanted = np.round(share / share.sum() * tokens * top_k).astype(np.int64)
    counts: Counts = np.minimum(wanted, tokens)
    over = int((wanted - counts).sum())
    counts = counts.reshape(ranks, -1)
    _hand_out(counts, over, tokens, 1)
    missing = int(tokens * top_k - counts.sum())
    _hand_out(counts, abs(missing), tokens, 1 if missing > 0 else -1)
    return counts


def _hand_out(counts: Counts, amount: int, most: int, sign: int) -> None:
    """Add (or take) one at a time, rank by rank, until `amount` is spent."""
    shares = _in_turn(amount, (most - counts if sign > 0 else counts).sum(axis=1))
    for rank in np.flatnonzero(shares):
        counts[rank] = sign * _filled(sign * counts[rank], int(shares[rank]))


def _in_turn(amount: int, room: Counts) -> Counts:
    """Each rank's part of `amount`, handed out in turn to ranks with room."""
    shares = np.zeros_like(room)
    while amount > 0 and len(able := np.flatnonzero(shares < room)[:amount]):
        turns = min(amount // len(able), int((room - shares)[able].min()))
        shares[able] += turns
        amount -= turns * len(able)
    return shares


def _filled(heights: Counts, amount: int) -> Counts:
    """Heights after adding `amount` one at a time to the lowest, ties to the first."""
    ordered = np.sort(heights)
    below = np.cumsum(ordered) - ordered
    num_raised = int((np.arange(len(ordered)) * ordered - below <= amount).sum())
    level, left = divmod(amount + int(ordered[:num_raised].sum()), num_raised)
    result = np.maximum(heights, level)
    result[np.flatnonzero(heights <= level)[:left]] += 1
    return result


def _numbers(counts: Counts, tokens: float) -> NDArray[np.float64]:
    tiles = [np.ceil(counts / rows).sum() for rows in TILE_ROWS]
    return np.array([(counts > 0).sum(), counts.sum(), tokens, *tiles], dtype=np.float64)


def _load(numbers: NDArray[Any]) -> RankLoad:
    distinct, assignments, tokens, *tiles = map(float, numbers)
    return RankLoad(distinct, assignments, tokens, tuple(tiles))
