"""Causal attention of one sequence with the scores in memory: a product, a softmax, a product."""

__all__ = ["attention_standard"]

import math

import torch
from torch import Tensor


def attention_standard(q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(H)) v, [T, N, H_v]; the queries are the last T of the L tokens.

    Scores and weights are kept in the dtype of `q`, as the kernels between which they pass store them. The masked half
    is computed and thrown away. The query heads of a group are rows of one product, so that keys are read once.
    """
    (num_queries, num_heads, head_dim), (num_keys, kv_heads, _) = q_TNH.shape, k_LKH.shape
    q_KRH = q_TNH.view(num_queries, kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    scores_KRL = torch.bmm(q_KRH, k_LKH.permute(1, 2, 0)) * (1 / math.sqrt(head_dim))
    if num_queries > 1:
        ahead = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_TNH.device).triu(
            num_keys - num_queries + 1
        )
        scores_KRL.view(kv_heads, -1, num_queries, num_keys).masked_fill_(ahead, -math.inf)
    weights_KRL = torch.softmax(scores_KRL, dim=-1)
    out_KGTH = torch.bmm(weights_KRL, v_LKH.transpose(0, 1)).view(kv_heads, -1, num_queries, v_LKH.shape[2])
    return out_KGTH.permute(2, 0, 1, 3).reshape(num_queries, num_heads, -1)
