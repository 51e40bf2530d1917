"""Tiles of products with experts in 8 or 4 bits; the SRAM they take is that of linear layers (`swapped_product`).

Up to eight tokens, or where each expert has fewer rows still, a tile has eight: then Hopper, too, multiplies by warps,
which read their codes as words.

Both products with experts in 8 or 4 bits: a tile is rows of one expert's stored matrix by some of its pairs.

W is the left operand, as in linear layers of these formats. Formats whose activations are quantised, too, take a launch
before each product, which gives every row a scale. Where experts have a gate, a tile of `up` holds rows of both halves,
eight by eight: a thread that has row i of a fragment has row i + 8, so that gate and up meet without a shuffle.
"""

from collections.abc import Callable
from functools import partial
from math import sqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.moe import ExpertLayer
from perfmodel_executors.kernels.stored_rows import ExpertWeight, Stacked
from perfmodel_executors.kernels.tiles import TileConfig, capability_of, pick
from perfmodel_executors.kernels.triton.linear import quantize_tokens
from perfmodel_executors.kernels.triton.moe_products import sum_in_splits
from perfmodel_executors.kernels.triton.moe_tiles import FEW_TOKENS, ExpertRows, own_tile
from perfmodel_executors.kernels.triton.operand import Operand, operand_of
from perfmodel_executors.kernels.triton.stored_weights import check_format, scaled, tile_sums
from perfmodel_executors.kernels.triton.swapped_product import shared_bytes
from perfmodel_executors.kernels.triton.swiglu import act, act_gated

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


_HALF = tl.constexpr(8)  # rows of gate, then of up, that follow each other in a tile


@triton.jit(do_not_specialize=["num_tokens"])
def _up_stored_kernel(
    experts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_tokens, x_ptr, x_scales_ptr, x_stride, values_ptr,
    row_scales_ptr, group_scales_ptr, zeros_ptr, row_stride, num_rows, K, bias_ptr, hidden_ptr, inner,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, FORMAT: tl.constexpr, GROUP_SIZE: tl.constexpr, EVEN_K: tl.constexpr, BY_BITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    expert, pair, mask, block, is_live = own_tile(
        experts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_tokens, tl.cdiv(inner, COLUMNS), BLOCK_M, TOP_K, CHOICES,
        GROUP, FORM,
    )  # fmt: skip
    if not is_live:
        return
    place = tl.arange(0, BLOCK_N)
    # Columns beyond the last wrap around to valid ones: their products are not stored, and the loads need no mask.
    if GATED:
        row = (block * COLUMNS + place // (2 * _HALF) * _HALF + place % _HALF) % inner + place // _HALF % 2 * inner
        row += expert * 2 * inner
    else:
        row = (block * COLUMNS + place) % inner + expert * inner
    pair = tl.maximum(pair, 0)  # of rows without one: stored nowhere
    sums = tile_sums(
        x_ptr, x_scales_ptr, num_tokens, x_stride, pair // TOP_K, values_ptr, group_scales_ptr, zeros_ptr, row_stride,
        row, num_rows, K, 0, tl.cdiv(K, BLOCK_K), FORMAT, GROUP_SIZE, EVEN_K, BY_BITS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    sums = scaled(sums, x_scales_ptr, pair // TOP_K, row_scales_ptr, row, FORMAT)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    if GATED:
        halves = tl.reshape(sums, (BLOCK_N // (2 * _HALF), 2, _HALF, BLOCK_M))
        gate, up = tl.split(tl.permute(halves, (0, 2, 3, 1)))
        hidden = tl.reshape(act_gated(gate, up, ACTIVATION), (COLUMNS, BLOCK_M))
    else:
        hidden = act(sums, ACTIVATION)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    hidden_ptrs = hidden_ptr + pair.to(tl.int64)[None, :] * inner + column[:, None]
    tl.store(hidden_ptrs, hidden.to(hidden_ptr.dtype.element_ty), mask=mask[None, :] & (column < inner)[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _down_stored_kernel(
    experts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_tokens, x_ptr, x_scales_ptr, x_stride, values_ptr,
    row_scales_ptr, group_scales_ptr, zeros_ptr, row_stride, num_rows, K, bias_ptr, weights_ptr, y_ptr, width,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, SPLITS: tl.constexpr,
    FORMAT: tl.constexpr, GROUP_SIZE: tl.constexpr, EVEN_K: tl.constexpr, BY_BITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert, pair, mask, block, is_live = own_tile(
        experts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_tokens, tl.cdiv(width, BLOCK_N), BLOCK_M, TOP_K, CHOICES,
        GROUP, FORM,
    )  # fmt: skip
    if not is_live:
        return
    split = tl.program_id(1)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    row = column % width + expert * width
    pair = tl.maximum(pair, 0)
    sums = tile_sums(
        x_ptr, x_scales_ptr, num_tokens * TOP_K, x_stride, pair, values_ptr, group_scales_ptr, zeros_ptr, row_stride,
        row, num_rows, K, split * steps, tl.minimum(split * steps + steps, tl.cdiv(K, BLOCK_K)),
        FORMAT, GROUP_SIZE, EVEN_K, BY_BITS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    sums = scaled(sums, x_scales_ptr, pair, row_scales_ptr, row, FORMAT)
    if bias_ptr is not None and split == 0:
        sums += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    sums *= tl.load(weights_ptr + pair, mask=mask, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + (pair.to(tl.int64) * SPLITS + split)[None, :] * width + column[:, None]
    tl.store(y_ptrs, sums.to(y_ptr.dtype.element_ty), mask=mask[None, :] & (column < width)[:, None])


def grouped_up(x_TC: Tensor, placement: ExpertRows, layer: ExpertLayer, forced: TileConfig | None = None) -> Tensor:
    """[A, I]: the activated up projection of every pair, in the order of pairs.

    Raises PerfmodelError for e4m3 on a device that knows no such numbers.
    """
    up, gates = _stacked(layer.up_EFC), 2 if layer.gated else 1
    check_format(up, x_TC.device)
    inner = layer.up_EFC.shape[1] // gates
    hidden_AI = torch.empty(placement.experts_TX.numel(), inner, dtype=x_TC.dtype, device=x_TC.device)
    operand = operand_of(up)
    arguments = _arguments(x_TC, operand)

    def run(config: TileConfig) -> None:
        launch(
            _up_stored_kernel,
            (placement.num_tiles * triton.cdiv(inner, config.sizes["BLOCK_N"] // gates),),
            *(*placement.arguments, *arguments, layer.up_bias_EF, hidden_AI, inner),
            options=config.options,
            **placement.constants,
            **operand.constants(x_TC, config.sizes["BLOCK_K"]),
            **config.sizes,
            ACTIVATION=layer.activation,
            GATED=layer.gated,
        )

    run(_tile("moe_up_stored", (), placement, layer.up_EFC, x_TC, forced, run))
    return hidden_AI


def grouped_down(
    hidden_AI: Tensor,
    weights_TX: Tensor,
    placement: ExpertRows,
    layer: ExpertLayer,
    forced: TileConfig | None = None,
) -> Tensor:
    """[T, C]: the weighted sum of each token's experts, in hidden's dtype."""
    weights_TX, operand = weights_TX.contiguous(), operand_of(_stacked(layer.down_ECI))
    _, width, inner = layer.down_ECI.shape
    out_TC = torch.empty(weights_TX.shape[0], width, dtype=hidden_AI.dtype, device=hidden_AI.device)
    arguments = _arguments(hidden_AI, operand)

    def run(config: TileConfig) -> None:
        def product(y: Tensor, splits: int) -> None:
            launch(
                _down_stored_kernel,
                (placement.num_tiles * triton.cdiv(width, config.sizes["BLOCK_N"]), splits),
                *(*placement.arguments, *arguments, layer.down_bias_EC, weights_TX, y, width),
                options=config.options,
                **placement.constants,
                **operand.constants(hidden_AI, config.sizes["BLOCK_K"]),
                **config.sizes,
                SPLITS=splits,
            )

        sum_in_splits(product, placement, inner, config, out_TC)

    few = weights_TX.shape[0] if placement.pairs is None else 0
    run(_tile("moe_down_stored", (few,), placement, layer.down_ECI, hidden_AI, forced, run))
    return out_TC


def _stacked(weight: Tensor | ExpertWeight) -> Stacked:
    assert isinstance(weight, ExpertWeight)
    return weight.stacked


def _arguments(x_AK: Tensor, operand: Operand) -> tuple[Tensor | int | None, ...]:
    """What kernels are passed from x to the depth K of the sum; x is quantised if the format says so."""
    values, scales = quantize_tokens(x_AK, operand) if operand.meets_codes else (x_AK, None)
    return values, scales, values.stride(0), *operand.arguments, *operand.shape


def _tile(
    kernel: str,
    problem: tuple[object, ...],
    placement: ExpertRows,
    weight: Tensor | ExpertWeight,
    x_AK: Tensor,
    forced: TileConfig | None,
    run: Callable[[TileConfig], None],
) -> TileConfig:
    operand = operand_of(_stacked(weight))
    problem = (placement.rows, placement.form, *problem, weight.shape, x_AK.dtype, *operand.problem, str(forced or ""))

    def listed() -> list[TileConfig]:
        return [forced] if forced else candidates(placement.rows, operand, capability_of(x_AK.device))

    law = partial(shared_bytes, operand, x_AK.element_size())
    return pick(kernel, problem, listed, law, run, x_AK.device)
