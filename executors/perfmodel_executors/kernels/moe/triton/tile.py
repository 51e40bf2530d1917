"""Which tile a program computes: an expert, its rows, and a block of columns.

sorted  `sort_pairs` made the tiles. Programs walk down `GROUP` tiles before they take the next columns, so that the
        rows of an expert that needs several tiles find its weights in the L2.
few     An expert's rows are one tile, and the program finds them in the routing table itself, which is cheaper
        than another launch. The grid has a tile for each pair; those whose expert an earlier pair has exit.
one     One token: each of its pairs is a tile.
"""

# ruff: noqa: N815 (fields carry the suffix of their shape, like the variables)

__all__ = ["FEW_TOKENS", "GROUP", "ExpertRows", "own_tile"]

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.moe.triton.sort import SortedPairs, most_tiles, sort_pairs

GROUP = 8
FEW_TOKENS = 16
_FEW_PER_EXPERT = 2  # pairs: beyond, the programs that only exit take as long as sorting


@dataclass(frozen=True)
class ExpertRows:
    """Which rows go to which expert: `experts_TX`, contiguous, or what sorting made of it; tiles of `rows` rows."""

    experts_TX: Tensor
    num_experts: int
    rows: int
    pairs: SortedPairs | None

    @classmethod
    def of(cls, experts_TX: Tensor, num_experts: int, rows: int) -> "ExpertRows":
        """Sorted unless the tokens, and so the rows of any expert, are few enough to fit one tile."""
        experts_TX = experts_TX.contiguous()
        num_tokens, num_pairs = experts_TX.shape[0], experts_TX.numel()
        is_few = num_tokens <= min(rows, FEW_TOKENS) and num_pairs <= _FEW_PER_EXPERT * num_experts
        return cls(experts_TX, num_experts, rows, None if is_few else sort_pairs(experts_TX, num_experts, rows))

    @property
    def form(self) -> str:
        if self.pairs is not None:
            return "sorted"
        return "one" if self.experts_TX.shape[0] == 1 else "few"

    @property
    def num_tiles(self) -> int:
        """Tiles that the grid has: one a pair, or the most there can be, in whole groups."""
        num_pairs = self.experts_TX.numel()
        if self.pairs is None:
            return num_pairs
        return int(triton.cdiv(most_tiles(num_pairs, self.num_experts, self.rows), GROUP)) * GROUP

    @property
    def arguments(self) -> tuple[Tensor | int | None, ...]:
        """The first arguments of `own_tile`."""
        return self.experts_TX, *(self.pairs or (None, None, None)), self.experts_TX.shape[0]

    @property
    def constants(self) -> dict[str, int | str]:
        """Compile-time constants of `own_tile`."""
        top_k = self.experts_TX.shape[1]
        return {"TOP_K": top_k, "CHOICES": triton.next_power_of_2(top_k), "GROUP": GROUP, "FORM": self.form}


@triton.jit
def own_tile(
    experts_ptr,
    order_ptr,
    tiles_ptr,
    num_tiles_ptr,
    num_tokens,
    blocks,
    BLOCK_M: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    GROUP: tl.constexpr,
    FORM: tl.constexpr,
):
    """(expert, its pairs, which rows have one, block of columns, whether there is anything to do)."""
    program = tl.program_id(0)
    row = tl.arange(0, BLOCK_M)
    if FORM == "sorted":
        num_tiles = tl.load(num_tiles_ptr)
        first = program // (GROUP * blocks) * GROUP
        depth = tl.maximum(tl.minimum(num_tiles - first, GROUP), 1)
        place = program % (GROUP * blocks)
        block = place // depth
        is_live = (first < num_tiles) & (block < blocks)
        entry = tiles_ptr + (first + place % depth) * 3
        expert = tl.load(entry, mask=is_live, other=0)
        begin = tl.load(entry + 1, mask=is_live, other=0)
        mask = row < tl.load(entry + 2, mask=is_live, other=0)
        pair = tl.load(order_ptr + begin + row, mask=mask, other=0)
    elif FORM == "one":
        pair = program // blocks + 0 * row
        block = program % blocks
        expert = tl.load(experts_ptr + program // blocks).to(tl.int32)
        mask = row == 0
        is_live = program >= 0
    else:
        slot = program // blocks
        block = program % blocks
        choice = tl.arange(0, CHOICES)
        pairs = row[:, None] * TOP_K + choice[None, :]
        is_pair = (row < num_tokens)[:, None] & (choice < TOP_K)[None, :]
        expert = tl.load(experts_ptr + slot).to(tl.int32)
        is_own = tl.load(experts_ptr + pairs, mask=is_pair, other=-1).to(tl.int32) == expert
        pair = tl.max(tl.where(is_own, pairs, -1), axis=1)
        mask = pair >= 0
        is_live = tl.min(tl.min(tl.where(is_own, pairs, slot), axis=1), axis=0) == slot
    return expert, pair, mask, block, is_live
