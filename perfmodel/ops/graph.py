"""The step graph: every operator that one step of a model runs on one device, and how often.

Equal mixers and equal feed-forward blocks share their nodes, so that a model of 80 equal layers has some twenty nodes.

Parallelism, per device of the replica (`BatchShape` is the batch of one data-parallel rank):
    tensor:    projections by columns then rows, heads shared out, one all-reduce after each mixer and each
               feed-forward block and after the embedding, logits gathered
    pipeline:  p stages work on p microbatches of 1/p of the batch each; in steady state a step of the whole batch
               takes p t_stage(B/p), and p messages between stages. Nodes of layers count p times the layers of the
               longest stage; embedding and LM head count p times, as on the last stage of an even split.
    data:      ranks are independent, but mixtures of experts see the tokens of all of them (`has_group`)
    expert:    whole experts are shared out over tp * dp ranks
"""

__all__ = ["GraphPart", "StepGraph", "build_graph"]

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from perfmodel.ops.formats import served_model
from perfmodel.ops.layers import embedding_nodes, head_nodes, layer_nodes
from perfmodel.ops.node import LayerContext, OperatorNode
from perfmodel.ops.ragged import ContextSpread
from perfmodel.ops.routing import Routing, slowest_uniform_routing
from perfmodel.ops.sharding import Sharding, stages
from perfmodel.ops.work import BatchShape, Depends, Work
from perfmodel.specs.engine import EngineSpec
from perfmodel.specs.model.architecture import MoEFFN
from perfmodel.specs.model.spec import ModelSpec


@dataclass(frozen=True)
class StepGraph:
    """All operators of a step. `model` is as served (formats of the engine applied); `is_eager`: no CUDA graphs;
    `is_async`: the host plans a step while the one before runs; `is_plain`: operators of plain PyTorch modules,
    launched one by one from Python.

    mixed: (node, nodes that it stands for): one kernel for prompts and decodes of a step that has both, where the
           calibration knows such a kernel
    """

    model: ModelSpec
    shard: Sharding
    nodes: tuple[OperatorNode, ...]
    is_eager: bool = False
    mixed: tuple[tuple[OperatorNode, tuple[OperatorNode, ...]], ...] = ()
    is_async: bool = True
    is_plain: bool = False

    @cached_property
    def num_moe_layers(self) -> int:
        """Layers with a mixture of experts."""
        return sum(isinstance(layer.ffn, MoEFFN) for layer in self.model.iter_layers())

    @property
    def has_group(self) -> bool:
        """Whether data-parallel ranks share operators, so that they must step together."""
        return bool(self.by_depends[Depends.GROUP])

    @cached_property
    def by_depends(self) -> dict[Depends, tuple[OperatorNode, ...]]:
        """The nodes grouped by what their work is a function of."""
        return {kind: tuple(node for node in self.nodes if node.depends is kind) for kind in Depends}


@dataclass(frozen=True, slots=True)
class GraphPart:
    """Consecutive layers of a model, with what stands before or behind all of them, or without."""

    layers: range
    has_embedding: bool = True
    has_head: bool = True


def build_graph(
    model: ModelSpec,
    engine: EngineSpec | None = None,
    *,
    sampling: str = "default",
    bytes_per_logit: float | None = None,
    routing: Routing = slowest_uniform_routing,
    spread: ContextSpread | None = None,
    part: GraphPart | None = None,
) -> StepGraph:
    """The step graph of `model` under `engine`.

    sampling:        "greedy", "top_p", ...; "default" is the model's own generation config
    bytes_per_logit: overrides the traffic of the sampling method
    routing:         the load of the rank that sets the time, for mixtures of experts
    spread:          of the contexts of sequences that decode together (default: all are equally long)
    part:            some layers only, on one pipeline stage (default: all of them)
    """
    engine = engine or EngineSpec()
    model = served_model(model, engine)
    is_plain = engine.enforce_eager and not engine.fused_kernels
    context = LayerContext(
        model,
        Sharding.of(engine),
        is_fused=engine.fused_kernels,
        is_flash=engine.attention == "flash",
        splits_kv=engine.split_kv and engine.flash_attn_version != 1,
        flash_version=engine.flash_attn_version,
        concatenates_kv=is_plain and engine.kv_cache == "paged",
        routing=routing,
        spread=spread,
    )
    method = model.sampling if sampling == "default" else sampling
    pp = context.shard.pp
    span = part.layers if part is not None else _critical_stage(model, pp)
    stage = list(model.iter_layers())[span.start : span.stop]
    reach = model.exits.reach[span.start : span.stop] if model.exits else None
    nodes = [
        *(embedding_nodes(context) if part is None or part.has_embedding else []),
        *layer_nodes(stage, context, reach),
        *(head_nodes(context, method, bytes_per_logit) if part is None or part.has_head else []),
    ]
    if engine.kv_cache == "off":
        nodes = [node for node in nodes if node.name.split("@")[0] != "kv_write"]
    together = [node for node in nodes if node.depends is Depends.MIXED]
    nodes = [node for node in nodes if node.depends is not Depends.MIXED]
    if model.exits is not None:  # prompts pass layers that decodes leave out
        together = []
    if pp > 1:  # prompts and decodes are not in the same microbatches
        nodes, together = [_in_microbatches(node, pp) for node in nodes], []
    mixed = tuple((node, _parts(node, nodes)) for node in together)
    return StepGraph(model, context.shard, tuple(nodes), engine.enforce_eager, mixed, engine.plans_ahead, is_plain)


def _parts(mixed: OperatorNode, nodes: Sequence[OperatorNode]) -> tuple[OperatorNode, ...]:
    """The attention of prompts and of decodes of the same layers."""
    layers = mixed.name.removeprefix("attention_mixed")
    return tuple(node for node in nodes if node.name in (f"attention_prefill{layers}", f"attention_decode{layers}"))


def _critical_stage(model: ModelSpec, num_stages: int) -> range:
    """The layers of the longest pipeline stage."""
    return max(stages(model.num_layers, num_stages), key=len)


def _in_microbatches(node: OperatorNode, num_stages: int) -> OperatorNode:
    """The node, run on each of `num_stages` microbatches. Prefills are not cut: their work is shared evenly."""
    work, runs, count = node.work, node.runs, node.count * num_stages
    if node.depends is Depends.PREFILL:
        return replace(node, count=count, work=lambda shape: _scaled(work(shape), 1 / num_stages))
    in_each = replace(node, count=count, work=lambda shape: work(_microbatch(shape, num_stages)))
    if runs is None:
        return in_each
    return replace(in_each, runs=lambda shape: num_stages * runs(_microbatch(shape, num_stages)))


def _microbatch(shape: BatchShape, num_stages: int) -> BatchShape:
    """One of `num_stages` parts of the shape, without its prefills."""
    return BatchShape(
        num_tokens=ceil(shape.num_tokens / num_stages),
        num_samples=ceil(shape.num_samples / num_stages),
        num_decodes=ceil(shape.num_decodes / num_stages),
        decode_context=ceil(shape.decode_context / num_stages),
        decode_windowed=tuple(ceil(context / num_stages) for context in shape.decode_windowed),
        group_tokens=ceil(shape.group_tokens / num_stages),
        decode_tokens=ceil(shape.decode_tokens / num_stages),
    )


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
