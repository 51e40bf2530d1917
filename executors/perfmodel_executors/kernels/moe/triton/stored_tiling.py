"""Tiles of products with experts in 8 or 4 bits; the SRAM they take is that of linear layers (`swapped_product`).

Up to eight tokens, or where each expert has fewer rows still, a tile has eight: then Hopper, too, multiplies by warps,
which read their codes as words.
"""

__all__ = ["block_rows", "candidates"]

from math import sqrt

from perfmodel_executors.kernels.launch import Options
from perfmodel_executors.kernels.moe.triton.tile import FEW_TOKENS
from perfmodel_executors.kernels.tiles import TileConfig
from perfmodel_executors.kernels.weight_formats.experts import ExpertWeight
from perfmodel_executors.kernels.weight_formats.operand import Operand

_ROWS = (8, 16, 32, 64, 128)
_LEAST_ROWS_8_BITS = 16  # where both operands are codes
_MOST_SUMS_GROUPED = 32  # a thread can hold, twice

# Rows of a tile -> (stored rows, those of gate and of up together; depth; warps; stages), the one to trust first.
_FEW = ((64, 256, 4, 4), (64, 128, 4, 5), (128, 128, 4, 4), (32, 256, 2, 4), (64, 128, 4, 3))
_WEIGHT_ONLY = {
    8: _FEW,
    16: _FEW,
    32: ((64, 128, 4, 4), (128, 128, 4, 4), (64, 128, 4, 3)),
    64: ((64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 8, 3), (64, 64, 4, 3)),
    128: ((128, 64, 8, 4), (128, 64, 8, 3), (64, 64, 8, 3)),
}
_FEW_8_BITS = ((64, 256, 4, 4), (128, 128, 4, 4), (64, 128, 4, 5), (64, 128, 4, 3))
_8_BITS = {
    16: _FEW_8_BITS,
    32: _FEW_8_BITS,
    64: ((64, 128, 4, 4), (128, 128, 4, 4), (64, 128, 4, 3)),
    128: ((128, 128, 8, 3), (128, 128, 4, 3), (64, 128, 4, 3)),
}
# Blocks have the sums of 128 inputs beside the sums of all.
_BLOCKS = {
    16: ((64, 128, 4, 4), (128, 128, 4, 4), (64, 128, 4, 5), (64, 128, 4, 3)),
    32: ((64, 128, 4, 4), (64, 128, 4, 5), (64, 128, 4, 3)),
    64: ((64, 128, 4, 4), (128, 128, 8, 3), (64, 128, 4, 3)),
    128: ((64, 128, 4, 3), (64, 128, 8, 3)),
}


def block_rows(num_tokens: int, num_experts: int, top_k: int, weight: ExpertWeight) -> int:
    """As for plain weights, but of eight rows at least, and of as many as the tokens where those are few."""
    mean = num_tokens * top_k / num_experts
    needed = max(mean + 2.5 * sqrt(mean), min(num_tokens, FEW_TOKENS))
    rows = next((rows for rows in _ROWS if rows >= needed), _ROWS[-1])
    return max(rows, _LEAST_ROWS_8_BITS) if weight.quantizes_input else rows


def candidates(rows: int, operand: Operand, capability: int | None) -> list[TileConfig]:
    """Tiles with so many rows of x, the one to trust without measuring first, as deep as whole groups are.

    Formats in groups have the sums of a group beside the sums of all: where warps multiply, all of these are registers.
    """
    table = _BLOCKS if operand.form == "blocks" else _8_BITS if operand.meets_codes else _WEIGHT_ONLY
    is_tight = operand.form in ("int4", "fp4", "blocks") and capability is not None and not 90 <= capability < 120
    return [
        TileConfig({"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": operand.depth(depth)}, Options(warps, stages))
        for columns, depth, warps, stages in table[rows]
        if not is_tight or rows * columns <= _MOST_SUMS_GROUPED * 32 * warps
    ]
