"""How the logits of a router become each token's experts and their weights."""

__all__ = ["LEAST_SUM", "PLAIN_RULE", "RoutingRule"]

from typing import NamedTuple

LEAST_SUM = 1e-20  # of scores, before weights are divided by it (DeepSeek-V3)


class RoutingRule(NamedTuple):
    """scoring:      softmax over all experts, or the sigmoid of each
    renormalizes: the weights of the chosen experts are divided by their sum
    scale:        and then multiplied by this
    num_groups:   of neighbouring experts; a token's are in the best `top_k_groups` of them
    groups_by:    the score of a group: that of its best expert (max), or the sum of its best two (top2)
    """

    scoring: str = "softmax"
    renormalizes: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_k_groups: int = 1
    groups_by: str = "max"


PLAIN_RULE = RoutingRule()
