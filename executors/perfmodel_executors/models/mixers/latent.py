"""Multi-head latent attention (DeepSeek-V2, section 2.1): queries through a thin product or not, latents into pages."""

import math

import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel.models.architecture import LatentAttention
from perfmodel_executors.kernels.apply_linear import apply_linear
from perfmodel_executors.kernels.attention_latent import LatentHeads, LatentPages
from perfmodel_executors.models.states import MixerStep
from perfmodel_executors.models.weights import LatentWeights

_NORM_EPS = 1e-6  # of norms of latents, whatever the file says of others (DeepSeek's modelling files)


def latent_attention(
    step: MixerStep, x_TC: Tensor, mixer: LatentAttention, weights: LatentWeights, pages: LatentPages
) -> Tensor:
    """What the block adds, [T, C]; writes all latents into `pages`. Raises PerfmodelError for a tree of drafts."""
    kernels, batch, nope = step.kernels, step.batch, mixer.qk_nope_head_dim
    if batch.trees is not None:
        raise PerfmodelError("a tree of drafted tokens is not verified with latent attention; draft a chain instead.")
    assert mixer.rope is not None  # refused before a run (`why_not_executed`)
    rotation = step.rotations.rows(mixer.rope, mixer.qk_rope_head_dim)
    queries = x_TC
    if weights.q_down is not None:
        queries = kernels.rms_norm(apply_linear(kernels, x_TC, weights.q_down), weights.q_norm, _NORM_EPS)
    q_TNH = apply_linear(kernels, queries, weights.q_up).view(len(x_TC), mixer.num_heads, -1)
    q_TNH = torch.cat((q_TNH[..., :nope], kernels.rope(q_TNH[..., nope:], rotation)), dim=-1)
    latents_TW = apply_linear(kernels, x_TC, weights.kv_down)
    rank = mixer.kv_lora_rank
    latents_TR = kernels.rms_norm(latents_TW[:, :rank].contiguous(), weights.kv_norm, _NORM_EPS)
    keys_Tr = kernels.rope(latents_TW[:, None, rank:], rotation)[:, 0]
    pages.write(torch.cat((latents_TR, keys_Tr), dim=-1), batch.slots_T)
    scale = mixer.softmax_scale or 1 / math.sqrt(nope + mixer.qk_rope_head_dim)
    heads = LatentHeads(weights.keys_NPR, weights.values_NVR, scale)
    split, parts = batch.num_decodes, []
    if split:
        parts.append(kernels.attention_latent_decode(q_TNH[:split], pages, batch.tables_DM, batch.contexts_D, heads))
    if len(batch.chunks.computed_G):
        parts.append(kernels.attention_latent_prefill(q_TNH[split:], pages, batch.chunks, heads))
    return apply_linear(kernels, torch.cat(parts).flatten(1), weights.out)
