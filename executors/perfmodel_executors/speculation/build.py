"""From `engine.speculative_config` to a `Speculator`, and a sentence for what is simulated only.

Decoders that draft with the model's own weights have its first layers, all of them in fewer bits, or one more layer.
"""

from dataclasses import replace
from math import gcd

import torch
from torch import Tensor

from perfmodel.errors import PerfmodelError
from perfmodel.models.architecture import Attention, Layer
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.formats import served_model
from perfmodel.ops.graphs.drafting import draft_model_of
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.engine.speculation import SpeculativeConfig
from perfmodel_executors.models.decoder import Decoder, load_decoder
from perfmodel_executors.models.kv_cache import KVCache
from perfmodel_executors.models.quantized import check_quantization, layer_quantizer
from perfmodel_executors.models.random_weights import random_layers, random_matrix
from perfmodel_executors.models.weights import AttentionWeights, DecoderWeights
from perfmodel_executors.runner import StepRunner
from perfmodel_executors.speculation.eagle import EaglePasses, EagleProposer
from perfmodel_executors.speculation.lookahead import LookaheadBranches, LookaheadProposer
from perfmodel_executors.speculation.medusa import MedusaHeads, MedusaProposer
from perfmodel_executors.speculation.model import ModelProposer, SelfProposer, SkippingProposer
from perfmodel_executors.speculation.ngram import NgramProposer
from perfmodel_executors.speculation.pipelined import PipelinedProposer, PipelinedSpeculator
from perfmodel_executors.speculation.proposer import Proposer
from perfmodel_executors.speculation.speculator import Speculator
from perfmodel_executors.speculation.tree import DraftTree


def first_layers(decoder: Decoder, count: int) -> Decoder:
    """The first `count` layers, then the final norm and the LM head (LayerSkip: Elhoushi et al. 2024).

    Raises PerfmodelError for as many layers as there are.
    """
    model = decoder.model
    if count >= model.num_layers:
        raise PerfmodelError(
            f"found draft_layers={count}, but {model.name} has {model.num_layers} layers; draft with fewer."
        )
    kept: list[tuple[Layer, int]] = [(layer, 1) for layer in list(model.iter_layers())[:count]]
    cut = replace(model, name=f"{model.name}-first-{count}", layers=tuple(kept), num_distinct_layers=None)
    return _with(decoder, cut, replace(decoder.weights, layers=decoder.weights.layers[:count]))


def in_fewer_bits(decoder: Decoder, quantization: str) -> Decoder:
    """The same model with its matrices quantised to `quantization` (a name of engine.quantization).

    Where a format's groups of weights do not divide a matrix, they are the largest part of them that divides all.

    Raises PerfmodelError for a format that is not executed, and for a model that is quantised already.
    """
    model = decoder.model
    served_in = model.quantization.weights or "several formats"
    if model.quantization.weights is not None or any(layer.formats for layer, _ in model.layers):
        raise PerfmodelError(
            f"{model.name} is served in {served_in} already, and is quantised from its full weights only; leave "
            f"engine.quantization out (none for a file that is quantised) to draft with method: self_quantized."
        )
    served = served_model(model, EngineSpec(quantization=quantization))
    check_quantization(served)
    if served.quantization.group_size:
        size = gcd(served.quantization.group_size, *_widths(decoder.weights))
        served = replace(served, quantization=replace(served.quantization, group_size=size))
    quantize = layer_quantizer(served)
    drafting = replace(model, name=f"{model.name}-{quantization}", quantization=served.quantization)
    weights = replace(
        decoder.weights,
        layers=[
            quantize(own, layer, index)
            for index, (own, layer) in enumerate(zip(decoder.weights.layers, model.iter_layers(), strict=True))
        ],
    )
    return _with(decoder, drafting, weights)


def eagle_layer(decoder: Decoder, layer: ModelSpec, seed: int) -> Decoder:
    """`layer`, a model of one layer with random weights, between the embedding and the head of `decoder`."""
    layers = random_layers(layer, decoder.dtype, seed, decoder.device)
    return _with(decoder, layer, replace(decoder.weights, layers=layers))


def eagle_projection(decoder: Decoder, seed: int) -> Tensor:
    """EAGLE's projection of embedding and state, [C, 2 C], untrained: random weights for the embedding, and the state
    as it is, so that a draft begins as what the model said last."""
    hidden, dtype, device = decoder.model.hidden_size, decoder.dtype, decoder.device
    random_CD = random_matrix(hidden, 2 * hidden, dtype, seed, device)
    return torch.cat((random_CD[:, :hidden], torch.eye(hidden, dtype=dtype, device=device)), dim=1)


def _widths(weights: DecoderWeights) -> list[int]:
    """Inputs of all matrices that may be quantised."""
    found = []
    for layer in weights.layers:
        mixer, ffn = layer.mixer, layer.ffn
        own = (mixer.qkv, mixer.out) if isinstance(mixer, AttentionWeights) else ()
        matrices = [*own, *((ffn.up, ffn.down) if ffn else ())]
        found += [matrix.shape[-1] for matrix in matrices if isinstance(matrix, Tensor)]
    return found


def _with(decoder: Decoder, model: ModelSpec, weights: DecoderWeights) -> Decoder:
    attention = "standard" if decoder.is_standard else "flash"
    return Decoder(model, decoder.dtype, 0, decoder.kernels, weights, decoder.device, attention=attention)


_LOOKUP = 5  # vLLM's default for the longest and the shortest n-gram
_MOST_NODES = 64  # bits of an int64: what a node of a tree sees of it


def check_speculation(model: ModelSpec, engine: EngineSpec) -> None:
    """Raises PerfmodelError with one sentence for what can be simulated, but is not executed."""
    config = engine.speculative_config
    if config is None:
        return
    if config.pipelined and not config.has_own_device:
        raise PerfmodelError(
            "speculative_config.pipelined is executed with a thread of the drafter's own, on another core than the "
            "model's: where both share one device it is simulated only; set speculative_config.has_own_device to true."
        )
    if engine.tensor_parallel_size > 1:
        raise PerfmodelError(
            f"speculation is executed on one device, and tensor_parallel_size is {engine.tensor_parallel_size}; set "
            f"it to 1."
        )
    if model.rolling_span is not None:
        raise PerfmodelError(
            f"{model.name} overwrites keys and values that left its windows, and drafted tokens that are turned down "
            f"would have overwritten some that are still seen; execute it without speculative_config."
        )
    if config.tree is not None or config.lookahead is not None:
        _check_branches(model, config)


def _check_branches(model: ModelSpec, config: SpeculativeConfig) -> None:
    num_nodes, shape = 1 + config.nodes_by_depth[-1], config.lookahead
    if num_nodes > _MOST_NODES:
        found = f"the tree {list(config.tree or ())}"
        if shape is not None:
            found = f"lookahead with window={shape.window}, ngram={shape.ngram} and guesses={shape.guesses}"
        raise PerfmodelError(f"{found} has {num_nodes} nodes, and {_MOST_NODES} are executed at most; narrow it.")
    if any(isinstance(layer.mixer, Attention) and layer.mixer.span for layer in model.iter_layers()):
        raise PerfmodelError(
            f"{model.name} has layers that see a window or chunk only, where a node's slot says nothing about its "
            f"place; draft a chain (num_speculative_tokens) instead of branches."
        )


def build_speculator(
    runner: StepRunner, engine: EngineSpec, draft: Decoder | None = None, seed: int = 0
) -> Speculator | PipelinedSpeculator | None:
    """What drafts for `runner`; None without `engine.speculative_config`.

    draft: the decoder of the draft model, where it is there already; else it is loaded as the engine says
    """
    config = engine.speculative_config
    if config is None:
        return None
    check_speculation(runner.decoder.model, engine)
    if config.lookahead is not None:
        branches = LookaheadBranches(config.lookahead)
        return Speculator(runner, LookaheadProposer(branches), branches, config.method)
    tree = DraftTree(config.tree or (1,) * config.depth)
    if config.pipelined:
        return _pipelined(runner, engine, config, tree, draft, seed)
    return Speculator(runner, _proposer(runner, engine, config, tree, draft, seed), tree, config.method)


def _pipelined(
    runner: StepRunner,
    engine: EngineSpec,
    config: SpeculativeConfig,
    tree: DraftTree,
    draft: Decoder | None,
    seed: int,
) -> PipelinedSpeculator:
    """Raises PerfmodelError on a GPU, where two threads would take turns at one device."""
    if runner.decoder.device.type != "cpu":
        raise PerfmodelError(
            "speculative_config.pipelined is executed on a CPU, with a core for the drafter's thread; on a GPU it is "
            "simulated only: leave it out."
        )
    drafter = draft or _load(runner.decoder, engine, config, seed)
    cache = drafter.new_cache(runner.cache.block_size)
    proposer = PipelinedProposer(StepRunner(drafter, cache), tree.depth, engine.max_num_seqs)
    return PipelinedSpeculator(Speculator(runner, proposer, tree, config.method), proposer)


def _proposer(
    runner: StepRunner,
    engine: EngineSpec,
    config: SpeculativeConfig,
    tree: DraftTree,
    draft: Decoder | None,
    seed: int,
) -> Proposer:
    target = runner.decoder
    if config.method == "ngram":
        longest = config.prompt_lookup_max or config.prompt_lookup_min or _LOOKUP
        return NgramProposer(longest, config.prompt_lookup_min or longest)
    if config.method == "draft_model":
        drafter = draft or _load(target, engine, config, seed)
        cache = drafter.new_cache(runner.cache.block_size, runner.cache.num_blocks)
        return ModelProposer(_beside(runner, drafter, cache), tree)
    if config.method == "medusa":
        return MedusaProposer(MedusaHeads(target, runner.cache, tree.widths), tree)
    if config.method == "eagle":
        layer = eagle_layer(target, draft_model_of(target.model, config), seed)
        cache = layer.new_cache(runner.cache.block_size, runner.cache.num_blocks)
        return EagleProposer(EaglePasses(layer, cache, eagle_projection(target, seed)), tree)
    if config.method == "self_skip":
        assert config.draft_layers is not None
        skipping = _beside(runner, first_layers(target, config.draft_layers), runner.cache)
        # A graph's replay gives tokens only, so where there are graphs the first layers run again.
        return SelfProposer(skipping, tree) if skipping.graphs else SkippingProposer(skipping, tree)
    assert config.quantization is not None
    return SelfProposer(_beside(runner, in_fewer_bits(target, config.quantization), runner.cache), tree)


def _beside(runner: StepRunner, drafter: Decoder, cache: KVCache) -> StepRunner:
    """A runner of `drafter`, with graphs where `runner` has some."""
    return StepRunner(drafter, cache, None if runner.graphs is None else runner.graphs.of(drafter, cache))


def _load(target: Decoder, engine: EngineSpec, config: SpeculativeConfig, seed: int) -> Decoder:
    """The draft model in its formats. Raises PerfmodelError for another vocabulary or too short a context."""
    model, served = config.model, target.model
    assert model is not None
    if model.vocab_size != served.vocab_size:
        raise PerfmodelError(
            f"the draft model {model.name} has {model.vocab_size} tokens and {served.name} {served.vocab_size}; draft "
            f"with a model of the same vocabulary."
        )
    longest = engine.max_model_len or served.max_position_embeddings
    if model.max_position_embeddings < longest:
        raise PerfmodelError(
            f"the draft model {model.name} has {model.max_position_embeddings} positions, and sequences have up to "
            f"{longest}; set max_model_len to at most the first."
        )
    own = engine.model_copy(update={"quantization": config.quantization, "speculative_config": None})
    return load_decoder(model, own, seed, target.device, target.kernels)
