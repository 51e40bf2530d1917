"""Mixture of experts: softmax top-k routing, then each touched expert on its own tokens.

The time of the grouped experts is a sum over distinct experts of (a constant + their weights), plus the tokens.
"""

__all__ = ["grouped_experts", "route"]

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel_executors.kernels.swiglu.reference import activate


def route(logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(weights, expert ids), both [T, top_k]: softmax over all experts, the top_k kept and renormalised to 1."""
    probabilities_TE = torch.softmax(logits_TE.float(), dim=-1)
    weights_TX, experts_TX = torch.topk(probabilities_TE, top_k, dim=-1)
    return weights_TX / weights_TX.sum(dim=-1, keepdim=True), experts_TX


def grouped_experts(
    x_TC: Tensor,
    weights_TX: Tensor,
    experts_TX: Tensor,
    up_EFC: Tensor,
    down_ECI: Tensor,
    activation: str,
    gated: bool,
) -> Tensor:
    """sum over each token's experts of weight * down(act(up(x))), [T, C]; accumulated in x's dtype."""
    top_k = experts_TX.shape[1]
    order = torch.argsort(experts_TX.flatten(), stable=True)
    tokens = torch.div(order, top_k, rounding_mode="floor")
    counts: list[int] = torch.bincount(experts_TX.flatten(), minlength=up_EFC.shape[0]).tolist()
    x_sorted = x_TC[tokens]
    y_sorted = torch.empty_like(x_sorted)
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(begin, begin + count)
            hidden = activate(functional.linear(x_sorted[rows], up_EFC[expert]), activation, gated)
            y_sorted[rows] = functional.linear(hidden, down_ECI[expert])
            begin += count
    y_sorted *= weights_TX.flatten()[order, None].to(y_sorted.dtype)
    return torch.zeros_like(x_TC).index_add_(0, tokens, y_sorted)
