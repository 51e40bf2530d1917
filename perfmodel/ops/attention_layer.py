"""The operators of one softmax-attention mixer (MHA, GQA, MQA), sharded by heads."""

__all__ = ["attention_heads", "attention_nodes"]

from functools import partial

from perfmodel.ops.activation import gate
from perfmodel.ops.attention_decode import attention_decode
from perfmodel.ops.attention_mixed import mixed_attention
from perfmodel.ops.attention_prefill import Heads, flash_prefill, standard_prefill
from perfmodel.ops.kv_write import kv_write
from perfmodel.ops.linear import linear_nodes
from perfmodel.ops.node import LayerContext, OperatorNode, on_decodes, on_mixed, on_prefills, on_tokens
from perfmodel.ops.norm import rms_norm
from perfmodel.ops.rope import rope
from perfmodel.specs.model.architecture import Attention
from perfmodel.specs.model.kv_cache import kv_surplus, unpack_operations


def attention_heads(mixer: Attention, context: LayerContext) -> Heads:
    """The heads of the mixer that one device computes."""
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
        kept=mixer.evicts_to,
        fraction=sparsity.fraction or 1.0 if sparsity else 1.0,
        block=sparsity.block if sparsity else 1,
        flash_version=context.flash_version,
    )


def attention_nodes(mixer: Attention, context: LayerContext) -> list[OperatorNode]:
    """QKV projection, query/key norm, RoPE, KV write, attention of prefills and of decodes, output projection."""
    heads = attention_heads(mixer, context)
    nodes = _projections(mixer, context, heads)
    rotated = (heads.num_heads + heads.num_kv_heads) * heads.head_dim
    size, fused = context.element_bytes, context.is_fused
    if mixer.qk_norm:
        nodes.append(on_tokens("qk_norm", lambda n: rms_norm("qk_norm", n, rotated, size, is_fused=fused)))
    if mixer.use_rope:
        nodes.append(on_tokens("rope", lambda n: rope(n, rotated, size, is_fused=fused)))
    nodes.append(on_tokens("kv_write", lambda n: kv_write(n, heads.kv_elements, size, heads.written_bytes)))

    is_flash = context.is_flash and heads.kept is None
    prefill = flash_prefill if is_flash else partial(standard_prefill, is_fused=fused)
    nodes.append(on_prefills("attention_prefill", partial(prefill, heads=heads)))
    nodes += _decode(mixer, context, heads)
    gated = heads.num_heads * heads.v_head_dim
    if mixer.output_gate:
        nodes.append(on_tokens("output_gate", lambda n: gate("output_gate", n, gated, size)))
    form = context.format("attention")
    out = linear_nodes({"o_proj": context.hidden}, gated, form, rank=mixer.out_rank, has_bias=mixer.out_bias)
    return nodes + out


def _decode(mixer: Attention, context: LayerContext, heads: Heads) -> list[OperatorNode]:
    """Attention of decodes, and the kernel that it shares with prompts where there is one."""
    span = mixer.span
    attend = partial(
        attention_decode,
        splits_kv=context.splits_kv,
        is_flash=context.is_flash and heads.kept is None,
        is_fused=context.is_fused,
        spread=context.spread if span is None else None,
    )
    index = None if span is None else context.model.attention_spans.index(span)
    nodes = [on_decodes("attention_decode", lambda seqs, c, queries: attend(seqs, c, heads, queries=queries), index)]
    if span is None and context.is_flash and heads.is_plain and heads.flash_version in (None, 3):
        mixed = partial(mixed_attention, heads=heads, spread=context.spread)
        nodes.append(on_mixed("attention_mixed", lambda prompts, b, c, queries: mixed(prompts, b, c, queries=queries)))
    return nodes


def _projections(mixer: Attention, context: LayerContext, heads: Heads) -> list[OperatorNode]:
    """One GEMM for q, k, v (and the gate) when fused, one each otherwise."""
    form, hidden = context.format("attention"), context.hidden
    widths = {
        "q_proj": heads.num_heads * heads.head_dim,
        "gate_proj": heads.num_heads * heads.v_head_dim if mixer.output_gate else 0,
        "k_proj": heads.num_kv_heads * heads.head_dim,
        "v_proj": heads.num_kv_heads * heads.v_head_dim,
    }
    if context.is_fused:
        widths = {"qkv_proj": sum(widths.values())}
    widths = {name: width for name, width in widths.items() if width}
    return linear_nodes(widths, hidden, form, rank=mixer.qkv_rank, thin="qkv_rank_proj", has_bias=mixer.qkv_bias)
