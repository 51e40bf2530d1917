"""Choice of the next token: the most likely one, or one drawn with a given random number.

What is drawn from is set by a threshold on probabilities, not by ranks: equal logits are kept or left together.

    w       = exp((logit - largest) / temperature), at most 1; summed as integers, w 2^40, in any order
    min-p:  w >= min_p (the largest is 1)
    top-k:  w >= the k-th largest w
    top-p:  w >= the largest t for which the kept w with w >= t sum up to top_p of all that min-p and top-k kept
    token:  the first in the vocabulary's order at which the sum of kept integers exceeds draw / 2^31 of their total

The order of the vocabulary instead of a sorted one is as good for drawing, and needs no sort. Tokens less likely than
2^-41 of the likeliest are not drawn: all together at most V 2^-41, 6e-8 of 128k tokens.

A logit that is not a number counts as the least there is, and is counted, so that a run can say so: a token is one of
the vocabulary, whatever a model computes.
"""

__all__ = ["DRAW_BITS", "WEIGHT_BITS", "greedy", "sample_top_k_top_p"]

import torch
from torch import Tensor

DRAW_BITS = 31  # of a random number
WEIGHT_BITS = 40  # of the integer of the largest weight, whose sum over a vocabulary fits 63


def greedy(logits_SV: Tensor, num_nan: Tensor | None = None) -> Tensor:
    """The index of each row's largest logit, [S]; the first of equal ones.

    num_nan: int64 [1], to which logits that are not numbers are added
    """
    return _numbers(logits_SV, num_nan).argmax(dim=-1)


def sample_top_k_top_p(
    logits_SV: Tensor,
    draws_S: Tensor,
    temperature_S: Tensor,
    top_k_S: Tensor | None = None,
    top_p_S: Tensor | None = None,
    min_p_S: Tensor | None = None,
    num_nan: Tensor | None = None,
) -> Tensor:
    """One token for each row, int64 [S].

    draws_S:       int64 in 0 .. 2^31 - 1
    temperature_S: fp32; 0 takes the most likely token, the first of equal ones
    top_k_S:       int32; how many tokens to draw from, 0 for all
    top_p_S:       fp32; which share of the probability, 1 for all
    min_p_S:       fp32; the least probability over the largest, 0 for all
    num_nan:       int64 [1], to which logits that are not numbers are added
    """
    logits_SV = _numbers(logits_SV, num_nan).float()
    is_greedy_S1 = (temperature_S <= 0)[:, None]
    inverse_S1 = 1.0 / torch.where(is_greedy_S1, 1.0, temperature_S[:, None])
    largest_S1 = logits_SV.amax(dim=1, keepdim=True)
    weights_SV = torch.where(logits_SV == largest_S1, 1.0, ((logits_SV - largest_S1) * inverse_S1).exp())
    least_S1 = torch.zeros_like(inverse_S1) if min_p_S is None else min_p_S[:, None]
    if top_k_S is not None:
        least_S1 = torch.maximum(least_S1, _kth_largest(weights_SV, top_k_S))
    if top_p_S is not None:
        least_S1 = torch.maximum(least_S1, _nucleus(weights_SV, least_S1, top_p_S))
    least_S1 = torch.where(is_greedy_S1, 1.0, least_S1)
    sums_SV = torch.where(weights_SV >= least_S1, _integers(weights_SV), 0).cumsum(dim=1)
    draws_S1 = torch.where(is_greedy_S1, 0, draws_S[:, None])
    high_S1, low_S1 = sums_SV[:, -1:] >> DRAW_BITS, sums_SV[:, -1:] & ((1 << DRAW_BITS) - 1)
    target_S1 = high_S1 * draws_S1 + (low_S1 * draws_S1 >> DRAW_BITS)
    return (sums_SV <= target_S1).sum(dim=1)


def _numbers(logits_SV: Tensor, num_nan: Tensor | None) -> Tensor:
    is_nan_SV = logits_SV.isnan()
    if num_nan is not None:
        num_nan += is_nan_SV.sum()
    return logits_SV.masked_fill(is_nan_SV, -torch.inf)


def _integers(weights_SV: Tensor) -> Tensor:
    return (weights_SV * float(1 << WEIGHT_BITS)).long()


def _kth_largest(weights_SV: Tensor, top_k_S: Tensor) -> Tensor:
    """The least weight that top-k keeps, [S, 1]; 0 where it keeps all."""
    vocab = weights_SV.shape[1]
    is_all_S = (top_k_S <= 0) | (top_k_S >= vocab)
    rank_S1 = torch.where(is_all_S, vocab, top_k_S).long()[:, None] - 1
    kth_S1 = weights_SV.sort(dim=1, descending=True).values.gather(1, rank_S1)
    return torch.where(is_all_S[:, None], 0.0, kth_S1)


def _nucleus(weights_SV: Tensor, least_S1: Tensor, top_p_S: Tensor) -> Tensor:
    """The least weight that top-p keeps of those from `least` on, [S, 1]; 0 where it keeps all."""
    sorted_SV = weights_SV.sort(dim=1, descending=True).values
    sums_SV = torch.where(sorted_SV >= least_S1, _integers(sorted_SV), 0).cumsum(dim=1)
    wanted_S1 = (sums_SV[:, -1:].double() * top_p_S.double()[:, None]).long().clamp_min(1)
    last_S1 = (sums_SV < wanted_S1).sum(dim=1, keepdim=True).clamp_max(weights_SV.shape[1] - 1)
    return torch.where((top_p_S >= 1)[:, None], 0.0, sorted_SV.gather(1, last_S1))
