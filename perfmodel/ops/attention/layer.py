"""The operators of one softmax-attention mixer (MHA, GQA, MQA), sharded by heads.

A norm over the queries of all heads adds an all-reduce of the sum of squares, as in vLLM's `MiniMaxText01RMSNormTP`
(its OLMo-2 gathers queries and keys instead, which takes as long for a few tokens)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from perfmodel.models.architecture import Attention
from perfmodel.models.number_formats import kv_surplus, unpack_operations
from perfmodel.ops.attention.decode import attention_decode, mixed_attention
from perfmodel.ops.attention.indexer import choice_nodes
from perfmodel.ops.attention.prefill import Heads, flash_prefill, standard_prefill
from perfmodel.ops.collectives import all_gather, all_reduce, reduce_scatter, tensor_parallel
from perfmodel.ops.elementwise import gate, kv_concat, kv_write, rms_norm, rope
from perfmodel.ops.linear import linear_nodes
from perfmodel.ops.node import LayerContext, OperatorNode, on_decodes, on_mixed, on_prefills, on_tokens
from perfmodel.ops.work import Work

_SQUARE_SUMS_BYTES = 2 * 4  # of a token's queries and of its keys, in FP32


def attention_heads(mixer: Attention, context: LayerContext) -> Heads:
    """The mixer's heads on one device."""
    sparsity = mixer.sparsity
    return Heads(
        num_heads=context.shard.columns(mixer.num_heads),
        num_kv_heads=context.shard.kv_heads(mixer.num_kv_heads),
        head_dim=mixer.head_dim,
        v_head_dim=mixer.v_head_dim,
        dtype=context.dtype,
        element_bytes=context.element_bytes,
        kv_element_bytes=context.kv_element_bytes,
        # Counts with sinks are those of a wider window; what eviction leaves is no window to a prompt.
        window=mixer.span if mixer.chunk is None and mixer.evicts_to is None else None,
        chunk=mixer.chunk,
        keeps_all=mixer.window is None,
        surplus=kv_surplus(context.model),
        unpack_ops=unpack_operations(context.model),
        evicts_to=mixer.evicts_to,
        fraction=sparsity.fraction or 1.0 if sparsity else 1.0,
        block=sparsity.block if sparsity else 1,
        flash_version=context.flash_version,
        is_causal=mixer.is_causal,
    )


def striped_decode(
    heads: Heads, context: LayerContext, attend: Callable[[int, float, float, Heads], Work], index: int | None = None
) -> list[OperatorNode]:
    """Decode attention (`attend`: sequences, context, queries of each, `heads` on one device; index: see `on_decodes`),
    whose KV may be striped over dcp ranks of the tensor-parallel group: queries of the group's heads are gathered, each
    rank attends to its part of the context, and results are merged by the sums of their exponentials.

    With H heads in the group and q queries: H h b q bytes are gathered, then 4 H dcp q of sums, and H v b q of results
    scattered, which one kernel has weighted. Source: vLLM, vllm/v1/attention/ops/dcp.py (`cp_lse_ag_out_rs`)."""
    dcp, group, size = context.shard.dcp, context.shard.group("context"), context.element_bytes
    if dcp == 1:
        name = "attention_decode"
        return [on_decodes(name, lambda seqs, visible, queries: attend(seqs, visible, queries, heads), index)]
    joint = replace(heads, num_heads=heads.num_heads * dcp)
    results = joint.num_heads * heads.v_head_dim * size

    def weight(seqs: int, _: int, queries: float) -> Work:
        num_bytes = seqs * queries * (2 * results + 4 * joint.num_heads * dcp)
        return Work("dcp_weights", "elementwise", activation_bytes=num_bytes, num_kernels=min(seqs, 1))

    def message(name: str, collective: Callable[[float, Any, str], Work], query_bytes: float) -> OperatorNode:
        return on_decodes(name, lambda seqs, _, queries: collective(seqs * queries * query_bytes, group, name))

    return [
        message("dcp_query_all_gather", all_gather, joint.num_heads * heads.head_dim * size),
        on_decodes("attention_decode", lambda seqs, visible, queries: attend(seqs, visible / dcp, queries, joint)),
        message("dcp_sums_all_gather", all_gather, 4 * joint.num_heads * dcp),
        on_decodes("dcp_weights", weight),
        message("dcp_reduce_scatter", reduce_scatter, results),
    ]


def striped_prefill(token_bytes: float, context: LayerContext) -> list[OperatorNode]:
    """Prompts that see cached tokens of other ranks, of `token_bytes` each, gather as many from each rank; no node
    where each device has all of them."""
    name, group, dcp = "dcp_context_all_gather", context.shard.group("context"), context.shard.dcp

    def gather(prefills: Sequence[tuple[int, int]]) -> Work:
        return all_gather(token_bytes * sum(-(-cached // dcp) * dcp for _, cached in prefills), group, name)

    return [on_prefills(name, gather)] if dcp > 1 else []


def split_prompts(prefills: Sequence[tuple[int, int]], pcp: int) -> Sequence[tuple[int, int]]:
    """What a rank of `pcp` computes of prompts, (new tokens, cached ones): of 2 pcp equal parts one from the front and
    the one as far from the end, so that all ranks attend to as many pairs.

    Source: vLLM, vllm/v1/worker/gpu/pcp_manager.py (`_iter_rank_chunks`)."""
    if pcp == 1:
        return prefills
    parts = [(-(-new // (2 * pcp)), new, cached) for new, cached in prefills]
    return [
        (tokens, place)
        for size, new, cached in parts
        for tokens, place in ((size, cached), (min(size, new - size), cached + new - size))
        if tokens > 0
    ]


def gathered_prompts(elements: int, kv_bytes: float, written_bytes: float, context: LayerContext) -> list[OperatorNode]:
    """Keys and values of prompts' new tokens, `elements` a token, gathered from all ranks that share the tokens out,
    which each keep all of them; no node where one rank computes them all.

    kv_bytes: of a gathered element; written_bytes: see `Heads`; context: of the layer"""
    pcp, group, size, fused = context.shard.pcp, context.shard.group("data"), context.element_bytes, context.is_fused
    name, share = "pcp_kv_all_gather", (context.shard.pcp - 1) / context.shard.pcp

    def written(prefills: Sequence[tuple[int, int]]) -> Work:
        tokens = share * sum(new for new, _ in prefills)
        return replace(kv_write(tokens, elements, size, written_bytes, is_fused=fused), name="pcp_kv_write")

    def gather(prefills: Sequence[tuple[int, int]]) -> Work:
        return all_gather(kv_bytes * elements * sum(new for new, _ in prefills), group, name)

    return [on_prefills(name, gather), on_prefills("pcp_kv_write", written)] if pcp > 1 else []


def attention_nodes(mixer: Attention, context: LayerContext) -> list[OperatorNode]:
    """QKV projection, query/key norm, RoPE, KV write, attention of prefills and of decodes, output projection."""
    heads = attention_heads(mixer, context)
    nodes = _projections(mixer, context, heads)
    rotated = (heads.num_heads + heads.num_kv_heads) * heads.head_dim
    size, fused = context.element_bytes, context.is_fused
    if mixer.qk_norm:
        norm = partial(rms_norm, "qk_norm", size=rotated, element_bytes=size, is_fused=fused, num_tensors=2)
        nodes.append(on_tokens("qk_norm", norm))
        if mixer.qk_norm_width == "all_heads":
            nodes += tensor_parallel(all_reduce, "qk_norm_all_reduce", _SQUARE_SUMS_BYTES, context)
    if mixer.rope is not None:
        nodes.append(on_tokens("rope", lambda n: rope(n, rotated, size, is_fused=fused)))
    nodes += _written(mixer, context, heads)
    if mixer.indexer is not None:
        # Norms, rotation and writes of its queries and keys are in the kernels of attention's (vLLM, minimax_m3).
        nodes += choice_nodes(replace(mixer.indexer, num_heads=context.shard.kv_heads(mixer.indexer.num_heads)))
    is_flash = context.is_flash and heads.evicts_to is None
    prefill = flash_prefill if is_flash else partial(standard_prefill, is_fused=fused, is_module=not fused)
    nodes += striped_prefill(heads.kv_elements * heads.kv_element_bytes, context)
    nodes += gathered_prompts(heads.kv_elements, size, heads.written_bytes, context)
    pcp = context.shard.pcp
    nodes.append(on_prefills("attention_prefill", lambda prompts: prefill(split_prompts(prompts, pcp), heads=heads)))
    nodes += _decode(mixer, context, heads)
    gated = heads.num_heads * heads.v_head_dim
    if mixer.output_gate:
        nodes.append(on_tokens("output_gate", lambda n: gate("output_gate", n, gated, size, is_fused=fused)))
    form = context.format("attention")
    return nodes + linear_nodes({"o_proj": context.hidden}, gated, form, rank=mixer.out_rank, has_bias=mixer.out_bias)


def _written(mixer: Attention, context: LayerContext, heads: Heads) -> list[OperatorNode]:
    size, fused, elements = context.element_bytes, context.is_fused, heads.kv_elements
    if not context.concatenates_kv:
        written, dcp = heads.written_bytes, context.shard.dcp
        return [on_tokens("kv_write", lambda n: kv_write(n / dcp, elements, size, written, is_fused=fused))]
    index = None if mixer.span is None else context.model.attention_spans.index(mixer.span)
    sizes = size, heads.kv_element_bytes

    def of_prompts(prefills: Sequence[tuple[int, int]]) -> Work:
        num_bytes = heads.cached_bytes(sum(new + cached for new, cached in prefills), len(prefills))
        new_elements = elements * sum(new for new, _ in prefills)
        return kv_concat("kv_concat_prefill", len(prefills), num_bytes, new_elements, sizes)

    def of_decodes(num_seqs: int, visible: float, queries: float) -> Work:
        num_bytes = heads.cached_bytes(visible, num_seqs)
        return kv_concat("kv_concat_decode", min(num_seqs, 1), num_bytes, elements * num_seqs * queries, sizes)

    return [on_prefills("kv_concat_prefill", of_prompts), on_decodes("kv_concat_decode", of_decodes, index)]


def _decode(mixer: Attention, context: LayerContext, heads: Heads) -> list[OperatorNode]:
    """Decode attention, and the mixed kernel if there is one."""
    span = mixer.span
    attend = partial(
        attention_decode,
        splits_kv=context.splits_kv,
        is_flash=context.is_flash and heads.evicts_to is None,
        is_fused=context.is_fused,
        is_module=not context.is_fused,
        spread=context.spread if span is None else None,
    )
    index = None if span is None else context.model.attention_spans.index(span)
    nodes = striped_decode(heads, context, lambda seqs, c, queries, own: attend(seqs, c, own, queries=queries), index)
    if (
        context.shard.dcp == context.shard.pcp == 1
        and span is None
        and context.is_flash
        and heads.is_plain
        and heads.is_causal
        and heads.flash_version in (None, 3)
    ):
        mixed = partial(mixed_attention, heads=heads, spread=context.spread)
        nodes.append(on_mixed("attention_mixed", lambda prompts, b, c, queries: mixed(prompts, b, c, queries=queries)))
    return nodes


def _projections(mixer: Attention, context: LayerContext, heads: Heads) -> list[OperatorNode]:
    """One QKV (and gate) GEMM when fused, one each otherwise."""
    form, hidden = context.format("attention"), context.hidden
    widths = {
        "q_proj": heads.num_heads * heads.head_dim,
        "gate_proj": heads.num_heads * heads.v_head_dim if mixer.output_gate else 0,
        "k_proj": heads.num_kv_heads * heads.head_dim,
        "v_proj": heads.num_kv_heads * heads.v_head_dim,
    }
    if mixer.q_rank is not None:  # the queries' first half beside keys and values, as of latent attention
        widths["q_proj"], queries = mixer.q_rank, {"q_b_proj": widths["q_proj"]}
        nodes = linear_nodes({"qkv_a_proj": sum(widths.values())}, hidden, form)
        size, rank = context.element_bytes, mixer.q_rank
        norm = on_tokens("q_a_norm", lambda n: rms_norm("q_a_norm", n, rank, size, is_fused=context.is_fused))
        return [*nodes, norm, *linear_nodes(queries, rank, form)]
    if mixer.indexer is not None:
        widths["index_proj"] = (context.shard.kv_heads(mixer.indexer.num_heads) + 1) * mixer.indexer.head_dim
    if context.is_fused:
        widths = {"qkv_proj": sum(widths.values())}
    widths = {name: width for name, width in widths.items() if width}
    return linear_nodes(widths, hidden, form, rank=mixer.qkv_rank, thin="qkv_rank_proj", has_bias=mixer.qkv_bias)
