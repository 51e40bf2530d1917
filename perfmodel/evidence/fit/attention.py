"""Measured attention: decodes (`generation_attention`), prompts (`context_attention`), latent (`*_mla*`).

Columns: batch_size, isl (query tokens of a sequence), step (cached tokens), num_heads, num_key_value_heads, head_dim,
window_size (0 or NaN: none), attn_dtype, kv_cache_dtype, kernel_source, engine_version; latent modules also gemm_type.
Rows of one kernel, head size and formats are fitted together over all windows. Latent tables without a model have
DeepSeek-V3's sizes; attention alone (`context_mla`, `generation_mla`) includes GEMMs that expand or absorb latents."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.kernel_models.attention.decode import DecodeKernel, DecodeSizes, FlashDecodeFit
from perfmodel.cost.kernel_models.attention.latent import LatentDecodeFit, LatentPrefillFit, LatentSizes
from perfmodel.cost.kernel_models.attention.prefill import FlashPrefillFit, PrefillKernel, PrefillSizes
from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.cost.kernel_models.fits import Domain
from perfmodel.evidence.fit.kernels import Groups, KernelModule, best_of, fit_groups, search_of, seconds_of
from perfmodel.evidence.sources.kernels import (
    Group,
    KernelTable,
    bytes_of,
    engine_and_version,
    format_bytes,
    format_name,
    kernel_groups,
    numbers,
    version_order,
)
from perfmodel.ops.problem_sizes import DecodeSize, HeadShape
from perfmodel.specs.architectures import find_architecture

_MAX_ROWS = 2500  # of a fit


def _libraries(table: KernelTable, device: DeviceFacts) -> NDArray[np.str_]:
    """The kernel of each row by library. FlashAttention-3 is another kernel before Hopper, and so are TensorRT-LLM's on
    Hopper and on devices with tensor memory, which FlashInfer ships, too."""
    flash = "flash3" if _has_wgmma(device) else "flash2"
    is_gen = device.hardware.level("tensor_memory") is not None
    known = {
        "flash_attention": "flash3" if _has_wgmma(device) else "flash3_sm80",
        "torch_flow": "trtllm_gen" if is_gen else "trtllm_sm90" if _has_wgmma(device) else "trtllm",
        "vllm_flash_attn": flash,
        "vllm_flash_attn_fa2": "flash2",
        "vllm_flash_attn_fa4": "flash4",
        "vllm_flashinfer": "trtllm_gen" if is_gen else "flashinfer",
        **dict.fromkeys(("fa3", "vllm_flash_attn_fa3"), "flash3"),
        **dict.fromkeys(
            ("torch_flow_flashinfer", "vllm_flashinfer_fidecode", "vllm_flashinfer_fiprefill"), "flashinfer"
        ),
        **dict.fromkeys(("trtllm_mha", "vllm_flashinfer_trtllmdecode", "vllm_flashinfer_trtllmprefill"), "trtllm_gen"),
        "vllm_triton_attn": "triton",
    }
    return np.array([known.get(name, name) for name in table["kernel_source"].astype(str)], dtype="U32")


def _has_wgmma(device: DeviceFacts) -> bool:
    return find_architecture(device.hardware.declared.architecture).has_wgmma


def _domain(kv_format: str, head_dim: str, **more: Any) -> Domain:
    """Domain of the key parts `kv_<format>` and `hd<size>`."""
    size, kv_bytes = int(head_dim.removeprefix("hd")), bytes_of(kv_format.removeprefix("kv_"))
    return Domain(head_dim=size, kv_element_bytes=kv_bytes, **more)


def _heads(table: KernelTable) -> HeadShape:
    head_dim, kv_bytes = numbers(table, "head_dim"), format_bytes(table, "kv_cache_dtype")
    counts = numbers(table, "num_heads"), numbers(table, "num_key_value_heads")
    return HeadShape(*counts, head_dim, head_dim, kv_bytes, numbers(table, "window_size"))


class _Decodes(NamedTuple):
    """A decode kernel: its rules, extra parameters that its rows determine, and its groups."""

    kernel: DecodeKernel = DecodeKernel()
    free: tuple[str, ...] = ("group_traffic",)
    groups: tuple[tuple[int, int], ...] = ()


_MMHA_ABOVE = 32  # TensorRT-LLM: larger groups, and single heads, run the kernel without tensor cores
_WIDE = (_MMHA_ABOVE + 1, 4096)
_WIDE_APART = version_order("1.3.0rc15")  # from which on trtllm-gen does not decode wide groups, as the tables show
_XQA: tuple[tuple[str, ...], tuple[tuple[int, int], ...]] = ("group_traffic", "group_block"), ((2, _MMHA_ABOVE),)
_DECODES = {
    "flash2": _Decodes(
        DecodeKernel(splits_mha=False, is_balanced=False, window_overlap=128, window_unpacks=True),
        ("group_traffic", "swap_s"),
    ),
    "flash3": _Decodes(DecodeKernel(split_share=1.1, window_overlap=128)),
    "flash3_sm80": _Decodes(DecodeKernel(split_tokens=128, whole_splits=True, pays_splits=True, window_overlap=128)),
    "xqa": _Decodes(
        DecodeKernel(split_tokens=128, split_waves=8, whole_splits=True, splits_window=True, pays_splits=True), *_XQA
    ),
    "xqa_fp8": _Decodes(DecodeKernel(split_tokens=256), *_XQA),  # Hopper's own: one wave of splits
    "mmha": _Decodes(
        DecodeKernel(heads_per_block=1, rows=1, split_waves=1.5, splits_window=True, pays_splits=True),
        (),
        ((1, 1), _WIDE),
    ),
}
_DECODES["mmha_wide"] = _DECODES["mmha"]._replace(groups=(_WIDE,))  # beside trtllm_gen, which takes single heads
_TRITON_SPLITS = (8.0, 16.0)  # of a context at most: SGLang's triton_attention_num_kv_splits; vLLM's segments
_FREE_IF_UNKNOWN = ("group_traffic", "group_block")
_MAX_BANDWIDTH = 0.95  # no kernel streams more of the declared peak; faster rows timed something else
_BEYOND_CACHE = 1.5  # times L2: smaller KV may have come from there


def decode_kernels(table: KernelTable, device: DeviceFacts) -> NDArray[np.str_]:
    """Kernel of each decode row; TensorRT-LLM chooses among its own by group size."""
    names, group = _libraries(table, device), numbers(table, "num_heads") / numbers(table, "num_key_value_heads")
    is_mmha = (group < 2) | (group > _MMHA_ABOVE)
    xqa = np.where(_has_wgmma(device) & (format_bytes(table, "kv_cache_dtype") == 1), "xqa_fp8", "xqa")
    names = np.where(
        np.char.startswith(names, "trtllm") & (names != "trtllm_gen"), np.where(is_mmha, "mmha", xqa), names
    )
    engines = [engine_and_version(called) for called in table["engine_version"].astype(str)]
    is_apart = np.array([name == "trtllm" and version_order(at) >= _WIDE_APART for name, at in engines], dtype=bool)
    return np.where((names == "trtllm_gen") & (group > _MMHA_ABOVE) & is_apart, "mmha_wide", names)


def decode_sizes(table: KernelTable) -> DecodeSizes:
    """Sizes of each decode row."""
    batch, length, heads = numbers(table, "batch_size"), numbers(table, "step") + 1, _heads(table)
    kv_heads, head_dim, kv_bytes = heads.num_kv_heads, numbers(table, "head_dim"), format_bytes(table, "kv_cache_dtype")
    new_token = kv_heads * head_dim * (2 + kv_bytes)  # read in 2 bytes, written into the cache
    return DecodeSizes(
        DecodeSize(heads, num_seqs=batch, kv_tokens=batch * length),
        length,
        kv_token_bytes=2 * kv_heads * head_dim * kv_bytes,
        io_bytes=batch * (2 * 2 * heads.num_heads * head_dim + 2 * new_token),
        flops_per_token=4 * head_dim,
    )


def decodes_too_fast(table: KernelTable, device: DeviceFacts) -> NDArray[np.bool_]:
    """Rows whose KV, too large for L2, would exceed the declared bandwidth."""
    sizes = decode_sizes(table)
    window = sizes.problem.heads.window
    visible = np.where(window > 0, np.minimum(sizes.length, window), sizes.length)
    kv_bytes = sizes.problem.num_seqs * visible * sizes.kv_token_bytes
    fastest = kv_bytes / (_MAX_BANDWIDTH * device.bandwidth)
    return np.asarray((kv_bytes > _BEYOND_CACHE * device.l2_bytes) & (table.seconds < fastest))


def _fit_decodes(groups: Groups) -> FlashDecodeFit:
    _, _, kv_format, head_dim, name = groups[0].key.split("/")
    known = _DECODES.get(name)
    kernels = [known] if known else [*_DECODES.values(), _Decodes()]
    if name == "triton":
        kernels += [_Decodes(DecodeKernel(most_splits=most, pays_splits=True)) for most in _TRITON_SPLITS]
    free, begins = search_of("decode")
    free = (*free, *(known.free if known else _FREE_IF_UNKNOWN))
    if not known and name.endswith("_alone"):  # latents: one KV head for all query heads, which tiles share
        shapes = ((rows, waves, pays) for rows in (16, 64, 128) for waves in (1.0, 2.0) for pays in (False, True))
        kernels = [
            _Decodes(DecodeKernel(heads_per_block=r, rows=r, split_waves=w, pays_splits=p)) for r, w, p in shapes
        ]
        free = (*free, "tensor_fraction")
    starts = [
        FlashDecodeFit(kernel=k.kernel, domain=_domain(kv_format, head_dim, groups=k.groups if known else ()))
        for k in kernels
    ]
    return best_of(groups, starts, free, begins, _MAX_ROWS)


def prefill_sizes(table: KernelTable) -> PrefillSizes:
    """Sizes of each prompt row."""
    heads, head_dim = _heads(table), numbers(table, "head_dim")
    return PrefillSizes(
        heads,
        tokens=numbers(table, "isl"),
        cached=numbers(table, "step"),
        count=numbers(table, "batch_size"),
        io_bytes=2 * 2 * head_dim * heads.num_heads,
        kv_bytes=2 * heads.num_kv_heads * head_dim * format_bytes(table, "kv_cache_dtype"),
    )


def prefills_too_fast(table: KernelTable, device: DeviceFacts) -> NDArray[np.bool_]:
    """Rows whose visible products alone would take longer at the declared peak; with FP8 keys they multiply in FP8."""
    sizes = prefill_sizes(table)
    tokens, cached, window = sizes.tokens, sizes.cached, sizes.heads.window
    short = np.clip(window - cached, 0, tokens)
    windowed = short * (cached + (short + 1) / 2) + (tokens - short) * window
    pairs = np.where(window > 0, windowed, tokens * (cached + (tokens + 1) / 2))
    flops = 2 * sizes.count * sizes.heads.num_heads * sizes.heads.head_size * pairs
    formats = zip(table["attn_dtype"].astype(str), table["kv_cache_dtype"].astype(str), strict=True)
    peak = np.array([device.peak("fp8" if kv == "fp8" else format_name(rate)) for rate, kv in formats])
    return np.asarray(table.seconds < flops / peak)


_MASKS = 1e9  # tokens beyond a window that kernels visit which mask keys outside it, and skip none


def _prefill_kernels(name: str, head_dim: int, is_fp8: bool) -> list[PrefillKernel]:
    """Tile sizes by head size (tiles share registers and SRAM), from the libraries' sources. TensorRT-LLM's closed
    kernels are inferred from their tables: 128 rows, windows that start in wide key tiles. Of others, all may be."""
    if name == "trtllm":
        return [PrefillKernel(rows=128, keys=32, packs="never")]
    if name == "trtllm_sm90":
        narrow, wide = (768.0, 384.0) if is_fp8 else (256.0, 64.0)
        return [PrefillKernel(rows=128, keys=64, packs="never", window_overlap=narrow if head_dim <= 64 else wide)]
    if name == "flash2":
        return [PrefillKernel(rows=64, keys=128, packs="single")]
    if name == "flash3_sm80":
        return [PrefillKernel(rows=128, keys=64)]
    if name == "flash3":
        return [PrefillKernel(rows=192 if head_dim <= 64 else 128, keys=128 if head_dim > 192 and is_fp8 else 64)]
    shapes, ways = ((64, 64), (128, 64), (128, 128), (256, 128)), ("never", "worthwhile")
    overlaps = (0.0, _MASKS) if name == "triton" else (0.0,)
    return [
        PrefillKernel(rows=rows, keys=keys, packs=packs, window_overlap=overlap)
        for overlap in overlaps
        for rows, keys in shapes
        for packs in ways
    ]


def _fit_prefills(groups: Groups) -> FlashPrefillFit:
    _, rate, kv_format, head_dim, name = groups[0].key.split("/")
    domain, is_fp8 = _domain(kv_format, head_dim), bytes_of(kv_format.removeprefix("kv_")) == 1
    kernels = _prefill_kernels(name, domain.head_dim or 0, is_fp8)
    facts: dict[str, Any] = {"domain": domain, "rate": "fp8" if is_fp8 else rate, "cache_speedup": 1.5}
    free, begins = search_of("prefill")
    if groups[0].key.startswith("encoder"):  # which has no KV cache to write
        free = tuple(name for name in free if name != "write_s")
    if len({group.device.exponentials for group in groups}) > 1:  # which tells the softmax from the products
        free, facts["softmax_ops"] = (*free, "softmax_ops"), 10.0
    starts = [FlashPrefillFit(kernel=kernel, **facts) for kernel in kernels]
    return best_of(groups, starts, free, begins, _MAX_ROWS)


# DeepSeek-V3 (config.json): hidden size, ranks of the query and of the latent, head sizes.
_HIDDEN, _QUERY_RANK, _RANK, _ROPE, _NOPE, _VALUE = 7168, 1536, 512, 64, 128, 128
# Query heads that share a tile of the decode kernel, by what its code calls it; Triton pads to 16.
_ROWS = {"FLASHMLA": 64, "FLASH_ATTN_MLA": 128, "vllm_triton_mla": 16}
_ROWS_ELSE = 64
_WITH_PRODUCTS = "vllm"  # kernels whose tables of attention alone have the products in them that expand or absorb
_LATENT_FREE = ("launch_s", "gemm_fraction", "weight_fraction", "tensor_fraction", "floor_s")


def _latent_sizes(table: KernelTable, is_alone: bool) -> LatentSizes | DecodeSizes | PrefillSizes:
    """Sizes of modules, or of the attention alone."""
    batch, heads, one = numbers(table, "batch_size"), numbers(table, "num_heads"), np.ones(len(table))
    is_module, is_decode = table.op.endswith("module"), "generation" in table.op
    down = _HIDDEN * (_QUERY_RANK + _RANK + _ROPE)
    projections = (_QUERY_RANK * heads * (_NOPE + _ROPE) + heads * _VALUE * _HIDDEN + down) * is_module
    absorbed = heads * (_NOPE + _VALUE) * _RANK
    inner: DecodeSizes | PrefillSizes
    if is_decode:
        tokens, weights, wide = batch, projections, _RANK * 2 + _ROPE + _NOPE + _VALUE
        length, kv_bytes = numbers(table, "step") + 1, format_bytes(table, "kv_cache_dtype")
        shared = HeadShape(heads, one, (_RANK + _ROPE) * one, _RANK * one, kv_bytes, 0 * one)
        inner = DecodeSizes(
            DecodeSize(shared, num_seqs=batch, kv_tokens=batch * length),
            length,
            kv_token_bytes=(_RANK + _ROPE) * kv_bytes,
            io_bytes=2.0 * batch * heads * (2 * _RANK + _ROPE) * is_alone,
            flops_per_token=2.0 * (2 * _RANK + _ROPE) * one,
        )
    else:
        tokens, weights, wide = batch * numbers(table, "isl"), projections + absorbed, 2 * _NOPE + _ROPE + 2 * _VALUE
        expanded = HeadShape(heads, heads, (_NOPE + _ROPE) * one, _VALUE * one, 2 * one, 0 * one)
        io_bytes = 2.0 * (_NOPE + _ROPE + _VALUE) * heads * is_alone
        inner = PrefillSizes(expanded, numbers(table, "isl"), 0 * one, batch, io_bytes=io_bytes, kv_bytes=io_bytes)
    if is_alone:
        return inner
    return LatentSizes(
        tokens=tokens,
        weights=weights,
        weight_bytes=format_bytes(table, "gemm_type") if "gemm_type" in table.columns else np.full(len(table), 2.0),
        absorbed=absorbed if is_decode else 0.0 * absorbed,
        activation_bytes=4.0 * tokens * (_HIDDEN + heads * wide),
        attention=inner,
    )


def _latent_groups(table: KernelTable, device: DeviceFacts) -> list[Group]:
    """One group per engine, kernel, KV format and projection format; serving uses decodes with BF16 projections."""
    is_decode, columns = "generation" in table.op, dict(table.columns)
    columns.setdefault("gemm_type", np.full(len(table), "bfloat16"))
    size = _RANK + _ROPE if is_decode else _NOPE + _ROPE
    result = []
    names = ("engine_version", "kernel_source", "kv_cache_dtype", "gemm_type")
    for (engine, kernel, kv_format, gemm), rows in KernelTable(table.system, table.op, columns).groups(names):
        serves = is_decode and format_name(gemm) == "bf16"
        family = "attention_decode/bf16" if serves else f"latent_{'decode' if is_decode else 'prefill'}/{gemm}"
        is_alone = not table.op.endswith("module") and not kernel.startswith(_WITH_PRODUCTS)
        name = f"{kernel}_alone" if is_alone else kernel
        part, key = table.take(rows), f"{family}/kv_{format_name(kv_format)}/hd{size}/{name}"
        sizes = _latent_sizes(part, is_alone)
        result.append(Group(*engine_and_version(engine), key, device, sizes, part.seconds, rows))
    return result


def _fit_latents(groups: Groups) -> LatentDecodeFit | LatentPrefillFit | FlashDecodeFit | FlashPrefillFit:
    sizes = groups[0].sizes
    if isinstance(sizes, DecodeSizes):
        return _fit_decodes(groups)
    if isinstance(sizes, PrefillSizes):
        return _fit_prefills(groups)
    *_, kv_format, head_dim, kernel = groups[0].key.split("/")
    domain, rows = _domain(kv_format, head_dim), _ROWS.get(kernel, _ROWS_ELSE)
    start: LatentDecodeFit | LatentPrefillFit
    free: tuple[str, ...]
    if isinstance(sizes.attention, PrefillSizes):
        start, free = LatentPrefillFit(domain=domain), (*_LATENT_FREE, "activation_fraction")
    else:
        start = LatentDecodeFit(kernel=DecodeKernel(heads_per_block=rows, rows=rows), domain=domain)
        free = (*_LATENT_FREE, "memory_fraction", "block_s")
    starts: tuple[dict[str, float], ...] = ({}, {"floor_s": float(np.min(seconds_of(groups)))})
    return fit_groups(groups, start, free=free, starts=starts)


_decode_groups = partial(
    kernel_groups, family="attention_decode", too_fast=decodes_too_fast, kernels=decode_kernels, sizes_of=decode_sizes
)
_prompt_groups = partial(
    kernel_groups, family="attention_prefill", too_fast=prefills_too_fast, kernels=_libraries, sizes_of=prefill_sizes
)
DECODES = KernelModule(_decode_groups, _fit_decodes)
PROMPTS = KernelModule(_prompt_groups, _fit_prefills)
LATENT = KernelModule(_latent_groups, _fit_latents)
