"""A query sees the first `sinks` tokens and the last `window`, itself included: min(p + 1, window + sinks) keys.
Positions are those in the cache, as in StreamingLLM (Xiao et al. 2023, section 3.2): the distance from the query to
a key of its window is the one in the text, and to a sink it is as if the tokens in between had never been."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from perfmodel_executors.kernels import kv_pages
from perfmodel_executors.kernels.attention_decode import attend_one
from perfmodel_executors.kernels.attention_prefill import FEW_QUERIES, QUERY_TILE, AttentionRule, attend, visible
from perfmodel_executors.kernels.kv_pages import Chunks, KVPages
from perfmodel_executors.kernels.problem import Inputs, Problem
from perfmodel_executors.kernels.rope_kv_write import rope, rope_table


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
    out_DNH = q_DNH.new_empty(*q_DNH.shape[:2], pages.v_dim)
    for row, context in enumerate(context_lens_D.tolist()):
        ahead, table_M = context - ring.size, block_tables_DM[row]
        if is_rolling or ahead <= 0:  # in the ring's own order, of which a softmax knows nothing
            k_LKH, v_LKH = pages.first(min(context, ring.size), table_M, q_DNH.dtype)
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
    k_TKH, v_TKH = (as_stored(x, pages.dtype) for x in (k_TKH, v_TKH))
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


def as_stored(x_TKH: Tensor, dtype: torch.dtype) -> Tensor:
    """x as it will be read back from pages of `dtype`."""
    values_TKH, scale_TK = kv_pages.quantized(x_TKH, dtype)
    return (values_TKH if scale_TK is None else values_TKH * scale_TK[..., None]).to(x_TKH.dtype)


class _Case(NamedTuple):
    """What problems have beside their lengths; a cache that rolls has no more blocks than its ring."""

    ring: Ring
    is_rolling: bool
    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype
    kv_dtype: torch.dtype

    def stored(self, inputs: Inputs, lengths: list[int]) -> tuple[KVPages, Tensor]:
        """Pages with so many tokens of each sequence, and their block tables."""
        width = max(1, -(-min(max(lengths), self.ring.size if self.is_rolling else max(lengths)) // _PAGE))
        blocks = width * len(lengths) + 1
        pages = kv_pages.random_pages(inputs, blocks, _PAGE, self.heads[1], self.dims, self.dtype, self.kv_dtype)
        return pages, kv_pages.shuffled_tables(inputs, len(lengths), width)

    def problem(self, step: str, lengths: list[int], make: Callable[[Inputs], tuple[Any, ...]]) -> Problem:
        sizes = {"sequences": len(lengths), "step": max(lengths), "num_heads": self.heads[0], "head_dim": self.dims[0],
                 "num_key_value_heads": self.heads[1], "window_size": self.ring.window, "sinks": self.ring.sinks,
                 "rolls": "yes" if self.is_rolling else "no", "attn_dtype": kv_pages.NAMES[self.dtype],
                 "kv_cache_dtype": kv_pages.NAMES[self.kv_dtype]}  # fmt: skip
        return Problem(f"attention_sinks_{step}", sizes, make, tolerance=kv_pages.TOLERANCE[self.dtype])

    def decodes(self, contexts: list[int]) -> Problem:
        def make(inputs: Inputs) -> tuple[Any, ...]:
            q_DNH = inputs.normal(len(contexts), self.heads[0], self.dims[0], dtype=self.dtype)
            table = rope_table(max(contexts), self.dims[0], _THETA, self.dtype).to(inputs.device)
            contexts_D = inputs.of(contexts, torch.int64)
            return q_DNH, *self.stored(inputs, contexts), contexts_D, self.ring, self.is_rolling, table

        return self.problem("decode", contexts, make)

    def prompts(self, chunks: list[tuple[int, int]]) -> Problem:
        """chunks: (new tokens, tokens before)"""
        spans = [range(before, before + new) for new, before in chunks]

        def make(inputs: Inputs) -> tuple[Any, ...]:
            at_T = inputs.of([position for span in spans for position in span], torch.int64)
            widths = ((self.heads[0], self.dims[0]), (self.heads[1], self.dims[0]), (self.heads[1], self.dims[1]))
            q, k, v = (inputs.normal(len(at_T), *width, dtype=self.dtype) for width in widths)
            table = rope_table(max(span.stop for span in spans), self.dims[0], _THETA, self.dtype).to(inputs.device)
            starts_G = inputs.of(np.cumsum([0, *map(len, spans)]).tolist(), torch.int64)
            pages, tables = self.stored(inputs, [span.start for span in spans])
            own = Chunks(tables, starts_G, inputs.of([span.start for span in spans], torch.int64))
            rotated = (rope(q, table[at_T]), rope(q, table[at_T.clamp_max(self.ring.size - 1)]))
            return *rotated, k, v, pages, own, self.ring, self.is_rolling

        return self.problem("prefill", [span.stop for span in spans], make)


_PAGE, _THETA = 16, 10_000.0


def tiny(dtype: torch.dtype) -> list[Problem]:
    shape = ((4, 2), (16, 24), dtype)
    cases = [_Case(Ring(21, 3), rolls, *shape, dtype) for rolls in (False, True)]
    cases.append(_Case(Ring(9), True, (3, 1), (20, 20), dtype, dtype))
    decodes = [case.decodes([1, 3, 17, 24, 70]) for case in (*cases, cases[1]._replace(kv_dtype=kv_pages.FP8))]
    chunks = [(5, 0), (1, 2), (40, 3), (30, 61)]
    return [*decodes, *(case.prompts(chunks) for case in (*cases, cases[0]._replace(kv_dtype=torch.int8)))]


def serving() -> list[Problem]:
    case = _Case(Ring(4096, 4), True, (32, 8), (128, 128), torch.bfloat16, torch.bfloat16)
    return [*(case.decodes([16384] * size) for size in (1, 64)), case.prompts([(4096, 8192)])]
