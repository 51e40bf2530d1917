"""Attention over latents (DeepSeek-V2, section 2.1): decodes absorb the up-projection, prompts expand what they read.

    k_j = [W_k c_j | r_j], v_j = W_v c_j  for each head, of the cached latents c (R elements) and rotated keys r

Absorbed, a query reads each latent once for all heads: (W_k^T q) . c + q_r . r, and W_v of the weighted sum of latents.
"""

__all__ = ["attention_latent_decode", "attention_latent_prefill"]

import math

import torch
from torch import Tensor

from perfmodel_executors.kernels.attention_latent.heads import LatentHeads
from perfmodel_executors.kernels.attention_latent.pages import LatentPages
from perfmodel_executors.kernels.attention_prefill.reference import QUERY_TILE, attend
from perfmodel_executors.kernels.spans import visible


def attention_latent_decode(
    q_DNH: Tensor,
    pages: LatentPages,
    block_tables_DM: Tensor,
    context_lens_D: Tensor,
    heads: LatentHeads,
) -> Tensor:
    """One new token per sequence, [D, N, V].

    q:      queries, P elements that meet keys made of latents, then r rotated ones
    block_tables, context_lens: blocks of each sequence, and its tokens, the new one included
    """
    keys_NPR, values_NVR, scale = heads
    num_nope, rank = keys_NPR.shape[1:]
    absorbed_DNR = torch.einsum("dnp,npr->dnr", q_DNH[..., :num_nope], keys_NPR)
    q_DNW = torch.cat((absorbed_DNR, q_DNH[..., num_nope:]), dim=-1) * scale
    sums_DNR = q_DNW.new_empty(*q_DNH.shape[:2], rank)
    for row, context in enumerate(context_lens_D.tolist()):
        latents_LW = pages.gathered(block_tables_DM[row, : -(-context // pages.block_size)])[:context]
        scores_NL = q_DNW[row] @ latents_LW.T
        weights_NL = torch.softmax(scores_NL.float(), dim=-1).to(q_DNW.dtype)
        sums_DNR[row] = weights_NL @ latents_LW[:, :rank]
    return torch.einsum("dnr,nvr->dnv", sums_DNR, values_NVR)


def attention_latent_prefill(
    q_TNH: Tensor,
    pages: LatentPages,
    block_tables_GM: Tensor,
    query_starts_G: Tensor,
    num_computed_G: Tensor,
    heads: LatentHeads,
) -> Tensor:
    """Prompt chunks, [T, N, V], whose latents are in their pages; `query_starts` and `num_computed` as those of
    `attention_prefill`, the others as those of the decode."""
    keys_NPR, values_NVR, scale = heads
    (num_heads, _, rank), size = keys_NPR.shape, pages.block_size
    starts: list[int] = query_starts_G.tolist()
    q_TNH = q_TNH * (scale * math.sqrt(q_TNH.shape[-1]))  # `attend` divides by the root
    out_TNV = q_TNH.new_empty(*q_TNH.shape[:2], values_NVR.shape[1])
    for row, computed in enumerate(num_computed_G.tolist()):
        begin, end = starts[row], starts[row + 1]
        total = computed + end - begin
        latents_LW = pages.gathered(block_tables_GM[row, : -(-total // size)])[:total]
        k_NLP = latents_LW[:, :rank] @ keys_NPR.transpose(1, 2)
        k_NLH = torch.cat((k_NLP, latents_LW[:, rank:].expand(num_heads, -1, -1)), dim=-1)
        v_NLV = latents_LW[:, :rank] @ values_NVR.transpose(1, 2)
        for tile in range(begin, end, QUERY_TILE):
            rows = slice(tile, min(tile + QUERY_TILE, end))
            first, last = computed + tile - begin, computed + rows.stop - begin
            queries_T, keys_L = (torch.arange(p, last, device=q_TNH.device) for p in (first, 0))
            mask_TL = visible(queries_T, keys_L, None, None)
            out_TNV[rows] = attend(q_TNH[rows], k_NLH[:, :last], v_NLV[:, :last], mask_TL)
    return out_TNV
