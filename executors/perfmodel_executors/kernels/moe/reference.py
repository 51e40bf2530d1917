"""Mixture of experts: softmax top-k routing, then each touched expert on its own tokens, by its format's linear layer.

The time of the grouped experts is a sum over distinct experts of (a constant + their weights), plus the tokens.
"""

__all__ = ["grouped_experts", "route"]

from functools import cache

import torch
from torch import Tensor

from perfmodel_executors.kernels.apply_linear import apply_linear
from perfmodel_executors.kernels.dispatch import load_kernels
from perfmodel_executors.kernels.moe.layer import ExpertLayer
from perfmodel_executors.kernels.swiglu.reference import activate

_torch_kernels = cache(load_kernels)


def route(logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(weights, expert ids), both [T, top_k]: softmax over all experts, the top_k kept and renormalised to 1."""
    probabilities_TE = torch.softmax(logits_TE.float(), dim=-1)
    weights_TX, experts_TX = torch.topk(probabilities_TE, top_k, dim=-1)
    return weights_TX / weights_TX.sum(dim=-1, keepdim=True), experts_TX


def grouped_experts(x_TC: Tensor, weights_TX: Tensor, experts_TX: Tensor, layer: ExpertLayer) -> Tensor:
    """sum over each token's experts of weight * down(act(up(x))), [T, C]; accumulated in x's dtype."""
    kernels, top_k = _torch_kernels(), experts_TX.shape[1]
    order = torch.argsort(experts_TX.flatten(), stable=True)
    tokens = torch.div(order, top_k, rounding_mode="floor")
    counts: list[int] = torch.bincount(experts_TX.flatten(), minlength=layer.up_EFC.shape[0]).tolist()
    x_sorted = x_TC[tokens]
    y_sorted = torch.empty_like(x_sorted)
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(begin, begin + count)
            up_bias_F, down_bias_C = (b if b is None else b[expert] for b in (layer.up_bias_EF, layer.down_bias_EC))
            up = apply_linear(kernels, x_sorted[rows], layer.up_EFC[expert], up_bias_F)
            hidden = activate(up, layer.activation, layer.gated)
            y_sorted[rows] = apply_linear(kernels, hidden, layer.down_ECI[expert], down_bias_C)
            begin += count
    y_sorted *= weights_TX.flatten()[order, None].to(y_sorted.dtype)
    return torch.zeros_like(x_TC).index_add_(0, tokens, y_sorted)
