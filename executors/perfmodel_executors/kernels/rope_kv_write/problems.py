"""Queries, keys and values as slices of one projection's output, written to shuffled slots."""

__all__ = ["serving", "tiny"]

from dataclasses import replace
from typing import Any

import torch

from perfmodel.ops.elementwise import kv_write as write_work
from perfmodel.ops.elementwise import rope as rope_work
from perfmodel.ops.work import Work
from perfmodel_executors.kernels.kv_pages import FP8, empty_pages
from perfmodel_executors.kernels.kv_pages.samples import NAMES, TOLERANCE
from perfmodel_executors.kernels.problem import Inputs, Problem
from perfmodel_executors.kernels.rope.reference import rope_table

_PAGE = 16
_THETA = 10_000.0


def tiny(dtype: torch.dtype) -> list[Problem]:
    """Odd numbers of heads, head sizes that are no powers of two, values of another size, no table."""
    return [
        _problem(5, (3, 1), (20, 12), dtype, dtype),
        _problem(3, (6, 5), (16, 16), dtype, dtype, has_rope=False),
        _problem(7, (4, 2), (16, 24), dtype, FP8),
        _problem(6, (5, 1), (20, 16), dtype, torch.int8),
    ]


def serving() -> list[Problem]:
    """Prompts beyond the L2 and a decode batch of an 8B model's heads, in the formats of the cache."""
    shapes = ((8192, (32, 8)), (64, (32, 8)), (16384, (64, 8)))
    kinds = (torch.bfloat16, FP8, torch.int8)
    return [_problem(tokens, heads, (128, 128), torch.bfloat16, kv) for kv in kinds for tokens, heads in shapes]


def _problem(
    num_tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    has_rope: bool = True,
) -> Problem:
    widths = [heads[0] * dims[0], heads[1] * dims[0], heads[1] * dims[1]]
    num_blocks = -(-num_tokens // _PAGE) + 2

    def make(inputs: Inputs) -> tuple[Any, ...]:
        q, k, v = inputs.normal(num_tokens, sum(widths), dtype=dtype).tensor_split([widths[0], sum(widths[:2])], dim=-1)
        parts = (x.view(num_tokens, -1, width) for x, width in zip((q, k, v), (dims[0], dims[0], dims[1]), strict=True))
        table = rope_table(num_tokens, dims[0], _THETA, dtype).to(inputs.device) if has_rope else None
        pages = empty_pages(num_blocks, _PAGE, heads[1], dims, kv_dtype, inputs.device)
        return *parts, table, pages, inputs.permutation(num_blocks * _PAGE)[:num_tokens]

    tolerance = TOLERANCE[dtype]
    if dtype != torch.float32 and kv_dtype != dtype:  # one step of the quantiser, where the roundings before it differ
        tolerance = max(tolerance, 1 / 8 if kv_dtype == FP8 else 1 / 127)
    return Problem(
        "rope_kv_write",
        {"tokens": num_tokens, "num_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": dims[0],
         "kv_cache_dtype": NAMES[kv_dtype], "dtype": NAMES[dtype], "rope": "yes" if has_rope else "no"},
        make,
        _work(num_tokens, widths, dtype, kv_dtype, has_rope),
        tolerance,
    )  # fmt: skip


def _work(num_tokens: int, widths: list[int], dtype: torch.dtype, kv_dtype: torch.dtype, has_rope: bool) -> Work:
    """Both operators' FLOPs; of keys, the rotated ones are not written and read again."""
    write = write_work(num_tokens, widths[1] + widths[2], dtype.itemsize, kv_dtype.itemsize)
    if not has_rope:
        return write
    queries = rope_work(num_tokens, widths[0], dtype.itemsize)
    rotated = rope_work(num_tokens, widths[0] + widths[1], dtype.itemsize)
    return replace(
        write,
        name="rope_kv_write",
        flops=rotated.flops,
        activation_bytes=write.activation_bytes + queries.activation_bytes,
    )
