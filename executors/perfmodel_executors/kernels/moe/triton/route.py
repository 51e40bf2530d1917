"""Top-k routing in one kernel: every program holds some tokens' logits in registers and takes k maxima from them.

Renormalised over the chosen, softmax over all experts is softmax over the chosen alone: no sum over the others is
needed. Of equal logits the lowest expert id comes first (the reference leaves their order open).
"""

__all__ = ["route"]

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfmodel_executors.kernels.launch import Options, launch

_BLOCK_ELEMENTS = 2048  # logits that a program of four warps holds


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    logits_ptr,
    weights_ptr,
    experts_ptr,
    num_tokens,
    num_experts,
    row_stride,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, EXPERTS)
    choice = tl.arange(0, CHOICES)
    is_token = token < num_tokens
    at = token.to(tl.int64)[:, None] * row_stride + expert[None, :]
    is_expert = (expert < num_experts)[None, :]
    left = tl.load(logits_ptr + at, mask=is_token[:, None] & is_expert, other=0.0).to(tl.float32)
    left = tl.where(is_expert, left, float("-inf"))
    values = tl.full([BLOCK_T, CHOICES], float("-inf"), tl.float32)
    ids = tl.zeros([BLOCK_T, CHOICES], tl.int32)
    for i in tl.static_range(TOP_K):
        value, index = tl.max(left, axis=1, return_indices=True, return_indices_tie_break_left=True)
        is_now = (choice == i)[None, :]
        values = tl.where(is_now, value[:, None], values)
        ids = tl.where(is_now, index[:, None], ids)
        left = tl.where(expert[None, :] == index[:, None], float("-inf"), left)
    shares = tl.exp(values - tl.max(values, axis=1)[:, None])
    weights = shares / tl.sum(shares, axis=1)[:, None]
    at = token[:, None] * TOP_K + choice[None, :]
    mask = is_token[:, None] & (choice < TOP_K)[None, :]
    tl.store(weights_ptr + at, weights, mask=mask)
    tl.store(experts_ptr + at, ids.to(tl.int64), mask=mask)


def route(logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(weights, expert ids), both [T, top_k]: softmax over all experts, the top_k kept and renormalised to 1."""
    num_tokens, num_experts = logits_TE.shape
    weights_TX = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits_TE.device)
    experts_TX = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    width = max(2, triton.next_power_of_2(num_experts))
    rows = max(1, min(8, triton.next_power_of_2(num_tokens), _BLOCK_ELEMENTS // width))
    launch(
        _route_kernel,
        (triton.cdiv(num_tokens, rows),),
        *(logits_TE, weights_TX, experts_TX, num_tokens, num_experts, logits_TE.stride(0)),
        options=Options(num_warps=max(1, min(4, rows * width // 256)), num_stages=1),
        TOP_K=top_k,
        CHOICES=triton.next_power_of_2(top_k),
        EXPERTS=width,
        BLOCK_T=rows,
    )
    return weights_TX, experts_TX
