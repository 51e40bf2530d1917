"""Which drafted tokens the target keeps, and the token that it puts after them.

Drafts of a sequence are the nodes of a tree: node 0 is the last token that is known already, every other node a
drafted token behind its parent. A chain is a tree with one child a node. Nodes come after their parents, siblings in
the order in which they are tried.

greedy:      a node is kept if it is its parent's most likely successor; the first node of a path that is not ends it.
stochastic:  at a node with the target's distribution p, its children are tried one after the other: a child x drawn
             from q is kept with probability min(1, p(x) / q(x)); if it is not, p becomes max(p - q, 0), normalised,
             and the next child is tried. When none is kept, the next token is drawn from what p has become; after a
             leaf from p itself. The tokens are distributed as those of the target alone, whatever q is.

Sources: Leviathan et al. 2023, algorithm 1, and Chen et al. 2023 (chains); Miao et al. 2024 (SpecInfer), algorithm 2
(trees). Siblings must be drawn independently of one another, given their q. Candidates that are not drawn at all (the k
most likely ones, a phrase found in the text) have a q that is 1 at the candidate.
"""

__all__ = ["verify_greedy", "verify_stochastic"]

from collections.abc import Sequence

import torch
from torch import Tensor

_TINY = 1e-30  # below it, nothing of a distribution is left


def verify_greedy(
    tokens_RN: Tensor, parents: Sequence[int], chosen_RN: Tensor, num_nodes_R: Tensor | None = None
) -> Tensor:
    """The last node kept of each sequence, int64 [R]; what follows it is `chosen` there.

    tokens:    ids of the nodes, the known token first
    parents:   the node before each; -1 for node 0
    chosen:    the target's most likely token after each node
    num_nodes: how many of a sequence's nodes were drafted, the known token included; None for all
    """
    drafted_RN = _drafted(tokens_RN, num_nodes_R)
    kept = [torch.ones_like(drafted_RN[:, 0])]
    depths = [0]
    for node in range(1, len(parents)):
        parent = parents[node]
        kept.append(kept[parent] & drafted_RN[:, node] & (tokens_RN[:, node] == chosen_RN[:, parent]))
        depths.append(depths[parent] + 1)
    depth_N = torch.tensor(depths, device=tokens_RN.device)
    last_R: Tensor = (torch.stack(kept, dim=1) * (depth_N + 1)).argmax(dim=1)  # the first of equally deep ones
    return last_R


def verify_stochastic(
    tokens_RN: Tensor,
    parents: Sequence[int],
    draft_RNV: Tensor,
    target_RNV: Tensor,
    uniform_RN: Tensor,
    num_nodes_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The last node kept of each sequence and the token that follows it, int64 [R] each.

    tokens, parents, num_nodes: as for `verify_greedy`
    draft:   the distribution that each node was drawn from; node 0's is not read
    target:  the target's distribution after each node
    uniform: in [0, 1), independent; node 0's draws the token that follows the last node kept
    """
    drafted_RN = _drafted(tokens_RN, num_nodes_R)
    at_R = torch.zeros_like(tokens_RN[:, 0])
    left_RV = target_RNV[:, 0].double()
    for node in range(1, len(parents)):
        tried_R = (at_R == parents[node]) & drafted_RN[:, node]
        x_R1, q_RV = tokens_RN[:, node : node + 1], draft_RNV[:, node].double()
        ratio_R = (left_RV.gather(1, x_R1) / q_RV.gather(1, x_R1).clamp_min(_TINY))[:, 0]
        kept_R = tried_R & (uniform_RN[:, node] < ratio_R)
        at_R = torch.where(kept_R, node, at_R)
        left_RV = torch.where((tried_R & ~kept_R)[:, None], _residual(left_RV, q_RV), left_RV)
        left_RV = torch.where(kept_R[:, None], target_RNV[:, node].double(), left_RV)
    sums_RV = left_RV.cumsum(dim=1)
    wanted_R1 = uniform_RN[:, :1].double() * sums_RV[:, -1:]
    next_R = (sums_RV <= wanted_R1).sum(dim=1).clamp_max(left_RV.shape[1] - 1)
    return at_R, next_R


def _residual(p_RV: Tensor, q_RV: Tensor) -> Tensor:
    """max(p - q, 0), normalised; p where nothing is left, which no rejection comes to but by rounding."""
    over_RV = (p_RV - q_RV).clamp_min(0.0)
    total_R1 = over_RV.sum(dim=1, keepdim=True)
    return torch.where(total_R1 > _TINY, over_RV / total_R1.clamp_min(_TINY), p_RV)


def _drafted(tokens_RN: Tensor, num_nodes_R: Tensor | None) -> Tensor:
    """Which nodes are there, bool [R, N]."""
    num_nodes = tokens_RN.shape[1]
    if num_nodes_R is None:
        return torch.ones_like(tokens_RN, dtype=torch.bool)
    return torch.arange(num_nodes, device=tokens_RN.device) < num_nodes_R[:, None]
