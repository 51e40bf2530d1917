"""Draft models: the step graph of one drafter pass, for each method.

draft_model     a model of its own: all of its layers and its head
self_skip       the first layers of the model and its head; the KV of those layers is the model's own
self_quantized  the model with quantized weights; the KV is the model's own
eagle           a projection of (feature, embedding) 2 d -> d, one decoder layer, the model's head
medusa          k heads on the last hidden state, each a residual block d x d and a projection d x V
ngram, lookahead  nothing on the device: the host looks up n-grams; the step itself is the draft

Source: Leviathan et al. 2023; Elhoushi et al. 2024 (LayerSkip); Cai et al. 2024 (Medusa); Li et al. 2024 (EAGLE)."""

from dataclasses import dataclass, replace
from functools import partial

from perfmodel.errors import SpecError
from perfmodel.models import architecture as arch
from perfmodel.models.architecture import LinearAttention as _Linear
from perfmodel.models.number_formats import with_quantization
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.collectives import all_gather, tensor_parallel
from perfmodel.ops.elementwise import sample
from perfmodel.ops.formats import served_model
from perfmodel.ops.graphs.step import GraphPart, StepGraph, build_graph
from perfmodel.ops.linear import gemm
from perfmodel.ops.node import LayerContext, OperatorNode, on_samples, on_tokens
from perfmodel.ops.routing import Routing, slowest_uniform_routing
from perfmodel.ops.sharding import Sharding
from perfmodel.ops.work import Work
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.engine.speculation import SpeculativeConfig
from perfmodel.specs.hardware import HardwareSpec


@dataclass(frozen=True)
class Drafter:
    """One pass of a drafter.

    computes_prompts: it has its own KV cache, so prompts pass through it
    first_tokens:     tokens per sequence in a round's first pass: what the last round added beside the newest
    has_one_pass:     one pass drafts all depths
    has_distribution: rejection sampling needs its probabilities"""

    graph: StepGraph
    computes_prompts: bool = False
    first_tokens: int = 1
    has_one_pass: bool = False
    has_distribution: bool = True


def drafter_of(
    model: ModelSpec,
    engine: EngineSpec,
    method: str,
    routing: Routing = slowest_uniform_routing,
    hardware: HardwareSpec | None = None,
) -> Drafter | None:
    """The drafter for `engine.speculative_config`; None without one, or if no device drafts.

    method: the `model`'s sampling; a drafter is greedy with greedy sampling; routing: for a drafter with experts;
    hardware: as in `build_graph`. Raises SpecError for a model that this method cannot draft for."""
    config = engine.speculative_config
    if config is None:
        return None
    _refuse(model, config)
    sampling = "greedy" if method == "greedy" else "random"
    own = draft_engine(engine, config)
    if config.method in ("ngram", "lookahead", "suffix"):
        return None
    if config.method == "medusa":
        return Drafter(_medusa_graph(model, engine, config.depth), has_one_pass=True, has_distribution=False)
    drafting = draft_model_of(model, config)
    part = GraphPart(range(config.draft_layers or 0)) if config.method == "self_skip" else None
    graph = build_graph(drafting, own, sampling=sampling, routing=routing, part=part, hardware=hardware)
    if config.method == "eagle":
        context = LayerContext(served_model(drafting, own), graph.shard)
        hidden, form = context.hidden, context.format("attention")
        node: OperatorNode = on_tokens("eagle_fc", partial(gemm, "eagle_fc", n=hidden, k=2 * hidden, form=form))
        first = next(i for i, item in enumerate(graph.nodes) if not item.name.startswith("embedding"))
        graph = replace(graph, nodes=(*graph.nodes[:first], node, *graph.nodes[first:]))
        return Drafter(graph, computes_prompts=True, first_tokens=config.depth + 1)
    is_own = config.method == "draft_model"
    # Pipelined, the drafter has gone on behind its last token, or begins behind the newest one.
    return Drafter(graph, computes_prompts=is_own, first_tokens=2 if is_own and not config.pipelined else 1)


def draft_model_of(model: ModelSpec, config: SpeculativeConfig) -> ModelSpec:
    """The drafting model: the one named, the quantized one, the EAGLE layer, or `model` (whose layers draft).

    Raises SpecError for a model that this method cannot draft for."""
    _refuse(model, config)
    if config.method == "draft_model":
        assert config.model is not None
        return with_quantization(config.model, config.quantization)
    if config.method == "self_quantized":
        return with_quantization(model, config.quantization)
    return _eagle_model(model) if config.method == "eagle" else model


def skipping_parts(model: ModelSpec, engine: EngineSpec) -> tuple[GraphPart, GraphPart]:
    """LayerSkip's verification: the first layers, which only the last drafted token still needs, and the rest."""
    assert engine.speculative_config is not None
    first = engine.speculative_config.draft_layers or 0
    return GraphPart(range(first), has_head=False), GraphPart(range(first, model.num_layers), has_embedding=False)


def rejection(num_drafted: float, vocab_size: int, method: str, has_distribution: bool) -> Work:
    """Rejection sampling of `num_drafted` tokens: accepted with min(1, p / q), else resampled from max(0, p - q).

        bytes = 4 V (p read) + 4 V (q read, where the drafter has a distribution) a token, fp32; greedy: ids only

    vocab_size V; method: of sampling; has_distribution: q is read.
    Source: Leviathan et al. 2023, algorithm 1; Chen et al. 2023."""
    per_logit = 0.0 if method == "greedy" else 8.0 if has_distribution else 4.0
    return Work(
        "rejection_sampling",
        "sampling",
        flops=2.0 * num_drafted * vocab_size if per_logit else num_drafted,
        rate="vector",
        activation_bytes=per_logit * num_drafted * vocab_size + 8.0 * num_drafted,
        num_kernels=2 if num_drafted else 0,
    )


def medusa_weights(model: ModelSpec, shard: Sharding, num_heads: int) -> float:
    """Weights of Medusa's heads on one device: k (d^2 + d V / tp)."""
    return float(num_heads * model.hidden_size * (model.hidden_size + shard.columns(model.vocab_size)))


def draft_engine(engine: EngineSpec, config: SpeculativeConfig) -> EngineSpec:
    """The engine's parallelism and kernels; a drafter's passes are launched back to back."""
    keeps = config.method == "self_skip"
    update = {"speculative_config": None, "async_scheduling": True}
    return engine.model_copy(update=update if keeps else update | {"quantization": None, "quantization_by_layer": ()})


def _medusa_graph(model: ModelSpec, engine: EngineSpec, num_heads: int) -> StepGraph:
    served = served_model(model, engine)
    context = LayerContext(served, Sharding.of(engine))
    hidden, vocab, form = context.hidden, served.vocab_size, context.format("lm_head")
    columns = context.shard.columns(vocab)
    logits_bytes = columns * context.shard.tp * context.element_bytes
    nodes = [
        on_samples("medusa_block", partial(gemm, "medusa_block", n=hidden, k=hidden, form=form)),
        on_samples("medusa_head", partial(gemm, "medusa_head", n=columns, k=hidden, form=form)),
        *tensor_parallel(all_gather, "medusa_all_gather", logits_bytes, context, on_samples),
        on_samples("medusa_top_k", lambda b: replace(sample(b, vocab), name="medusa_top_k")),
    ]
    nodes = [replace(node, count=num_heads) for node in nodes]
    return StepGraph(served, context.shard, tuple(nodes), engine.enforce_eager)


def _eagle_model(model: ModelSpec) -> ModelSpec:
    """One decoder layer of the model's sizes and dtype between embedding and head; dense, as wide as active experts."""
    layers = [layer for layer in model.iter_layers() if isinstance(layer.mixer, arch.Attention | arch.LatentAttention)]
    dense = [layer for layer in layers if getattr(layer.mixer, "span", None) is None]
    chosen = (dense or layers)[-1]
    ffn = next((layer.ffn for layer in reversed(list(model.iter_layers())) if layer.ffn is not None), None)
    if isinstance(ffn, arch.MoEFFN):
        width = ffn.top_k * ffn.intermediate_size + ffn.shared_intermediate_size
        ffn = arch.DenseFFN(width, ffn.gated, ffn.activation, ffn.bias)
    return replace(
        model,
        name=f"{model.name}-eagle",
        layers=((arch.Layer(chosen.mixer, ffn), 1),),
        quantization=arch.QuantizationSpec(
            kv_cache=model.quantization.kv_cache,
            kv_group_size=model.quantization.kv_group_size,
            kv_recent=model.quantization.kv_recent,
        ),
        extra_params=0.0,
        num_distinct_layers=None,
        weight_sparsity=None,
    )


def _refuse(model: ModelSpec, config: SpeculativeConfig) -> None:
    mixers = [layer.mixer for layer in model.iter_layers()]
    if model.exits is not None:
        raise SpecError(
            "speculative_config with model_changes.early_exit: verifying needs the last layer's answer for every "
            "token, which tokens that left early do not have; leave one of the two out (self_skip drafts with the "
            "first layers)."
        )
    is_branching = config.lookahead is not None or any(width > 1 for width in config.tree or ())
    if is_branching and any(isinstance(mixer, arch.Mamba | arch.GatedDeltaNet | _Linear) for mixer in mixers):
        raise SpecError(
            f"speculative_config.{'lookahead' if config.lookahead else 'tree'}: {model.name} has layers with a "
            f"recurrent state, which follows one sequence and not several branches; draft a chain."
        )
    has_attention = any(isinstance(mixer, arch.Attention | arch.LatentAttention) for mixer in mixers)
    if config.method == "eagle" and not has_attention:
        raise SpecError(f"speculative_config.method=eagle: {model.name} has no attention layer to make the draft of.")
    if config.method == "self_skip" and not 0 < (config.draft_layers or 0) < model.num_layers:
        raise SpecError(
            f"speculative_config.draft_layers: got {config.draft_layers}, {model.name} has {model.num_layers} "
            f"layers; draft with fewer than all."
        )
