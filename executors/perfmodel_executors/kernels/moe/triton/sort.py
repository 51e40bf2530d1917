"""Sort (token, choice) pairs by expert and cut each expert's rows into tiles, in one launch and without the host.

One program an expert: it counts the rows of all experts, so it knows where its own begin, then scans the ids again and
writes its pairs in their order. Only whole tiles are handed out, and none to an expert without rows; how many there are
stays on the device. The host knows the most there can be and launches as many; the programs beyond them exit.

    tiles = sum over experts of ceil(rows / B)  <=  D + (A - D) / B,   A pairs, D = min(E, A) experts with rows
"""

__all__ = ["SortedPairs", "most_tiles", "sort_pairs"]

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch

_BLOCK = 2048  # ids that a program looks at in one pass


class SortedPairs(NamedTuple):
    """order:     [A] pairs (token * top_k + choice) in the order of their experts, each expert's in ascending order
    tiles:     [most, 3] of each tile: its expert, where in `order` it begins, how many rows it has; valid up to
    num_tiles: [1], the tiles there are
    """

    order: Tensor
    tiles: Tensor
    num_tiles: Tensor


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_kernel(
    experts_ptr,
    order_ptr,
    tiles_ptr,
    num_tiles_ptr,
    num_pairs,
    num_experts,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    own = tl.program_id(0)
    counts = tl.zeros([EXPERTS], tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        pair = begin + tl.arange(0, BLOCK)
        ids = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=0).to(tl.int32)
        counts += tl.histogram(ids, EXPERTS, mask=pair < num_pairs)
    expert = tl.arange(0, EXPERTS)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    row = tl.sum(tl.where(expert < own, counts, 0), axis=0)
    tile = tl.sum(tl.where(expert < own, tiles, 0), axis=0)
    rows = tl.sum(tl.where(expert == own, counts, 0), axis=0)
    for done in range(0, rows, BLOCK_M):
        entry = tiles_ptr + (tile + done // BLOCK_M) * 3
        tl.store(entry, own)
        tl.store(entry + 1, row + done)
        tl.store(entry + 2, tl.minimum(rows - done, BLOCK_M))
    if own == num_experts - 1:
        tl.store(num_tiles_ptr, tl.sum(tiles, axis=0))
    if rows > 0:
        for begin in range(0, num_pairs, BLOCK):
            pair = begin + tl.arange(0, BLOCK)
            ids = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
            is_own = (ids == own).to(tl.int32)
            tl.store(order_ptr + row - 1 + tl.cumsum(is_own, axis=0), pair, mask=is_own > 0)
            row += tl.sum(is_own, axis=0)


def sort_pairs(experts_TX: Tensor, num_experts: int, block_rows: int) -> SortedPairs:
    """The pairs of `experts_TX` (contiguous, ids in 0 .. num_experts - 1) in tiles of at most `block_rows`."""
    pairs = experts_TX.numel()
    order, num_tiles = (torch.empty(n, dtype=torch.int32, device=experts_TX.device) for n in (pairs, 1))
    tiles = torch.empty(most_tiles(pairs, num_experts, block_rows), 3, dtype=torch.int32, device=experts_TX.device)
    block = max(16, min(_BLOCK, triton.next_power_of_2(pairs)))
    launch(
        _sort_kernel,
        (num_experts,),
        *(experts_TX, order, tiles, num_tiles, pairs, num_experts),
        options=Options(num_warps=max(1, min(8, block // 256)), num_stages=1),
        BLOCK_M=block_rows,
        BLOCK=block,
        EXPERTS=max(16, triton.next_power_of_2(num_experts)),
    )
    return SortedPairs(order, tiles, num_tiles)


def most_tiles(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """Tiles that `num_pairs` rows make at most, however they fall on the experts."""
    touched = min(num_experts, num_pairs)
    return touched + (num_pairs - touched) // block_rows
