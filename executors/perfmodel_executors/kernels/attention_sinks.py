"""A query sees the first `sinks` tokens and the last `window`, itself included: min(p + 1, window + sinks) keys.
Positions are those in the cache, as in StreamingLLM (Xiao et al. 2023, section 3.2): the distance from the query to
a key of its window is the one in the text, and to a sink it is as if the tokens in between had never been."""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from perfmodel_executors.kernels.attention_decode import attend_one
from perfmodel_executors.kernels.attention_prefill import FEW_QUERIES, QUERY_TILE, AttentionRule, attend, visible
from perfmodel_executors.kernels.kv_pages import Chunks, KVPages, quantized
from perfmodel_executors.kernels.rope_kv_write import rope


class Ring(NamedTuple):
    """The first `sinks` tokens stay where they are; the others share `window` places in turn."""

    window: int
    sinks: int = 0

    @property
    def size(self) -> int:
        return self.window + self.sinks

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
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
    """softmax(q k^T / sqrt(H)) v of one token per sequence over its sinks and window, [D, N, H_v]. is_rolling: the
    pages are a ring; rope_table: cos and sin of all positions, None without RoPE."""
    size = pages.block_size
    out_DNH = q_DNH.new_empty(*q_DNH.shape[:2], pages.v_dim)
    for row, context in enumerate(context_lens_D.tolist()):
        ahead, table_M = context - ring.size, block_tables_DM[row]
        if is_rolling or ahead <= 0:  # in the ring's own order, of which a softmax knows nothing
            held = min(context, ring.size)
            k_LKH, v_LKH = (part[:held] for part in pages.gathered(table_M[: -(-held // size)], q_DNH.dtype))
        else:
            k_LKH, v_LKH = _sinks_and_window(pages, table_M, context - ring.window, context, ring.sinks, q_DNH.dtype)
        if ring.sinks and ahead > 0 and rope_table_PH is not None:
            k_LKH[: ring.sinks] = rope(k_LKH[: ring.sinks], rope_table_PH[ahead : ahead + 1])
        out_DNH[row] = attend_one(q_DNH[row], k_LKH, v_LKH)
    return out_DNH


def attention_sinks_prefill(
    q_TNH: Tensor,
    q_sinks_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    pages: KVPages,
    chunks: Chunks,
    ring: Ring,
    is_rolling: bool,
) -> Tensor:
    """The same for each chunk of a prompt, [T, N, H_v]; its own keys are `k` and `v`, the pages hold those before it,
    which in a rolling cache a chunk longer than the window overwrites where its first queries still see them. q_sinks:
    the queries rotated by min(position, window + sinks - 1), their place in the cache."""
    k_TKH, v_TKH = (_as_stored(x, pages.dtype) for x in (k_TKH, v_TKH))
    out_TNH = q_TNH.new_empty(*q_TNH.shape[:2], v_TKH.shape[2])
    for row, (begin, end, computed) in enumerate(chunks.spans()):
        rows = slice(begin, end)
        k_old, v_old = _before(pages, chunks.tables_GM[row], computed, ring, is_rolling, q_TNH.dtype)
        k_LKH, v_LKH = torch.cat((k_old, k_TKH[rows])), torch.cat((v_old, v_TKH[rows]))
        _attend_in_tiles(out_TNH[rows], q_TNH[rows], q_sinks_TNH[rows], k_LKH, v_LKH, computed, ring)
    return out_TNH


def _before(
    pages: KVPages, table_M: Tensor, computed: int, ring: Ring, is_rolling: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values of the tokens before a chunk that its first query sees, by their positions."""
    sinks, near = min(ring.sinks, computed), max(ring.sinks, computed - ring.window + 1)
    if not is_rolling:
        return _sinks_and_window(pages, table_M, near, max(near, computed), sinks, dtype)
    # The whole ring, of which the tokens of the window are then put in order.
    k, v = pages.gathered(table_M[: -(-min(computed, ring.size) // pages.block_size)], dtype)
    positions = np.concatenate((np.arange(sinks), np.arange(near, max(near, computed))))
    place_L = torch.from_numpy(ring.places(positions)).to(table_M.device)
    return k.index_select(0, place_L), v.index_select(0, place_L)


def _sinks_and_window(
    pages: KVPages, table_M: Tensor, first: int, last: int, sinks: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    size = pages.block_size
    head, begin = table_M[: -(-sinks // size)], first // size
    k, v = pages.gathered(torch.cat((head, table_M[begin : -(-last // size)])), dtype)
    near = slice(len(head) * size + first - begin * size, len(head) * size + last - begin * size)
    return torch.cat((k[:sinks], k[near])), torch.cat((v[:sinks], v[near]))


def _attend_in_tiles(
    out_TNH: Tensor, q_TNH: Tensor, q_sinks_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, computed: int, ring: Ring
) -> None:
    """Attention of tiles of queries, each over the sinks and over the keys that some query of it has in its window. A
    tile reads its own keys and a window: tiles of half a window read half as much again as their queries see. Keys lie
    by their positions, without those that no query sees; `computed`: tokens before the chunk."""
    num_queries, device = len(q_TNH), q_TNH.device
    num_sinks, near = min(ring.sinks, computed + num_queries), max(ring.sinks, computed - ring.window + 1)
    tile = min(QUERY_TILE, max(ring.window // 2, FEW_QUERIES))
    k_KLH, v_KLH = k_LKH.transpose(0, 1), v_LKH.transpose(0, 1)
    for begin in range(0, num_queries, tile):
        rows = slice(begin, min(begin + tile, num_queries))
        low = max(near, computed + begin - ring.window + 1)
        high = max(low, computed + rows.stop)
        seen = slice(num_sinks + low - near, num_sinks + high - near)
        query_T = torch.arange(computed + begin, computed + rows.stop, device=device)
        mask_TL = visible(query_T, torch.arange(low, high, device=device), AttentionRule(ring.window))
        queries, keys, values = q_TNH[rows], k_KLH[:, seen], v_KLH[:, seen]
        if num_sinks:
            # One softmax over both as one product of heads twice as wide: (q, q_sinks) with (k, 0) for the window and
            # with (0, k) for the sinks, on queries that are scaled for torch's own division by the root of the width.
            dim = q_TNH.shape[2]
            mask_TL = torch.cat((torch.arange(num_sinks, device=device) <= query_T[:, None], mask_TL), dim=1)
            queries = torch.cat((queries, q_sinks_TNH[rows]), dim=2).mul_(math.sqrt(2))
            k_far = functional.pad(k_KLH[:, :num_sinks], (dim, 0))
            keys = torch.cat((k_far, functional.pad(keys, (0, dim))), dim=1)
            values = torch.cat((v_KLH[:, :num_sinks], values), dim=1)
        out_TNH[rows] = attend(queries, keys, values, mask_TL)


def _as_stored(x_TKH: Tensor, dtype: torch.dtype) -> Tensor:
    """x as it will be read back from pages of `dtype`."""
    values_TKH, scale_TK = quantized(x_TKH, dtype)
    return (values_TKH if scale_TK is None else values_TKH * scale_TK[..., None]).to(x_TKH.dtype)
