"""What one device holds: weights by component, KV cache per token, recurrent state per sequence.

Sharding is applied to the architecture itself (heads, widths and experts of one device), so replicated parts (routers,
latents, surplus KV heads, norms) need no list.

Memory of a drafter:

draft_model     all of its weights; a KV cache of its own
self_quantized  the quantized weights; embedding, head, norms and the KV cache are the model's
eagle           a projection of 2 d^2 and one layer; the KV of that layer
medusa          k (d^2 + d V)
self_skip, ngram, lookahead  nothing

Other memory: activations of a step, the sampler's buffers, the rotary table. An engine that sizes its KV cache by a
profiling run computes `max_num_batched_tokens` tokens, then samples for `max_num_seqs` sequences; what the worse of the
two leaves is for blocks. Not modelled: an encoder's activations (some 0.3 GB for the largest image of Llama-4 Scout on
two devices, less than its sampler takes)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

from perfmodel.models import architecture as arch
from perfmodel.models.number_formats import bytes_per_weight, kv_element_bytes, kv_surplus
from perfmodel.models.params import classifier_parameters, final_norms, layer_parameters
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.attention.compressed import compressed_row_bytes, kept_bytes
from perfmodel.ops.attention.prefill import SCORE_SUM_BYTES
from perfmodel.ops.formats import linear_format, served_model
from perfmodel.ops.graphs.drafting import draft_engine, draft_model_of, medusa_weights
from perfmodel.ops.recurrent import STATE_BYTES, conv_channels, linear_heads, state_shape
from perfmodel.ops.sharding import Sharding
from perfmodel.specs.engine.spec import EngineSpec

# Sizes of a block that ranks share out, and the function of `Sharding` that cuts each.
_CUT: Mapping[type[arch.Mixer | arch.FeedForward], Mapping[str, str]] = {
    arch.Attention: {"num_heads": "columns", "num_kv_heads": "kv_heads"},
    arch.LinearAttention: {"num_heads": "columns", "num_kv_heads": "kv_heads"},
    arch.LatentAttention: {"num_heads": "columns"},
    arch.CompressedAttention: {"num_heads": "columns", "o_groups": "columns"},
    arch.GatedDeltaNet: {"num_key_heads": "columns", "num_value_heads": "columns"},
    arch.Mamba: {"num_heads": "columns", "num_groups": "columns"},
    arch.DenseFFN: {"intermediate_size": "columns"},
    arch.MoEFFN: {
        "num_experts": "local_experts",
        "intermediate_size": "expert_columns",
        "shared_intermediate_size": "columns",
    },
}


def shard_layer(layer: arch.Layer, shard: Sharding) -> arch.Layer:
    """The part of a layer on one device, as a layer of smaller sizes."""
    return replace(layer, mixer=_cut(layer.mixer, shard), ffn=_cut(layer.ffn, shard))


def _cut(block: Any, shard: Sharding) -> Any:
    if block is None:
        return None
    sizes = {name: getattr(shard, way)(getattr(block, name)) for name, way in _CUT[type(block)].items()}
    return replace(block, **sizes)


def weights(
    model: ModelSpec,
    shard: Sharding,
    stage: Sequence[arch.Layer],
    *,
    is_first: bool,
    is_last: bool,
    has_table: bool = True,
) -> dict[str, float]:
    """Bytes of weights on a device of a pipeline stage, by component; "other": what comes with the text decoder.

    A tied LM head shares the embedding's memory, or copies it if they are on different devices. model, shard: as
    served; stage: its layers; is_first: with embedding and encoder; has_table: False if the host keeps the embedding
    table; is_last: with head"""
    plain = bytes_per_weight(model.dtype)
    totals: dict[str, float] = {}

    def add(component: str, params: float, own: arch.QuantizationSpec | None = None) -> None:
        per_weight = plain if component == "norms" else linear_format(model, component, own).weight_bytes
        totals[component] = totals.get(component, 0.0) + params * per_weight

    table = shard.columns(model.vocab_size) * model.hidden_size
    has_table = has_table and is_first
    if has_table:
        add("embedding", table + model.num_learned_positions * model.hidden_size)
    if is_last:
        add("norms", final_norms(model))
        if model.pooling is not None:
            add("lm_head", classifier_parameters(model))
        elif not (model.tie_word_embeddings and has_table):
            add("lm_head", table)
        if model.lm_head_bias and model.pooling is None:
            add("lm_head", shard.columns(model.vocab_size))
    distinct = stage[: model.num_distinct_layers]
    alike = Counter(map(id, distinct))  # a plan asks for thousands of memory plans
    for layer in {id(layer): layer for layer in distinct}.values():
        formats = dict(layer.formats)
        for component, params in layer_parameters(model, shard_layer(layer, shard)).items():
            if component == "router" and isinstance(layer.ffn, arch.MoEFFN):
                params = model.hidden_size * layer.ffn.num_experts  # routers know all experts
            add(component, params * alike[id(layer)], formats.get(component))
    if is_first and model.extra_params:
        totals["other"] = model.extra_params * plain
    return totals


def kv_bytes_per_token(model: ModelSpec, shard: Sharding, layers: Sequence[arch.Layer]) -> float:
    """KV cache bytes of one token in `layers` on one device.

    Attention 2 K h b (K KV heads of this device), MLA (r_kv + r) b on every device, a compressed key's share, plus an
    indexer's keys. Layers with a window or chunk count in full: blocks are allocated for whole sequences. With several
    formats, that of the oldest tokens; `kv_bytes` adds what newer ones take. Layers that evict keep 4 H bytes of score
    sums besides. Of ranks that share out tokens (dcp) the mean."""
    form, group_size = model.quantization.kv_cache or model.dtype, model.quantization.kv_group_size
    size = kv_element_bytes(form, group_size)
    total = 0.0
    for layer in layers:
        mixer = layer.mixer
        if isinstance(mixer, arch.Attention):
            total += shard.kv_heads(mixer.num_kv_heads) * (mixer.head_dim + mixer.v_head_dim) * size / shard.dcp
            if mixer.evicts_to is not None:
                total += shard.columns(mixer.num_heads) * SCORE_SUM_BYTES
        elif isinstance(mixer, arch.LatentAttention):
            total += (mixer.kv_lora_rank + mixer.qk_rope_head_dim) * size / shard.dcp
        elif isinstance(mixer, arch.CompressedAttention) and mixer.ratio:
            total += compressed_row_bytes(mixer, size, bytes_per_weight(model.dtype)) / mixer.ratio
        indexer = getattr(mixer, "indexer", None)
        if indexer is not None:
            total += indexer.cached_bytes / getattr(mixer, "ratio", 1)
    return total


def kv_bytes(model: ModelSpec, shard: Sharding, layers: Sequence[arch.Layer], context: int) -> float:
    """KV bytes of a sequence of `context` tokens in `layers` on one device, with wider formats of newer tokens, and
    span limits of layers that overwrite or evict. model, shard: as served"""
    held: dict[int, list[arch.Layer]] = {}
    for layer in layers:
        mixer = layer.mixer
        span = mixer.span if isinstance(mixer, arch.Attention) and mixer.is_rolling else None
        held.setdefault(context if span is None else min(context, span), []).append(layer)
    quantization, total = model.quantization, 0.0
    item = kv_element_bytes(quantization.kv_cache or model.dtype, quantization.kv_group_size)
    for tokens, some in held.items():
        more = sum(min(tokens, tier.tokens) * tier.num_bytes for tier in kv_surplus(model)) / item
        total += (tokens + more) * kv_bytes_per_token(model, shard, some)
    return total


def is_rolling(layer: arch.Layer) -> bool:
    """Whether the layer overwrites keys outside its window."""
    return isinstance(layer.mixer, arch.Attention) and layer.mixer.is_rolling


def rolling_bytes_per_sequence(model: ModelSpec, shard: Sharding, layers: Sequence[arch.Layer], longest: int) -> float:
    """Bytes of one sequence in rolling buffers as long as each layer's window, at most `longest` tokens.

    model, shard, layers: as served"""
    return sum(
        min(layer.mixer.span or longest, longest) * kv_bytes_per_token(model, shard, [layer])
        for layer in layers
        if isinstance(layer.mixer, arch.Attention) and layer.mixer.is_rolling
    )


def state_bytes_per_sequence(model: ModelSpec, shard: Sharding, layers: Sequence[arch.Layer]) -> float:
    """State of one sequence on one device, whatever its length: recurrent states as stored, and convolution windows;
    the window of compressed attention, and what its compressors have yet to weigh."""
    size = bytes_per_weight(model.dtype)
    total = 0.0
    for layer in layers:
        mixer = layer.mixer
        if isinstance(mixer, arch.Mamba | arch.GatedDeltaNet):
            state = state_shape(mixer, shard.tp, model.dtype, size)
            total += state.state_elements * state.state_bytes
            total += conv_channels(mixer, state) * (mixer.conv_kernel - 1) * size
        elif isinstance(mixer, arch.CompressedAttention):
            total += kept_bytes(mixer, kv_element_bytes(model.quantization.kv_cache or model.dtype), size)
        elif isinstance(mixer, arch.LinearAttention):
            total += linear_heads(mixer, shard, model.dtype, size).state_elements * STATE_BYTES
    return total


class DraftFootprint(NamedTuple):
    """Bytes of weights, and of KV cache per token, on one device."""

    weight_bytes: float = 0.0
    kv_bytes_per_token: float = 0.0


def draft_footprint(model: ModelSpec, engine: EngineSpec) -> DraftFootprint:
    """Memory of the drafter of `engine.speculative_config`, beside `model`; zero without one."""
    config = engine.speculative_config
    if config is None or config.has_own_device or config.method in ("self_skip", "ngram", "lookahead", "suffix"):
        return DraftFootprint()
    shard = Sharding.of(engine)
    if config.method == "medusa":
        per_weight = linear_format(served_model(model, engine), "lm_head").weight_bytes
        return DraftFootprint(per_weight * medusa_weights(model, shard, config.depth))
    drafter = served_model(draft_model_of(model, config), draft_engine(engine, config))
    layers = list(drafter.iter_layers())
    is_own = config.method == "draft_model"
    held = weights(drafter, shard, layers, is_first=is_own, is_last=is_own)
    if config.method == "self_quantized":
        shared = drafter.quantization.kept | {"norms", "other"}
        return DraftFootprint(sum(size for component, size in held.items() if component not in shared))
    size = sum(held.values())
    if config.method == "eagle":
        size += 2 * drafter.hidden_size**2 * bytes_per_weight(drafter.dtype)
    return DraftFootprint(size, kv_bytes_per_token(drafter, shard, layers))


_FP32, _INT32, _INT64 = 4, 4, 8
_SEGMENTS = 128  # rows from which on PyTorch sorts each by itself (aten/src/ATen/native/cuda/Sort.cu)


def activation_bytes(model: ModelSpec, shard: Sharding, engine: EngineSpec) -> float:
    """Peak of activations: T = `max_num_batched_tokens` tokens in the layers, or S = `max_num_seqs` being sampled.

        T b d + max( T b (d + widest intermediate),  S V x bytes per logit )

    Final hidden states stay while logits are computed and sampled; layers hold residual, hidden and the widest pair of
    tensors. V is the whole vocabulary, gathered on every rank. Standard attention holds two T x T score matrices per
    head. Without inference mode the framework keeps the inputs of every operator of every layer for a backward pass."""
    size = bytes_per_weight(model.dtype)
    tokens, hidden = -(-engine.max_num_batched_tokens // shard.pcp), model.hidden_size
    widest = max((_intermediate(layer, shard, hidden) for layer, _ in model.layers), default=0)
    in_layers = tokens * size * (hidden + widest)
    if engine.attention == "standard":
        heads = [layer.mixer.num_heads for layer, _ in model.layers if isinstance(layer.mixer, arch.Attention)]
        in_layers += 2.0 * shard.columns(max(heads, default=0)) * tokens * tokens * size
    stays = tokens * size * hidden
    if not engine.inference_mode:
        inputs = sum(count * _inputs(layer, shard, hidden) for layer, count in model.layers)
        stays += tokens * size * inputs / shard.pp
    per_logit = sampler_bytes_per_logit(engine, size) if model.pooling is None else 0.0
    return stays + max(in_layers, per_logit * engine.max_num_seqs * model.vocab_size)


def sampler_bytes_per_logit(engine: EngineSpec, size: float) -> float:
    """Peak bytes per logit in sampling: logits of `size` bytes, their copy in fp32, and

    without a sort  the probabilities
    with a sort     sorted logits and their indices, and what the sort takes meanwhile: indices to begin with
                    and a second buffer of keys and values for its passes; for fewer than 128 rows, which
                    PyTorch sorts as one, pairs of (row, index) twice, keys, and that second buffer

    Source: vllm/v1/worker/gpu_model_runner.py, _dummy_sampler_run; vllm/v1/sample/sampler.py and ops/
    topk_topp_sampler.py, apply_top_k_top_p; PyTorch, aten/src/ATen/native/cuda/Sort.cu; CUB, DeviceSegmentedRadixSort
    (inputs that are not overwritten ask for room for another copy);
    TensorRT-LLM, cpp/tensorrt_llm/kernels/samplingTopPKernels.cu.

    engine: whose facts say whether it sorts"""
    held = size + _FP32
    sorts = engine.described.facts.buffers.sorts_logits
    if sorts == "none":
        return held + _FP32
    index = _INT64 if sorts == "int64" else _INT32
    is_apart = sorts == "int32" or engine.max_num_seqs >= _SEGMENTS
    row_bytes_apart = index if is_apart else 2 * _INT64 + _FP32
    return held + _FP32 + index + row_bytes_apart + _FP32 + index


def rotary_table_bytes(model: ModelSpec, engine: EngineSpec) -> float:
    """Cosines and sines of all positions the model was trained for, whatever context the engine serves.

        positions x rotated elements of a head x bytes, for each distinct rotation

    All layers with equal rotations share one table, whole on every device. Source: vllm/model_executor/layers/
    rotary_embedding/base.py; pull request 44738 of vllm-project/vllm says what cutting it to the context would save."""
    rules = engine.described.facts.buffers
    if rules.rotary_table == "none":
        return 0.0
    size = _FP32 if rules.rotary_table == "fp32" else bytes_per_weight(model.dtype)
    tables = {_rotated(layer) for layer, _ in model.layers} - {None}
    positions = model.max_position_embeddings * (rules.positions_per_axes if model.has_position_axes else 1)
    return positions * size * sum(table[1] for table in tables if table is not None)


def _rotated(layer: arch.Layer) -> tuple[arch.Rope, int] | None:
    """A layer's RoPE, and the rotated elements per head."""
    mixer = layer.mixer
    if isinstance(mixer, arch.LatentAttention) and mixer.rope is not None:
        return mixer.rope, mixer.qk_rope_head_dim
    if isinstance(mixer, arch.CompressedAttention) and mixer.rope is not None:
        return mixer.rope, mixer.rope_dim
    if isinstance(mixer, arch.Attention) and mixer.rope is not None:
        return mixer.rope, mixer.rope.dim or mixer.head_dim
    return None


def _inputs(layer: arch.Layer, shard: Sharding, hidden: int) -> int:
    """Elements per token that a layer's operators read: residual and normed state before each block, queries, keys,
    values, attention output, the halves of a feed-forward block and their product.

    Source: Korthikanti et al. 2022, section 4.1, without dropout; fused attention stores no score matrices."""
    total = 0
    if layer.mixer is not None:
        total += 2 * hidden
        if isinstance(layer.mixer, arch.Attention):
            mixer = layer.mixer
            heads, kv_heads = shard.columns(mixer.num_heads), shard.kv_heads(mixer.num_kv_heads)
            total += (heads + kv_heads) * (mixer.head_dim + mixer.v_head_dim)
        else:  # about what goes in and comes out
            total += 2 * hidden
    if layer.ffn is not None:
        total += 2 * hidden + _intermediate(layer, shard, hidden)
    return total


def _intermediate(layer: arch.Layer, shard: Sharding, hidden: int) -> int:
    ffn = layer.ffn
    if isinstance(ffn, arch.DenseFFN):
        return (3 if ffn.gated else 2) * shard.columns(ffn.intermediate_size)
    if isinstance(ffn, arch.MoEFFN):
        per_row = (3 if ffn.gated else 2) * shard.expert_columns(ffn.intermediate_size) + (ffn.latent_size or hidden)
        return ceil(ffn.top_k * shard.dp / shard.ep) * per_row
    return 0
