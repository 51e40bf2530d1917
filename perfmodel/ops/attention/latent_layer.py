"""The operators of one MLA mixer: heads are cut over devices, latents are held by all of them."""

__all__ = ["latent_nodes"]

from collections.abc import Callable, Sequence
from functools import partial

from perfmodel.models.architecture import Indexer, LatentAttention
from perfmodel.ops.attention.latent import (
    absorb,
    expanded_heads,
    index_decode,
    index_prefill,
    latent_decode,
    latent_heads,
    sparse_prefill,
)
from perfmodel.ops.attention.prefill import flash_prefill, standard_prefill
from perfmodel.ops.elementwise import kv_concat, kv_write, rms_norm, rope
from perfmodel.ops.linear import gemm
from perfmodel.ops.node import LayerContext, OperatorNode, on_decodes, on_prefills, on_tokens
from perfmodel.ops.work import Work


def latent_nodes(mixer: LatentAttention, context: LayerContext) -> list[OperatorNode]:
    """Down- and up-projections, norms of the latents, RoPE, KV write, attention, output projection."""
    num_heads, size = context.shard.columns(mixer.num_heads), context.element_bytes
    latent = mixer.kv_lora_rank + mixer.qk_rope_head_dim
    nodes = _projections(mixer, context, num_heads)
    rotated = (num_heads + 1) * mixer.qk_rope_head_dim
    nodes.append(on_tokens("rope", lambda n: rope(n, rotated, size, is_fused=context.is_fused)))
    nodes += _written(latent, context)
    if mixer.indexer is None:
        nodes += [*_dense_prefill(mixer, context, num_heads), *_decode(mixer, context, num_heads, None)]
    else:
        nodes += _index_nodes(mixer, mixer.indexer, context)
        nodes += _decode(mixer, context, num_heads, mixer.indexer)
    form, width = context.format("attention"), num_heads * mixer.v_head_dim
    nodes.append(on_tokens("o_proj", partial(gemm, "o_proj", n=context.hidden, k=width, form=form)))
    return nodes


def _written(latent: int, context: LayerContext) -> list[OperatorNode]:
    """New latents into the cache, or with it into a new one."""
    size, kv_size = context.element_bytes, context.kv_element_bytes
    if not context.concatenates_kv:
        return [on_tokens("kv_write", lambda n: kv_write(n, latent, size, kv_size, is_fused=context.is_fused))]

    def concat(name: str, num_calls: int, num_tokens: float, num_new: float) -> Work:
        return kv_concat(name, num_calls, num_tokens * latent * kv_size, num_new * latent, (size, kv_size))

    prefill, decode = "kv_concat_prefill", "kv_concat_decode"
    return [
        on_prefills(
            prefill, lambda prompts: concat(prefill, len(prompts), sum(map(sum, prompts)), sum(t for t, _ in prompts))
        ),
        on_decodes(decode, lambda seqs, visible, queries: concat(decode, min(seqs, 1), visible, seqs * queries)),
    ]


def _projections(mixer: LatentAttention, context: LayerContext, num_heads: int) -> list[OperatorNode]:
    """The latents of queries and keys (one GEMM when fused; on every device in full), then the query heads."""
    form, hidden, size = context.format("attention"), context.hidden, context.element_bytes
    query_dim = num_heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim)
    latent = mixer.kv_lora_rank + mixer.qk_rope_head_dim
    rank = mixer.q_lora_rank
    widths = {"kv_a_proj": latent}
    if rank is not None:
        widths = {"qkv_a_proj": rank + latent} if context.is_fused else {"q_a_proj": rank, "kv_a_proj": latent}
    nodes = [on_tokens(name, partial(gemm, name, n=width, k=hidden, form=form)) for name, width in widths.items()]
    normed = mixer.kv_lora_rank + (rank or 0)
    fused, tensors = context.is_fused, 1 if rank is None else 2
    norm = partial(rms_norm, "latent_norm", size=normed, element_bytes=size, is_fused=fused, num_tensors=tensors)
    nodes.append(on_tokens("latent_norm", norm))
    name = "q_proj" if rank is None else "q_b_proj"
    nodes.append(on_tokens(name, partial(gemm, name, n=query_dim, k=rank or hidden, form=form)))
    return nodes


def _standard(context: LayerContext) -> Callable[..., Work]:
    return partial(standard_prefill, is_fused=context.is_fused, is_module=not context.is_fused)


def _dense_prefill(mixer: LatentAttention, context: LayerContext, num_heads: int) -> list[OperatorNode]:
    """Keys and values of all visible tokens, cached ones too, expanded from their latents; then attention."""
    form = context.format("attention")
    columns = num_heads * (mixer.qk_nope_head_dim + mixer.v_head_dim)
    heads = expanded_heads(mixer, num_heads, context.dtype, context.element_bytes)
    attention = flash_prefill if context.is_flash else _standard(context)

    def expand(prefills: Sequence[tuple[int, int]]) -> Work:
        visible = sum(tokens + cached for tokens, cached in prefills)
        return gemm("kv_b_proj", visible, columns, mixer.kv_lora_rank, form)

    return [
        on_prefills("kv_b_proj", expand),
        on_prefills("attention_prefill", partial(attention, heads=heads)),
    ]


def _decode(
    mixer: LatentAttention, context: LayerContext, num_heads: int, indexer: Indexer | None
) -> list[OperatorNode]:
    """Absorbed attention. With an indexer prefills run absorbed too, so the absorbing GEMMs see all tokens."""
    dtype, size = context.dtype, context.element_bytes
    heads = latent_heads(mixer, num_heads, dtype, size, context.kv_element_bytes)
    rank, nope, value = mixer.kv_lora_rank, mixer.qk_nope_head_dim, mixer.v_head_dim

    def into(num_tokens: float) -> Work:
        return absorb("absorb_query", num_tokens, num_heads, rank, nope, dtype, size)

    def out_of(num_tokens: float) -> Work:
        return absorb("expand_output", num_tokens, num_heads, value, rank, dtype, size)

    def attend(num_seqs: int, visible: int, queries: float) -> Work:
        if indexer is not None:  # the mean context decides: min() of a sum, an upper bound of the sum of min()
            visible = min(visible, num_seqs * indexer.top_k)
        return latent_decode(num_seqs, visible, heads, splits_kv=context.splits_kv, queries=queries)

    if indexer is None:
        return [
            on_decodes("absorb_query", lambda seqs, _, queries: into(seqs * queries)),
            on_decodes("attention_decode", attend),
            on_decodes("expand_output", lambda seqs, _, queries: out_of(seqs * queries)),
        ]
    return [
        on_tokens("absorb_query", into),
        on_prefills("attention_prefill", partial(sparse_prefill, heads=heads, top_k=indexer.top_k)),
        on_decodes("attention_decode", attend),
        on_tokens("expand_output", out_of),
    ]


def _index_nodes(mixer: LatentAttention, indexer: Indexer, context: LayerContext) -> list[OperatorNode]:
    """Index queries, key and head weights (replicated), index scores of prefills and decodes."""
    form, hidden = context.format("attention"), context.hidden
    query_input = mixer.q_lora_rank or hidden
    width = indexer.num_heads * indexer.head_dim
    rest = indexer.head_dim + indexer.num_heads
    return [
        on_tokens("index_q_proj", partial(gemm, "index_q_proj", n=width, k=query_input, form=form)),
        on_tokens("index_k_proj", partial(gemm, "index_k_proj", n=rest, k=hidden, form=form)),
        on_tokens("index_write", lambda n: kv_write(n, indexer.head_dim, context.element_bytes, 1.0)),
        on_prefills("index_prefill", partial(index_prefill, indexer=indexer)),
        on_decodes("index_decode", lambda seqs, visible, queries: index_decode(seqs, visible, indexer, queries)),
    ]
