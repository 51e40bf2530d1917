"""Decodes and prompts of models whose tokens are latents: DeepSeek's sizes, and odd ones."""

__all__ = ["serving", "tiny"]

import math
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from perfmodel.ops.attention.latent import latent_decode
from perfmodel.ops.attention.prefill import Heads, flash_prefill
from perfmodel_executors.kernels.attention_latent.heads import LatentHeads
from perfmodel_executors.kernels.attention_latent.pages import LatentPages
from perfmodel_executors.kernels.kv_pages.samples import NAMES, TOLERANCE
from perfmodel_executors.kernels.problem import Inputs, Problem

_DEEPSEEK = (128, 64, 512, 128)  # elements of a query that meet keys of latents, rotated ones, of a latent, of a value


def tiny(dtype: torch.dtype) -> list[Problem]:
    """Odd contexts and sizes, fewer heads than a tile has rows and more; few tokens behind a long prefix, and many."""
    small = (12, 8, 32, 10)
    return [
        _decode([1, 19, 40], 6, small, dtype, 4),
        _decode([33, 70], 20, (10, 6, 24, 16), dtype),
        _prompt([(9, 0), (2, 30), (140, 5)], 3, small, dtype, 4),
        _prompt([(50, 90)], 2, (16, 16, 32, 16), dtype),
        _prompt([(3, 37), (2, 0)], 4, small, dtype, 4),
    ]


def serving() -> list[Problem]:
    """Heads of DeepSeek-V3 on one device and on eight."""
    bf16 = torch.bfloat16
    shapes = ((32, 4096, 128), (128, 2048, 128), (1, 32768, 128), (64, 4096, 16), (8, 16384, 16))
    spans = (
        ([(4096, 0)], 128),
        ([(1024, 0)] * 8, 16),
        ([(8192, 0)], 16),
        ([(2048, 14336)], 16),
        ([(4, 8192)] * 32, 16),
    )
    decodes = [_decode([context] * size, heads, _DEEPSEEK, bf16) for size, context, heads in shapes]
    return decodes + [_prompt(each, heads, _DEEPSEEK, bf16) for each, heads in spans]


def _decode(
    contexts: list[int], num_heads: int, dims: tuple[int, int, int, int], dtype: torch.dtype, page: int = 16
) -> Problem:
    nope, rotated, rank, _ = dims

    def make(inputs: Inputs) -> tuple[Any, ...]:
        q = inputs.normal(len(contexts), num_heads, nope + rotated, dtype=dtype)
        pages, tables = _pages(inputs, contexts, page, rank + rotated, dtype)
        return q, pages, tables, inputs.of(contexts, torch.int64), _heads(inputs, num_heads, dims, dtype)

    heads = Heads(num_heads, 1, rank + rotated, rank, NAMES[dtype], dtype.itemsize, dtype.itemsize)
    return Problem(
        "attention_latent_decode",
        {"batch_size": len(contexts), "step": max(contexts) - 1, "num_heads": num_heads, "kv_lora_rank": rank,
         "qk_rope_head_dim": rotated, "block_size": page, "attn_dtype": NAMES[dtype]},
        make,
        latent_decode(len(contexts), sum(contexts), heads),
        TOLERANCE[dtype],
    )  # fmt: skip


def _prompt(
    spans: list[tuple[int, int]], num_heads: int, dims: tuple[int, int, int, int], dtype: torch.dtype, page: int = 16
) -> Problem:
    """spans: (new tokens, tokens computed before) of each chunk"""
    nope, rotated, rank, value = dims
    starts = list(accumulate((new for new, _ in spans), initial=0))

    def make(inputs: Inputs) -> tuple[Any, ...]:
        q = inputs.normal(starts[-1], num_heads, nope + rotated, dtype=dtype)
        pages, tables = _pages(inputs, [new + done for new, done in spans], page, rank + rotated, dtype)
        chunks = (inputs.of(starts, torch.int64), inputs.of([done for _, done in spans], torch.int64))
        return q, pages, tables, *chunks, _heads(inputs, num_heads, dims, dtype)

    heads = Heads(num_heads, num_heads, nope + rotated, value, NAMES[dtype], dtype.itemsize, dtype.itemsize)
    return Problem(
        "attention_latent_prefill",
        {"batch_size": len(spans), "isl": max(new for new, _ in spans), "step": max(done for _, done in spans),
         "num_heads": num_heads, "kv_lora_rank": rank, "qk_rope_head_dim": rotated, "block_size": page,
         "attn_dtype": NAMES[dtype]},
        make,
        flash_prefill(spans, heads),
        TOLERANCE[dtype],
    )  # fmt: skip


def _pages(
    inputs: Inputs, contexts: list[int], page: int, width: int, dtype: torch.dtype
) -> tuple[LatentPages, Tensor]:
    """Latents, and the blocks of each sequence, shuffled."""
    columns = -(-max(contexts) // page)
    num_blocks = columns * len(contexts) + 1
    pages = LatentPages(inputs.normal(num_blocks, page, width, dtype=dtype))
    return pages, inputs.permutation(num_blocks)[: columns * len(contexts)].view(len(contexts), columns)


def _heads(inputs: Inputs, num_heads: int, dims: tuple[int, int, int, int], dtype: torch.dtype) -> LatentHeads:
    nope, rotated, rank, value = dims
    keys = inputs.normal(num_heads, nope, rank, dtype=dtype, scale=rank**-0.5)
    values = inputs.normal(num_heads, value, rank, dtype=dtype, scale=rank**-0.5)
    return LatentHeads(keys, values, 1 / math.sqrt(nope + rotated))
