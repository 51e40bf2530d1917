"""From `engine.speculative_config` to a `Speculator`, and a sentence for what is simulated only. Decoders that draft
with the model's own weights have its first layers, all of them in fewer bits, or one more layer."""

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
from perfmodel_executors.models.random_weights import RandomTensors, random_layers
from perfmodel_executors.models.weights import AttentionWeights, DecoderWeights, FFNWeights, MoEWeights
from perfmodel_executors.runner import StepRunner
from perfmodel_executors.speculation.heads import EaglePasses, EagleProposer, MedusaHeads, MedusaProposer
from perfmodel_executors.speculation.lookahead import LookaheadBranches, LookaheadProposer, NgramProposer
from perfmodel_executors.speculation.model import ModelProposer, SelfProposer, SkippingProposer
from perfmodel_executors.speculation.pipelined import PipelinedProposer, PipelinedSpeculator
from perfmodel_executors.speculation.proposer import DraftTree, Proposer
from perfmodel_executors.speculation.speculator import Speculator

_LOOKUP = 5  # vLLM's default for the longest and the shortest n-gram
_MAX_NODES = 64  # bits of an int64: what a node of a tree sees of it


def first_layers(decoder: Decoder, count: int) -> Decoder:
    """The first `count` layers, then the final norm and the LM head (LayerSkip: Elhoushi et al. 2024). Raises
    PerfmodelError for as many layers as there are."""
    model = decoder.model
    if count >= model.num_layers:
        raise PerfmodelError(
            f"got draft_layers={count}, but {model.name} has {model.num_layers} layers; draft with fewer."
        )
    kept: list[tuple[Layer, int]] = [(layer, 1) for layer in list(model.iter_layers())[:count]]
    cut = replace(model, name=f"{model.name}-first-{count}", layers=tuple(kept), num_distinct_layers=None)
    return _with(decoder, cut, replace(decoder.weights, layers=decoder.weights.layers[:count]))


def in_fewer_bits(decoder: Decoder, quantization: str) -> Decoder:
    """The same model in `quantization`, in the largest groups that divide every matrix. Raises PerfmodelError for a
    format that is not executed, and for a model that is quantised already."""
    model = decoder.model
    served_in = model.quantization.weights or "several formats"
    if model.quantization.weights is not None or any(layer.formats for layer, _ in model.layers):
        raise PerfmodelError(
            f"{model.name} is served in {served_in} already, and is quantised from its full weights only; leave "
            f"engine.quantization out (none for a file that is quantised) to draft with method: self_quantized."
        )
    served = served_model(model, EngineSpec(quantization=quantization))
    check_quantization(served)
    weights = decoder.weights
    if served.quantization.group_size:
        kinds = AttentionWeights | FFNWeights | MoEWeights
        blocks = [block for layer in weights.layers for block in (layer.mixer, layer.ffn) if isinstance(block, kinds)]
        matrices = [getattr(block, name, None) for block in blocks for name in ("qkv", "out", "up", "down")]
        widths = [matrix.shape[-1] for matrix in matrices if isinstance(matrix, Tensor)]
        size = gcd(served.quantization.group_size, *widths)
        served = replace(served, quantization=replace(served.quantization, group_size=size))
    quantize = layer_quantizer(served)
    drafting = replace(model, name=f"{model.name}-{quantization}", quantization=served.quantization)
    pairs = enumerate(zip(weights.layers, model.iter_layers(), strict=True))
    return _with(decoder, drafting, replace(weights, layers=[quantize(own, layer, i) for i, (own, layer) in pairs]))


def _with(decoder: Decoder, model: ModelSpec, weights: DecoderWeights) -> Decoder:
    attention = "standard" if decoder.is_standard else "flash"
    return Decoder(model, decoder.dtype, 0, decoder.kernels, weights, decoder.device, attention=attention)


def check_speculation(model: ModelSpec, engine: EngineSpec) -> None:
    """Raises PerfmodelError with one sentence for what can be simulated, but is not executed."""
    config = engine.speculative_config
    if config is None:
        return
    if config.method == "suffix":
        raise PerfmodelError("got method=suffix, whose trees are not executed; simulate it, or execute method: ngram.")
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
    if config.tree is None and config.lookahead is None:
        return
    num_nodes, shape = 1 + config.nodes_by_depth[-1], config.lookahead
    if num_nodes > _MAX_NODES:
        what = f"the tree {list(config.tree or ())}"
        if shape is not None:
            what = f"lookahead with window={shape.window}, ngram={shape.ngram} and guesses={shape.guesses}"
        raise PerfmodelError(f"{what} has {num_nodes} nodes, and {_MAX_NODES} are executed at most; narrow it.")
    if any(isinstance(layer.mixer, Attention) and layer.mixer.span for layer in model.iter_layers()):
        raise PerfmodelError(
            f"{model.name} has layers that see a window or chunk only, where a node's slot says nothing about its "
            f"place; draft a chain (num_speculative_tokens) instead of branches."
        )


def build_speculator(
    runner: StepRunner, engine: EngineSpec, draft: Decoder | None = None, seed: int = 0
) -> Speculator | None:
    """What drafts for `runner`; None without `engine.speculative_config`. draft: the decoder of the draft model, where
    it is there already; else it is loaded as the engine says."""
    config, target, block_size = engine.speculative_config, runner.decoder, runner.cache.block_size
    if config is None:
        return None
    check_speculation(target.model, engine)
    if config.lookahead is not None:
        branches = LookaheadBranches(config.lookahead)
        return Speculator(runner, LookaheadProposer(branches), branches, config.method)
    tree = DraftTree(config.tree or (1,) * config.depth)
    if config.pipelined:
        if target.device.type != "cpu":  # where two threads would take turns at one device
            raise PerfmodelError(
                "speculative_config.pipelined is executed on a CPU, with a core for the drafter's thread; on a GPU it "
                "is simulated only: leave it out."
            )
        drafter = draft or _load(target, engine, config, seed)
        ahead = PipelinedProposer(StepRunner(drafter, drafter.new_cache(block_size)), tree.depth, engine.max_num_seqs)
        return PipelinedSpeculator(runner, ahead, tree, config.method)

    def runner_of(drafter: Decoder, cache: KVCache) -> StepRunner:
        return StepRunner(drafter, cache, None if runner.graphs is None else runner.graphs.of(drafter, cache))

    proposer: Proposer
    if config.method == "ngram":
        longest = config.prompt_lookup_max or config.prompt_lookup_min or _LOOKUP
        proposer = NgramProposer(longest, config.prompt_lookup_min or longest)
    elif config.method == "draft_model":
        drafter = draft or _load(target, engine, config, seed)
        proposer = ModelProposer(runner_of(drafter, drafter.new_cache(block_size, runner.cache.num_blocks)), tree)
    elif config.method == "medusa":
        proposer = MedusaProposer(MedusaHeads(target, runner.cache, tree.widths), tree)
    elif config.method == "eagle":
        # Untrained: random weights for the layer and, in its projection, for the embedding; the state as it is, so that
        # a draft begins as what the model said last.
        model, hidden = draft_model_of(target.model, config), target.model.hidden_size
        layers = random_layers(model, target.dtype, seed, target.device)
        layer = _with(target, model, replace(target.weights, layers=layers))
        random_CD = RandomTensors(target.dtype, seed, target.device).matrix(hidden, 2 * hidden)
        state_CC = torch.eye(hidden, dtype=target.dtype, device=target.device)
        projection_CD = torch.cat((random_CD[:, :hidden], state_CC), dim=1)
        cache = layer.new_cache(block_size, runner.cache.num_blocks)
        proposer = EagleProposer(EaglePasses(layer, cache, projection_CD), tree)
    elif config.method == "self_skip":
        assert config.draft_layers is not None
        skipping = runner_of(first_layers(target, config.draft_layers), runner.cache)
        # A graph's replay gives tokens only, so where there are graphs the first layers run again.
        proposer = SelfProposer(skipping, tree) if skipping.graphs else SkippingProposer(skipping, tree)
    else:
        assert config.quantization is not None
        proposer = SelfProposer(runner_of(in_fewer_bits(target, config.quantization), runner.cache), tree)
    return Speculator(runner, proposer, tree, config.method)


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
