"""From a router's logits to each token's experts and their weights, by the rules of the model's `Routing`."""

from torch import Tensor

from perfmodel.models.architecture import MoEFFN
from perfmodel_executors.kernels import Kernels
from perfmodel_executors.kernels.moe import RoutingRule


def route_tokens(kernels: Kernels, logits_TE: Tensor, ffn: MoEFFN, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """(weights, expert ids), both [T, top_k].

    bias: one value for each expert: of the logits, or of the choice alone
    """
    own = ffn.routing
    if bias_E is not None and not own.bias_chooses:
        logits_TE, bias_E = logits_TE + bias_E, None
    rule = RoutingRule(own.scoring, own.renormalizes, own.scale, ffn.num_groups, ffn.top_k_groups, own.groups_by)
    chosen: tuple[Tensor, Tensor] = kernels.route(logits_TE, ffn.top_k, rule, bias_E)
    return chosen
