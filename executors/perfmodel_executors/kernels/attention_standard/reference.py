"""Causal attention of one prompt with the scores in memory: a product, a softmax, a product."""

__all__ = ["attention_standard"]

import math

import torch
from torch import Tensor


def attention_standard(q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(H)) v, [T, N, H_v]; the queries are the last T of the L tokens.

    Scores and weights are kept in the dtype of `q`, as the kernels between which they pass store them.
    """
    (num_queries, num_heads, head_dim), num_keys = q_TNH.shape, k_LKH.shape[0]
    group = num_heads // k_LKH.shape[1]
    k_NHL = k_LKH.repeat_interleave(group, 1).permute(1, 2, 0)
    scores_NTL = torch.bmm(q_TNH.transpose(0, 1), k_NHL) * (1 / math.sqrt(head_dim))
    ahead = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_TNH.device).triu(num_keys - num_queries + 1)
    weights_NTL = torch.softmax(scores_NTL.masked_fill_(ahead, -math.inf), dim=-1)
    return torch.bmm(weights_NTL, v_LKH.repeat_interleave(group, 1).transpose(0, 1)).transpose(0, 1)
