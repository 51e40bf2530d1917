"""Measured modules: what a table times in one number that no other form has.

dsa_*_module, glm5_dsa_attn, wideep_*_mla   latent attention, its projections, and the indexer of sparse attention
dsv4_csa_*, dsv4_hca_*                      DeepSeek-V4: a window, and compressed keys, all or the indexer's choice
msa_*_module                                MiniMax-M3: grouped-query attention to chosen blocks
*_topk_*, *_mqa_logits_*                    the indexer's two kernels alone
gdn, kda                                    gated delta rules: their convolutions, chunks of prompts, and decodes
computescale, scale_matrix, mhc_module      kernels that stream activations
mla_bmm                                     products of latent attention, one per head

Columns: batch_size, isl (new tokens of a sequence), step (tokens cached), num_heads (of the rank), model, gemm_type,
kv_cache_dtype; gdn: num_tokens, seq_len, num_k_heads, head_k_dim, num_v_heads, head_v_dim."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from perfmodel.cost.kernel_models.attention.prefill import PrefillSizes
from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.cost.kernel_models.module import ModuleFit, ModuleSizes
from perfmodel.evidence.fit.attention import PROMPTS
from perfmodel.evidence.fit.kernels import Groups, KernelModule, fit_groups, search_of, seconds_of, within_ranges
from perfmodel.evidence.sources.kernels import (
    Group,
    KernelTable,
    bytes_of,
    engine_and_version,
    format_bytes,
    format_name,
    numbers,
    version_order,
)
from perfmodel.ops.problem_sizes import HeadShape

_MAX_ROWS = 2500  # of a fit


class _Latents(NamedTuple):
    """A model's latent attention. keys: chosen by the indexer; ratio: tokens per compressed key; window: seen by all"""

    hidden: int
    query_rank: int
    rank: int
    rope: int
    nope: int
    value: int
    index_heads: int
    index_size: int
    keys: int
    ratio: int = 1
    window: int = 0


# Those of the models' cards.
_MODELS = {
    "DeepseekV3": _Latents(7168, 1536, 512, 64, 128, 128, 0, 0, 0),
    "DeepseekV32": _Latents(7168, 1536, 512, 64, 128, 128, 64, 128, 2048),
    "GlmMoeDsa": _Latents(6144, 2048, 512, 64, 192, 256, 32, 128, 2048),
    "DeepseekV4": _Latents(7168, 1536, 448, 64, 448, 512, 64, 128, 1024, 4, 128),
    "DeepseekV4-Flash": _Latents(4096, 1024, 448, 64, 448, 512, 64, 128, 512, 4, 128),
}
_MINIMAX_HIDDEN, _MINIMAX_KV_HEADS, _MINIMAX_KEYS, _HEAD = 6144, 4, 2048, 128
_ALL = 1e12  # keys
_CHUNK = 64  # tokens of a gated delta rule's chunk


def _visible(new: Any, cached: Any, most: Any) -> Any:
    """Keys that all new tokens of a sequence see together: position + 1 each, at most `most`."""
    rising = np.clip(most - cached, 0, new)
    return rising * (cached + (rising + 1) / 2) + (new - rising) * most


def _latent(table: KernelTable, kernel: str) -> ModuleSizes:
    batch, heads, is_decode = numbers(table, "batch_size"), numbers(table, "num_heads"), "generation" in table.op
    new = np.ones(len(table)) if is_decode else numbers(table, "isl")
    cached = numbers(table, "isl" if is_decode and table.op.startswith("wideep") else "step")
    name = str(table["architecture"][0]).removesuffix("ForCausalLM")
    name += "-Flash" if name == "DeepseekV4" and "Flash" in str(table["model"][0]) else ""
    m, tokens, has_index = _MODELS.get(name, _MODELS["DeepseekV3"]), batch * new, "skip" not in str(table["op_name"][0])
    ratio = numbers(table, "compress_ratio")[0] if "compress_ratio" in table.columns else m.ratio
    chosen = m.keys if m.index_heads and ratio < 128 and "dense" not in kernel else _ALL
    compressed = batch * _visible(new / ratio, cached / ratio, chosen) * ratio
    pairs = compressed + batch * _visible(new, cached, m.window) if m.window else compressed
    indexed = batch * _visible(new, cached, _ALL) / ratio * bool(m.index_heads and has_index and ratio < 128)
    is_alone = any(part in table.op for part in ("attn_module", "logits", "topk"))
    index = (m.query_rank * m.index_size + m.hidden) * m.index_heads + m.hidden * m.index_size
    weights = m.hidden * (m.query_rank + m.rank + m.rope) + m.query_rank * heads * (m.nope + m.rope)
    weights = weights + heads * ((m.nope + m.value) * m.rank * (m.ratio == 1) + m.value * m.hidden / m.ratio)
    weights = (weights + index * has_index * bool(m.index_heads)) * (not is_alone)
    element, wide = format_bytes(table, "kv_cache_dtype"), m.rank + m.rope
    only = {"logits": (0.0, 1.0, 0.0), "topk": (0.0, 0.0, 1.0), "attn_module": (1.0, 0.0, 0.0)}
    of_attention, of_index, of_choice = next((only[part] for part in only if part in table.op), (1.0, 1.0, 1.0))
    width = heads * (m.nope + m.rope + m.value) + 2 * m.hidden * (not is_alone)
    return ModuleSizes(
        tokens=tokens,
        weights=weights * np.ones(len(table)),
        weight_bytes=format_bytes(table, "gemm_type"),
        attention_flops=of_attention * 2.0 * heads * (2 * m.rank + m.rope) * pairs,
        index_flops=of_index * 2.0 * m.index_heads * m.index_size * indexed,
        cached_bytes=of_attention * pairs * wide * element / np.minimum(new, 64)
        + (of_index * m.index_size + of_choice * 8.0) * indexed,
        activation_bytes=2.0 * tokens * width * of_attention,
        blocks=tokens * np.ceil(heads / 64),
        steps=of_choice * np.ceil(tokens / 128) * np.log2(1 + (cached + new) / ratio) * (indexed > 0),
        launches=0.0 * tokens,
        rate=_rate(table),
    )


def _rate(table: KernelTable) -> str:
    return {2.0: "bf16", 1.0: "fp8", 0.5: "fp4"}[bytes_of(str(table["gemm_type"][0]))]


def _blocks_chosen(table: KernelTable, _: str) -> ModuleSizes:
    batch, heads, cached = numbers(table, "batch_size"), numbers(table, "num_heads"), numbers(table, "step")
    new = numbers(table, "isl")
    tokens, kv_heads = batch * new, np.maximum(1.0, np.minimum(heads, _MINIMAX_KV_HEADS))
    pairs, indexed = batch * _visible(new, cached, _MINIMAX_KEYS), batch * _visible(new, cached, _ALL)
    weights = _MINIMAX_HIDDEN * _HEAD * (2 * heads + 2 * kv_heads)
    element = format_bytes(table, "kv_cache_dtype")
    return ModuleSizes(
        tokens=tokens,
        weights=weights,
        weight_bytes=format_bytes(table, "gemm_type"),
        attention_flops=4.0 * heads * _HEAD * pairs,
        index_flops=2.0 * kv_heads * _HEAD * indexed,
        cached_bytes=2 * kv_heads * _HEAD * element * (pairs / np.minimum(new, 64) + batch * (cached + new)),
        activation_bytes=4.0 * tokens * (_MINIMAX_HIDDEN + 2 * heads * _HEAD) + 8.0 * indexed / 128,
        blocks=tokens * kv_heads,
        steps=np.log2(1 + cached + new),
        launches=0.0 * tokens,
        rate=_rate(table),
    )


# Versions from which on tables time the convolution of queries, keys and values; before, of keys alone: what they time
# does not depend on the values. No version of TensorRT-LLM does yet.
_ALL_CHANNELS_FROM = {"sglang": (0, 5, 14), "vllm": (0, 24, 0), "trtllm": (99,)}


def _recurrent(table: KernelTable, kernel: str) -> ModuleSizes:
    tokens, batch, length = (numbers(table, name) for name in ("num_tokens", "batch_size", "seq_len"))
    key, value = (numbers(table, f"num_{x}_heads") * numbers(table, f"head_{x}_dim") for x in "kv")
    heads, none = numbers(table, "num_v_heads"), np.zeros(len(table))
    state = value * numbers(table, "head_k_dim")
    is_conv, in_chunks = "conv" in kernel, "chunk" in kernel or "flashkda" in kernel
    engine, version = engine_and_version(str(table["engine_version"][0]))
    is_of_keys = "conv1d_fn" in kernel and version_order(version) < _ALL_CHANNELS_FROM.get(engine, ())
    channels = key if is_of_keys else 2 * key + value
    chunks = np.ceil(length / _CHUNK)
    return ModuleSizes(
        tokens=tokens,
        weights=none,
        weight_bytes=none + 2,
        attention_flops=tokens
        * (16.0 * channels if is_conv else 6.0 * state + 6.0 * _CHUNK * (value + key) * in_chunks),
        index_flops=none,
        cached_bytes=batch * (channels * 6.0 if is_conv else 8.0 * state),
        activation_bytes=tokens * (4.0 * channels if is_conv else 4.0 * value + 2.0 * channels),
        blocks=batch * (np.ceil(channels / 256) if is_conv else heads),
        steps=chunks if is_conv or in_chunks else length,
        launches=batch * is_conv,
        rate="bf16",
    )


def _streamed(table: KernelTable, _: str) -> ModuleSizes:
    none = np.zeros(len(table))
    if table.op == "mhc_module":
        tokens = numbers(table, "num_tokens")
        num_bytes = 2.0 * tokens * numbers(table, "hidden_size") * (numbers(table, "hc_mult") + 1)
    else:
        tokens = numbers(table, "m")
        num_bytes = tokens * numbers(table, "k") * (2.0 if table.op == "computescale" else 3.0)
    return ModuleSizes(tokens, none, none + 2, none, none, none, num_bytes, none, none, none, "bf16")


def _heads_products(table: KernelTable, _: str) -> ModuleSizes:
    tokens, heads, none = numbers(table, "num_tokens"), numbers(table, "num_heads"), np.zeros(len(table))
    element, rate = bytes_of(str(table["bmm_dtype"][0])), format_name(str(table["bmm_dtype"][0]))
    moved = tokens * heads * (512 + 128) * (2.0 + element) / 2
    return ModuleSizes(tokens, heads * 512.0 * 128, none + element, none, none, none, moved, none, none, none, rate)


_SIZES: Mapping[str, Callable[[KernelTable, str], ModuleSizes]] = {
    **dict.fromkeys(("dsa_context_module", "dsa_generation_module", "glm5_dsa_attn_module"), _latent),
    **dict.fromkeys(("dsv4_csa_context_module", "dsv4_csa_generation_module", "dsv4_hca_attn_module"), _latent),
    **dict.fromkeys(("dsv4_hca_context_module", "dsv4_hca_generation_module", "dsv4_csa_topk_calib"), _latent),
    **dict.fromkeys(("dsv4_paged_mqa_logits_module", "glm5_mqa_logits_module", "glm5_topk_module"), _latent),
    **dict.fromkeys(("wideep_context_mla", "wideep_generation_mla"), _latent),
    **dict.fromkeys(("msa_context_module", "msa_generation_module"), _blocks_chosen),
    **dict.fromkeys(("gdn", "kda"), _recurrent),
    **dict.fromkeys(("computescale", "scale_matrix", "mhc_module"), _streamed),
    "mla_bmm": _heads_products,
}
# What separates kernels within a table, beside engine and version; formats and models that share nothing but a name.
_APART = (
    *("op_name", "kernel_source", "phase", "gemm_type", "kv_cache_dtype", "mla_dtype", "bmm_dtype"),
    *("architecture", "score_mode"),
)


def _groups(table: KernelTable, device: DeviceFacts) -> list[Group]:
    apart = tuple(name for name in _APART if name in table.columns)
    models = ("model",) * ("model" in table.columns)  # told apart for their sizes alone
    result = []
    for (called, *texts), rows in table.groups(("engine_version", *apart, *models)):
        part, texts = table.take(rows), texts[: len(apart)]
        kernel = texts[apart.index("kernel_source")]
        key = "/".join((table.op, *(text.replace("/", "_") for text in texts)))
        sizes = _SIZES[table.op](part, kernel)
        result.append(Group(*engine_and_version(called), key, device, sizes, part.seconds, rows))
    return result


def _fit(groups: Groups) -> ModuleFit:
    """Fit one module; parameters of parts that it lacks stay at their defaults."""
    has = {name: any(np.any(getattr(group.sizes, name)) for group in groups) for name in ModuleSizes._fields[1:-1]}
    lacks = {
        "gemm_fraction": not has["weights"],
        "weight_fraction": not has["weights"],
        "tensor_fraction": not has["attention_flops"],
        "index_fraction": not has["index_flops"],
        "kv_fraction": not has["cached_bytes"],
        "knee": not has["cached_bytes"],
        "step_s": not has["steps"],
        "block_share": not has["blocks"],
        "host_s": not has["launches"],
    }
    free = tuple(name for name in search_of("module")[0] if not lacks.get(name))
    if len({group.device.has_own_host for group in groups}) > 1:
        free = (*free, "on_own_host")
    least = float(np.quantile(seconds_of(groups), 0.02))
    begin = {
        "launch_s": max(0.5 * least, 1e-6),
        "floor_s": max(0.9 * least, 1e-6),
        "host_s": 1e-6,
        "cache_speedup": 1.5,
    }
    starts: tuple[dict[str, float], ...] = (
        begin,
        {**begin, "launch_s": max(0.9 * least, 1e-6), "tensor_fraction": 0.05, "kv_fraction": 0.1},
        {**begin, "tensor_fraction": 0.8, "index_fraction": 1.5, "kv_fraction": 2.0, "knee": 1.2},
    )
    return fit_groups(groups, within_ranges(ModuleFit, begin), free=free, starts=starts, most_rows=_MAX_ROWS)


def _encoder_groups(table: KernelTable, device: DeviceFacts) -> list[Group]:
    """Attention of encoders: every token sees all."""
    result = []
    for (called, kernel, size), rows in table.groups(("engine_version", "kernel_source", "head_dim")):
        part = table.take(rows)
        heads, one = numbers(part, "num_heads"), np.ones(len(rows))
        shape = HeadShape(heads, heads, float(size) * one, float(size) * one, 2 * one, 0 * one)
        bytes_per_token = 4.0 * heads * float(size)
        sizes = PrefillSizes(
            shape, numbers(part, "isl"), 0 * one, numbers(part, "batch_size"), bytes_per_token, bytes_per_token, False
        )
        key = f"encoder_attention/bf16/kv_bf16/hd{float(size):.0f}/{kernel}"
        result.append(Group(*engine_and_version(called), key, device, sizes, part.seconds, rows))
    return result


ENCODERS = KernelModule(_encoder_groups, PROMPTS.fit)
WHOLE = KernelModule(_groups, _fit)
MODULE_TABLES = tuple(_SIZES)
