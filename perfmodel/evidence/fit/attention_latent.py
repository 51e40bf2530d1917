"""Measured latent attention: `mla_context_module`, `mla_generation_module`, `context_mla`, `generation_mla`.

Columns: batch_size, isl (context), step (generation: tokens in the cache), num_heads, kv_cache_dtype, kernel_source,
engine_version, and for whole modules model and gemm_type. Tables without a model were taken with DeepSeek-V3's sizes.
Attention alone (`context_mla`, `generation_mla`) still has the GEMMs that expand or absorb the latents.
"""

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.forms.attention.decode import DecodeKernel, DecodeSizes
from perfmodel.cost.forms.attention.latent import (
    LatentDecodeFit,
    LatentPrefillFit,
    LatentSizes,
    latent_decode_seconds,
    latent_prefill_seconds,
)
from perfmodel.cost.forms.attention.prefill import PrefillSizes
from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.cost.forms.fits import Domain
from perfmodel.evidence.fit.forms import fit_group
from perfmodel.evidence.sources.kernels import (
    Group,
    KernelTable,
    bytes_of,
    engine_name,
    format_bytes,
    format_name,
    numbers,
)
from perfmodel.ops.extents import DecodeExtent, HeadsExtent

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

OPS = ("mla_context_module", "mla_generation_module", "context_mla", "generation_mla")

# DeepSeek-V3 (config.json): hidden size, ranks of the query and of the latent, head sizes.
_HIDDEN, _QUERY_RANK, _RANK, _ROPE, _NOPE, _VALUE = 7168, 1536, 512, 64, 128, 128
# Query heads that share a tile of the decode kernel, by what its code calls it; Triton pads to 16.
_ROWS = {"FLASHMLA": 64, "FLASH_ATTN_MLA": 128, "vllm_triton_mla": 16}
_ROWS_ELSE = 64
_COMMON = ("launch_s", "gemm_fraction", "weight_fraction", "tensor_fraction", "floor_s")
_FREE_PREFILL = (*_COMMON, "activation_fraction")
_FREE_DECODE = (*_COMMON, "memory_fraction", "block_s")


def sizes_of(table: KernelTable) -> LatentSizes:
    """The sizes of each row."""
    batch, heads = numbers(table, "batch_size"), numbers(table, "num_heads")
    is_module, is_decode = table.op.endswith("module"), "generation" in table.op
    down = _HIDDEN * (_QUERY_RANK + _RANK + _ROPE)
    projections = _QUERY_RANK * heads * (_NOPE + _ROPE) + heads * _VALUE * _HIDDEN + down
    absorbed = heads * (_NOPE + _VALUE) * _RANK
    tokens = batch if is_decode else batch * numbers(table, "isl")
    weights = projections * is_module if is_decode else projections * is_module + absorbed
    size = format_bytes(table, "gemm_type") if "gemm_type" in table.columns else np.full(len(table), 2.0)
    inner = _decode_sizes(table) if is_decode else _prompt_sizes(table)
    wide = _RANK * 2 + _ROPE + _NOPE + _VALUE if is_decode else 2 * _NOPE + _ROPE + 2 * _VALUE
    return LatentSizes(
        tokens=tokens,
        weights=weights,
        weight_bytes=size,
        absorbed=absorbed if is_decode else 0.0 * absorbed,
        activation_bytes=4.0 * tokens * (_HIDDEN + heads * wide),
        attention=inner,
    )


def _decode_sizes(table: KernelTable) -> DecodeSizes:
    batch, one = numbers(table, "batch_size"), np.ones(len(table))
    length, kv_bytes = numbers(table, "step") + 1, format_bytes(table, "kv_cache_dtype")
    heads = HeadsExtent(numbers(table, "num_heads"), one, (_RANK + _ROPE) * one, _RANK * one, kv_bytes, 0 * one)
    return DecodeSizes(
        DecodeExtent(heads, num_seqs=batch, kv_tokens=batch * length),
        length,
        kv_token_bytes=(_RANK + _ROPE) * kv_bytes,
        io_bytes=0 * one,
        flops_per_token=2.0 * (2 * _RANK + _ROPE) * one,
    )


def _prompt_sizes(table: KernelTable) -> PrefillSizes:
    heads, one = numbers(table, "num_heads"), np.ones(len(table))
    return PrefillSizes(
        HeadsExtent(heads, heads, (_NOPE + _ROPE) * one, _VALUE * one, 2 * one, 0 * one),
        tokens=numbers(table, "isl"),
        cached=0 * one,
        count=numbers(table, "batch_size"),
        io_bytes=0 * one,
        kv_bytes=0 * one,
    )


def groups(table: KernelTable, device: DeviceFacts) -> list[Group]:
    """One group per engine, kernel, KV format and format of the projections.

    Modules with projections in BF16 are the ones that serving takes its decode attention from.
    """
    is_decode, columns = "generation" in table.op, dict(table.columns)
    columns.setdefault("gemm_type", np.full(len(table), "bfloat16"))
    result = []
    names = ("engine_version", "kernel_source", "kv_cache_dtype", "gemm_type")
    for (engine, kernel, kv_format, gemm), rows in KernelTable(table.system, table.op, columns).groups(names):
        serves = is_decode and format_name(gemm) == "bf16"
        family = "attention_decode/bf16" if serves else f"latent_{'decode' if is_decode else 'prefill'}/{gemm}"
        size = _RANK + _ROPE if is_decode else _NOPE + _ROPE
        one = table.take(rows)
        key = f"{family}/kv_{format_name(kv_format)}/hd{size}/{kernel}"
        result.append(Group(engine_name(engine), key, sizes_of(one), one.seconds, rows))
    return result


def fit(group: Group, device: DeviceFacts) -> LatentDecodeFit | LatentPrefillFit:
    """The parameters of one module."""
    kv_format, head_dim, kernel = group.key.split("/")[-3:]
    kv_bytes = bytes_of(kv_format.removeprefix("kv_"))
    domain = Domain(head_dim=int(head_dim.removeprefix("hd")), kv_element_bytes=kv_bytes)
    starts: tuple[dict[str, float], ...] = ({}, {"floor_s": float(np.min(group.seconds))})
    if isinstance(group.sizes.attention, PrefillSizes):
        start = LatentPrefillFit(domain=domain)
        return fit_group(group, latent_prefill_seconds, start, device, free=_FREE_PREFILL, starts=starts)
    rows = _ROWS.get(kernel, _ROWS_ELSE)
    begin = LatentDecodeFit(kernel=DecodeKernel(heads_per_block=rows, rows=rows), domain=domain)
    return fit_group(group, latent_decode_seconds, begin, device, free=_FREE_DECODE, starts=starts)


def predict(group: Group, fit: LatentDecodeFit | LatentPrefillFit, device: DeviceFacts) -> Floats:
    """Seconds of each row."""
    if isinstance(fit, LatentPrefillFit):
        return np.asarray(latent_prefill_seconds(group.sizes, fit, device))
    return np.asarray(latent_decode_seconds(group.sizes, fit, device))
