"""RoPE of queries and keys, and the paged write of keys and values: what comes between the projection and attention.
Rotations are in the half-rotation layout (pairs are elements i and i + H/2 of a head); the engine assigned the slots.
Problems: queries, keys and values as slices of one projection's output, written to shuffled slots."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from perfmodel.ops.elementwise import kv_write as kv_write_work
from perfmodel.ops.elementwise import rope as rope_work
from perfmodel_executors.kernels.kv_pages import FP8, NAMES, TOLERANCE, KVPages, empty_pages
from perfmodel_executors.kernels.problem import Inputs, Problem


def rope_table(num_positions: int, head_dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """cos and sin of position * theta^(-2i/head_dim), concatenated: [num_positions, head_dim]."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse)
    return torch.cat((angle.cos(), angle.sin()), dim=-1).to(dtype)


def rope(x_TNH: Tensor, cos_sin_TH: Tensor) -> Tensor:
    """x rotated; `cos_sin_TH` holds the table's row of each token's position."""
    cos, sin = cos_sin_TH[:, None].chunk(2, dim=-1)
    first, second = x_TNH.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def kv_write(k_TKH: Tensor, v_TKH: Tensor, pages: KVPages, slots_T: Tensor) -> None:
    """Writes row t of k and v to slot `slots[t] = block_id * block_size + offset`, in place, quantised as pages are."""
    pages.write(k_TKH, v_TKH, slots_T)


def rope_kv_write(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cos_sin_TH: Tensor | None, pages: KVPages, slots_T: Tensor
) -> Tensor:
    """The rotated queries; keys and values go to their `slots` of `pages`. cos_sin: see `rope_table`; None: no RoPE."""
    if cos_sin_TH is not None:
        q_TNH, k_TKH = rope(q_TNH, cos_sin_TH), rope(k_TKH, cos_sin_TH)
    pages.write(k_TKH, v_TKH, slots_T)
    return q_TNH


_PAGE = 16
_THETA = 10_000.0


def tiny(dtype: torch.dtype) -> list[Problem]:
    return [
        _problem(5, (3, 1), (20, 12), dtype, dtype),
        _problem(3, (6, 5), (16, 16), dtype, dtype, has_rope=False),
        _problem(7, (4, 2), (16, 24), dtype, FP8),
        _problem(6, (5, 1), (20, 16), dtype, torch.int8),
        *(_part(operator, 9, (5, 3), 20, dtype) for operator in ("rope", "kv_write")),
    ]


def serving() -> list[Problem]:
    shapes = ((8192, (32, 8)), (64, (32, 8)), (16384, (64, 8)))
    kinds = (torch.bfloat16, FP8, torch.int8)
    both = [_problem(tokens, heads, (128, 128), torch.bfloat16, kv) for kv in kinds for tokens, heads in shapes]
    return [*both, *(_part(operator, 64, (32, 8), 128, torch.bfloat16) for operator in ("rope", "kv_write"))]


def _part(operator: str, num_tokens: int, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> Problem:
    """One of the two alone, for mixers that do something else between them."""
    whole = _problem(num_tokens, heads, (dim, dim), dtype, dtype)

    def make(inputs: Inputs) -> tuple[Any, ...]:
        q, k, v, table, pages, slots = whole.make(inputs)
        return (q, table) if operator == "rope" else (k, v, pages, slots)

    work = rope_work(num_tokens, dim * heads[0], dtype.itemsize)
    if operator == "kv_write":
        work = kv_write_work(num_tokens, 2 * dim * heads[1], dtype.itemsize, dtype.itemsize)
    return replace(whole, operator=operator, make=make, work=work)


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

    # Both operators' FLOPs; of keys, the rotated ones are not written and read again.
    work = kv_write_work(num_tokens, widths[1] + widths[2], dtype.itemsize, kv_dtype.itemsize)
    if has_rope:
        queries = rope_work(num_tokens, widths[0], dtype.itemsize)
        rotated = rope_work(num_tokens, widths[0] + widths[1], dtype.itemsize)
        num_bytes = work.activation_bytes + queries.activation_bytes
        work = replace(work, name="rope_kv_write", flops=rotated.flops, activation_bytes=num_bytes)
    tolerance = TOLERANCE[dtype]
    if dtype != torch.float32 and kv_dtype != dtype:  # one step of the quantiser, where the roundings before it differ
        tolerance = max(tolerance, 1 / 8 if kv_dtype == FP8 else 1 / 127)
    return Problem(
        "rope_kv_write",
        {"tokens": num_tokens, "num_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": dims[0],
         "kv_cache_dtype": NAMES[kv_dtype], "dtype": NAMES[dtype], "rope": "yes" if has_rope else "no"},
        make,
        work,
        tolerance,
    )  # fmt: skip
