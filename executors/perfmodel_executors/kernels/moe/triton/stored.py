"""Both products with experts in 8 or 4 bits: a tile is rows of one expert's stored matrix by some of its pairs.

W is the left operand, as in linear layers of these formats. Formats whose activations are quantised, too, take a launch
before each product, which gives every row a scale. Where experts have a gate, a tile of `up` holds rows of both halves,
eight by eight: a thread that has row i of a fragment has row i + 8, so that gate and up meet without a shuffle.
"""

__all__ = ["grouped_down", "grouped_up"]

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import launch
from perfmodel_executors.kernels.linear_low_precision.triton import quantize_tokens
from perfmodel_executors.kernels.moe.layer import ExpertLayer
from perfmodel_executors.kernels.moe.triton.down import sum_in_splits
from perfmodel_executors.kernels.moe.triton.stored_tiling import candidates
from perfmodel_executors.kernels.moe.triton.tile import ExpertRows, own_tile
from perfmodel_executors.kernels.swapped_product.tiling import shared_bytes
from perfmodel_executors.kernels.swiglu.triton import act, act_gated
from perfmodel_executors.kernels.tiles import TileConfig, capability_of, pick
from perfmodel_executors.kernels.weight_formats.experts import ExpertWeight, Stacked
from perfmodel_executors.kernels.weight_formats.operand import Operand, operand_of
from perfmodel_executors.kernels.weight_formats.triton import check_format, scaled, tile_sums

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
