"""The lightning indexer of sparse attention: its projections, scores of cached keys, and the choice.

One key per token for all heads, or per group of tokens that DeepSeek-V4 compresses to one; a query's scores are summed
over its heads with weights of their own (DeepSeek, GLM), or give each KV head its blocks of tokens (MiniMax-M3)."""

from collections.abc import Sequence
from functools import partial

from perfmodel.models.architecture import Indexer
from perfmodel.ops.attention.prefill import visible_keys, visible_pairs
from perfmodel.ops.elementwise import kv_write
from perfmodel.ops.linear import gemm
from perfmodel.ops.node import LayerContext, OperatorNode, on_decodes, on_prefills, on_tokens
from perfmodel.ops.problem_sizes import DecodeSize, HeadShape, PrefillSize
from perfmodel.ops.work import Work

Prompts = Sequence[tuple[int, int]]  # new tokens and cached ones of each


def index_prefill(prefills: Prompts, indexer: Indexer, ratio: int = 1) -> Work:
    """Index scores of every visible pair, and top-k: FLOPs = 2 pairs H_i h_i, at the rate of the cached keys' format.

    bytes: keys once, fp32 scores written and read by the top-k. ratio: tokens to a key, of which the problem
    has all, so that a kernel model takes a share of their products.
    Source: DeepSeek-V3.2-Exp report, eq. 1."""
    if not prefills:
        return Work("index_prefill", "attention_prefill", rate="fp8", num_kernels=0)
    pairs = sum(visible_pairs(t, p) for t, p in prefills)
    keys = sum(visible_keys(t, p) for t, p in prefills)
    tokens = sum(t for t, _ in prefills)
    return Work(
        "index_prefill",
        "attention_prefill",
        flops=2.0 * pairs * indexer.num_heads * indexer.head_dim / ratio,
        rate=_index_rate(indexer),
        activation_bytes=8.0 * pairs / ratio + tokens * indexer.num_heads * indexer.head_dim,
        kv_bytes=float(keys * indexer.head_dim) * indexer.key_bytes / ratio,
        num_kernels=2,
        problem=PrefillSize(_index_heads(indexer), tuple(prefills), tokens, keys, pairs),
    )


def index_decode(num_seqs: int, context: float, indexer: Indexer, queries: float = 1.0) -> Work:
    """Index scores and top-k of q new tokens per sequence: FLOPs = 2 q C H_i h_i, bytes C h_i b_i of keys and 8 q C of
    scores.

    num_seqs: sequences of `queries` new tokens each; context: cached tokens C, all sequences; indexer: the model's"""
    if num_seqs == 0:
        return Work("index_decode", "attention_decode", rate="fp8", num_kernels=0)
    return Work(
        "index_decode",
        "attention_decode",
        flops=2.0 * queries * context * indexer.num_heads * indexer.head_dim,
        rate=_index_rate(indexer),
        activation_bytes=8.0 * queries * context + queries * num_seqs * indexer.num_heads * indexer.head_dim,
        kv_bytes=context * indexer.head_dim * indexer.key_bytes,
        num_kernels=2,
        problem=DecodeSize(_index_heads(indexer), num_seqs, context, queries),
    )


# Norm of the key, RoPE, Hadamard rotation of queries and of the key, quantization of the queries, scaled head weights.
_INDEX_KERNELS = 6


def index_preparation(num_tokens: int, indexer: Indexer, element_bytes: float, is_fused: bool = False) -> Work:
    """Elementwise kernels between the index projections and the scores: six, one of which quantizes; is_fused:
    one, as for DeepSeek-V4 (vLLM: fused_indexer_q).

    num_tokens: new; indexer: the model's; element_bytes: before quantization.
    Source: `Indexer.forward` of deepseek-ai/DeepSeek-V3.2-Exp, inference/model.py; engines launch as many kernels."""
    queries = indexer.num_heads * indexer.head_dim
    passes = 2 * 2 * queries + 3 * 2 * indexer.head_dim + 2 * indexer.num_heads  # twice the queries, thrice the key
    num_bytes = num_tokens * (passes * element_bytes + queries * (element_bytes + 1.0))
    kernels = (1 if is_fused else _INDEX_KERNELS) if num_tokens else 0
    return Work("index_prepare", "elementwise", activation_bytes=num_bytes, num_kernels=kernels)


def _index_heads(indexer: Indexer) -> HeadShape:
    """One key for all heads; no values."""
    return HeadShape(indexer.num_heads, 1, indexer.head_dim, 0, kv_element_bytes=indexer.key_bytes)


def _index_rate(indexer: Indexer) -> str:
    return "fp8" if indexer.key_bytes == 1.0 else "bf16"


def index_nodes(indexer: Indexer, context: LayerContext, query_width: int, ratio: int = 1) -> list[OperatorNode]:
    """Projections of an indexer, what is done to them, its scores and choice; none where another layer chooses.

    context: the device's; query_width: of what queries are projected from; ratio: tokens to
    a key, which `compressed_nodes` has made"""
    if indexer.is_shared:
        return []
    form, hidden, size = context.format("attention"), context.hidden, indexer.head_dim
    plain = context.format("router")  # head weights stay in the model's dtype
    gemms = {"index_q_proj": (indexer.num_heads * size, query_width, form)}
    if ratio == 1:
        gemms["index_k_proj"] = (size, hidden, form)
    gemms["index_weights_proj"] = (indexer.num_heads, hidden, plain)
    prepare = partial(index_preparation, indexer=indexer, element_bytes=context.element_bytes, is_fused=ratio > 1)
    return [
        *(on_tokens(name, partial(gemm, name, n=n, k=k, form=form)) for name, (n, k, form) in gemms.items()),
        on_tokens("index_prepare", prepare),
        on_tokens("index_write", lambda n: kv_write(n / ratio, size, context.element_bytes, indexer.key_bytes)),
        *choice_nodes(indexer, ratio),
    ]


def choice_nodes(indexer: Indexer, ratio: int = 1) -> list[OperatorNode]:
    """Scores of cached keys and the choice; queries are there. indexer: with this device's heads"""
    return [
        on_prefills("index_prefill", partial(index_prefill, indexer=indexer, ratio=ratio)),
        on_decodes("index_decode", lambda seqs, keys, queries: index_decode(seqs, keys / ratio, indexer, queries)),
    ]
