"""Which blocks of keys the queries of a block see: BigBird's and Longformer's patterns for text that is generated."""

__all__ = ["seen_blocks"]

import math
import random
from functools import lru_cache

from perfmodel.models.architecture import BlockSparsity


@lru_cache(maxsize=65536)
def seen_blocks(block: int, sparsity: BlockSparsity) -> tuple[int, ...]:
    """Ascending: blocks at the beginning, blocks anywhere (the same whenever they are asked for), the nearest ones.

    The last is the queries' own. With a fraction, BigBird's random blocks are half of those that are left beside the
    ones at the beginning.
    """
    count = sparsity.num_blocks or math.ceil((sparsity.fraction or 1.0) * (block + 1))
    if count > block:
        return tuple(range(block + 1))
    first = min(sparsity.num_globals, count - 1)
    drawn = min(sparsity.num_random, count - first - 1)
    if sparsity.num_blocks is None:
        drawn = (count - first) // 2 if sparsity.num_random else 0
    nearest = count - first - drawn
    between = range(first, block - nearest + 1)
    chosen = sorted(random.Random(block).sample(between, drawn))
    return (*range(first), *chosen, *range(block - nearest + 1, block + 1))
