"""Multi-head latent attention (MLA): the cache holds one latent of r_kv + r elements per token for all heads.

Symbols: H heads on this device, n / r / v no-position, rotary and value head sizes, r_kv the latent rank. Prefill
expands keys and values from the latent and attends as usual. Decode absorbs the expansion into query and output and
attends to the latent as one KV head of size r_kv + r. Per query-key pair expanded attention takes 2 H (n + r + v)
FLOPs, absorbed 2 H (2 r_kv + r): 3.4 times as many for DeepSeek-V3, for a cache 57 times smaller.

With an indexer (DSA) each token attends to `top_k` latents, absorbed in prefill, too. If no prompt of a step sees more
tokens, engines run dense prefill: sglang, nsa_backend.py, set_nsa_prefill_impl; vllm, mla_attention.py
(`prefill_max_seq_len <= topk_tokens`)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from perfmodel.models.architecture import LatentAttention
from perfmodel.ops.attention.decode import attention_decode
from perfmodel.ops.attention.indexer import Prompts, index_nodes
from perfmodel.ops.attention.layer import gathered_prompts, split_prompts, striped_decode, striped_prefill
from perfmodel.ops.attention.prefill import Heads, flash_prefill, standard_prefill, visible_pairs
from perfmodel.ops.elementwise import gate, kv_concat, kv_write, rms_norm, rope
from perfmodel.ops.linear import gemm
from perfmodel.ops.node import LayerContext, OperatorNode, on_decodes, on_prefills, on_tokens
from perfmodel.ops.problem_sizes import GemmSize, PrefillSize
from perfmodel.ops.work import Work


def expanded_heads(
    mixer: LatentAttention, num_heads: int, dtype: str, element_bytes: float, kv_element_bytes: float | None = None
) -> Heads:
    """Heads of expanded attention: keys n + r wide, values v wide, at the model's dtype.

    mixer: the attention spec; num_heads: on this device; element_bytes: per element of `dtype`; kv_element_bytes: of
    keys and values as multiplied, where they are narrower"""
    return Heads(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=mixer.qk_nope_head_dim + mixer.qk_rope_head_dim,
        v_head_dim=mixer.v_head_dim,
        dtype=dtype,
        element_bytes=element_bytes,
        kv_element_bytes=element_bytes if kv_element_bytes is None else kv_element_bytes,
    )


def latent_heads(
    mixer: LatentAttention, num_heads: int, dtype: str, element_bytes: float, kv_element_bytes: float
) -> Heads:
    """Heads of absorbed attention: one KV head, keys r_kv + r wide, values their first r_kv elements.

    mixer: the attention spec; num_heads: on this device; element_bytes: per element of `dtype`, the products' format;
    kv_element_bytes: per cached element"""
    return Heads(
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=mixer.kv_lora_rank + mixer.qk_rope_head_dim,
        v_head_dim=mixer.kv_lora_rank,
        dtype=dtype,
        element_bytes=element_bytes,
        kv_element_bytes=kv_element_bytes,
    )


def absorb(name: str, num_tokens: float, num_heads: int, n: int, k: int, dtype: str, element_bytes: float) -> Work:
    """One small GEMM per head, (tokens, k) x (k, n): W_UK into the query, or W_UV out of the latent output.

        FLOPs = 2 T H n k    bytes = b H (n k + T (n + k))

    Weights stay in the model's `dtype`. name: of the operator; num_tokens T, num_heads H: on this device;
    element_bytes b. Source: DeepSeek-V2 (2024), section 2.1.2."""
    if num_tokens == 0:
        return Work(name, "gemm", rate=dtype, num_kernels=0)
    return Work(
        name,
        "gemm",
        flops=2.0 * num_tokens * num_heads * n * k,
        rate=dtype,
        weight_bytes=num_heads * n * k * element_bytes,
        activation_bytes=num_tokens * num_heads * (n + k) * element_bytes,
        problem=GemmSize(num_tokens, n, k, element_bytes, element_bytes, batch=num_heads),
    )


def latent_decode(num_seqs: int, context: float, heads: Heads, *, splits_kv: bool = True, queries: float = 1.0) -> Work:
    """Absorbed decode over `context` latents: FLOPs = 2 q C H (2 r_kv + r), KV bytes = C (r_kv + r) b_kv.

    The latent is read once for key and value. num_seqs: sequences of `queries` new tokens each; heads: from
    `latent_heads`; splits_kv: over thread blocks. Source: DeepSeek-V2, section 2.1."""
    work = attention_decode(num_seqs, context, heads, splits_kv=splits_kv, queries=queries)
    return replace(work, kv_bytes=context * heads.head_dim * heads.kv_element_bytes)


def sparse_prefill(prefills: Sequence[tuple[int, int]], heads: Heads, top_k: int) -> Work:
    """Absorbed prefill attention over the `top_k` latents that the indexer selects per query.

    FLOPs = 2 H (2 r_kv + r) sum(min(pos + 1, top_k)). Each visible latent is read from HBM once; gathers per query come
    from L2 (`sram_bytes`). Source: DeepSeek-V3.2-Exp report (2025), eq. 2."""
    work = flash_prefill(prefills, heads)
    if not prefills:
        return replace(work, family="attention_sparse")
    pairs = sum(visible_pairs(t, p, window=top_k) for t, p in prefills)
    latents = heads.head_dim * heads.kv_element_bytes
    return replace(
        work,
        family="attention_sparse",
        problem=work.problem_as(PrefillSize)._replace(pairs=pairs, thread_blocks=0, chooses_keys=True),
        flops=2.0 * pairs * heads.query_elements,
        kv_bytes=sum(t + p for t, p in prefills) * latents,
        sram_bytes=work.activation_bytes + pairs * latents,
    )


def latent_nodes(mixer: LatentAttention, context: LayerContext) -> list[OperatorNode]:
    """Down- and up-projections, norms of the latents, RoPE, KV write, attention, output projection."""
    num_heads, size = context.shard.columns(mixer.num_heads), context.element_bytes
    rotated = (num_heads + 1) * mixer.qk_rope_head_dim
    form, width = context.format("attention"), num_heads * mixer.v_head_dim
    return [
        *_projections(mixer, context, num_heads),
        *([on_tokens("rope", lambda n: rope(n, rotated, size, is_fused=context.is_fused))] if mixer.rope else []),
        *_written(mixer.kv_lora_rank + mixer.qk_rope_head_dim, context),
        *(
            index_nodes(mixer.indexer, context, mixer.q_lora_rank or context.hidden)
            if mixer.indexer is not None
            else []
        ),
        *striped_prefill((mixer.kv_lora_rank + mixer.qk_rope_head_dim) * context.kv_element_bytes, context),
        *gathered_prompts(mixer.kv_lora_rank + mixer.qk_rope_head_dim, size, context.kv_element_bytes, context),
        *_prefill(mixer, context, num_heads),
        *_decode(mixer, context, num_heads),
        *([on_tokens("output_gate", lambda n: gate("output_gate", n, width, size))] if mixer.output_gate else []),
        on_tokens("o_proj", partial(gemm, "o_proj", n=context.hidden, k=width, form=form)),
    ]


def _written(latent: int, context: LayerContext) -> list[OperatorNode]:
    size, kv_size, dcp = context.element_bytes, context.kv_element_bytes, context.shard.dcp
    if not context.concatenates_kv:
        return [on_tokens("kv_write", lambda n: kv_write(n / dcp, latent, size, kv_size, is_fused=context.is_fused))]

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
    """Query and KV latents (one GEMM when fused, replicated on every device), then query heads."""
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
    if mixer.output_gate:
        columns = num_heads * mixer.v_head_dim
        nodes.append(on_tokens("gate_proj", partial(gemm, "gate_proj", n=columns, k=hidden, form=form)))
    name = "q_proj" if rank is None else "q_b_proj"
    nodes.append(on_tokens(name, partial(gemm, name, n=query_dim, k=rank or hidden, form=form)))
    return nodes


def _prefill(mixer: LatentAttention, context: LayerContext, num_heads: int) -> list[OperatorNode]:
    """Keys and values of all visible tokens expanded, cached ones included, then attention. With an indexer that leaves
    some out: absorbed attention to its choice, in whole tiles of heads."""
    form, indexer, size, own = context.format("attention"), mixer.indexer, context.element_bytes, context.latent_prompts
    columns = num_heads * (mixer.qk_nope_head_dim + mixer.v_head_dim)
    narrow = context.kv_element_bytes if own is not None and own.in_cache_format else size
    expanded = expanded_heads(mixer, num_heads, context.dtype, size, min(narrow, size))
    standard = partial(standard_prefill, is_fused=context.is_fused, is_module=not context.is_fused)
    attend_densely = partial(flash_prefill if context.is_flash else standard, heads=expanded)
    computed = -(-num_heads // context.sparse_heads) * context.sparse_heads
    latents = latent_heads(mixer, computed, context.dtype, size, context.kv_element_bytes)

    def is_dense(prefills: Prompts) -> bool:
        return indexer is None or max((new + cached for new, cached in prefills), default=0) <= indexer.top_k

    def expand(prefills: Prompts) -> Work:
        visible = sum(new + cached for new, cached in prefills) if is_dense(prefills) else 0
        return gemm("kv_b_proj", visible, columns, mixer.kv_lora_rank, form)

    def attend(prefills: Prompts) -> Work:
        if indexer is None or is_dense(prefills):
            work = attend_densely(split_prompts(prefills, context.shard.pcp))
            return work if own is None else replace(work, family="latent_prefill")
        return sparse_prefill(prefills, latents, indexer.top_k)

    def absorbed(name: str, prefills: Prompts) -> Work:
        num_tokens = 0 if is_dense(prefills) else sum(new for new, _ in prefills)
        return _absorbed(name, num_tokens, mixer=mixer, context=context, num_heads=num_heads)

    first, attention = on_prefills("kv_b_proj", expand), on_prefills("attention_prefill", attend)
    if indexer is None:
        return [first, attention]
    absorb, expand = (partial(absorbed, name) for name in ("absorb_query", "expand_output"))
    before, behind = on_prefills("absorb_query_prefill", absorb), on_prefills("expand_output_prefill", expand)
    return [first, before, attention, behind]


def _absorbed(name: str, num_tokens: float, *, mixer: LatentAttention, context: LayerContext, num_heads: int) -> Work:
    rank = mixer.kv_lora_rank
    n, k = (rank, mixer.qk_nope_head_dim) if name == "absorb_query" else (mixer.v_head_dim, rank)
    return absorb(name, num_tokens, num_heads, n, k, context.dtype, context.element_bytes)


def _decode(mixer: LatentAttention, context: LayerContext, num_heads: int) -> list[OperatorNode]:
    heads = latent_heads(mixer, num_heads, context.dtype, context.element_bytes, context.kv_element_bytes)
    absorbed = partial(_absorbed, mixer=mixer, context=context, num_heads=num_heads)

    def attend(num_seqs: int, visible: float, queries: float, own: Heads) -> Work:
        if mixer.indexer is not None:  # the mean context decides: min() of a sum, an upper bound of the sum of min()
            visible = min(visible, num_seqs * mixer.indexer.top_k)
        return latent_decode(num_seqs, visible, own, splits_kv=context.splits_kv, queries=queries)

    return [
        on_decodes("absorb_query", lambda seqs, _, queries: absorbed("absorb_query", seqs * queries)),
        *striped_decode(heads, context, attend),
        on_decodes("expand_output", lambda seqs, _, queries: absorbed("expand_output", seqs * queries)),
    ]
