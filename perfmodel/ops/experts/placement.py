"""Experts copied and placed so that ranks are loaded alike, as expert-parallel load balancers do it.

Copies go, one at a time, to the expert whose copies are loaded most; then experts and copies, most loaded first, to the
rank that is loaded least and has a place left. What is known when they are placed is how popular experts are in the
long run, not how many tokens the next step sends them: that noise stays.

Source: DeepSeek-AI 2024, "Expert Parallelism Load Balancer" (EPLB; vLLM: enable_eplb), global policy.
"""

__all__ = ["Placement", "consecutive_experts", "place_experts"]

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Placement:
    """Slot s of rank r holds a copy of expert `expert[r, s]` (-1: none), the `copy[r, s]`-th of `copies[expert]`."""

    expert: NDArray[np.int64]
    copy: NDArray[np.int64]
    copies: NDArray[np.int64]

    def rows(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """(ranks, slots): the tokens of each slot, where `counts` has those of each expert, shared among its copies."""
        shared = (counts[self.expert] + self.copy) // self.copies[self.expert]
        return np.where(self.expert < 0, 0, shared)


def consecutive_experts(num_experts: int, num_ranks: int) -> Placement:
    """Ranks with consecutive experts, one copy of each."""
    slots = ceil(num_experts / num_ranks)
    padded = np.full(num_ranks * slots, -1, dtype=np.int64)
    padded[:num_experts] = np.arange(num_experts)
    expert = padded.reshape(num_ranks, slots)
    return Placement(expert, np.zeros_like(expert), np.ones(num_experts, dtype=np.int64))


def place_experts(popularity: Values, num_ranks: int, num_redundant: int = 0) -> Placement:
    """The placement of experts of such `popularity` (in any unit) and `num_redundant` copies on `num_ranks` ranks."""
    num_experts = len(popularity)
    copies = np.ones(num_experts, dtype=np.int64)
    for _ in range(num_redundant):
        copies[(popularity / copies).argmax()] += 1
    loads = popularity / copies
    slots = ceil((num_experts + num_redundant) / num_ranks)
    expert = np.full((num_ranks, slots), -1, dtype=np.int64)
    copy = np.zeros((num_ranks, slots), dtype=np.int64)
    used, load = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks)
    for e in np.argsort(-loads, kind="stable"):
        for number in range(copies[e]):
            rank = np.where(used < slots, load, np.inf).argmin()
            expert[rank, used[rank]], copy[rank, used[rank]] = e, number
            used[rank] += 1
            load[rank] += loads[e]
    return Placement(expert, copy, copies)
