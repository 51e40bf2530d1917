"""`Exchange`: who gets a copy of a token that goes to its experts, or returns from them."""

__all__ = ["Exchange", "Route", "distinct_nodes", "distinct_ranks"]

from dataclasses import dataclass
from math import comb
from typing import Literal

from perfmodel.models.architecture import MoEFFN

Route = Literal["node", "rank", "expert"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the bytes of a dispatch or a combine are made of.

    copy_bytes: of all tokens of a rank, once
    route:      one copy for each "node" that has an expert of the token, handed on there over the scale-up link; for
                each "rank"; for each "expert"; None: the first or the last, whichever is faster
    """

    ffn: MoEFFN
    copy_bytes: float
    route: Route | None = None


def distinct_ranks(ffn: MoEFFN, num_ranks: int) -> float:
    """Expected distinct ranks that a token's k experts live on, when E/R experts live on each.

        R (1 - C(E - E/R, k) / C(E, k))

    With group-limited routing the token reaches only top_k_groups / num_groups of experts and ranks.
    Source: inclusion of a rank, hypergeometric.
    """
    fraction = ffn.top_k_groups / ffn.num_groups
    return _distinct(ffn, max(1.0, num_ranks * fraction), ffn.num_experts * fraction)


def distinct_nodes(ffn: MoEFFN, num_nodes: int) -> float:
    """Expected distinct nodes that a token's k experts live on.

    As of ranks, but a node may hold several of the G groups of which a token reaches t. With g = G / N of them, a node
    is missed with the mean of C(E t / G - j E / G, k) / C(E t / G, k) over the j of its groups that are among the t,
    hypergeometric as well. Where nodes cut groups, the most there can be.
    """
    groups, chosen = ffn.num_groups, ffn.top_k_groups
    if chosen == groups:
        return _distinct(ffn, float(num_nodes), float(ffn.num_experts))
    if groups % num_nodes:
        return distinct_ranks(ffn, num_nodes) if num_nodes > groups else float(min(num_nodes, ffn.top_k))
    own, size = groups // num_nodes, ffn.num_experts / groups
    missed = 0.0
    for j in range(min(own, chosen) + 1):
        chance = comb(own, j) * comb(groups - own, chosen - j) / comb(groups, chosen)
        missed += chance * _missed(ffn, size * chosen, size * j)
    return num_nodes * (1.0 - missed)


def _distinct(ffn: MoEFFN, parts: float, reachable: float) -> float:
    return parts * (1.0 - _missed(ffn, reachable, reachable / parts))


def _missed(ffn: MoEFFN, reachable: float, local: float) -> float:
    """Chance that none of k among `reachable` experts is one of `local`."""
    missed = 1.0
    for i in range(min(ffn.top_k, ffn.num_experts)):
        missed *= max(0.0, (reachable - local - i) / (reachable - i))
    return missed
