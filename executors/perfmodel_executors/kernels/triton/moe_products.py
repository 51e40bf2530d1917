"""hidden[pair] = act(x[token] gate^T) * (x[token] up^T): both in one program, the activation before the store.

out[token] = sum over its pairs of weight * (hidden[pair] down^T).

The product writes each pair's row, times its weight, in parts of the sum over I when few experts are touched; a second
kernel sums a token's rows. One token needs no such rows: a program reads its columns of each chosen expert in turn and
stores the sum, without a second launch.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch
from perfmodel_executors.kernels.moe import ExpertLayer
from perfmodel_executors.kernels.tiles import TileConfig, capability_of, pick
from perfmodel_executors.kernels.triton.moe_tiles import ExpertRows, candidates, num_splits, own_tile, shared_bytes
from perfmodel_executors.kernels.triton.swiglu import act, act_gated


@triton.jit(do_not_specialize=["num_tokens"])
def _up_kernel(
    experts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_tokens, x_ptr, up_ptr, bias_ptr, hidden_ptr, width, inner,
    x_stride, expert_stride, row_stride,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert, pair, mask, block, is_live = own_tile(
        experts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_tokens, tl.cdiv(inner, BLOCK_N), BLOCK_M, TOP_K, CHOICES,
        GROUP, FORM,
    )  # fmt: skip
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


def grouped_up(x_TC: Tensor, placement: ExpertRows, layer: ExpertLayer, forced: TileConfig | None = None) -> Tensor:
    """[A, I]: the activated up projection of every pair, in the order of pairs."""
    up_EFC, gated = layer.up_EFC, layer.gated
    assert isinstance(up_EFC, Tensor)
    width, gates = x_TC.shape[1], 2 if gated else 1
    inner = up_EFC.shape[1] // gates
    hidden_AI = torch.empty(placement.experts_TX.numel(), inner, dtype=x_TC.dtype, device=x_TC.device)

    def run(config: TileConfig) -> None:
        launch(
            _up_kernel,
            (placement.num_tiles * triton.cdiv(inner, config.sizes["BLOCK_N"]),),
            *placement.arguments,
            *(x_TC, up_EFC, layer.up_bias_EF, hidden_AI, width, inner),
            *(x_TC.stride(0), up_EFC.stride(0), up_EFC.stride(1)),
            options=config.options,
            **placement.constants,
            ACTIVATION=layer.activation,
            GATED=gated,
            EVEN_K=width % config.sizes["BLOCK_K"] == 0,
            **config.sizes,
        )

    problem = (placement.rows, placement.form, up_EFC.shape, x_TC.dtype, str(forced or ""))

    def listed() -> list[TileConfig]:
        return [forced] if forced else candidates("up", placement.rows, capability_of(x_TC.device))

    law = shared_bytes(gates, x_TC.element_size())
    run(pick("moe_up", problem, listed, law, run, x_TC.device))
    return hidden_AI


_ONE_COLUMNS = 8  # that a program of the kernel for one token sums


@triton.jit(do_not_specialize=["num_tokens"])
def _down_kernel(
    experts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_tokens, hidden_ptr, down_ptr, bias_ptr, weights_ptr, y_ptr,
    width, inner, expert_stride, row_stride,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert, pair, mask, block, is_live = own_tile(
        experts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_tokens, tl.cdiv(width, BLOCK_N), BLOCK_M, TOP_K, CHOICES,
        GROUP, FORM,
    )  # fmt: skip
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


def grouped_down(
    hidden_AI: Tensor,
    weights_TX: Tensor,
    placement: ExpertRows,
    layer: ExpertLayer,
    forced: TileConfig | None = None,
) -> Tensor:
    """[T, C]: the weighted sum of each token's experts, in hidden's dtype."""
    down_ECI, weights_TX = layer.down_ECI, weights_TX.contiguous()
    assert isinstance(down_ECI, Tensor)
    operands = (hidden_AI, down_ECI, layer.down_bias_EC, weights_TX)
    strides = (down_ECI.stride(0), down_ECI.stride(1))
    out_TC = torch.empty(weights_TX.shape[0], down_ECI.shape[1], dtype=hidden_AI.dtype, device=hidden_AI.device)
    if placement.form == "one" and forced is None:
        _down_one(placement.experts_TX, *operands, out_TC)
        return out_TC
    _, width, inner = down_ECI.shape

    def run(config: TileConfig) -> None:
        def product(y: Tensor, splits: int) -> None:
            launch(
                _down_kernel,
                (placement.num_tiles * triton.cdiv(width, config.sizes["BLOCK_N"]), splits),
                *(*placement.arguments, *operands, y, width, inner, *strides),
                options=config.options,
                **placement.constants,
                SPLITS=splits,
                EVEN_K=inner % config.sizes["BLOCK_K"] == 0,
                **config.sizes,
            )

        sum_in_splits(product, placement, inner, config, out_TC)

    few = weights_TX.shape[0] if placement.form == "few" else 0
    problem = (placement.rows, placement.form, few, down_ECI.shape, out_TC.dtype, str(forced or ""))

    def listed() -> list[TileConfig]:
        return [forced] if forced else candidates("down", placement.rows, capability_of(out_TC.device))

    law = shared_bytes(1, hidden_AI.element_size())
    run(pick("moe_down", problem, listed, law, run, out_TC.device))
    return out_TC


def _down_one(
    experts_1X: Tensor,
    hidden_XI: Tensor,
    down_ECI: Tensor,
    bias_EC: Tensor | None,
    weights_1X: Tensor,
    out_1C: Tensor,
) -> None:
    _, width, inner = down_ECI.shape
    block = max(16, min(1024, triton.next_power_of_2(inner)))
    tensors = (experts_1X, hidden_XI, down_ECI, bias_EC, weights_1X, out_1C)
    launch(
        _down_one_kernel,
        (triton.cdiv(width, _ONE_COLUMNS),),
        *(*tensors, width, inner, down_ECI.stride(0), down_ECI.stride(1)),
        options=Options(num_warps=8, num_stages=1),
        TOP_K=experts_1X.shape[1],
        EVEN_K=inner % block == 0,
        BLOCK_N=_ONE_COLUMNS,
        BLOCK_K=block,
    )


def sum_in_splits(
    product: Callable[[Tensor, int], None], placement: ExpertRows, inner: int, config: TileConfig, out_TC: Tensor
) -> None:
    """Each token's rows of a product over `inner` values, summed into `out_TC`.

    product: writes a row for each pair and part of the sum, given where and in how many parts
    """
    (num_tokens, top_k), width = placement.experts_TX.shape, out_TC.shape[1]
    splits = num_splits(num_tokens, placement.num_experts, top_k, width, inner, config)
    dtype = torch.float32 if splits > 1 else out_TC.dtype
    y = torch.empty(num_tokens * top_k * splits, width, dtype=dtype, device=out_TC.device)
    product(y, splits)
    _combine(y, out_TC, top_k * splits)


def _combine(y: Tensor, out_TC: Tensor, parts: int) -> None:
    """The sum of each token's `parts` rows of y."""
    num_tokens, width = out_TC.shape
    rows = triton.next_power_of_2(parts)
    block = max(16, min(triton.next_power_of_2(width), 4096 // rows))
    launch(
        _combine_kernel,
        (num_tokens, triton.cdiv(width, block)),
        *(y, out_TC, width),
        options=Options(num_warps=4, num_stages=1),
        PARTS=parts,
        ROWS=rows,
        BLOCK=block,
    )
