"""Mixture of experts: softmax top-k routing, then each touched expert on its own tokens, by its format's linear layer.

The time of the grouped experts is a sum over distinct experts of (a constant + their weights), plus the tokens.
"""

__all__ = ["capacity_experts", "grouped_biased_experts", "grouped_experts", "route"]

from functools import cache

import torch
from torch import Tensor

from perfmodel_executors.kernels.apply_linear import apply_linear
from perfmodel_executors.kernels.dispatch import load_kernels
from perfmodel_executors.kernels.swiglu.reference import activate
from perfmodel_executors.kernels.weight_formats.experts import ExpertWeight

_torch_kernels = cache(load_kernels)


def route(logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(weights, expert ids), both [T, top_k]: softmax over all experts, the top_k kept and renormalised to 1."""
    probabilities_TE = torch.softmax(logits_TE.float(), dim=-1)
    weights_TX, experts_TX = torch.topk(probabilities_TE, top_k, dim=-1)
    return weights_TX / weights_TX.sum(dim=-1, keepdim=True), experts_TX


def grouped_experts(
    x_TC: Tensor,
    weights_TX: Tensor,
    experts_TX: Tensor,
    up_EFC: Tensor | ExpertWeight,
    down_ECI: Tensor | ExpertWeight,
    activation: str,
    gated: bool,
) -> Tensor:
    """sum over each token's experts of weight * down(act(up(x))), [T, C]; accumulated in x's dtype."""
    matrices = up_EFC, down_ECI
    return grouped_biased_experts(x_TC, weights_TX, experts_TX, *matrices, activation, gated, None, None)


def grouped_biased_experts(
    x_TC: Tensor,
    weights_TX: Tensor,
    experts_TX: Tensor,
    up_EFC: Tensor | ExpertWeight,
    down_ECI: Tensor | ExpertWeight,
    activation: str,
    gated: bool,
    up_bias_EF: Tensor | None,
    down_bias_EC: Tensor | None,
) -> Tensor:
    """As `grouped_experts`, with a bias of each expert behind either product (gpt-oss); None: without."""
    kernels, top_k = _torch_kernels(), experts_TX.shape[1]
    order = torch.argsort(experts_TX.flatten(), stable=True)
    tokens = torch.div(order, top_k, rounding_mode="floor")
    counts: list[int] = torch.bincount(experts_TX.flatten(), minlength=up_EFC.shape[0]).tolist()
    x_sorted = x_TC[tokens]
    y_sorted = torch.empty_like(x_sorted)
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(begin, begin + count)
            biases = (None if bias is None else bias[expert] for bias in (up_bias_EF, down_bias_EC))
            up_bias_F, down_bias_C = biases
            hidden = activate(apply_linear(kernels, x_sorted[rows], up_EFC[expert], up_bias_F), activation, gated)
            y_sorted[rows] = apply_linear(kernels, hidden, down_ECI[expert], down_bias_C)
            begin += count
    y_sorted *= weights_TX.flatten()[order, None].to(y_sorted.dtype)
    return torch.zeros_like(x_TC).index_add_(0, tokens, y_sorted)


def capacity_experts(
    x_TC: Tensor,
    weights_TX: Tensor,
    experts_TX: Tensor,
    up_EFC: Tensor | ExpertWeight,
    down_ECI: Tensor | ExpertWeight,
    activation: str,
    gated: bool,
    num_rows: int,
) -> Tensor:
    """As `grouped_experts`, where every expert multiplies `num_rows` rows: buffers are padded with zeros, and what
    exceeds them adds nothing. First choices go before second ones, in the order of the tokens.

    Source: Lepikhin et al. 2020 (GShard), algorithm 1.
    """
    kernels, num_experts = _torch_kernels(), up_EFC.shape[0]
    experts_A = experts_TX.T.flatten()
    order_A = torch.argsort(experts_A, stable=True)
    sorted_A = experts_A[order_A]
    starts_E = torch.bincount(experts_A, minlength=num_experts).cumsum(0).roll(1)
    starts_E[0] = 0
    places_A = torch.arange(len(order_A), device=order_A.device) - starts_E[sorted_A]
    has_room_A = places_A < num_rows
    last = num_experts * num_rows  # a row behind the buffers, for what has no room
    slots_A = torch.where(has_room_A, sorted_A * num_rows + places_A, last)
    tokens_A = order_A % len(x_TC)
    buffers_RC = x_TC.new_zeros(last + 1, x_TC.shape[1])
    buffers_RC[slots_A] = x_TC[tokens_A]
    outputs_RC = torch.zeros_like(buffers_RC)
    for expert in range(num_experts):
        rows = slice(expert * num_rows, (expert + 1) * num_rows)
        hidden = activate(apply_linear(kernels, buffers_RC[rows], up_EFC[expert]), activation, gated)
        outputs_RC[rows] = apply_linear(kernels, hidden, down_ECI[expert])
    shares_A = torch.where(has_room_A, weights_TX.T.flatten()[order_A], 0.0)
    parts_AC = outputs_RC[slots_A] * shares_A[:, None].to(x_TC.dtype)
    return torch.zeros_like(x_TC).index_add_(0, tokens_A, parts_AC)
