"""Both products with experts in 8 or 4 bits: a tile is rows of one expert's stored matrix by some of its pairs.

W is the left operand, as in linear layers of these formats. Formats whose activations are quantised, too, take a launch
before each product, which gives every row a scale. Where experts have a gate, a tile of `up` holds rows of both halves,
eight by eight: a thread that has row i of a fragment has row i + 8, so that gate and up meet without a shuffle.
"""

__all__ = ["grouped_down", "grouped_up"]

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import launch
from perfmodel_executors.kernels.linear_low_precision.triton import quantize_tokens
from perfmodel_executors.kernels.moe.triton.down import combine
from perfmodel_executors.kernels.moe.triton.stored_tiling import candidates, shared_bytes
from perfmodel_executors.kernels.moe.triton.tile import ExpertRows, own_tile
from perfmodel_executors.kernels.moe.triton.tiling import num_splits
from perfmodel_executors.kernels.moe.triton.up import act
from perfmodel_executors.kernels.tiles import TileConfig, capability_of, pick
from perfmodel_executors.kernels.weight_formats.containers import Int4Weight
from perfmodel_executors.kernels.weight_formats.experts import ExpertWeight
from perfmodel_executors.kernels.weight_formats.triton import add_products_4bit, add_products_8bit, check_format

_HALF = tl.constexpr(8)  # rows of gate, then of up, that follow each other in a tile


@triton.jit
def _tile_sums(
    x_ptr, x_scales_ptr, x_stride, x_row, values_ptr, scales_ptr, zeros_ptr, row_stride, row, num_rows, K, first, last,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_SIZE: tl.constexpr,
    EVEN_K: tl.constexpr, BY_BITS: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_N, BLOCK_M]: stored `row`s times rows `x_row` of x, over the blocks `first` .. `last` - 1 of K."""
    k = tl.arange(0, GROUP_SIZE // 2 if GROUP_SIZE else BLOCK_K)
    x_ptrs = x_ptr + x_row.to(tl.int64)[None, :] * x_stride + k[:, None]
    values_ptrs = values_ptr + row.to(tl.int64)[:, None] * row_stride + k[None, :]
    if GROUP_SIZE:
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        sums = add_products_4bit(
            sums, x_ptrs, values_ptrs, scales_ptr, zeros_ptr, row, num_rows, first, last, BLOCK_K // GROUP_SIZE,
            GROUP_SIZE, BY_BITS,
        )  # fmt: skip
    else:
        dtype: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype)
        acc = add_products_8bit(acc, x_ptrs, values_ptrs, K, first, last, BLOCK_K, EVEN_K)
        sums = acc.to(tl.float32) * tl.load(scales_ptr + row)[:, None]
        if x_scales_ptr is not None:
            sums *= tl.load(x_scales_ptr + x_row)[None, :]
    return sums


@triton.jit(do_not_specialize=["num_tokens"])
def _up_stored_kernel(
    experts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_tokens, x_ptr, x_scales_ptr, x_stride, values_ptr, scales_ptr,
    zeros_ptr, row_stride, num_rows, K, hidden_ptr, inner,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, GROUP_SIZE: tl.constexpr, EVEN_K: tl.constexpr, BY_BITS: tl.constexpr,
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
    sums = _tile_sums(
        x_ptr, x_scales_ptr, x_stride, pair // TOP_K, values_ptr, scales_ptr, zeros_ptr, row_stride, row, num_rows, K,
        0, tl.cdiv(K, BLOCK_K), BLOCK_M, BLOCK_N, BLOCK_K, GROUP_SIZE, EVEN_K, BY_BITS,
    )  # fmt: skip
    if GATED:
        halves = tl.reshape(sums, (BLOCK_N // (2 * _HALF), 2, _HALF, BLOCK_M))
        gate, up = tl.split(tl.permute(halves, (0, 2, 3, 1)))
        hidden = tl.reshape(act(gate, ACTIVATION) * up, (COLUMNS, BLOCK_M))
    else:
        hidden = act(sums, ACTIVATION)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    hidden_ptrs = hidden_ptr + pair.to(tl.int64)[None, :] * inner + column[:, None]
    tl.store(hidden_ptrs, hidden.to(hidden_ptr.dtype.element_ty), mask=mask[None, :] & (column < inner)[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _down_stored_kernel(
    experts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_tokens, x_ptr, x_scales_ptr, x_stride, values_ptr, scales_ptr,
    zeros_ptr, row_stride, num_rows, K, weights_ptr, y_ptr, width,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, SPLITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, EVEN_K: tl.constexpr, BY_BITS: tl.constexpr,
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
    pair = tl.maximum(pair, 0)
    sums = _tile_sums(
        x_ptr, x_scales_ptr, x_stride, pair, values_ptr, scales_ptr, zeros_ptr, row_stride,
        column % width + expert * width, num_rows, K, split * steps,
        tl.minimum(split * steps + steps, tl.cdiv(K, BLOCK_K)),
        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_SIZE, EVEN_K, BY_BITS,
    )  # fmt: skip
    sums *= tl.load(weights_ptr + pair, mask=mask, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + (pair.to(tl.int64) * SPLITS + split)[None, :] * width + column[:, None]
    tl.store(y_ptrs, sums.to(y_ptr.dtype.element_ty), mask=mask[None, :] & (column < width)[:, None])


def grouped_up(
    x_TC: Tensor,
    placement: ExpertRows,
    up: ExpertWeight,
    activation: str,
    gated: bool,
    forced: TileConfig | None = None,
) -> Tensor:
    """[A, I]: the activated up projection of every pair, in the order of pairs; up is [gate | up] if gated.

    Raises PerfmodelError for e4m3 on a device that knows no such numbers.
    """
    check_format(up.stacked, x_TC.device)
    gates = 2 if gated else 1
    inner = up.shape[1] // gates
    hidden_AI = torch.empty(placement.experts_TX.numel(), inner, dtype=x_TC.dtype, device=x_TC.device)
    operands = _operands(x_TC, up)

    def run(config: TileConfig) -> None:
        launch(
            _up_stored_kernel,
            (placement.num_tiles * triton.cdiv(inner, config.sizes["BLOCK_N"] // gates),),
            *placement.arguments,
            *(*operands, hidden_AI, inner),
            options=config.options,
            **placement.constants,
            **_constants(x_TC, up, config),
            ACTIVATION=activation,
            GATED=gated,
        )

    problem = (placement.rows, placement.form, *_problem(x_TC, up), str(forced or ""))

    def listed() -> list[TileConfig]:
        return [forced] if forced else candidates(placement.rows, up, capability_of(x_TC.device))

    run(pick("moe_up_stored", problem, listed, shared_bytes(up, x_TC.element_size()), run, x_TC.device))
    return hidden_AI


def grouped_down(
    hidden_AI: Tensor, weights_TX: Tensor, placement: ExpertRows, down: ExpertWeight, forced: TileConfig | None = None
) -> Tensor:
    """[T, C]: the weighted sum of each token's experts, in hidden's dtype."""
    weights_TX = weights_TX.contiguous()
    (num_tokens, top_k), (num_experts, width, inner) = weights_TX.shape, down.shape
    out_TC = torch.empty(num_tokens, width, dtype=hidden_AI.dtype, device=hidden_AI.device)
    operands = _operands(hidden_AI, down)

    def run(config: TileConfig) -> None:
        splits = num_splits(num_tokens, num_experts, top_k, width, inner, config)
        parts = (num_tokens * top_k * splits, width)
        y = torch.empty(parts, dtype=torch.float32 if splits > 1 else out_TC.dtype, device=out_TC.device)
        launch(
            _down_stored_kernel,
            (placement.num_tiles * triton.cdiv(width, config.sizes["BLOCK_N"]), splits),
            *placement.arguments,
            *(*operands, weights_TX, y, width),
            options=config.options,
            **placement.constants,
            **_constants(hidden_AI, down, config),
            SPLITS=splits,
        )
        combine(y, out_TC, top_k * splits)

    few = num_tokens if placement.pairs is None else 0
    problem = (placement.rows, placement.form, few, *_problem(hidden_AI, down), str(forced or ""))

    def listed() -> list[TileConfig]:
        return [forced] if forced else candidates(placement.rows, down, capability_of(out_TC.device))

    run(pick("moe_down_stored", problem, listed, shared_bytes(down, hidden_AI.element_size()), run, out_TC.device))
    return out_TC


def _operands(x_AK: Tensor, weight: ExpertWeight) -> tuple[Tensor | int | None, ...]:
    """The arguments from x to the depth K of the sum; x is quantised if the format says so."""
    stacked, (num_rows, k) = weight.stacked, weight.stacked.shape
    if isinstance(stacked, Int4Weight):
        stored = (stacked.packed_NJ, stacked.scales_GN, stacked.zeros_GN, stacked.packed_NJ.stride(0))
        return x_AK, None, x_AK.stride(0), *stored, num_rows, k
    values, scales_A = x_AK, None
    if weight.quantizes_input:
        values, scales_A = quantize_tokens(x_AK, stacked.values_NK.dtype)
    rows = (stacked.values_NK, stacked.scales_N, None, stacked.values_NK.stride(0))
    return values, scales_A, values.stride(0), *rows, num_rows, k


def _constants(x_AK: Tensor, weight: ExpertWeight, config: TileConfig) -> dict[str, Any]:
    stacked = weight.stacked
    by_bits = x_AK.device.type != "cpu" and x_AK.dtype in (torch.bfloat16, torch.float16)
    return {
        "GROUP_SIZE": stacked.group_size if isinstance(stacked, Int4Weight) else 0,
        "EVEN_K": weight.shape[2] % config.sizes["BLOCK_K"] == 0,
        "BY_BITS": isinstance(stacked, Int4Weight) and by_bits,
        **config.sizes,
    }


def _problem(x_AK: Tensor, weight: ExpertWeight) -> tuple[object, ...]:
    """What the best tile depends on, of the weight."""
    stacked = weight.stacked
    if isinstance(stacked, Int4Weight):
        return weight.shape, x_AK.dtype, stacked.group_size, stacked.zeros_GN is None
    return weight.shape, x_AK.dtype, stacked.values_NK.dtype, stacked.quantizes_input
