"""A query sees the first `sinks` tokens and the last `window`, itself included: min(p + 1, window + sinks) keys.

Positions are those in the cache, as in StreamingLLM (Xiao et al. 2023, section 3.2): the distance from the query to a
key of its window is the one in the text, and to a sink it is as if the tokens in between had never been. Keys lie in
the cache rotated by their positions in the text, which is right for the window; for the sinks, either the query is
rotated anew, by its place in the cache (prompts), or the few sinks are turned ahead (decodes). Both cost next to
nothing, where rotating the whole cache in every step would not.

In a rolling cache (`Ring`) a prompt chunk longer than the window overwrites keys that its own first queries see: it
attends to what the ring held and to its own keys, before these are written.
"""

__all__ = ["attention_sinks_decode", "attention_sinks_prefill"]

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from perfmodel_executors.kernels.attention_prefill.reference import QUERY_TILE
from perfmodel_executors.kernels.attention_sinks.ring import Ring
from perfmodel_executors.kernels.kv_pages import KVPages, dequantized, quantized
from perfmodel_executors.kernels.one_query import attend_one
from perfmodel_executors.kernels.rope.reference import rope


def attention_sinks_decode(
    q_DNH: Tensor,
    pages: KVPages,
    block_tables_DM: Tensor,
    context_lens_D: Tensor,
    ring: Ring,
    is_rolling: bool,
    rope_table_PH: Tensor | None,
) -> Tensor:
    """softmax(q k^T / sqrt(H)) v of one token per sequence over its sinks and window, [D, N, H_v].

    is_rolling: the pages are a ring; else they hold the whole sequence
    rope_table: cos and sin of all positions, None without RoPE
    """
    num_seqs, num_heads, _ = q_DNH.shape
    out_DNH = q_DNH.new_empty(num_seqs, num_heads, pages.v_dim)
    for row, context in enumerate(context_lens_D.tolist()):
        k_LKH, v_LKH = _held(pages, block_tables_DM[row], context, ring, is_rolling, q_DNH.dtype)
        ahead = context - ring.size
        if ring.sinks and ahead > 0 and rope_table_PH is not None:
            k_LKH[: ring.sinks] = rope(k_LKH[: ring.sinks], rope_table_PH[ahead : ahead + 1])
        out_DNH[row] = attend_one(q_DNH[row], k_LKH, v_LKH)
    return out_DNH


def _held(
    pages: KVPages, table_M: Tensor, context: int, ring: Ring, is_rolling: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values that the last of `context` tokens sees, the sinks first, as copies."""
    size = pages.block_size
    if is_rolling or context <= ring.size:  # in the ring's own order, of which a softmax knows nothing
        held = min(context, ring.size)
        k_LKH, v_LKH = pages.gathered(table_M[: -(-held // size)], dtype)
        return k_LKH[:held], v_LKH[:held]
    near = context - ring.window
    first = near // size
    parts = [pages.gathered(table_M[first : -(-context // size)], dtype)]
    ranges = [slice(near - first * size, context - first * size)]
    if ring.sinks:
        parts.insert(0, pages.gathered(table_M[: -(-ring.sinks // size)], dtype))
        ranges.insert(0, slice(0, ring.sinks))
    k, v = (torch.cat([part[side][rows] for part, rows in zip(parts, ranges, strict=True)]) for side in (0, 1))
    return k, v


def attention_sinks_prefill(
    q_TNH: Tensor,
    q_sinks_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    pages: KVPages,
    block_tables_GM: Tensor,
    query_starts_G: Tensor,
    num_computed_G: Tensor,
    ring: Ring,
    is_rolling: bool,
) -> Tensor:
    """The same for each chunk of a prompt, [T, N, H_v]; its own keys are `k` and `v`, the pages hold those before it.

    q_sinks: the queries rotated by min(position, window + sinks - 1), their place in the cache
    """
    starts: list[int] = query_starts_G.tolist()
    k_TKH, v_TKH = (_as_stored(x, pages.dtype) for x in (k_TKH, v_TKH))
    out_TNH = q_TNH.new_empty(*q_TNH.shape[:2], v_TKH.shape[2])
    for row, computed in enumerate(num_computed_G.tolist()):
        rows = slice(starts[row], starts[row + 1])
        k_old, v_old, positions = _before(pages, block_tables_GM[row], computed, ring, is_rolling, q_TNH.dtype)
        positions += range(computed, computed + starts[row + 1] - starts[row])
        k_LKH, v_LKH = torch.cat((k_old, k_TKH[rows])), torch.cat((v_old, v_TKH[rows]))
        parts = _tiles(q_TNH[rows], q_sinks_TNH[rows], k_LKH, v_LKH, positions, computed, ring)
        out_TNH[rows] = torch.cat(list(parts))
    return out_TNH


def _before(
    pages: KVPages, table_M: Tensor, computed: int, ring: Ring, is_rolling: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[int]]:
    """Keys, values and positions of the tokens before a chunk that its first query sees."""
    positions = [*range(min(ring.sinks, computed)), *range(max(ring.sinks, computed - ring.window + 1), computed)]
    places = [ring.place(p) for p in positions] if is_rolling else positions
    blocks = sorted({place // pages.block_size for place in places})
    number = {block: index for index, block in enumerate(blocks)}
    rows = [number[place // pages.block_size] * pages.block_size + place % pages.block_size for place in places]
    index = torch.tensor(rows, dtype=torch.int64, device=table_M.device)
    k, v = pages.gathered(table_M[torch.tensor(blocks, dtype=torch.int64, device=table_M.device)], dtype)
    return k.index_select(0, index), v.index_select(0, index), positions


def _tiles(
    q_TNH: Tensor, q_sinks_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, positions: list[int], first: int, ring: Ring
) -> Iterator[Tensor]:
    """Attention of tiles of queries, each over the sinks and over the keys that some query of it has in its window.

    positions: of the keys, ascending; first: that of the first query
    """
    num_sinks = sum(p < ring.sinks for p in positions)
    near = positions[num_sinks] if num_sinks < len(positions) else 0  # the keys from here on have no gaps
    position_L = torch.tensor(positions, device=q_TNH.device)
    for begin in range(0, len(q_TNH), QUERY_TILE):
        end = min(begin + QUERY_TILE, len(q_TNH))
        low = num_sinks + max(0, first + begin - ring.window + 1 - near)
        high = num_sinks + max(0, first + end - near)
        seen = slice(low, high)
        query_T = torch.arange(first + begin, first + end, device=q_TNH.device)[:, None]
        mask_TL = (position_L[seen] <= query_T) & (position_L[seen] > query_T - ring.window)
        sinks_TL = position_L[:num_sinks] <= query_T
        scores = _scores(q_TNH[begin:end], k_LKH[seen], mask_TL)
        if num_sinks:
            scores = torch.cat((_scores(q_sinks_TNH[begin:end], k_LKH[:num_sinks], sinks_TL), scores), dim=-1)
        v = torch.cat((v_LKH[:num_sinks], v_LKH[seen])) if num_sinks else v_LKH[seen]
        weights = torch.softmax(scores, dim=-1).to(q_TNH.dtype)
        out_KRH = torch.bmm(weights.flatten(1, 2), v.transpose(0, 1))
        out_KGTH = out_KRH.view(*weights.shape[:3], -1)
        yield out_KGTH.permute(2, 0, 1, 3).reshape(end - begin, q_TNH.shape[1], -1)


def _scores(q_TNH: Tensor, k_LKH: Tensor, mask_TL: Tensor) -> Tensor:
    """q k^T / sqrt(H) in fp32 as [K, N / K, T, L], what is not seen at minus infinity."""
    num_queries, num_heads, dim = q_TNH.shape
    kv_heads = k_LKH.shape[1]
    group = num_heads // kv_heads
    q_KRH = q_TNH.view(num_queries, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = torch.bmm(q_KRH, k_LKH.permute(1, 2, 0)).float().mul_(1 / math.sqrt(dim))
    return scores.view(kv_heads, group, num_queries, -1).masked_fill_(~mask_TL, -math.inf)


def _as_stored(x_TKH: Tensor, dtype: torch.dtype) -> Tensor:
    """x as it will be read back from pages of `dtype`."""
    if x_TKH.dtype == dtype:
        return x_TKH
    values_TKH, scale_TK = quantized(x_TKH, dtype)
    scales = None if scale_TK is None else scale_TK[..., None].expand(-1, -1, 1)
    block = torch.arange(len(x_TKH), device=x_TKH.device)
    return dequantized(values_TKH[:, None], scales, block, x_TKH.dtype)
