"""Softmax attention: to all keys, flash or standard, to a window with sinks, or to blocks. Keys and values are written
first, but in a rolling cache, whose chunks may overwrite what their first queries see; or stay where they are made."""

import math

import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel.models.architecture import Attention
from perfmodel.models.spec import ModelSpec
from perfmodel_executors.kernels import Kernels
from perfmodel_executors.kernels.apply_linear import apply_linear, rows_of
from perfmodel_executors.kernels.attention_prefill import AttentionRule
from perfmodel_executors.kernels.attention_sinks import Ring
from perfmodel_executors.kernels.kv_pages import KVPages
from perfmodel_executors.models.kept import HeldTokens, KVTiers
from perfmodel_executors.models.mixers.eviction import attend_evicting
from perfmodel_executors.models.mixers.striped import attend_striped
from perfmodel_executors.models.mixers.tiers import attend_in_tiers
from perfmodel_executors.models.states import MixerStep
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
        out_TNH = attend_evicting(step, mixer, q_TNH, k_TKH, v_TKH, pages)
    elif isinstance(pages, KVTiers):
        out_TNH = attend_in_tiers(step, mixer, q_TNH, k_TKH, v_TKH, pages)
    else:
        rule = AttentionRule(mixer.window, mixer.chunk, mixer.logit_cap, weights.sinks)
        out_TNH = attend(step, mixer, q_TNH, k_TKH, v_TKH, pages, rule)
    out_TD = out_TNH.flatten(1)
    if gate:
        out_TD = out_TD * torch.sigmoid(gate_TD)
    return apply_linear(kernels, out_TD, weights.out, weights.out_bias)


def ring_of(model: ModelSpec) -> Ring | None:
    """How the blocks of a sequence are used in turn, where every layer overwrites what left its window."""
    if model.rolling_span is None:
        return None
    mixers = (layer.mixer for layer, _ in model.layers)
    spans = ((m.evicts_to or m.window, m.num_sink_tokens) for m in mixers if isinstance(m, Attention))
    (ring,) = {Ring(window, sinks) for window, sinks in spans if window is not None}  # one change makes them all
    return ring


def attend(
    step: MixerStep, mixer: Attention, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, pages: KVPages, rule: AttentionRule
) -> Tensor:
    """[T, N, H_v]: the one-token rows first, then the chunks', then the trees'; queries and keys come unrotated. Raises
    PerfmodelError for a tree where a layer does not see all keys."""
    kernels, batch = step.kernels, step.batch
    limits = {
        "a window": mixer.is_rolling,
        "blocks": mixer.sparsity is not None,
        "standard attention": step.is_standard,
        "capped scores or sinks": rule.has_terms,
    }
    if batch.trees is not None and any(limits.values()):
        names = " and ".join(name for name, is_used in limits.items() if is_used)
        raise PerfmodelError(f"a tree of drafted tokens is not verified with {names}; draft a chain instead.")
    if mixer.is_rolling:
        return _in_window(step, mixer, q_TNH, k_TKH, v_TKH, pages)
    if step.group.num_stripes > 1:
        return attend_striped(step, *step.rotated(mixer, q_TNH, k_TKH), v_TKH, pages)
    if batch.keeps_kv:
        rows = None if mixer.rope is None else step.rotations.rows(mixer.rope, mixer.head_dim)
        q_TNH = kernels.rope_kv_write(q_TNH, k_TKH, v_TKH, rows, pages, batch.slots_T)
    else:
        q_TNH, k_TKH = step.rotated(mixer, q_TNH, k_TKH)
        pages = KVPages(k_TKH.contiguous()[:, None], v_TKH.contiguous()[:, None])  # a block for each token
    if step.is_standard:
        return _standard(step, q_TNH, pages)
    decode, prefill, how = kernels.attention_decode, kernels.attention_prefill, mixer.sparsity or rule
    if mixer.sparsity is not None:
        decode, prefill = kernels.attention_sparse_decode, kernels.attention_sparse_prefill
    split, end = batch.num_decodes, batch.num_decodes + batch.num_chunk_tokens
    parts: list[Tensor] = []
    if split:
        parts.append(decode(q_TNH[:split], pages, batch.tables_DM, batch.contexts_D, how))
    if len(batch.chunks.computed_G):
        parts.append(prefill(q_TNH[split:end], pages, batch.chunks, how))
    if batch.trees is not None:
        parts.append(prefill(q_TNH[end:], pages, batch.trees, how))
    return _joined(parts)


def heads_normed(kernels: Kernels, x_TNH: Tensor, weight: Tensor | None, norm_eps: float) -> Tensor:
    """Queries or keys behind their norm: over each head, or over all of them where the weights are as wide."""
    if weight is None:
        return x_TNH
    heads = x_TNH if len(weight) == x_TNH.shape[2] else x_TNH.flatten(1)
    normed: Tensor = kernels.rms_norm(heads, weight, norm_eps)
    return normed.view(x_TNH.shape)


def keys_and_values(
    kernels: Kernels, x_RC: Tensor, mixer: Attention, weights: AttentionWeights, norm_eps: float
) -> tuple[Tensor, Tensor]:
    """Keys [R, K, H], unrotated, and values [R, K, H_v] of states behind the layer's norm."""
    heads, width = mixer.num_kv_heads, mixer.num_kv_heads * mixer.head_dim
    first = mixer.num_heads * mixer.head_dim
    rows = slice(first, first + width + heads * mixer.v_head_dim)
    bias = None if weights.qkv_bias is None else weights.qkv_bias[rows]
    kv_RD = apply_linear(kernels, x_RC, rows_of(weights.qkv, rows), bias)
    k_RKH = kv_RD[:, :width].view(len(x_RC), heads, mixer.head_dim)
    k_RKH = heads_normed(kernels, k_RKH, weights.k_norm, norm_eps)
    return k_RKH, kv_RD[:, width:].view(len(x_RC), heads, mixer.v_head_dim)


def _standard(step: MixerStep, q_TNH: Tensor, pages: KVPages) -> Tensor:
    batch = step.batch
    queries = [*(slice(row, row + 1) for row in range(batch.num_decodes)), *step.chunk_rows]
    totals: list[int] = batch.contexts_D.tolist()
    totals += (batch.chunks.computed_G + batch.chunks.starts_G.diff()).tolist()
    parts = []
    for rows, total, table in zip(queries, totals, (*batch.tables_DM, *batch.chunks.tables_GM), strict=True):
        parts.append(step.kernels.attention_standard(q_TNH[rows], *pages.first(total, table, q_TNH.dtype)))
    return _joined(parts)


def _in_window(
    step: MixerStep, mixer: Attention, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, pages: KVPages
) -> Tensor:
    """A window with sinks: over a ring, or over whole sequences where other layers keep all keys."""
    kernels, batch, rotations = step.kernels, step.batch, step.rotations
    assert mixer.window is not None
    ring, is_rolling = Ring(mixer.window, mixer.num_sink_tokens), batch.ring is not None
    assert batch.ring in (None, ring), f"a batch for {batch.ring} and a layer with {ring}"
    q_sinks_TNH, table, split = q_TNH, None, batch.num_decodes
    if mixer.rope is not None:
        how = (mixer.rope, mixer.head_dim)
        table = rotations.tables[how]
        if ring.sinks and len(batch.chunks.computed_G):
            q_sinks_TNH = kernels.rope(q_TNH, rotations.rows(*how, ring.size - 1))
        q_TNH, k_TKH = (kernels.rope(x, rotations.rows(*how)) for x in (q_TNH, k_TKH))
    parts: list[Tensor] = []
    if len(batch.chunks.computed_G):
        own = (q_TNH[split:], q_sinks_TNH[split:], k_TKH[split:], v_TKH[split:])
        parts.append(kernels.attention_sinks_prefill(*own, pages, batch.chunks, ring, is_rolling))
    if not batch.keeps_kv:
        return _joined(parts)
    kept = slice(None) if batch.kept_W is None else batch.kept_W
    kernels.kv_write(k_TKH[kept], v_TKH[kept], pages, batch.slots_T[kept])
    if split:
        decodes = (batch.tables_DM, batch.contexts_D, ring, is_rolling, table)
        parts.insert(0, kernels.attention_sinks_decode(q_TNH[:split], pages, *decodes))
    return _joined(parts)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
