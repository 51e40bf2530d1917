"""Choice of the next token: the most likely one, or one drawn with a given uniform number.

What is drawn from is set by a threshold on probabilities, not by ranks: equal logits are kept or left together.

    p       = softmax(logits / temperature)
    top-k:  p >= the k-th largest p
    top-p:  p >= the largest t for which the kept p with p >= t sum up to top_p of all that top-k kept
    token:  the first in the vocabulary's order at which the sum of kept p exceeds u times their total

The order of the vocabulary instead of a sorted one is as good for drawing, and needs no sort.
"""

__all__ = ["greedy", "sample_top_k_top_p"]

import torch
from torch import Tensor


def greedy(logits_SV: Tensor) -> Tensor:
    """The index of each row's largest logit, [S]; the first of equal ones."""
    return logits_SV.argmax(dim=-1)


def sample_top_k_top_p(
    logits_SV: Tensor, temperature_S: Tensor, top_k_S: Tensor, top_p_S: Tensor, uniform_S: Tensor
) -> Tensor:
    """One token for each row, int64 [S].

    temperature_S: fp32; 0 takes the most likely token, the first of equal ones
    top_k_S:       int32; how many tokens to draw from, 0 for all
    top_p_S:       fp32; which share of the probability, 1 for all
    uniform_S:     fp32 in [0, 1)
    """
    is_greedy_S = temperature_S <= 0
    inverse_S = 1.0 / torch.where(is_greedy_S, 1.0, temperature_S)
    logits_SV = logits_SV.float()
    weights_SV = ((logits_SV - logits_SV.amax(dim=1, keepdim=True)) * inverse_S[:, None]).exp()
    sorted_SV = weights_SV.sort(dim=1, descending=True).values
    vocab = logits_SV.shape[1]
    kept_S = torch.where((top_k_S <= 0) | (top_k_S > vocab), vocab, top_k_S).long()
    kept_S = torch.where(is_greedy_S, 1, kept_S)
    kth_S = sorted_SV.gather(1, kept_S[:, None] - 1)
    sorted_SV = torch.where(sorted_SV >= kth_S, sorted_SV, 0.0).double()
    sums_SV = sorted_SV.cumsum(dim=1)
    wanted_S = top_p_S.double()[:, None] * sums_SV[:, -1:]
    last_S = (sums_SV < wanted_S).sum(dim=1, keepdim=True).clamp_max(vocab - 1)
    threshold_S = torch.maximum(kth_S.double(), torch.where(top_p_S[:, None] < 1, sorted_SV.gather(1, last_S), 0.0))
    drawn_SV = torch.where(weights_SV.double() >= threshold_S, weights_SV.double(), 0.0).cumsum(dim=1)
    target_S = torch.where(is_greedy_S, 0.0, uniform_S).double()[:, None] * drawn_SV[:, -1:]
    return (drawn_SV <= target_S).sum(dim=1).clamp_max(vocab - 1)
