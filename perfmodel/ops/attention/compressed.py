"""The attention of DeepSeek-V4: a window of single keys, and keys that stand for many tokens each.

Symbols: H heads on this device, h elements of a key, which is its value too, w tokens of the window, m tokens to a
compressed key, of which an indexer keeps k (CSA) or all are seen (HCA). A query at position p sees

    min(p + 1, w) + min((p + 1) / m, k)  keys of  4 H h FLOPs each

A key is projected for every token, and with it, once per overlapping compressor, a second one and a weight for each of
its elements; the weighted sum of m or 2m of them is cached. Cached keys in FP8 keep their rotated elements in 16 bits
and a scale byte for every 64 others, padded to whole 8 bytes: 584 bytes instead of 1,024.
Source: DeepSeek-V4 (2026), section 2.3; vLLM 0.30, vllm/models/deepseek_v4/attention.py and compressor.py

Not modelled: that a compressed key is seen only once its last token is; contexts that differ within a batch (their mean
decides, as for MLA with an indexer); reads that an FP4 cache of index keys saves."""

from dataclasses import replace
from functools import partial
from math import ceil

from perfmodel.models.architecture import CompressedAttention
from perfmodel.ops.attention.decode import attention_decode
from perfmodel.ops.attention.indexer import Prompts, index_nodes
from perfmodel.ops.attention.prefill import Heads, flash_prefill, visible_pairs
from perfmodel.ops.elementwise import elementwise, rms_norm, rope
from perfmodel.ops.linear import gemm
from perfmodel.ops.node import LayerContext, OperatorNode, on_decodes, on_prefills, on_tokens
from perfmodel.ops.problem_sizes import SPARSE_TILE, PrefillSize
from perfmodel.ops.work import Work

_FP32_BYTES = 4
_SCALED = 64  # elements of an FP8 key that share a scale


def compressed_row_bytes(mixer: CompressedAttention, kv_element_bytes: float, element_bytes: float) -> float:
    """Bytes of a cached key.

    kv_element_bytes: of the cache's format; element_bytes: of the model's, which rotated elements keep"""
    if kv_element_bytes >= element_bytes:
        return mixer.head_dim * element_bytes
    plain = mixer.head_dim - mixer.rope_dim
    return plain * kv_element_bytes + mixer.rope_dim * element_bytes + 8 * ceil((plain / _SCALED + 1) / 8)


def kept_bytes(mixer: CompressedAttention, kv_element_bytes: float, element_bytes: float) -> float:
    """Bytes that a sequence of any length holds beside its compressed keys: the window, and in fp32 the keys and
    weights of the tokens that compressors, and with an indexer its own, have not done with."""
    index = mixer.indexer.head_dim if mixer.indexer is not None else 0
    waiting = mixer.num_overlapping * mixer.ratio * 2 * mixer.num_overlapping * (mixer.head_dim + index)
    return mixer.window * compressed_row_bytes(mixer, kv_element_bytes, element_bytes) + waiting * _FP32_BYTES


def visible_compressed(mixer: CompressedAttention, context: float) -> float:
    """Keys that a query sees behind `context` tokens, itself included."""
    keys = min(context, mixer.window) + (context / mixer.ratio if mixer.ratio else 0.0)
    return keys if mixer.indexer is None else min(keys, min(context, mixer.window) + mixer.indexer.top_k)


def compressed_prefill(prefills: Prompts, mixer: CompressedAttention, heads: Heads, row_bytes: float) -> Work:
    """Attention of `prefills` to both kinds of keys of `mixer`, whose rows of `row_bytes` are read once; gathers come
    from L2. heads: on one device"""
    work = flash_prefill(prefills, heads)
    if not prefills:
        return replace(work, family="attention_sparse")
    m, limit = mixer.ratio, None if mixer.indexer is None else mixer.indexer.top_k * mixer.ratio
    pairs = float(sum(visible_pairs(t, p, mixer.window) for t, p in prefills))
    rows = float(sum(min(t + p, t + mixer.window) for t, p in prefills))
    if m:
        pairs += sum(visible_pairs(t, p, limit) for t, p in prefills) / m
        rows += sum(t + p for t, p in prefills) / m
    return replace(
        work,
        family="attention_sparse",
        problem=work.problem_as(PrefillSize)._replace(pairs=pairs, thread_blocks=0, chooses_keys=True),
        flops=2.0 * pairs * heads.query_elements,
        kv_bytes=rows * row_bytes,
        sram_bytes=work.activation_bytes + pairs * row_bytes,
    )


def _compress(name: str, num_tokens: float, mixer: CompressedAttention, size: int, b: float) -> Work:
    """Keys and weights of `size` elements go to the state in fp32 and are read for each of the c keys that they are
    part of: FLOPs 8 n c^2 size, bytes 8 n c size (1 + c) + n size b / m."""
    elements, c = num_tokens * size, mixer.num_overlapping
    num_bytes = 2.0 * _FP32_BYTES * elements * c * (1 + c) + elements * b / mixer.ratio
    return elementwise(name, 8.0 * elements * c * c, num_bytes, 2)


def _insert(num_tokens: float, num_heads: int, size: int, row_bytes: float, b: float) -> Work:
    """Norm and rotation of each head's query, in place, and of the key, which goes into the cache: one kernel (vLLM:
    fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert). FLOPs 7 and bytes 2 b an element."""
    elements = num_tokens * (num_heads + 1) * size
    return elementwise("norm_rope_write", 7.0 * elements, 2.0 * elements * b, kv_bytes=num_tokens * row_bytes)


def compressed_nodes(mixer: CompressedAttention, context: LayerContext) -> list[OperatorNode]:
    """Queries and keys from one replicated projection; compressors; the indexer; attention; grouped output projection.

    Heads and output groups are divided over ranks, all else is on each of them."""
    form, plain, hidden = context.format("attention"), context.format("router"), context.hidden
    size, h, rank = context.element_bytes, mixer.head_dim, mixer.q_lora_rank
    num_heads, groups = context.shard.columns(mixer.num_heads), context.shard.columns(mixer.o_groups)
    row_bytes, ranks = compressed_row_bytes(mixer, context.kv_element_bytes, size), groups * mixer.o_lora_rank
    heads = Heads(num_heads, 1, h, h, context.dtype, size, row_bytes / h)
    tile = min(context.sparse_heads, SPARSE_TILE)  # keys of 512 elements have a kernel for so few heads everywhere
    tiled = replace(heads, num_heads=-(-num_heads // tile) * tile)
    norm = partial(rms_norm, "latent_norm", size=rank + h, element_bytes=size, is_fused=context.is_fused, num_tensors=2)
    gemms = {"q_kv_a_proj": (rank + h, hidden, form), "q_b_proj": (num_heads * h, rank, form)}
    compressors = {"compress": h} if mixer.ratio else {}
    if mixer.indexer is not None:
        compressors["index_compress"] = mixer.indexer.head_dim
    for name, width in compressors.items():  # which stay in the model's dtype
        gemms[f"{name}_proj"] = 2 * mixer.num_overlapping * width, hidden, plain

    def decode(num_seqs: int, visible: float, queries: float) -> Work:
        keys = num_seqs * visible_compressed(mixer, visible / num_seqs) if num_seqs else 0.0
        work = attention_decode(num_seqs, keys, heads, splits_kv=context.splits_kv, queries=queries)
        return replace(work, kv_bytes=keys * row_bytes)

    return [
        *(on_tokens(name, partial(gemm, name, n=n, k=k, form=form)) for name, (n, k, form) in gemms.items()),
        on_tokens("latent_norm", norm),
        on_tokens("norm_rope_write", partial(_insert, num_heads=num_heads, size=h, row_bytes=row_bytes, b=size)),
        *(on_tokens(name, partial(_compress, name, mixer=mixer, size=n, b=size)) for name, n in compressors.items()),
        *(index_nodes(mixer.indexer, context, rank, mixer.ratio) if mixer.indexer is not None else []),
        on_prefills("attention_prefill", partial(compressed_prefill, mixer=mixer, heads=tiled, row_bytes=row_bytes)),
        on_decodes("attention_decode", decode),
        on_tokens("output_rope", lambda n: rope(n, num_heads * h, size, is_fused=context.is_fused)),
        on_tokens("o_a_proj", partial(gemm, "o_a_proj", n=ranks, k=num_heads * h // groups, form=form)),
        on_tokens("o_b_proj", partial(gemm, "o_b_proj", n=hidden, k=ranks, form=form)),
    ]
