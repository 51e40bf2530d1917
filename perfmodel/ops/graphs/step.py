"""The step graph: every operator that one step of a model runs on one device, and how often.

Equal mixers and feed-forward blocks share nodes: a model of 80 equal layers has some twenty.

Parallelism, per device of the replica (`BatchShape` is the batch of one data-parallel rank):
    tensor:    projections by columns then rows, heads shared out, one all-reduce after each mixer and each
               feed-forward block and after the embedding, logits gathered
    pipeline:  nodes cover the whole path, on one device of each stage, with the messages between stages;
               `StepGraph.stages` has each stage's part. Overlap of plans is up to `perfmodel.cost`
    data:      ranks are independent, but mixtures of experts see all ranks' tokens (`has_group`)
    expert:    whole experts are shared out over tp * dp ranks"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from perfmodel.models.architecture import LatentAttention, MoEFFN
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.adapters import adapter_mix
from perfmodel.ops.attention.decode import ContextSpread
from perfmodel.ops.formats import served_model
from perfmodel.ops.graphs.encoder import encoder_nodes
from perfmodel.ops.graphs.ffn_devices import apart, engine_of_ffn, message_nodes
from perfmodel.ops.graphs.layers import embedding_nodes, head_nodes, layer_nodes, on_host, passing_on_nodes
from perfmodel.ops.node import LayerContext, OperatorNode
from perfmodel.ops.routing import Routing, slowest_uniform_routing
from perfmodel.ops.sharding import Sharding, stages
from perfmodel.ops.work import AdapterMix, Depends
from perfmodel.specs.engine.formats import experts_use, latent_prompts, sparse_heads_per_tile
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.traffic import Adapters


class LaunchedLayers(NamedTuple):
    """Layers, and those with experts launched operator by operator or with latent attention, whose prompts take twice
    as many operators as plain attention."""

    layers: int
    experts: int = 0
    latent: int = 0


@dataclass(frozen=True)
class StepGraph:
    """All operators of a step. `model` is as served; `is_eager`: no CUDA graphs; `is_async`: the host plans a step
    while the one before runs; `is_plain`: plain PyTorch modules, launched from Python.

    mixed: (node, nodes it replaces): one kernel for prompts and decodes, if the calibration has one
    experts_are_one_operator: routed experts are launched like any other operator
    adapters: LoRA adapters, where any are served
    stages: one graph per pipeline stage; empty for a single stage
    overlap_from: tokens of steps without and with prompts from which two halves overlap; None: none do
    stage_layers, stage_kind: a stage's layers, and the first stage that differs in message targets only
    ffn: the graph of feed-forward devices, where these are others; num_micro_batches: between both kinds"""

    model: ModelSpec
    shard: Sharding
    nodes: tuple[OperatorNode, ...]
    is_eager: bool = False
    mixed: tuple[tuple[OperatorNode, tuple[OperatorNode, ...]], ...] = ()
    is_async: bool = True
    is_plain: bool = False
    stages: tuple["StepGraph", ...] = ()
    stage_layers: range | None = None
    stage_kind: int = 0
    experts_are_one_operator: bool = False
    adapters: AdapterMix | None = None
    overlap_from: tuple[int, int] | None = None
    ffn: "StepGraph | None" = None
    num_micro_batches: int = 1

    @property
    def num_ffn_layers(self) -> int:
        """Layers of the model with a feed-forward block."""
        return sum(count for layer, count in self.model.layers if layer.ffn is not None)

    @cached_property
    def num_layers(self) -> int:
        """Layers of the model, or of the stage."""
        return self.model.num_layers if self.stage_layers is None else len(self.stage_layers)

    @cached_property
    def launched_layers(self) -> LaunchedLayers:
        """Layers launched operator by operator without CUDA graphs."""
        layers, span = list(self.model.iter_layers()), self.stage_layers
        result = layers if span is None else layers[span.start : span.stop]
        num_experts = 0 if self.experts_are_one_operator else sum(isinstance(layer.ffn, MoEFFN) for layer in result)
        num_latents = sum(isinstance(layer.mixer, LatentAttention) for layer in result)
        return LaunchedLayers(len(result), num_experts, num_latents)

    @property
    def has_group(self) -> bool:
        """Whether data-parallel ranks share operators, so that they step together."""
        return bool(self.by_depends[Depends.GROUP]) or self.ffn is not None

    @cached_property
    def by_depends(self) -> dict[Depends, tuple[OperatorNode, ...]]:
        """Nodes by what their work depends on."""
        return {kind: tuple(node for node in self.nodes if node.depends is kind) for kind in Depends}


class GraphPart(NamedTuple):
    """Consecutive layers, with or without embedding and head.

    num_hops: between pipeline stages, within or behind these layers; stage: if it is one
    device_layers: last layers (the head is one) on the device, the others on the host; None: all"""

    layers: range
    has_embedding: bool = True
    has_head: bool = True
    num_hops: int = 0
    stage: int | None = None
    device_layers: int | None = None


def build_graph(
    model: ModelSpec,
    engine: EngineSpec | None = None,
    *,
    sampling: str = "default",
    bytes_per_logit: float | None = None,
    routing: Routing = slowest_uniform_routing,
    spread: ContextSpread | None = None,
    part: GraphPart | None = None,
    hardware: HardwareSpec | None = None,
    adapters: Adapters | None = None,
) -> StepGraph:
    """The step graph of `model` under `engine`.

    sampling: "greedy", "top_p", ...; "default": the model's generation config; bytes_per_logit: overrides the method's
    traffic; routing: expert load of the slowest rank; spread: of decode contexts (default: equal); part: some layers on
    one pipeline stage (default: all); hardware: decides in which format weight-only kernels multiply; adapters: that
    requests name"""
    engine, given = engine or EngineSpec(), model
    model = served_model(model, engine, hardware)
    is_plain = engine.enforce_eager and not engine.fused_kernels
    experts = experts_use(engine, hardware, model.quantization, model.dtype) if hardware is not None else None
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
        experts=experts if engine.fused_kernels else None,
        sparse_heads=sparse_heads_per_tile(engine, hardware) if hardware is not None and engine.fused_kernels else 1,
        latent_prompts=latent_prompts(engine, hardware) if hardware is not None and engine.fused_kernels else None,
        adapters=adapter_mix(engine, adapters),
    )
    method = model.sampling if sampling == "default" else sampling
    num_stages = context.shard.pp
    encoders = encoder_nodes(context, engine.mm_encoder_tp_mode == "data")

    def graph(of: GraphPart) -> StepGraph:
        nodes, mixed = _nodes(context, of, method, bytes_per_logit, encoders)
        if engine.mm_encoder_only:
            nodes, mixed = encoders, ()
        if engine.kv_cache == "off":
            nodes = [node for node in nodes if node.name.split("@")[0] != "kv_write"]
        return StepGraph(
            model,
            context.shard,
            tuple(nodes),
            engine.enforce_eager,
            mixed,
            engine.plans_ahead,
            is_plain,
            experts_are_one_operator=experts is not None and experts.one_operator,
            adapters=context.adapters,
            overlap_from=engine.overlap_from,
        )

    if part is not None or num_stages == 1:
        one = graph(part or GraphPart(range(model.num_layers), device_layers=engine.n_gpu_layers))
        if engine.afd_config is None:
            return one
        others = engine_of_ffn(engine, engine.afd_config)
        ffn = build_graph(given, others, sampling=sampling, routing=routing, hardware=hardware)
        messages = message_nodes(context, engine.afd_config, one.num_ffn_layers)
        own, remote = apart(one.nodes, ffn.nodes, messages)
        num_batches = engine.afd_config.num_afd_stages
        return replace(one, nodes=own, ffn=replace(ffn, nodes=remote), num_micro_batches=num_batches)
    whole = graph(GraphPart(range(model.num_layers), num_hops=num_stages - 1))
    return replace(whole, stages=_stage_graphs(model, num_stages, graph))


def _nodes(
    context: LayerContext,
    part: GraphPart,
    method: str,
    bytes_per_logit: float | None,
    encoders: Sequence[OperatorNode],
) -> tuple[list[OperatorNode], tuple[tuple[OperatorNode, tuple[OperatorNode, ...]], ...]]:
    """The operators of `part`, and its mixed kernels (`StepGraph.mixed`)."""
    model, span = context.model, part.layers
    layers = list(model.iter_layers())[span.start : span.stop]
    reach = model.exits.reach[span.start : span.stop] if model.exits else None
    # Layers on the host, before the device's; None: it computes none and holds no table.
    stay = None if part.device_layers is None else max(0, len(layers) - part.device_layers)
    embedded = [*encoders, *embedding_nodes(context)] if part.has_embedding else []
    last = head_nodes(context, method, bytes_per_logit) if part.has_head else []
    nodes = [
        *(on_host([*embedded, *layer_nodes(layers[:stay], context)]) if stay is not None else embedded),
        *layer_nodes(layers[stay or 0 :], context, reach),
        *(on_host(last) if stay is not None and part.device_layers == len(layers) - stay else last),
        *(replace(node, count=part.num_hops) for node in passing_on_nodes(context, part.stage) if part.num_hops),
    ]
    together = [node for node in nodes if node.depends is Depends.MIXED]
    nodes = [node for node in nodes if node.depends is not Depends.MIXED]
    if model.exits is not None:  # prompts pass layers that decodes leave out
        together = []
    return nodes, tuple((node, _parts(node, nodes)) for node in together)


def _stage_graphs(model: ModelSpec, num_stages: int, graph: Callable[[GraphPart], StepGraph]) -> tuple[StepGraph, ...]:
    layers, stage_graphs, kinds = list(model.iter_layers()), [], dict[Hashable, int]()
    for index, span in enumerate(stages(len(layers), num_stages)):
        is_first, is_last = index == 0, index == num_stages - 1
        reach = model.exits.reach[span.start : span.stop] if model.exits else ()
        kind = kinds.setdefault((is_first, is_last, tuple(layers[span.start : span.stop]), tuple(reach)), index)
        part = GraphPart(span, is_first, is_last, num_hops=int(not is_last), stage=index)
        stage_graphs.append(replace(graph(part), stage_layers=span, stage_kind=kind))
    return tuple(stage_graphs)


def _parts(mixed: OperatorNode, nodes: Sequence[OperatorNode]) -> tuple[OperatorNode, ...]:
    layers = mixed.name.removeprefix("attention_mixed")
    return tuple(node for node in nodes if node.name in (f"attention_prefill{layers}", f"attention_decode{layers}"))
