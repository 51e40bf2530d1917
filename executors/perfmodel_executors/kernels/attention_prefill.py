"""Causal attention of prompt chunks over paged keys and values, the chunk's own included (written before the call).

Queries go in tiles, and each tile reads only the keys that some query of it sees: so the causal half and what lies
outside a window cost nothing, as in a flash kernel, and the work is that of the operator's formula. Few queries, as
those that verify drafted tokens, go to torch's own attention, which reads keys and values once for all of them.

Problems: prompts, chunks behind a prefix and trees of drafted tokens, in shuffled pages.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.ops.attention.prefill import Heads, flash_prefill
from perfmodel_executors.kernels.kv_pages import FP8, NAMES, TOLERANCE, KVPages, contiguous_kv, random_pages
from perfmodel_executors.kernels.problem import Inputs, Problem, by_backend
from perfmodel_executors.kernels.spans import check_tree, first_visible, visible

QUERY_TILE = 128  # 64 to 256 measured equal within 15 % at chunks of 128 to 1024
# Above, torch's attention with a mask measured slower than two products, below faster, up to twice.
FEW_QUERIES = 16


def attention_prefill(
    q_TNH: Tensor,
    pages: KVPages,
    block_tables_GM: Tensor,
    query_starts_G: Tensor,
    num_computed_G: Tensor,
    window: int | None = None,
    chunk: int | None = None,
    ancestors_T: Tensor | None = None,
    num_nodes_G: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(H)) v for each chunk, [T, N, H_v], softmax in fp32.

    block_tables: block ids of each sequence, padded with anything up to the longest
    query_starts: [G + 1]; chunk g has the query rows query_starts[g] : query_starts[g + 1]
    num_computed: tokens of each sequence in the KV cache before its chunk
    window:       a query sees only the last `window` tokens, itself included
    chunk:        a query sees only tokens of its own chunk of this length (chunked attention of Llama 4)
    ancestors:    int64 [T], for chunks that are trees of drafted tokens: a query sees the whole prefix, and of its
                  chunk (at most 64 tokens) token j if bit j is set, its own included; without window and chunk
    num_nodes:    nodes of each tree in the KV cache, of which its queries are the last; None where they are all

    Raises PerfmodelError for a tree with a window or chunk.
    """
    check_tree(ancestors_T, window, chunk)
    block_size = pages.block_size
    starts: list[int] = query_starts_G.tolist()
    computed: list[int] = num_computed_G.tolist()
    nodes: list[int] | None = None if num_nodes_G is None else num_nodes_G.tolist()
    out_TNH = q_TNH.new_empty(*q_TNH.shape[:2], pages.v_dim)
    for row, prefix in enumerate(computed):
        begin, end = starts[row], starts[row + 1]
        base = first_visible(prefix, window, chunk) // block_size
        num_keys = prefix + (end - begin if nodes is None else nodes[row])
        blocks = block_tables_GM[row, base : -(-num_keys // block_size)]
        k_KLH, v_KLH = (rows.transpose(0, 1) for rows in pages.gathered(blocks, q_TNH.dtype))
        for tile in range(begin, end, QUERY_TILE):
            stop = min(tile + QUERY_TILE, end)
            first, last = prefix + tile - begin, prefix + stop - begin  # positions of the tile's queries
            low = first_visible(first, window, chunk)
            if ancestors_T is None:
                keys = slice(low - base * block_size, last - base * block_size)
                q_pos, k_pos = (torch.arange(p, last, device=q_TNH.device) for p in (first, low))
                mask_TL = visible(q_pos, k_pos, window, chunk)
            else:
                keys = slice(0, num_keys)
                mask_TL = _in_tree(ancestors_T[tile:stop], prefix, num_keys)
            out_TNH[tile:stop] = attend(q_TNH[tile:stop], k_KLH[:, keys], v_KLH[:, keys], mask_TL)
    return out_TNH


def attend(q_TNH: Tensor, k_KLH: Tensor, v_KLH: Tensor, mask_TL: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(H)) v over the keys that `mask` lets each query see, [T, N, H_v], as is fastest."""
    how = attend_masked if len(q_TNH) > FEW_QUERIES else _attend_few
    return how(q_TNH, k_KLH, v_KLH, mask_TL)


def _in_tree(ancestors_T: Tensor, prefix: int, num_keys: int) -> Tensor:
    """The whole prefix, and the chunk's tokens whose bit is set: bool [T, prefix + chunk]."""
    bits_TL = ancestors_T[:, None] >> torch.arange(num_keys - prefix, device=ancestors_T.device)
    return functional.pad((bits_TL & 1).bool(), (prefix, 0), value=True)


def _attend_few(q_TNH: Tensor, k_KLH: Tensor, v_KLH: Tensor, mask_TL: Tensor) -> Tensor:
    """The query heads of a group act as the rows of one query, as in decodes."""
    num_queries, num_heads, head_dim = q_TNH.shape
    num_kv_heads = k_KLH.shape[0]
    group = num_heads // num_kv_heads
    q_KRH = q_TNH.view(num_queries, num_kv_heads, group, head_dim).transpose(0, 1).flatten(1, 2)
    mask_RL = mask_TL.repeat_interleave(group, 0)
    out_KRH = functional.scaled_dot_product_attention(q_KRH[None], k_KLH[None], v_KLH[None], attn_mask=mask_RL)
    out_TKGH = out_KRH[0].view(num_kv_heads, num_queries, group, -1).transpose(0, 1)
    return out_TKGH.reshape(num_queries, num_heads, -1)


def attend_masked(q_TNH: Tensor, k_KLH: Tensor, v_KLH: Tensor, mask_TL: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(H)) v over the keys that `mask` lets each query see, [T, N, H_v], softmax in fp32."""
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


# A tree of drafted tokens as bits of what each sees: 0 - 1 - 3 and 0 - 2 - 4, 2 - 5.
_TREE = [0b1, 0b11, 0b101, 0b1011, 0b10101, 0b100101]


def tiny(dtype: torch.dtype) -> list[Problem]:
    """Odd lengths, prefixes, groups and head sizes, spans that cut pages, every format of pages, a tree."""
    spans = [(9, 0), (2, 30), (40, 5)]
    return [
        _problem(spans, (4, 2), (16, 24), dtype, dtype),
        _problem([(70, 3)], (3, 1), (20, 20), dtype, dtype, window=21),
        _problem([(50, 20)], (2, 2), (16, 16), dtype, dtype, chunk=24),
        _problem([(33, 70)], (2, 1), (32, 16), dtype, FP8, page=32),
        _problem([(33, 70)], (2, 1), (16, 16), dtype, torch.int8),
        _problem([(6, 75), (6, 0)], (2, 1), (16, 16), dtype, dtype, tree=_TREE),
        _problem([(3, 75), (3, 0)], (2, 1), (16, 16), dtype, dtype, tree=_TREE[3:], num_above=3),
    ]


def serving() -> list[Problem]:
    """Heads of 8B and 70B models: whole prompts, a chunk behind a long prefix, a window, narrow and wide heads."""
    bf16 = torch.bfloat16
    llama, wide = (32, 8), (64, 8)
    prompts = [([(4096, 0)] * 4, llama), ([(8192, 0)], llama), ([(16384, 0)], llama), ([(1024, 0)] * 16, wide)]
    chunks = [([(2048, 14336)], llama), ([(512, 4096)] * 4, llama)]
    plain = [_problem(spans, heads, (128, 128), bf16, bf16) for spans, heads in prompts + chunks]
    quantised = [_problem(*chunks[0], (128, 128), bf16, kv) for kv in (FP8, torch.int8)]
    others = [
        _problem([(8192, 0)], llama, (128, 128), bf16, bf16, window=4096),
        _problem([(8192, 0)], llama, (64, 64), bf16, bf16),
        _problem([(8192, 0)], (16, 8), (256, 256), bf16, bf16),
        _problem([(6, 8192)] * 32, llama, (128, 128), bf16, bf16, tree=_TREE),
    ]
    return plain + quantised + others


def _problem(
    spans: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    window: int | None = None,
    chunk: int | None = None,
    page: int = 16,
    tree: list[int] | None = None,
    num_above: int = 0,
) -> Problem:
    """spans: (new tokens, tokens computed before) of each chunk; tree: the bits of each chunk's nodes, behind
    `num_above` others"""
    width = -(-max(new + done + num_above for new, done in spans) // page)
    starts = [sum(new for new, _ in spans[:i]) for i in range(len(spans) + 1)]
    num_blocks = width * len(spans) + 1

    def make(inputs: Inputs) -> tuple[Any, ...]:
        q = inputs.normal(starts[-1], heads[0], dims[0], dtype=dtype)
        pages = random_pages(inputs, num_blocks, page, heads[1], dims, dtype, kv_dtype)
        tables = inputs.permutation(num_blocks)[: width * len(spans)].view(len(spans), width)
        bits = inputs.of(tree * len(spans), torch.int64) if tree else None
        chunks = (inputs.of(starts, torch.int64), inputs.of([done for _, done in spans], torch.int64))
        nodes = inputs.of([new + num_above for new, _ in spans], torch.int64) if num_above else None
        return q, pages, tables, *chunks, window, chunk, bits, nodes

    size = Heads(*heads, *dims, NAMES[dtype], dtype.itemsize, kv_dtype.itemsize, window, chunk)
    is_plain = kv_dtype == dtype and window is None and chunk is None and tree is None and len(set(spans)) == 1
    return Problem(
        "attention_prefill",
        {"batch_size": len(spans), "isl": max(new for new, _ in spans), "step": max(done for _, done in spans),
         "num_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": dims[0], "v_head_dim": dims[1],
         "window_size": window or 0, "chunk": chunk or 0, "block_size": page, "tree": "yes" if tree else "no",
         "attn_dtype": NAMES[dtype], "kv_cache_dtype": NAMES[kv_dtype]},
        make,
        flash_prefill([(new, done) for new, done in spans], size),
        TOLERANCE[dtype],
        by_backend(_torch_attention) if is_plain else {},
    )  # fmt: skip


def _torch_attention(
    q_TNH: Tensor, pages: KVPages, tables_GM: Tensor, starts_G: Tensor, computed_G: Tensor, *_: object
) -> Tensor:
    """SDPA over contiguous keys and values of equal length, causal from the last query back."""
    length = tables_GM.shape[1] * pages.block_size
    k_GKLH, v_GKLH = contiguous_kv(pages, tables_GM, length)
    q_GNTH = q_TNH.view(len(computed_G), -1, *q_TNH.shape[1:]).transpose(1, 2)
    if q_GNTH.shape[2] == length:
        out = functional.scaled_dot_product_attention(q_GNTH, k_GKLH, v_GKLH, is_causal=True, enable_gqa=True)
    else:
        from torch.nn.attention.bias import causal_lower_right

        mask: Any = causal_lower_right(q_GNTH.shape[2], length)
        out = functional.scaled_dot_product_attention(q_GNTH, k_GKLH, v_GKLH, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)
