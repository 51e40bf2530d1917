"""Mixture of experts: routing, then each touched expert on its own tokens, by its format's linear layer.

The time of the grouped experts is a sum over distinct experts of (a constant + their weights), plus the tokens.
"""

__all__ = ["capacity_experts", "grouped_experts", "route"]

import math
from functools import cache

import torch
from torch import Tensor

from perfmodel_executors.kernels.apply_linear import apply_linear
from perfmodel_executors.kernels.dispatch import load_kernels
from perfmodel_executors.kernels.moe.layer import ExpertLayer
from perfmodel_executors.kernels.moe.rule import LEAST_SUM, PLAIN_RULE, RoutingRule
from perfmodel_executors.kernels.swiglu.reference import activate

_torch_kernels = cache(load_kernels)


def route(
    logits_TE: Tensor, top_k: int, rule: RoutingRule = PLAIN_RULE, bias_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(weights, expert ids), both [T, top_k], by the model's rule; bias_E is added to the scores for the choice."""
    logits_TE = logits_TE.float()
    scores_TE = torch.softmax(logits_TE, dim=-1) if rule.scoring == "softmax" else torch.sigmoid(logits_TE)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if rule.num_groups > 1:
        choice_TE = _within_best_groups(choice_TE, rule)
    experts_TX = torch.topk(choice_TE, top_k, dim=-1).indices
    weights_TX = scores_TE.gather(1, experts_TX)
    if rule.renormalizes:
        weights_TX = weights_TX / (weights_TX.sum(dim=-1, keepdim=True) + LEAST_SUM)
    return weights_TX * rule.scale, experts_TX


def _within_best_groups(choice_TE: Tensor, rule: RoutingRule) -> Tensor:
    """Scores of the experts of the best groups; -inf for the others."""
    members_TGM = choice_TE.view(len(choice_TE), rule.num_groups, -1)
    if rule.groups_by == "max":
        groups_TG = members_TGM.amax(dim=-1)
    else:
        groups_TG = members_TGM.topk(2, dim=-1).values.sum(dim=-1)
    best = torch.topk(groups_TG, rule.top_k_groups, dim=-1).indices
    is_best_TG = torch.zeros_like(groups_TG, dtype=torch.bool).scatter_(1, best, True)
    return members_TGM.masked_fill(~is_best_TG[..., None], -math.inf).flatten(1)


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


def capacity_experts(
    x_TC: Tensor,
    weights_TX: Tensor,
    experts_TX: Tensor,
    layer: ExpertLayer,
    num_rows: int,
) -> Tensor:
    """As `grouped_experts`, where every expert multiplies `num_rows` rows: buffers are padded with zeros, and what
    exceeds them adds nothing. First choices go before second ones, in the order of the tokens.

    Source: Lepikhin et al. 2020 (GShard), algorithm 1.
    """
    kernels, num_experts = _torch_kernels(), layer.up_EFC.shape[0]
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
        up = apply_linear(kernels, buffers_RC[rows], layer.up_EFC[expert])
        outputs_RC[rows] = apply_linear(kernels, activate(up, layer.activation, layer.gated), layer.down_ECI[expert])
    shares_A = torch.where(has_room_A, weights_TX.T.flatten()[order_A], 0.0)
    parts_AC = outputs_RC[slots_A] * shares_A[:, None].to(x_TC.dtype)
    return torch.zeros_like(x_TC).index_add_(0, tokens_A, parts_AC)
