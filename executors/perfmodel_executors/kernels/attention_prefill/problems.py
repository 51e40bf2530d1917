"""Prompts, chunks behind a prefix and trees of drafted tokens, in shuffled pages."""

__all__ = ["serving", "tiny"]

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from perfmodel.ops.attention.prefill import Heads, flash_prefill
from perfmodel_executors.kernels.kv_pages import FP8, KVPages
from perfmodel_executors.kernels.kv_pages.samples import NAMES, TOLERANCE, contiguous_kv, random_pages
from perfmodel_executors.kernels.problem import Inputs, Problem
from perfmodel_executors.kernels.sdpa import by_backend

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
