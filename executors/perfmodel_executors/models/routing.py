"""From a router's logits to each token's experts and their weights, by the rules of the model's `Routing`."""

__all__ = ["route_tokens"]

import math

import torch
from torch import Tensor

from perfmodel.models.architecture import DEFAULT_ROUTING, MoEFFN
from perfmodel_executors.kernels import Kernels

_LEAST_SUM = 1e-20  # of sigmoids, before weights are divided by it (DeepSeek-V3)


def route_tokens(kernels: Kernels, logits_TE: Tensor, ffn: MoEFFN, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """(weights, expert ids), both [T, top_k].

    bias: one value for each expert: of the logits, or of the choice alone
    """
    routing = ffn.routing
    if bias_E is not None and not routing.bias_chooses:
        logits_TE = logits_TE + bias_E
    if routing == DEFAULT_ROUTING and ffn.num_groups == 1:
        chosen: tuple[Tensor, Tensor] = kernels.route(logits_TE, ffn.top_k)
        return chosen
    logits_TE = logits_TE.float()
    scores_TE = torch.softmax(logits_TE, dim=-1) if routing.scoring == "softmax" else torch.sigmoid(logits_TE)
    choice_TE = scores_TE if bias_E is None or not routing.bias_chooses else scores_TE + bias_E
    if ffn.num_groups > 1:
        choice_TE = _within_best_groups(choice_TE, ffn)
    experts_TX = torch.topk(choice_TE, ffn.top_k, dim=-1).indices
    weights_TX = scores_TE.gather(1, experts_TX)
    if routing.renormalizes:
        weights_TX = weights_TX / (weights_TX.sum(dim=-1, keepdim=True) + _LEAST_SUM)
    return weights_TX * routing.scale, experts_TX


def _within_best_groups(choice_TE: Tensor, ffn: MoEFFN) -> Tensor:
    """Scores of the experts of the best groups; -inf for the others."""
    members_TGM = choice_TE.view(len(choice_TE), ffn.num_groups, -1)
    if ffn.routing.groups_by == "max":
        groups_TG = members_TGM.amax(dim=-1)
    else:
        groups_TG = members_TGM.topk(2, dim=-1).values.sum(dim=-1)
    best = torch.topk(groups_TG, ffn.top_k_groups, dim=-1).indices
    is_best_TG = torch.zeros_like(groups_TG, dtype=torch.bool).scatter_(1, best, True)
    kept_TGM = members_TGM.masked_fill(~is_best_TG[..., None], -math.inf)
    return kept_TGM.flatten(1)
