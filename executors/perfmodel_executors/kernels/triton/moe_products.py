"""Both products of experts: hidden[pair] = act(x[token] gate^T) * (x[token] up^T), the activation before the store, and

    out[token] = sum over its pairs of weight * (hidden[pair] down^T)

A tile is rows of one expert's matrix by some of its pairs. `down` writes each pair's row, times its weight, in parts of
the sum over I when few experts are touched; a second kernel sums a token's rows. One token needs no such rows: there a
program reads its columns of each chosen expert in turn and stores the sum.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.moe import ExpertLayer
from perfmodel_executors.kernels.stored_rows import ExpertWeight
from perfmodel_executors.kernels.tiles import TileConfig, capability_of, pick
from perfmodel_executors.kernels.triton import moe_tiles
from perfmodel_executors.kernels.triton.linear import quantize_tokens
from perfmodel_executors.kernels.triton.moe_tiles import ExpertRows, own_tile
from perfmodel_executors.kernels.triton.operand import Operand, operand_of
from perfmodel_executors.kernels.triton.stored_weights import check_format, scaled, tile_sums
from perfmodel_executors.kernels.triton.swapped_product import shared_bytes as stored_bytes
from perfmodel_executors.kernels.triton.swiglu import act, act_gated

_ONE_COLUMNS = 8  # that a program of the kernel for one token sums
_HALF = tl.constexpr(8)  # stored rows of gate, then of up, that follow each other in a tile


@triton.jit(do_not_specialize=["num_tokens"])
def _up_kernel(
    experts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_tokens, x_ptr, up_ptr, bias_ptr, hidden_ptr, width, inner,
    x_stride, expert_stride, row_stride,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pairs = (experts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_tokens)
    expert, pair, mask, block, is_live = own_tile(*pairs, tl.cdiv(inner, BLOCK_N), BLOCK_M, TOP_K, CHOICES, GROUP, FORM)
    if not is_live:
        return
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + (pair // TOP_K).to(tl.int64)[:, None] * x_stride + k[None, :]
    # Columns beyond the last wrap around to valid ones: their products are not stored, and the loads need no mask.
    up_at = up_ptr + expert.to(tl.int64) * expert_stride + (column % inner)[None, :] * row_stride + k[:, None]
    gate_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, tl.cdiv(width, BLOCK_K)):
        is_k = k < width - step * BLOCK_K
        if EVEN_K:
            x = tl.load(x_at, mask=mask[:, None], other=0.0)
            up = tl.load(up_at)
        else:
            x = tl.load(x_at, mask=mask[:, None] & is_k[None, :], other=0.0)
            up = tl.load(up_at, mask=is_k[:, None], other=0.0)
        if GATED:
            gate_sum = tl.dot(x, up, gate_sum, input_precision="ieee")
            if EVEN_K:
                up = tl.load(up_at + inner * row_stride)
            else:
                up = tl.load(up_at + inner * row_stride, mask=is_k[:, None], other=0.0)
        up_sum = tl.dot(x, up, up_sum, input_precision="ieee")
        x_at += BLOCK_K
        up_at += BLOCK_K
    if bias_ptr is not None:
        bias_at = bias_ptr + expert * (2 * inner if GATED else inner) + column % inner
        if GATED:
            gate_sum += tl.load(bias_at).to(tl.float32)[None, :]
            bias_at += inner
        up_sum += tl.load(bias_at).to(tl.float32)[None, :]
    if GATED:
        hidden = act_gated(gate_sum, up_sum, ACTIVATION)
    else:
        hidden = act(up_sum, ACTIVATION)
    hidden_at = hidden_ptr + pair.to(tl.int64)[:, None] * inner + column[None, :]
    tl.store(hidden_at, hidden.to(hidden_ptr.dtype.element_ty), mask=mask[:, None] & (column < inner)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _down_kernel(
    experts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_tokens, hidden_ptr, down_ptr, bias_ptr, weights_ptr, y_ptr,
    width, inner, expert_stride, row_stride,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pairs = (experts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_tokens)
    expert, pair, mask, block, is_live = own_tile(*pairs, tl.cdiv(width, BLOCK_N), BLOCK_M, TOP_K, CHOICES, GROUP, FORM)
    if not is_live:
        return
    split = tl.program_id(1)
    steps = tl.cdiv(tl.cdiv(inner, BLOCK_K), SPLITS)
    begin = split * steps
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = begin * BLOCK_K + tl.arange(0, BLOCK_K)
    hidden_at = hidden_ptr + pair.to(tl.int64)[:, None] * inner + k[None, :]
    down_at = down_ptr + expert.to(tl.int64) * expert_stride + (column % width)[None, :] * row_stride + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(begin, tl.minimum(begin + steps, tl.cdiv(inner, BLOCK_K))):
        is_k = k < inner - (step - begin) * BLOCK_K
        if EVEN_K:
            hidden = tl.load(hidden_at, mask=mask[:, None], other=0.0)
            down = tl.load(down_at)
        else:
            hidden = tl.load(hidden_at, mask=mask[:, None] & is_k[None, :], other=0.0)
            down = tl.load(down_at, mask=is_k[:, None], other=0.0)
        total = tl.dot(hidden, down, total, input_precision="ieee")
        hidden_at += BLOCK_K
        down_at += BLOCK_K
    if bias_ptr is not None and split == 0:
        total += tl.load(bias_ptr + expert * width + column % width).to(tl.float32)[None, :]
    total *= tl.load(weights_ptr + pair, mask=mask, other=0.0).to(tl.float32)[:, None]
    y_at = y_ptr + (pair.to(tl.int64) * SPLITS + split)[:, None] * width + column[None, :]
    tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=mask[:, None] & (column < width)[None, :])


@triton.jit
def _combine_kernel(y_ptr, out_ptr, width, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, ROWS)
    is_column = column < width
    y_at = y_ptr + (token * PARTS + part)[:, None] * width + column[None, :]
    y = tl.load(y_at, mask=(part < PARTS)[:, None] & is_column[None, :], other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + column, tl.sum(y, axis=0).to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def _down_one_kernel(
    experts_ptr, hidden_ptr, down_ptr, bias_ptr, weights_ptr, out_ptr, width, inner, expert_stride, row_stride,
    TOP_K: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    down_at = down_ptr + (column % width)[:, None] * row_stride
    steps = tl.cdiv(inner, BLOCK_K)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    # Unrolled, so that the loads of several steps are in flight: the tile is registers, there is no pipeline.
    for step in tl.range(0, TOP_K * steps, loop_unroll_factor=2):
        choice = step // steps
        k = step % steps * BLOCK_K + tl.arange(0, BLOCK_K)
        expert_at = down_at + tl.load(experts_ptr + choice).to(tl.int64) * expert_stride
        if EVEN_K:
            down = tl.load(expert_at + k[None, :])
            hidden = tl.load(hidden_ptr + choice * inner + k)
        else:
            down = tl.load(expert_at + k[None, :], mask=(k < inner)[None, :], other=0.0)
            hidden = tl.load(hidden_ptr + choice * inner + k, mask=k < inner, other=0.0)
        weighted = hidden.to(tl.float32) * tl.load(weights_ptr + choice).to(tl.float32)
        total += down.to(tl.float32) * weighted[None, :]
    sums = tl.sum(total, axis=1)
    if bias_ptr is not None:
        for choice in tl.static_range(TOP_K):
            bias_at = bias_ptr + tl.load(experts_ptr + choice) * width + column % width
            sums += tl.load(bias_at).to(tl.float32) * tl.load(weights_ptr + choice).to(tl.float32)
    tl.store(out_ptr + column, sums.to(out_ptr.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize=["num_tokens"])
def _up_stored_kernel(
    experts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_tokens, x_ptr, x_scales_ptr, x_stride, values_ptr,
    row_scales_ptr, group_scales_ptr, zeros_ptr, row_stride, num_rows, K, bias_ptr, hidden_ptr, inner,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, FORMAT: tl.constexpr, GROUP_SIZE: tl.constexpr, EVEN_K: tl.constexpr, BY_BITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    pairs = (experts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_tokens)
    expert, pair, mask, block, is_live = own_tile(*pairs, tl.cdiv(inner, COLUMNS), BLOCK_M, TOP_K, CHOICES, GROUP, FORM)
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
    pairs = (experts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_tokens)
    expert, pair, mask, block, is_live = own_tile(*pairs, tl.cdiv(width, BLOCK_N), BLOCK_M, TOP_K, CHOICES, GROUP, FORM)
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
    """[A, I]: the activated up projection of every pair, in the order of pairs. Raises PerfmodelError for e4m3 on a
    device that knows no such numbers."""
    up, gates = layer.up_EFC, 2 if layer.gated else 1
    inner = up.shape[1] // gates
    hidden_AI = torch.empty(placement.experts_TX.numel(), inner, dtype=x_TC.dtype, device=x_TC.device)
    own = (layer.up_bias_EF, hidden_AI)
    operand, matrix = _matrix(up, x_TC)

    def run(config: TileConfig) -> None:
        columns = config.sizes["BLOCK_N"] // (1 if operand is None else gates)
        constants = _constants(placement, operand, x_TC, config) | {"ACTIVATION": layer.activation}
        grid = (placement.num_tiles * triton.cdiv(inner, columns),)
        if operand is None:
            kernel, args = _up_kernel, (*matrix[:2], *own, x_TC.shape[1], inner, *matrix[2:])
        else:
            kernel, args = _up_stored_kernel, (*matrix, *own, inner)
        launch(kernel, grid, *placement.arguments, *args, options=config.options, **constants, GATED=layer.gated)

    _run_in_tiles("up", up, operand, placement, x_TC, gates, forced, run)
    return hidden_AI


def grouped_down(
    hidden_AI: Tensor, weights_TX: Tensor, placement: ExpertRows, layer: ExpertLayer, forced: TileConfig | None = None
) -> Tensor:
    """[T, C]: the weighted sum of each token's experts, in hidden's dtype."""
    down, weights_TX = layer.down_ECI, weights_TX.contiguous()
    (num_tokens, top_k), (_, width, inner) = placement.experts_TX.shape, down.shape
    out_TC = torch.empty(num_tokens, width, dtype=hidden_AI.dtype, device=hidden_AI.device)
    operand, matrix = _matrix(down, hidden_AI)
    if placement.form == "one" and forced is None and operand is None:
        block = max(16, min(1024, triton.next_power_of_2(inner)))
        launch(
            _down_one_kernel, (triton.cdiv(width, _ONE_COLUMNS),),
            placement.experts_TX, *matrix[:2], layer.down_bias_EC, weights_TX, out_TC, width, inner, *matrix[3:],
            options=Options(num_warps=8, num_stages=1),
            TOP_K=top_k, EVEN_K=inner % block == 0, BLOCK_N=_ONE_COLUMNS, BLOCK_K=block,
        )  # fmt: skip
        return out_TC

    def run(config: TileConfig) -> None:
        splits = moe_tiles.num_splits(num_tokens, placement.num_experts, top_k, width, inner, config)
        dtype, parts = torch.float32 if splits > 1 else out_TC.dtype, top_k * splits
        # Pairs without room write nothing.
        new = torch.empty if placement.room is None else torch.zeros
        y = new(num_tokens * parts, width, dtype=dtype, device=out_TC.device)
        constants = _constants(placement, operand, hidden_AI, config) | {"SPLITS": splits}
        grid = (placement.num_tiles * triton.cdiv(width, config.sizes["BLOCK_N"]), splits)
        own = (layer.down_bias_EC, weights_TX, y, width)
        if operand is None:
            kernel, args = _down_kernel, (*matrix[:2], *own, inner, *matrix[3:])
        else:
            kernel, args = _down_stored_kernel, (*matrix, *own)
        launch(kernel, grid, *placement.arguments, *args, options=config.options, **constants)
        rows = triton.next_power_of_2(parts)
        block = max(16, min(triton.next_power_of_2(width), 4096 // rows))
        sizes, options = {"PARTS": parts, "ROWS": rows, "BLOCK": block}, Options(num_warps=4, num_stages=1)
        launch(_combine_kernel, (num_tokens, triton.cdiv(width, block)), y, out_TC, width, options=options, **sizes)

    _run_in_tiles("down", down, operand, placement, hidden_AI, 1, forced, run)
    return out_TC


def _matrix(weight: Tensor | ExpertWeight, x_AK: Tensor) -> tuple[Operand | None, tuple[Any, ...]]:
    """(what is known of a stored matrix; x, quantised if the format says so, the matrix, and their strides)."""
    if isinstance(weight, Tensor):
        return None, (x_AK, weight, x_AK.stride(0), weight.stride(0), weight.stride(1))
    check_format(weight.stacked, x_AK.device)
    operand = operand_of(weight.stacked)
    values, scales = quantize_tokens(x_AK, operand) if operand.meets_codes else (x_AK, None)
    return operand, (values, scales, values.stride(0), *operand.arguments, *operand.shape)


def _constants(placement: ExpertRows, operand: Operand | None, x_AK: Tensor, config: TileConfig) -> dict[str, Any]:
    depth = config.sizes["BLOCK_K"]
    own = {"EVEN_K": x_AK.shape[1] % depth == 0} if operand is None else operand.constants(x_AK, depth)
    return {**placement.constants, **own, **config.sizes}


def _run_in_tiles(
    product: str,
    weight: Tensor | ExpertWeight,
    operand: Operand | None,
    placement: ExpertRows,
    x_AK: Tensor,
    gates: int,
    forced: TileConfig | None,
    run: Callable[[TileConfig], None],
) -> None:
    """Runs `up` or `down` with the tile that is forced, or the one that fits the problem."""
    few = len(placement.experts_TX) if placement.pairs is None and product == "down" else 0
    rows = (placement.rows, placement.form, placement.room, few)
    problem: tuple[object, ...] = (*rows, weight.shape, x_AK.dtype, str(forced or ""))
    if operand is None:
        kernel, law = f"moe_{product}", moe_tiles.shared_bytes(gates, x_AK.element_size())
        listing = partial(moe_tiles.candidates, product, placement.rows, capability_of(x_AK.device))
    else:
        kernel, law = f"moe_{product}_stored", partial(stored_bytes, operand, x_AK.element_size())
        listing = partial(moe_tiles.stored_candidates, placement.rows, operand, capability_of(x_AK.device))
        problem = (*problem, *operand.problem)
    run(pick(kernel, problem, (lambda: [forced]) if forced else listing, law, run, x_AK.device))
