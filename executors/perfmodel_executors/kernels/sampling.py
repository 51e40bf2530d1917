"""Choice of the next token of a batch of sequences, and which drafted tokens the target keeps.

What is drawn from is set by a threshold on probabilities, not by ranks: equal logits are kept or left together.

    w       = exp((logit - largest) / temperature), at most 1; summed as integers, w 2^40, in any order
    min-p:  w >= min_p (the largest is 1)
    top-k:  w >= the k-th largest w
    top-p:  w >= the largest t for which the kept w with w >= t sum up to top_p of all that min-p and top-k kept
    token:  the first in the vocabulary's order at which the sum of kept integers exceeds draw / 2^31 of their total

The order of the vocabulary is as good for drawing as a sorted one. Tokens less likely than 2^-41 of the likeliest are
not drawn: all together at most V 2^-41, 6e-8 of 128k tokens. A logit that is not a number counts as the least there is,
and is counted: a token is one of the vocabulary, whatever a model computes.

Drafts of a sequence are the nodes of a tree: node 0 is the last token that is known already, every other node a drafted
token behind its parent; nodes come after their parents, siblings in the order in which they are tried.

A node is kept if it is the token that the model has behind its parent, its likeliest or the one that the random number
of the token's position draws; the first node of a path that is not ends it. So drafts change no token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perfmodel.ops.elementwise import sample
from perfmodel_executors.kernels.problem import Inputs, Problem, Sizes

DRAW_BITS = 31  # of a random number
WEIGHT_BITS = 40  # of the integer of the largest weight, whose sum over a vocabulary fits 63


def greedy(logits_SV: Tensor, num_nan: Tensor | None = None) -> Tensor:
    """The index of each row's largest logit, [S]; the first of equal ones. num_nan: int64 [1], to which logits that are
    not numbers are added."""
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
    """One token for each row, int64 [S]. draws_S: int64 in 0 .. 2^31 - 1; temperature_S: fp32, 0 takes the first of the
    most likely tokens; top_k_S: int32, 0 for all; top_p_S: fp32, 1 for all; min_p_S: fp32, least probability over the
    largest; num_nan: int64 [1], to which logits that are not numbers are added."""
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


def verify_greedy(
    tokens_RN: Tensor, parents: Sequence[int], chosen_RN: Tensor, num_nodes_R: Tensor | None = None
) -> Tensor:
    """The last node kept of each sequence, int64 [R]; what follows it is `chosen` there. tokens: of the nodes, the
    known one first; parents: -1 for node 0; chosen: the target's most likely token after each node; num_nodes: drafted
    of a sequence, the known token included; None for all."""
    drafted_RN = torch.ones_like(tokens_RN, dtype=torch.bool)
    if num_nodes_R is not None:
        drafted_RN = torch.arange(len(parents), device=tokens_RN.device) < num_nodes_R[:, None]
    kept, depths = [torch.ones_like(drafted_RN[:, 0])], [1]
    for node, parent in list(enumerate(parents))[1:]:
        kept.append(kept[parent] & drafted_RN[:, node] & (tokens_RN[:, node] == chosen_RN[:, parent]))
        depths.append(depths[parent] + 1)
    depth_N = torch.tensor(depths, device=tokens_RN.device)
    last_R: Tensor = (torch.stack(kept, dim=1) * depth_N).argmax(dim=1)  # the first of equally deep ones
    return last_R


_VOCABULARIES = (32000, 128256)
# Share of tokens that may differ: exponentials differ in the last bit, and a drawn number may fall just beside.
_TOLERANCE = 0.01


def tiny(dtype: torch.dtype) -> list[Problem]:
    return [
        _problem("greedy", 3, 100, dtype),
        _problem("greedy", 2, 9000, dtype, num_nan=5000),
        _problem("sample_top_k_top_p", 7, 150, dtype, num_nan=60),
        _problem("sample_top_k_top_p", 7, 9000, dtype),
        *(_tree_problem(rows, parents, dtype) for rows, parents in ((5, (-1, 0, 1, 2)), (4, (-1, 0, 0, 1, 1, 2, 3)))),
    ]


def serving() -> list[Problem]:
    names = ("greedy", "sample_top_k_top_p")
    both = [_problem(name, s, v, torch.float32) for name in names for v in _VOCABULARIES for s in (1, 32, 256)]
    return [*both, _tree_problem(64, (-1, 0, 1, 2, 3), torch.float32)]


def _tree_problem(rows: int, parents: tuple[int, ...], dtype: torch.dtype) -> Problem:
    """Few different tokens, so that many drafted ones are kept."""
    nodes = len(parents)

    def make(inputs: Inputs) -> tuple[Any, ...]:
        tokens_RN, chosen_RN = (inputs.integers(0, 2, rows, nodes) for _ in range(2))
        return tokens_RN, parents, chosen_RN, inputs.integers(1, nodes + 1, rows)

    sizes: Sizes = {"samples": rows, "nodes": nodes, "depth": str(parents), "dtype": str(dtype).removeprefix("torch.")}
    return Problem("verify_greedy", sizes, make, None, 0.0)


def _problem(operator: str, rows: int, vocab: int, dtype: torch.dtype, num_nan: int = 0) -> Problem:
    """num_nan: leading logits of the last row that are no numbers"""

    def make(inputs: Inputs) -> tuple[Tensor | None, ...]:
        logits_SV = inputs.normal(rows, vocab, dtype=dtype, scale=2.0)
        if num_nan:
            logits_SV[-1, :num_nan] = float("nan")
        count = inputs.integers(0, 1, 1)
        if is_greedy:
            return (logits_SV, count)
        # In turn: greedy, everything, top-k, top-p, both at two temperatures, min-p.
        columns = (
            ((0.0, 1.0, 0.7, 1.0, 1.3, 0.8, 1.0), torch.float32),
            ((0, 0, 20, 0, 50, 5, 0), torch.int32),
            ((1.0, 1.0, 1.0, 0.9, 0.8, 0.5, 1.0), torch.float32),
            ((0.0, 0.0, 0.0, 0.0, 0.01, 0.0, 0.2), torch.float32),
        )
        settings = [inputs.of([values[row % 7] for row in range(rows)], kind) for values, kind in columns]
        return logits_SV, inputs.integers(0, 1 << DRAW_BITS, rows), *settings, count

    is_greedy = operator == "greedy"
    return Problem(
        operator,
        {"samples": rows, "vocab": vocab, "dtype": str(dtype).removeprefix("torch.")},
        make,
        sample(rows, vocab, "greedy" if is_greedy else "top_p"),
        0.0 if is_greedy or vocab < min(_VOCABULARIES) else _TOLERANCE,
        {"torch": greedy if is_greedy else sample_top_k_top_p},
    )
