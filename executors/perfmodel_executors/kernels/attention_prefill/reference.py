"""Causal attention of prompt chunks over paged keys and values, the chunk's own included (written before the call).

Queries go in tiles, and each tile reads only the keys that some query of it sees: so the causal half and what lies
outside a window cost nothing, as in a flash kernel, and the work is that of the operator's formula.
"""

__all__ = ["QUERY_TILE", "attention_prefill"]

import math

import torch
from torch import Tensor

from perfmodel_executors.kernels.spans import first_visible, visible

QUERY_TILE = 128  # 64 to 256 measured equal within 15 % at chunks of 128 to 1024


def attention_prefill(
    q_TNH: Tensor,
    k_cache_BSKH: Tensor,
    v_cache_BSKH: Tensor,
    block_tables_GM: Tensor,
    query_starts_G: Tensor,
    num_computed_G: Tensor,
    window: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(H)) v for each chunk, [T, N, H_v], softmax in fp32.

    block_tables: block ids of each sequence, padded with anything up to the longest
    query_starts: [G + 1]; chunk g has the query rows query_starts[g] : query_starts[g + 1]
    num_computed: tokens of each sequence in the KV cache before its chunk
    window:       a query sees only the last `window` tokens, itself included
    chunk:        a query sees only tokens of its own chunk of this length (chunked attention of Llama 4)
    """
    block_size = k_cache_BSKH.shape[1]
    starts: list[int] = query_starts_G.tolist()
    computed: list[int] = num_computed_G.tolist()
    out_TNH = q_TNH.new_empty(*q_TNH.shape[:2], v_cache_BSKH.shape[3])
    for row, prefix in enumerate(computed):
        begin, end = starts[row], starts[row + 1]
        base = first_visible(prefix, window, chunk) // block_size
        blocks = block_tables_GM[row, base : -(-(prefix + end - begin) // block_size)]
        k_KLH = k_cache_BSKH.index_select(0, blocks).flatten(0, 1).transpose(0, 1)
        v_KLH = v_cache_BSKH.index_select(0, blocks).flatten(0, 1).transpose(0, 1)
        for tile in range(begin, end, QUERY_TILE):
            stop = min(tile + QUERY_TILE, end)
            first, last = prefix + tile - begin, prefix + stop - begin  # positions of the tile's queries
            low = first_visible(first, window, chunk)
            keys = slice(low - base * block_size, last - base * block_size)
            mask_TL = visible(torch.arange(first, last), torch.arange(low, last), window, chunk)
            out_TNH[tile:stop] = _attend(q_TNH[tile:stop], k_KLH[:, keys], v_KLH[:, keys], mask_TL)
    return out_TNH


def _attend(q_TNH: Tensor, k_KLH: Tensor, v_KLH: Tensor, mask_TL: Tensor) -> Tensor:
    num_queries, num_heads, head_dim = q_TNH.shape
    num_kv_heads = k_KLH.shape[0]
    group = num_heads // num_kv_heads
    q_KRH = (
        q_TNH.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
    )
    scores = torch.bmm(q_KRH, k_KLH.transpose(1, 2)).float().mul_(1 / math.sqrt(head_dim))
    scores = scores.view(num_kv_heads, group, num_queries, -1).masked_fill_(~mask_TL, -math.inf)
    weights = torch.softmax(scores, dim=-1).to(q_TNH.dtype)
    out_KRH = torch.bmm(weights.view(num_kv_heads, group * num_queries, -1), v_KLH)
    out_KGTH = out_KRH.view(num_kv_heads, group, num_queries, -1)
    return out_KGTH.permute(2, 0, 1, 3).reshape(num_queries, num_heads, -1)
