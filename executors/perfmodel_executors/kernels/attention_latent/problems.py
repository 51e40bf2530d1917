"""Decodes of models whose tokens are latents: DeepSeek's sizes, and odd ones."""

__all__ = ["serving", "tiny"]

import math
from typing import Any

import torch

from perfmodel.ops.attention.latent import latent_decode
from perfmodel.ops.attention.prefill import Heads
from perfmodel_executors.kernels.attention_latent.pages import LatentPages
from perfmodel_executors.kernels.kv_pages.samples import NAMES, TOLERANCE
from perfmodel_executors.kernels.problem import Inputs, Problem

_DEEPSEEK = (128, 64, 512, 128)  # elements of a query that meet keys of latents, rotated ones, of a latent, of a value


def tiny(dtype: torch.dtype) -> list[Problem]:
    """Odd contexts and sizes, fewer heads than a tile has rows and more."""
    return [_problem([1, 19, 40], 6, (12, 8, 32, 10), dtype, 4), _problem([33, 70], 20, (10, 6, 24, 16), dtype)]


def serving() -> list[Problem]:
    """Heads of DeepSeek-V3 on one device and on eight."""
    shapes = ((32, 4096, 128), (128, 2048, 128), (1, 32768, 128), (64, 4096, 16), (8, 16384, 16))
    return [_problem([context] * size, heads, _DEEPSEEK, torch.bfloat16) for size, context, heads in shapes]


def _problem(
    contexts: list[int], num_heads: int, dims: tuple[int, int, int, int], dtype: torch.dtype, page: int = 16
) -> Problem:
    nope, rotated, rank, value = dims
    width = -(-max(contexts) // page)
    num_blocks = width * len(contexts) + 1

    def make(inputs: Inputs) -> tuple[Any, ...]:
        q = inputs.normal(len(contexts), num_heads, nope + rotated, dtype=dtype)
        pages = LatentPages(inputs.normal(num_blocks, page, rank + rotated, dtype=dtype))
        tables = inputs.permutation(num_blocks)[: width * len(contexts)].view(len(contexts), width)
        keys = inputs.normal(num_heads, nope, rank, dtype=dtype, scale=rank**-0.5)
        values = inputs.normal(num_heads, value, rank, dtype=dtype, scale=rank**-0.5)
        lengths = inputs.of(contexts, torch.int64)
        return q, pages, tables, lengths, keys, values, 1 / math.sqrt(nope + rotated)

    heads = Heads(num_heads, 1, rank + rotated, rank, NAMES[dtype], dtype.itemsize, dtype.itemsize)
    return Problem(
        "attention_latent_decode",
        {"batch_size": len(contexts), "step": max(contexts) - 1, "num_heads": num_heads, "kv_lora_rank": rank,
         "qk_rope_head_dim": rotated, "block_size": page, "attn_dtype": NAMES[dtype]},
        make,
        latent_decode(len(contexts), sum(contexts), heads),
        TOLERANCE[dtype],
    )  # fmt: skip
