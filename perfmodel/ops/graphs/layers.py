"""A layer of any kind as a list of operators, and what stands before and after the layers.

Early exit: of B decodes p_i B reach layer i. It runs if any does, and for all P prompt tokens, which pass all layers:

    runs  Q = sum over layers of q_i,  q_i = 1 with prompts, else 1 - (1 - p_i)^B     (weights are read Q times)
    rows of a run = (L P + B sum p_i) / Q                                             (FLOPs follow the tokens)

The cache still needs keys and values of the other (1 - p_i) B rows, projected from the state at exit. Source: Schuster
et al. 2022 (CALM), section 3.1 (state propagation); q_i: independent exits. Equal layers are timed at their mean rows.

CPU offload: single-machine engines keep the first layers of a model too large for the device, and always the embedding
table, in host memory (llama.cpp's n_gpu_layers). These operators are marked for a form of their own."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any, TypeVar, cast

from perfmodel.models import architecture as arch
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.adapters import adapter_nodes, block_targets, vocabulary_targets
from perfmodel.ops.attention.compressed import compressed_nodes
from perfmodel.ops.attention.latent import latent_nodes
from perfmodel.ops.attention.layer import attention_heads, attention_nodes
from perfmodel.ops.collectives import all_gather, all_reduce, send_recv, tensor_parallel
from perfmodel.ops.elementwise import embedding, residual_add, residual_mix, rms_norm, sample
from perfmodel.ops.feedforward import dense_ffn_nodes, moe_nodes
from perfmodel.ops.linear import gemm, linear_nodes
from perfmodel.ops.node import LayerContext, OperatorNode, on_prefills, on_samples, on_tokens
from perfmodel.ops.pooling import pooler_nodes
from perfmodel.ops.recurrent import delta_net_nodes, linear_attention_nodes, mamba_nodes
from perfmodel.ops.work import BatchShape, Depends, Work


def leaving_node(node: OperatorNode, reach: Sequence[float]) -> OperatorNode:
    """`node` for the tokens that reach its layers: the shares `reach` of the decodes, layer by layer.

    KV writes run for all tokens. Mixed kernels are left as they are: with early exit the graph does without them."""
    if node.name == "kv_write" or node.depends in (Depends.PREFILL, Depends.MIXED):
        return replace(node, count=node.count * len(reach))
    return _limited(node, reach)


def filling_nodes(mixer: arch.Mixer | None, context: LayerContext, reach: Sequence[float]) -> list[OperatorNode]:
    """KV (or latent) projection of the tokens that exit before the layers of `mixer`."""
    hidden, form = context.hidden, context.format("attention")
    if isinstance(mixer, arch.Attention):
        widths = {"skipped_kv_proj": attention_heads(mixer, context).kv_elements}
        nodes = linear_nodes(widths, hidden, form, rank=mixer.qkv_rank)
    elif isinstance(mixer, arch.LatentAttention):
        nodes = linear_nodes({"skipped_kv_proj": mixer.kv_lora_rank + mixer.qk_rope_head_dim}, hidden, form)
    else:
        return []
    return [_limited(node, [1 - p for p in reach], has_prompts=False) for node in nodes]


def asking_nodes(context: LayerContext, reach: Sequence[float]) -> list[OperatorNode]:
    """The LM head behind each layer but the last, where it decides on exit."""
    exits = context.model.exits
    if exits is None or not exits.asks_lm_head or not reach:
        return []
    columns = context.shard.columns(context.model.vocab_size)
    work = partial(gemm, "exit_lm_head", n=columns, k=context.hidden, form=context.format("lm_head"))
    return [_limited(on_tokens("exit_lm_head", work), reach, has_prompts=False)]


def _limited(node: OperatorNode, reach: Sequence[float], has_prompts: bool = True) -> OperatorNode:
    is_decode, item = node.depends is Depends.DECODE, node.count
    num_layers, sum_reach = len(reach), sum(reach)

    def prompts(shape: BatchShape) -> int:
        return shape.num_tokens - shape.num_decodes if has_prompts and not is_decode else 0

    def runs(shape: BatchShape) -> float:
        if prompts(shape):
            return float(item * num_layers)
        return item * sum(1.0 - (1.0 - p) ** shape.num_decodes for p in reach)

    def work(shape: BatchShape) -> Work:
        num_runs = runs(shape) / item
        if not num_runs:
            return node.work(BatchShape(0, 0))
        share = sum_reach / num_runs
        rows = num_layers * prompts(shape) / num_runs + shape.num_decodes * share
        # Means over the runs: operators count in real numbers, whatever the shapes of real steps are.
        return node.work(
            shape._replace(
                num_tokens=cast(int, rows),
                num_decodes=cast(int, shape.num_decodes * share),
                decode_context=cast(int, shape.decode_context * share),
                decode_windowed=tuple(cast(int, context * share) for context in shape.decode_windowed),
            )
        )

    depends = node.depends if is_decode else Depends.ROWS
    return replace(node, count=item * num_layers, depends=depends, work=work, runs=runs)


Block = TypeVar("Block", arch.Mixer, arch.FeedForward)
Formats = tuple[tuple[str, arch.QuantizationSpec], ...]
_MIXERS = frozenset({"attention", "linear_attention"})
_FFNS = frozenset({"dense_ffn", "experts", "shared_experts"})
_MIXER_NODES: Mapping[type[arch.Mixer], Callable[[Any, LayerContext], list[OperatorNode]]] = {
    arch.Attention: attention_nodes,
    arch.LatentAttention: latent_nodes,
    arch.CompressedAttention: compressed_nodes,
    arch.LinearAttention: linear_attention_nodes,
    arch.GatedDeltaNet: delta_net_nodes,
    arch.Mamba: mamba_nodes,
}
_LABELS = {
    "LatentAttention": "mla",
    "CompressedAttention": "compressed",
    "LinearAttention": "linear",
    "GatedDeltaNet": "delta_net",
    "Mamba": "mamba",
    "DenseFFN": "dense",
    "MoEFFN": "moe",
}


def embedding_nodes(context: LayerContext) -> list[OperatorNode]:
    hidden, size = context.hidden, context.element_bytes
    tables = 2 if context.model.num_learned_positions else 1
    nodes = [on_tokens("embedding", lambda n: embedding(n, hidden, size, num_tables=tables))]
    nodes += adapter_nodes(vocabulary_targets(context.model)[:1], context)
    return nodes + _reduce("embedding_all_reduce", context)


def passing_on_nodes(context: LayerContext, stage: int | None = None) -> list[OperatorNode]:
    """Sends from pipeline stage `stage` (or any) to the next: hidden states, and the residual if norms add it.

    Each tensor-parallel rank sends its part; the receivers all-gather.
    Source: vLLM's IntermediateTensors and `send_tensor_dict(all_gather_group=get_tp_group())`; SGLang's likewise."""
    shard, token_bytes = context.shard, context.hidden * context.element_bytes * (2 if context.is_fused else 1)
    pair = shard.group("pipeline", stage)
    nodes = [on_tokens("send_recv", lambda n: send_recv(n * token_bytes / shard.tp, pair))]
    return nodes + tensor_parallel(all_gather, "stage_all_gather", token_bytes, context)


def head_nodes(context: LayerContext, method: str, bytes_per_logit: float | None) -> list[OperatorNode]:
    if context.model.pooling is not None:
        return [*_norm("final_norm", context, adds_residual=context.is_fused), *pooler_nodes(context)]
    vocab, bias = context.model.vocab_size, context.model.lm_head_bias
    columns = context.shard.columns(vocab)
    head = partial(gemm, "lm_head", n=columns, k=context.hidden, form=context.format("lm_head"), has_bias=bias)
    logits_bytes = columns * context.shard.tp * context.element_bytes
    hidden_bytes, pcp, group = context.hidden * context.element_bytes, context.shard.pcp, context.shard.group("data")
    name = "pcp_hidden_all_gather"
    restored = on_prefills(name, lambda prompts: all_gather(hidden_bytes * sum(new for new, _ in prompts), group, name))
    return [
        *_norm("final_norm", context, adds_residual=context.is_fused),
        *([restored] if pcp > 1 else []),
        on_samples("lm_head", head),
        *adapter_nodes(vocabulary_targets(context.model)[1:], context),
        *tensor_parallel(all_gather, "logits_all_gather", logits_bytes, context, on_samples),
        on_samples("sample", lambda b: sample(b, vocab, method, bytes_per_logit)),
    ]


def layer_nodes(
    layers: Sequence[arch.Layer], context: LayerContext, reach: Sequence[float] | None = None
) -> list[OperatorNode]:
    """Each distinct mixer and feed-forward block of `layers` once, with its count.

    reach: share of decodes that reach each layer, under early exit. Colliding names get their block's label:
    "attention_decode@window_128"."""
    reaches = reach or [1.0] * len(layers)
    pairs = list(zip(layers, reaches, strict=True))
    mixers = _places(((x.mixer, _own(x, _MIXERS)), p) for x, p in pairs if x.mixer is not None)
    ffns = _places(((x.ffn, _own(x, _FFNS)), p) for x, p in pairs if x.ffn is not None)
    groups = [
        (label, _mixer_block(mixer, replace(context, formats=own)), mixers[mixer, own])
        for (mixer, own), label in _labels(mixers).items()
    ]
    groups += [
        (label, _ffn_block(ffn, replace(context, formats=own)), ffns[ffn, own])
        for (ffn, own), label in _labels(ffns).items()
    ]
    names = Counter(node.name for _, nodes, _ in groups for node in nodes if node.depends is not Depends.MIXED)
    result = []
    for label, nodes, shares in groups:
        for node in nodes:
            placed = leaving_node(node, shares) if reach else replace(node, count=node.count * len(shares))
            told_apart_by = "attention_prefill" if node.depends is Depends.MIXED else node.name  # which MIXED replaces
            result.append(replace(placed, name=f"{node.name}@{label}" if names[told_apart_by] > 1 else node.name))
    if reach:
        for (mixer, own), shares in mixers.items():
            result += filling_nodes(mixer, replace(context, formats=own), shares)
        result += asking_nodes(context, reach[:-1])
    return result


def _own(layer: arch.Layer, components: frozenset[str]) -> Formats:
    return tuple((name, form) for name, form in layer.formats if name in components)


def _places(blocks: Iterable[tuple[tuple[Block, Formats], float]]) -> dict[tuple[Block, Formats], list[float]]:
    places: dict[tuple[Block, Formats], list[float]] = {}
    for block, share in blocks:
        places.setdefault(block, []).append(share)
    return places


def _mixer_block(mixer: arch.Mixer, context: LayerContext) -> list[OperatorNode]:
    """Norm, mixer, all-reduce. Parallel blocks share the second one's all-reduce."""
    nodes = [*_norms("input_norm", context), *_MIXER_NODES[type(mixer)](mixer, context)]
    nodes += adapter_nodes(block_targets(mixer, context.hidden, context.shard), context)
    if not context.model.parallel_blocks:
        nodes += _reduce("mixer_all_reduce", context)
    return nodes + _post_norm("mixer_post_norm", context)


def _ffn_block(ffn: arch.FeedForward, context: LayerContext) -> list[OperatorNode]:
    """Norm, feed-forward block, all-reduce (mixtures of experts bring their own messages)."""
    nodes = [] if context.model.shared_block_norm else _norms("post_attention_norm", context)
    if isinstance(ffn, arch.DenseFFN):
        adapters = adapter_nodes(block_targets(ffn, context.hidden, context.shard), context)
        nodes += [*dense_ffn_nodes(ffn, context), *adapters, *_reduce("mlp_all_reduce", context)]
    else:
        nodes += moe_nodes(ffn, context)
    return nodes + _post_norm("ffn_post_norm", context)


def _norms(name: str, context: LayerContext) -> list[OperatorNode]:
    """The norm before a block, and the residual addition (one kernel when fused)."""
    hidden, size, has_norm = context.hidden, context.element_bytes, context.model.pre_norms
    inputs = residual_inputs(context.model)
    if inputs is not None:
        return [*_norm(name, context), on_tokens("residual_mix", lambda n: residual_mix(n, hidden, size, *inputs))]
    nodes = _norm(name, context, adds_residual=context.is_fused) if has_norm else []
    if not (context.is_fused and has_norm):
        nodes.append(on_tokens("residual_add", lambda n: residual_add("residual_add", n, hidden, size)))
    return nodes


def residual_inputs(model: ModelSpec) -> tuple[float, float, int] | None:
    """Hidden states that a block reads and writes beside its own input and output, and numbers of a token that weigh
    them; None with plain residuals. Sums of earlier layers are as many as the mean layer sees."""
    n, block = model.num_streams, model.residual_block
    if n > 1 or not block:
        return (n, n, n * (n + 2)) if n > 1 else None
    return 1 + sum(ceil(i / block) for i in range(model.num_layers)) / model.num_layers, 1, 1


def _post_norm(name: str, context: LayerContext) -> list[OperatorNode]:
    return _norm(name, context) if context.model.post_norms else []


def _norm(name: str, context: LayerContext, adds_residual: bool = False) -> list[OperatorNode]:
    """One norm. LayerNorm is always one kernel, as in PyTorch."""
    hidden, size, fused = context.hidden, context.element_bytes, context.is_fused or context.model.norm_bias
    return [on_tokens(name, lambda n: rms_norm(name, n, hidden, size, adds_residual=adds_residual, is_fused=fused))]


def _reduce(name: str, context: LayerContext) -> list[OperatorNode]:
    return tensor_parallel(all_reduce, name, context.hidden * context.element_bytes, context)


def _labels(blocks: Iterable[tuple[Block, Formats]]) -> dict[tuple[Block, Formats], str]:
    seen: Counter[str] = Counter()
    labels: dict[tuple[Block, Formats], str] = {}
    for block, formats in blocks:
        label = _label(block, formats)
        seen[label] += 1
        labels[block, formats] = label if seen[label] == 1 else f"{label}_{seen[label]}"
    return labels


def _label(block: arch.Mixer | arch.FeedForward, formats: Formats) -> str:
    """Kind and weight format: "full", "full_int4"."""
    return "_".join((_kind(block), *(form.weights or "plain" for _, form in formats)))


def _kind(block: arch.Mixer | arch.FeedForward) -> str:
    if isinstance(block, arch.Attention):
        if block.window is not None:
            return f"window_{block.window}"
        if block.sparsity is not None:
            return "sparse"
        return f"chunk_{block.chunk}" if block.chunk is not None else "full"
    return _LABELS[type(block).__name__]


HOST = "host"


def host_family(family: str) -> str:
    """The calibration family of `family` on the host."""
    return f"{HOST}_{family}"


def on_host(nodes: Iterable[OperatorNode]) -> list[OperatorNode]:
    """`nodes` as the host computes them, renamed."""
    return [replace(node, name=f"{node.name}@{HOST}", work=partial(_host_work, node)) for node in nodes]


def _host_work(node: OperatorNode, shape: BatchShape) -> Work:
    work = node.work(shape)
    return replace(work, family=host_family(work.family))
