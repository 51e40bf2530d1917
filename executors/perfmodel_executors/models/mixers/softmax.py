"""Softmax attention: one product for queries, keys, values and the gate; norms; attention; the output's product."""

import math

import torch
from torch import Tensor

from perfmodel.models.architecture import Attention
from perfmodel_executors.kernels.apply_linear import apply_linear
from perfmodel_executors.kernels.kv_pages import KVPages
from perfmodel_executors.models.attention import attend, heads_normed
from perfmodel_executors.models.kept import HeldTokens, KVTiers
from perfmodel_executors.models.mixers.eviction import attend_evicting
from perfmodel_executors.models.mixers.step import MixerStep
from perfmodel_executors.models.mixers.tiers import attend_in_tiers
from perfmodel_executors.models.weights import AttentionWeights


def softmax_attention(
    step: MixerStep, x_TC: Tensor, mixer: Attention, weights: AttentionWeights, pages: KVPages | KVTiers | HeldTokens
) -> Tensor:
    """What the block adds, [T, C]; writes the keys and values of all T tokens into `pages`."""
    kernels, num_tokens = step.kernels, x_TC.shape[0]
    heads, kv_heads, dim, v_dim = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.v_head_dim
    gate = heads * v_dim if mixer.output_gate else 0
    sizes = [heads * dim, kv_heads * dim, kv_heads * v_dim, gate]
    q, k, v, gate_TD = torch.split(apply_linear(kernels, x_TC, weights.qkv, weights.qkv_bias), sizes, dim=-1)
    q_TNH = heads_normed(kernels, q.view(num_tokens, heads, dim), weights.q_norm, step.norm_eps)
    k_TKH = heads_normed(kernels, k.view(num_tokens, kv_heads, dim), weights.k_norm, step.norm_eps)
    if mixer.softmax_scale is not None:  # kernels divide scores by the root
        q_TNH = q_TNH * (mixer.softmax_scale * math.sqrt(dim))
    v_TKH = v.view(num_tokens, kv_heads, v_dim)
    if isinstance(pages, HeldTokens):
        out_TD = attend_evicting(step, mixer, q_TNH, k_TKH, v_TKH, pages).flatten(1)
    elif isinstance(pages, KVTiers):
        out_TD = attend_in_tiers(step, mixer, q_TNH, k_TKH, v_TKH, pages).flatten(1)
    else:
        how = (step.batch, step.rotations, step.is_standard, weights.sinks)
        out_TD = attend(kernels, mixer, q_TNH, k_TKH, v_TKH, pages, *how).flatten(1)
    if gate:
        out_TD = out_TD * torch.sigmoid(gate_TD)
    return apply_linear(kernels, out_TD, weights.out, weights.out_bias)
