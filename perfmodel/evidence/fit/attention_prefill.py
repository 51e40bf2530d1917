"""Measured attention of prompts (`context_attention`): which kernel a row ran, its sizes, and the fit of its form.

Columns: batch_size, isl (query tokens per sequence), step (tokens already cached), num_heads, num_key_value_heads,
head_dim, window_size (0 or NaN: none), attn_dtype, kv_cache_dtype, kernel_source, engine_version. Rows of one kernel,
head size and pair of number formats are fitted together, whatever their window.
"""

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.forms.attention.prefill import FlashPrefillFit, PrefillKernel, PrefillSizes, prefill_seconds
from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.cost.forms.fits import Domain
from perfmodel.evidence.fit.forms import fit_group
from perfmodel.evidence.sources.kernels import (
    Group,
    KernelTable,
    bytes_of,
    format_bytes,
    format_name,
    kernel_groups,
    numbers,
)
from perfmodel.ops.extents import HeadsExtent
from perfmodel.specs.architectures import find_architecture

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

OP = "context_attention"

_FREE = ("launch_s", "tensor_fraction", "memory_fraction", "block_tokens", "tail", "kv_weight", "write_s")
_STARTS: tuple[dict[str, float], ...] = (
    {},
    {"block_tokens": 300.0, "tail": 1.0},
    {"tensor_fraction": 0.8, "memory_fraction": 0.9, "kv_weight": 3.0},
)


def kernel_names(table: KernelTable, device: DeviceFacts) -> NDArray[np.str_]:
    """The kernel of each row; SGLang's FlashAttention-3 is another kernel before Hopper, as is TensorRT-LLM's."""
    has_wgmma = find_architecture(device.hardware.declared.architecture).has_wgmma
    known = {
        "vllm_flash_attn": "flash2",
        "vllm_flash_attn_fa3": "flash3",
        "flash_attention": "flash3" if has_wgmma else "flash3_sm80",
        "torch_flow": "trtllm_sm90" if has_wgmma else "trtllm",
    }
    return np.array([known.get(name, name) for name in table["kernel_source"].astype(str)], dtype="U32")


def sizes_of(table: KernelTable) -> PrefillSizes:
    """The sizes of each row."""
    heads, kv_heads = numbers(table, "num_heads"), numbers(table, "num_key_value_heads")
    head_dim, kv_bytes = numbers(table, "head_dim"), format_bytes(table, "kv_cache_dtype")
    return PrefillSizes(
        HeadsExtent(heads, kv_heads, head_dim, head_dim, kv_bytes, numbers(table, "window_size")),
        tokens=numbers(table, "isl"),
        cached=numbers(table, "step"),
        count=numbers(table, "batch_size"),
        io_bytes=2 * 2 * head_dim * heads,
        kv_bytes=2 * kv_heads * head_dim * kv_bytes,
    )


def is_too_fast(table: KernelTable, device: DeviceFacts) -> NDArray[np.bool_]:
    """Rows whose visible products alone would take longer at the declared peak."""
    sizes = sizes_of(table)
    tokens, cached, window = sizes.tokens, sizes.cached, sizes.heads.window
    short = np.clip(window - cached, 0, tokens)
    windowed = short * (cached + (short + 1) / 2) + (tokens - short) * window
    pairs = np.where(window > 0, windowed, tokens * (cached + (tokens + 1) / 2))
    flops = 2 * sizes.count * sizes.heads.num_heads * sizes.heads.head_size * pairs
    peak = np.array([device.peak(rate) for rate in _tensor_rates(table)])
    return np.asarray(table.seconds < flops / peak)


def _tensor_rates(table: KernelTable) -> list[str]:
    """The number format of the products: a kernel that reads FP8 keys multiplies in FP8, whatever its queries were."""
    rates, formats = table["attn_dtype"].astype(str), table["kv_cache_dtype"].astype(str)
    return ["fp8" if kv == "fp8" else format_name(rate) for rate, kv in zip(rates, formats, strict=True)]


def groups(table: KernelTable, device: DeviceFacts) -> list[Group]:
    """One group per engine, kernel, number formats and head size; rows that beat the hardware are left out."""
    usable = np.flatnonzero(~is_too_fast(table, device))
    return kernel_groups(table, "attention_prefill", usable, lambda part: kernel_names(part, device), sizes_of)


def fit(group: Group, device: DeviceFacts) -> FlashPrefillFit:
    """The parameters of one kernel."""
    return fit_group(group, _seconds, _start(group.key), device, free=_FREE, starts=_STARTS, most_rows=2500)


def predict(group: Group, fit: FlashPrefillFit, device: DeviceFacts) -> Floats:
    """Seconds of each row."""
    return _seconds(group.sizes, fit, device)


def _seconds(sizes: PrefillSizes, fit: FlashPrefillFit, device: DeviceFacts) -> Floats:
    return np.asarray(prefill_seconds(sizes, fit, device).duration)


def _start(key: str) -> FlashPrefillFit:
    """The kernel's rules and domain."""
    _, rate, kv_format, head_dim, kernel = key.split("/")
    size, kv_bytes = int(head_dim.removeprefix("hd")), bytes_of(kv_format.removeprefix("kv_"))
    return FlashPrefillFit(
        kernel=_kernel(kernel, size, kv_bytes),
        domain=Domain(head_dim=size, kv_element_bytes=kv_bytes),
        rate="fp8" if kv_bytes == 1 else rate,
    )


def _kernel(name: str, head_dim: int, kv_bytes: float) -> PrefillKernel:
    """Tile sizes, from the libraries' sources: they depend on the head size, since tiles share registers and SRAM.

    TensorRT-LLM's closed kernels are read off their tables: 128 rows, and windows that start in wide key tiles.
    """
    if name == "trtllm":
        return PrefillKernel(rows=128, keys=32, packs="never")
    if name == "trtllm_sm90":
        narrow, wide = (768.0, 384.0) if kv_bytes == 1 else (256.0, 64.0)
        return PrefillKernel(rows=128, keys=64, packs="never", window_overlap=narrow if head_dim <= 64 else wide)
    if name == "flash2":
        return PrefillKernel(rows=64, keys=128, packs="single")
    if name == "flash3_sm80":
        return PrefillKernel(rows=128, keys=64)
    return PrefillKernel(rows=192 if head_dim <= 64 else 128, keys=128 if head_dim > 192 and kv_bytes == 1 else 64)
