"""The step graph: every operator that one step of a model runs on one device, and how often.

Equal mixers and equal feed-forward blocks share their nodes, so that a model of 80 equal layers has some twenty nodes.

Parallelism, per device of the replica (`BatchShape` is the batch of one data-parallel rank):
    tensor:    projections by columns then rows, heads shared out, one all-reduce after each mixer and each
               feed-forward block and after the embedding, logits gathered
    pipeline:  p stages work on p microbatches of 1/p of the batch each; in steady state a step of the whole batch
               takes p t_stage(B/p), and p messages between stages. Nodes of layers count p times the layers of the
               longest stage; embedding and LM head count p times, as on the last stage of an even split.
    data:      ranks are independent, but mixtures of experts see the tokens of all of them
    expert:    whole experts are shared out over tp * dp ranks
"""

__all__ = ["StepGraph", "build_graph"]

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from perfmodel.ops.attention_layer import attention_nodes
from perfmodel.ops.collectives import all_gather, all_reduce, send_recv
from perfmodel.ops.embedding import embedding
from perfmodel.ops.ffn_layer import dense_ffn_nodes
from perfmodel.ops.formats import served_model
from perfmodel.ops.gemm import gemm
from perfmodel.ops.node import LayerContext, OperatorNode, on_samples, on_tokens
from perfmodel.ops.norm import residual_add, rms_norm
from perfmodel.ops.sampling import sample
from perfmodel.ops.sharding import Sharding
from perfmodel.ops.work import BatchShape, Depends, Work
from perfmodel.specs.engine import EngineSpec
from perfmodel.specs.model.architecture import Attention, DenseFFN, FeedForward, Layer, Mixer
from perfmodel.specs.model.spec import ModelSpec


@dataclass(frozen=True)
class StepGraph:
    """All operators of a step. `model` is as served (formats of the engine applied); `is_eager`: no CUDA graphs."""

    model: ModelSpec
    shard: Sharding
    nodes: tuple[OperatorNode, ...]
    is_eager: bool = False

    @cached_property
    def by_depends(self) -> dict[Depends, tuple[OperatorNode, ...]]:
        """The nodes grouped by what their work is a function of."""
        return {kind: tuple(node for node in self.nodes if node.depends is kind) for kind in Depends}


def build_graph(
    model: ModelSpec,
    engine: EngineSpec | None = None,
    *,
    sampling: str = "default",
    bytes_per_logit: float | None = None,
) -> StepGraph:
    """The step graph of `model` under `engine`.

    sampling:        "greedy", "top_p", ...; "default" is the model's own generation config
    bytes_per_logit: overrides the traffic of the sampling method
    """
    engine = engine or EngineSpec()
    model = served_model(model, engine)
    context = LayerContext(
        model,
        Sharding.of(engine),
        is_fused=engine.fused_kernels,
        is_flash=engine.attention == "flash",
        splits_kv=engine.split_kv,
    )
    method = model.sampling if sampling == "default" else sampling
    nodes = [*_embedding_nodes(context), *_layer_nodes(context), *_head_nodes(context, method, bytes_per_logit)]
    pp = context.shard.pp
    if pp > 1:
        nodes = [replace(node, count=node.count * pp, work=_microbatch(node, pp)) for node in nodes]
    return StepGraph(model, context.shard, tuple(nodes), is_eager=engine.enforce_eager)


def _embedding_nodes(context: LayerContext) -> list[OperatorNode]:
    hidden, size, tp = context.hidden, context.element_bytes, context.shard.tp
    nodes = [on_tokens("embedding", lambda n: embedding(n, hidden, size))]
    if tp > 1:
        nodes.append(on_tokens("embedding_all_reduce", lambda n: all_reduce(n * hidden * size, tp)))
    if context.shard.pp > 1:
        nodes.append(on_tokens("send_recv", lambda n: send_recv(n * hidden * size)))
    return nodes


def _head_nodes(context: LayerContext, method: str, bytes_per_logit: float | None) -> list[OperatorNode]:
    hidden, size, tp = context.hidden, context.element_bytes, context.shard.tp
    vocab, form = context.model.vocab_size, context.format("lm_head")
    columns = context.shard.columns(vocab)
    fused = context.is_fused
    nodes = [
        on_tokens("final_norm", lambda n: rms_norm("final_norm", n, hidden, size, adds_residual=fused, is_fused=fused)),
        on_samples("lm_head", lambda b: gemm("lm_head", b, columns, hidden, form)),
    ]
    if tp > 1:
        nodes.append(on_samples("logits_all_gather", lambda b: all_gather(b * columns * tp * size, tp)))
    nodes.append(on_samples("sample", lambda b: sample(b, vocab, method, bytes_per_logit)))
    return nodes


def _layer_nodes(context: LayerContext) -> list[OperatorNode]:
    """Norms, mixers and feed-forward blocks with their all-reduces, each distinct one once with its count."""
    layers = _critical_stage(list(context.model.iter_layers()), context.shard.pp)
    mixers = Counter(layer.mixer for layer in layers if layer.mixer is not None)
    ffns = Counter(layer.ffn for layer in layers if layer.ffn is not None)
    groups = [(_label(m), [*_before("input_norm", context), *_mixer_nodes(m, context)], c) for m, c in mixers.items()]
    groups += [
        (_label(f), [*_before("post_attention_norm", context), *_ffn_nodes(f, context)], c) for f, c in ffns.items()
    ]
    names = Counter(node.name for _, nodes, _ in groups for node in nodes)
    return [
        replace(node, name=node.name if names[node.name] == 1 else f"{node.name}@{label}", count=node.count * count)
        for label, nodes, count in groups
        for node in nodes
    ]


def _before(name: str, context: LayerContext) -> list[OperatorNode]:
    """The norm in front of a block, and the residual addition after the one before it (one kernel when fused)."""
    hidden, size, fused = context.hidden, context.element_bytes, context.is_fused
    nodes = [on_tokens(name, lambda n: rms_norm(name, n, hidden, size, adds_residual=fused, is_fused=fused))]
    if not fused:
        nodes.append(on_tokens("residual_add", lambda n: residual_add("residual_add", n, hidden, size)))
    return nodes


def _mixer_nodes(mixer: Mixer, context: LayerContext) -> list[OperatorNode]:
    if isinstance(mixer, Attention):
        return [*attention_nodes(mixer, context), *_reduce("attention_all_reduce", context)]
    raise NotImplementedError(type(mixer).__name__)


def _ffn_nodes(ffn: FeedForward, context: LayerContext) -> list[OperatorNode]:
    if isinstance(ffn, DenseFFN):
        return [*dense_ffn_nodes(ffn, context), *_reduce("mlp_all_reduce", context)]
    raise NotImplementedError(type(ffn).__name__)


def _reduce(name: str, context: LayerContext) -> list[OperatorNode]:
    tp, token_bytes = context.shard.tp, context.hidden * context.element_bytes
    return [on_tokens(name, lambda n: all_reduce(n * token_bytes, tp))] if tp > 1 else []


def _label(block: Mixer | FeedForward) -> str:
    """A short name for a distinct block, to tell its nodes from those of another."""
    if isinstance(block, Attention):
        if block.window is not None:
            return f"window_{block.window}"
        return f"chunk_{block.chunk}" if block.chunk is not None else "full"
    return type(block).__name__.removesuffix("FFN").lower()


def _critical_stage(layers: list[Layer], num_stages: int) -> list[Layer]:
    """The layers of the longest pipeline stage, under vLLM's split: the remainder goes to stages before the last."""
    base, rest = divmod(len(layers), num_stages)
    sizes = [base] * num_stages
    for i in range(rest):
        sizes[-2 - i] += 1  # from the last but one backwards
    longest = max(sizes)
    start = 0
    for size in sizes:
        if size == longest:
            return layers[start : start + size]
        start += size
    raise AssertionError("no stage")


def _microbatch(node: OperatorNode, num_stages: int) -> Callable[[BatchShape], Work]:
    """The node's work on one of `num_stages` microbatches. Prefills are not cut: their total work is shared evenly."""
    work = node.work
    if node.depends is Depends.PREFILL:
        return lambda shape: _scaled(work(shape), 1 / num_stages)

    def part(shape: BatchShape) -> Work:
        return work(
            BatchShape(
                num_tokens=ceil(shape.num_tokens / num_stages),
                num_samples=ceil(shape.num_samples / num_stages),
                num_decodes=ceil(shape.num_decodes / num_stages),
                decode_context=ceil(shape.decode_context / num_stages),
                decode_windowed=tuple(ceil(context / num_stages) for context in shape.decode_windowed),
            )
        )

    return part


def _scaled(work: Work, factor: float) -> Work:
    """`work` with FLOPs and bytes scaled; launches stay."""
    return replace(
        work,
        flops=work.flops * factor,
        weight_bytes=work.weight_bytes * factor,
        activation_bytes=work.activation_bytes * factor,
        kv_bytes=work.kv_bytes * factor,
        sram_bytes=work.sram_bytes * factor,
    )
