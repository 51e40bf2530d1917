"""Causal attention of one sequence with the scores in memory: a product, a softmax, a product."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.ops.attention.prefill import Heads, standard_prefill
from perfmodel_executors.kernels.kv_pages import NAMES, TOLERANCE
from perfmodel_executors.kernels.problem import Inputs, Problem, by_backend


def attention_standard(q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(H)) v, [T, N, H_v], of the last T of the L tokens. Scores and weights are kept in q's dtype,
    as kernels between which they pass store them; the masked half is computed and thrown away."""
    (num_queries, num_heads, head_dim), (num_keys, kv_heads, _) = q_TNH.shape, k_LKH.shape
    q_KRH = q_TNH.view(num_queries, kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    scores_KRL = torch.bmm(q_KRH, k_LKH.permute(1, 2, 0)) * (1 / math.sqrt(head_dim))
    if num_queries > 1:
        ahead = q_TNH.new_ones(num_queries, num_keys, dtype=torch.bool).triu(num_keys - num_queries + 1)
        scores_KRL.view(kv_heads, -1, num_queries, num_keys).masked_fill_(ahead, -math.inf)
    weights_KRL = torch.softmax(scores_KRL, dim=-1)
    out_KGTH = torch.bmm(weights_KRL, v_LKH.transpose(0, 1)).view(kv_heads, -1, num_queries, v_LKH.shape[2])
    return out_KGTH.permute(2, 0, 1, 3).reshape(num_queries, num_heads, -1)


def tiny(dtype: torch.dtype) -> list[Problem]:
    return [_problem(37, 0, (4, 2), (16, 24), dtype), _problem(9, 61, (3, 1), (20, 16), dtype)]


def serving() -> list[Problem]:
    return [_problem(n, 0, (32, 8), (128, 128), torch.bfloat16) for n in (2048, 4096, 8192)]


def _problem(new: int, done: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> Problem:
    def make(inputs: Inputs) -> tuple[Tensor, ...]:
        shapes = ((new, heads[0], dims[0]), (new + done, heads[1], dims[0]), (new + done, heads[1], dims[1]))
        return tuple(inputs.normal(*shape, dtype=dtype) for shape in shapes)

    return Problem(
        "attention_standard",
        {"batch_size": 1, "isl": new, "step": done, "num_heads": heads[0], "num_key_value_heads": heads[1],
         "head_dim": dims[0], "v_head_dim": dims[1], "attn_dtype": NAMES[dtype]},
        make,
        standard_prefill([(new, done)], Heads(*heads, *dims, NAMES[dtype], dtype.itemsize, dtype.itemsize)),
        TOLERANCE[dtype],
        {} if done else by_backend(_torch_attention),
    )  # fmt: skip


def _torch_attention(q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q_TNH, k_LKH, v_LKH))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
