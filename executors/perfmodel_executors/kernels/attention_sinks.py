"""A query sees the first `sinks` tokens and the last `window`, itself included: min(p + 1, window + sinks) keys.

Positions are those in the cache, as in StreamingLLM (Xiao et al. 2023, section 3.2): the distance from the query to a
key of its window is the one in the text, and to a sink it is as if the tokens in between had never been. Keys lie in
the cache rotated by their positions in the text, which is right for the window; for the sinks, either the query is
rotated anew, by its place in the cache (prompts), or the few sinks are turned ahead (decodes). Both cost next to
nothing, where rotating the whole cache in every step would not.

In a rolling cache (`Ring`) a prompt chunk longer than the window overwrites keys that its own first queries see: it
attends to what the ring held and to its own keys, before these are written.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from perfmodel_executors.kernels.attention_decode import attend_one
from perfmodel_executors.kernels.attention_prefill import FEW_QUERIES, QUERY_TILE, attend
from perfmodel_executors.kernels.kv_pages import KVPages, dequantized, quantized
from perfmodel_executors.kernels.rope_kv_write import rope
from perfmodel_executors.kernels.spans import visible


class Ring(NamedTuple):
    """The first `sinks` tokens stay where they are; the others share `window` places in turn."""

    window: int
    sinks: int = 0

    @property
    def size(self) -> int:
        """Tokens that it holds at most."""
        return self.window + self.sinks

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The places of the tokens at `positions`, in 0 .. size - 1."""
        return np.where(positions < self.sinks, positions, self.sinks + (positions - self.sinks) % self.window)

    def holds(self, positions: NDArray[np.int64], num_tokens: int) -> NDArray[np.bool_]:
        """Which of the tokens at `positions` are still there once a sequence has `num_tokens`."""
        return (positions < self.sinks) | (positions >= num_tokens - self.window)


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
        k_old, v_old = _before(pages, block_tables_GM[row], computed, ring, is_rolling, q_TNH.dtype)
        k_LKH, v_LKH = torch.cat((k_old, k_TKH[rows])), torch.cat((v_old, v_TKH[rows]))
        _attend_in_tiles(out_TNH[rows], q_TNH[rows], q_sinks_TNH[rows], k_LKH, v_LKH, computed, ring)
    return out_TNH


def _before(
    pages: KVPages, table_M: Tensor, computed: int, ring: Ring, is_rolling: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values of the tokens before a chunk that its first query sees, by their positions."""
    sinks, size = min(ring.sinks, computed), pages.block_size
    near = max(ring.sinks, computed - ring.window + 1)
    if is_rolling:  # the whole ring, of which the tokens of the window are then put in order
        k, v = pages.gathered(table_M[: -(-min(computed, ring.size) // size)], dtype)
        place_L = torch.arange(near, max(near, computed), device=table_M.device)
        place_L = (place_L - ring.sinks).remainder_(ring.window).add_(ring.sinks)
        if sinks:
            place_L = torch.cat((torch.arange(sinks, device=table_M.device), place_L))
        return k.index_select(0, place_L), v.index_select(0, place_L)
    first = near // size
    parts = [pages.gathered(table_M[first : -(-computed // size)], dtype)]
    ranges = [slice(near - first * size, computed - first * size if computed > near else near - first * size)]
    if sinks:
        parts.insert(0, pages.gathered(table_M[: -(-sinks // size)], dtype))
        ranges.insert(0, slice(0, sinks))
    k, v = (torch.cat([part[side][rows] for part, rows in zip(parts, ranges, strict=True)]) for side in (0, 1))
    return k, v


def _attend_in_tiles(
    out_TNH: Tensor, q_TNH: Tensor, q_sinks_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, computed: int, ring: Ring
) -> None:
    """Attention of tiles of queries, each over the sinks and over the keys that some query of it has in its window.

    A tile reads its own keys and a window: tiles of half a window read half as much again as their queries see.

    computed: tokens before the chunk; keys lie by their positions, without those that no query sees
    """
    num_queries = len(q_TNH)
    num_sinks, near = min(ring.sinks, computed + num_queries), max(ring.sinks, computed - ring.window + 1)
    tile = min(QUERY_TILE, max(ring.window // 2, FEW_QUERIES))
    k_KLH, v_KLH = k_LKH.transpose(0, 1), v_LKH.transpose(0, 1)
    for begin in range(0, num_queries, tile):
        end = min(begin + tile, num_queries)
        low = max(near, computed + begin - ring.window + 1)
        seen = slice(num_sinks + low - near, num_sinks + max(low, computed + end) - near)
        query_T, key_L = (
            torch.arange(first, last, device=q_TNH.device)
            for first, last in ((computed + begin, computed + end), (low, max(low, computed + end)))
        )
        mask_TL = visible(query_T, key_L, ring.window, None)
        if num_sinks:
            mask_TL = torch.cat((torch.arange(num_sinks, device=q_TNH.device) <= query_T[:, None], mask_TL), dim=1)
            queries = q_TNH[begin:end], q_sinks_TNH[begin:end]
            out_TNH[begin:end] = _attend_to_both(*queries, k_KLH, v_KLH, slice(0, num_sinks), seen, mask_TL)
        else:
            out_TNH[begin:end] = attend(q_TNH[begin:end], k_KLH[:, seen], v_KLH[:, seen], mask_TL)


def _attend_to_both(
    q_TNH: Tensor, q_sinks_TNH: Tensor, k_KLH: Tensor, v_KLH: Tensor, sinks: slice, seen: slice, mask_TL: Tensor
) -> Tensor:
    """Attention to the sinks, for which queries are rotated otherwise, and to the keys `seen`: one softmax over both.

    As one product of heads twice as wide: (q, q_sinks) with (k, 0) for the window and with (0, k) for the sinks, on
    queries that are scaled for torch's own division by the square root of the width.
    """
    dim = q_TNH.shape[2]
    both_TNH = torch.cat((q_TNH, q_sinks_TNH), dim=2).mul_(math.sqrt(2))
    k_near, k_far = k_KLH[:, seen], k_KLH[:, sinks]
    keys_KLH = torch.cat((functional.pad(k_far, (dim, 0)), functional.pad(k_near, (0, dim))), dim=1)
    return attend(both_TNH, keys_KLH, torch.cat((v_KLH[:, sinks], v_KLH[:, seen]), dim=1), mask_TL)


def _as_stored(x_TKH: Tensor, dtype: torch.dtype) -> Tensor:
    """x as it will be read back from pages of `dtype`."""
    if x_TKH.dtype == dtype:
        return x_TKH
    values_TKH, scale_TK = quantized(x_TKH, dtype)
    scales = None if scale_TK is None else scale_TK[..., None].expand(-1, -1, 1)
    block = torch.arange(len(x_TKH), device=x_TKH.device)
    return dequantized(values_TKH[:, None], scales, block, x_TKH.dtype)
