"""hidden[pair] = act(x[token] gate^T) * (x[token] up^T): both in one program, the activation before the store."""

__all__ = ["grouped_up"]

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import launch
from perfmodel_executors.kernels.moe.layer import ExpertLayer
from perfmodel_executors.kernels.moe.triton.tile import ExpertRows, own_tile
from perfmodel_executors.kernels.moe.triton.tiling import candidates, shared_bytes
from perfmodel_executors.kernels.swiglu.triton import act, act_gated
from perfmodel_executors.kernels.tiles import TileConfig, capability_of, pick


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
