"""Random pages for problems, and the same keys and values contiguous, as library calls want them."""

__all__ = ["NAMES", "TOLERANCE", "contiguous_kv", "random_pages"]

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from perfmodel_executors.kernels.kv_pages.pages import FP8, KVPages, quantized
from perfmodel_executors.kernels.problem import Inputs

# The names of tables of measured kernels, and how far a sum over keys may differ from the reference's.
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", FP8: "fp8", torch.int8: "int8"}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}

_kept: Any = WeakTensorKeyDictionary()


def random_pages(
    inputs: Inputs,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> KVPages:
    """Standard normal keys and values of `dtype`, stored as `kv_dtype`."""
    pages: list[Tensor] = []
    scales: list[Tensor | None] = []
    for dim in head_dims:
        values, scale = quantized(inputs.normal(num_blocks, block_size, num_kv_heads, dim, dtype=dtype), kv_dtype)
        pages.append(values)
        scales.append(None if scale is None else scale.transpose(1, 2).contiguous())
    return KVPages(pages[0], pages[1], scales[0], scales[1])


def contiguous_kv(pages: KVPages, tables_DM: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values [D, K, L, H] of equally long sequences; gathered once per pages, so that calls can be timed."""
    known: dict[int, tuple[Tensor, Tensor]] = _kept.get(pages.k_BSKH, {})
    if length not in known:
        k, v = (
            rows.view(len(tables_DM), -1, *rows.shape[1:])[:, :length].transpose(1, 2).contiguous()
            for rows in pages.gathered(tables_DM.flatten(), pages.dtype)
        )
        known = {length: (k, v)}
        _kept[pages.k_BSKH] = known
    return known[length]
