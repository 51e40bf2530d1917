"""Which part of the weights a rank holds, cut as the cost model counts it (`perfmodel.ops.sharding`). Columns of a
product's output are shared out where the next product sums over them; that gives partial sums, which the ranks add up,
and its bias stays with the first rank. Experts are cut so, too, or shared out whole."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from perfmodel.cost.memory.footprint import shard_layer
from perfmodel.errors import PerfmodelError
from perfmodel.models.architecture import Attention, DenseFFN, Layer, MoEFFN
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.formats import served_model
from perfmodel.ops.sharding import Sharding
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel_executors.kernels.stored_rows import ExpertWeight
from perfmodel_executors.kernels.weight_formats import GgufWeight, LowRankWeight, Weight
from perfmodel_executors.models.quantized import layer_quantizer, refuse, table_quantizer
from perfmodel_executors.models.weights import AttentionWeights, DecoderWeights, FFNWeights, LayerWeights, MoEWeights
from perfmodel_executors.parallel.experts import ExpertSharing, LocalExperts
from perfmodel_executors.parallel.group import TensorGroup


def shard_model(model: ModelSpec, group: TensorGroup) -> ModelSpec:
    """The model with the layers of the rank's stage, and the heads and widths of the rank; vocabulary and hidden size
    are those of the whole. Raises PerfmodelError where they cannot be shared out evenly."""
    experts, dp = group.experts, group.num_expert_ranks if group.sends_tokens else 1
    if group.size * dp > 1:
        check_divisible(model, group.size, experts)
        copies = 0 if experts is None else experts.num_redundant or 0
        shard = Sharding(tp=group.size, dp=dp, is_expert_parallel=experts is not None, num_redundant_experts=copies)
        model = replace(model, layers=tuple((shard_layer(layer, shard), count) for layer, count in model.layers))
    if group.stage.num_stages > 1:
        layers = list(model.iter_layers())
        model = replace(model, layers=tuple((layers[i], 1) for i in group.stage.layers(model.num_layers)))
    return model


def check_divisible(model: ModelSpec, num_ranks: int, experts: ExpertSharing | None = None) -> None:
    """Raises PerfmodelError for heads or widths that `num_ranks` does not divide. experts: as of a `TensorGroup`."""
    sentence = (
        "weights in llama.cpp's blocks are not executed on several ranks; set tensor_parallel_size to 1, or "
        "engine.quantization to none."
    )
    refuse(model.name, {sentence: model.quantization.method == "gguf"})
    if num_ranks == 1:  # but for whole experts there is nothing to share out
        return
    for layer, _ in model.layers:
        mixer, ffn = layer.mixer, layer.ffn
        attention = mixer if isinstance(mixer, Attention) else None
        has_wide_norm = attention is not None and attention.qk_norm and attention.qk_norm_width != "head"
        sizes: dict[str, int] = {}
        if attention is not None:
            sizes |= {"num_attention_heads": attention.num_heads, "num_key_value_heads": attention.num_kv_heads}
        if isinstance(ffn, DenseFFN) or (isinstance(ffn, MoEFFN) and experts is None):
            sizes["intermediate_size"] = ffn.intermediate_size
        if isinstance(ffn, MoEFFN):
            sizes["shared_intermediate_size"] = ffn.shared_intermediate_size
        missing = {
            f"the mixer {type(mixer).__name__}": mixer is not None and attention is None,
            "a softmax with sinks": attention is not None and attention.sinks,
            "a norm of queries and keys over all heads": has_wide_norm,
            "a mixture of experts with biases, cut by their width,": isinstance(ffn, MoEFFN)
            and ffn.bias
            and experts is None,
        }
        refuse(model.name, missing, "{} is not executed on several ranks; set tensor_parallel_size to 1.")
        for name, size in sizes.items():
            is_repeated = name == "num_key_value_heads" and size < num_ranks
            sentence = (
                f"{name}={size} cannot be shared out evenly over tensor_parallel_size={num_ranks}; choose a size that "
                f"divides it."
            )
            refuse(model.name, {sentence: bool(num_ranks % size if is_repeated else size % num_ranks)})


def check_stages(model: ModelSpec, num_stages: int, num_ranks: int) -> None:
    """Raises PerfmodelError for what is not executed on `num_stages` pipeline stages of `num_ranks` ranks each."""
    count = model.num_layers
    cases = {
        f": pipeline stages of several ranks are not executed; set pipeline_parallel_size={num_stages} or "
        f"tensor_parallel_size={num_ranks} to 1, or simulate it.": num_ranks > 1,
        f" has {count} layers, fewer than pipeline_parallel_size={num_stages}; lower that.": num_stages > count,
        ": tokens that leave early (model_changes.early_exit) are not executed on pipeline stages; set "
        "pipeline_parallel_size to 1, or simulate it.": model.exits is not None,
    }
    for sentence, applies in cases.items():
        if applies:
            raise PerfmodelError(model.name + sentence)


def check_striped(model: ModelSpec, engine: EngineSpec) -> None:
    """Raises PerfmodelError for keys and values that are not executed striped over ranks."""
    model = served_model(model, engine)
    size, mixers = engine.decode_context_parallel_size, [layer.mixer for layer, _ in model.layers]
    has_others = any(
        not isinstance(m, Attention) or m.span is not None or m.sparsity is not None or m.sinks or m.logit_cap
        for m in mixers
    )
    missing = {
        "other mixers than attention over all keys": has_others,
        "a quantised KV cache": model.quantization.kv_cache not in (None, model.dtype),
        "standard attention": engine.attention != "flash",
        "tensor-parallel ranks without copies of a KV head": any(
            isinstance(m, Attention) and max(1, engine.tensor_parallel_size // m.num_kv_heads) % size for m in mixers
        ),
    }
    how = f"is not executed with decode_context_parallel_size={size}; set that to 1."
    refuse(model.name, {f"{what} {how}": size > 1 and applies for what, applies in missing.items()})


def shard_rows(table_VC: Tensor | GgufWeight, group: TensorGroup) -> Tensor | GgufWeight:
    if group.size == 1:
        return table_VC
    assert isinstance(table_VC, Tensor), "in blocks on several ranks"
    rows = -(-table_VC.shape[0] // group.size)
    part = table_VC[group.rank * rows : (group.rank + 1) * rows]
    return torch.nn.functional.pad(part, (0, 0, 0, rows - len(part)))  # a copy, whether it pads or not


def held_weights(
    weights: DecoderWeights, layers: Iterable[LayerWeights], model: ModelSpec, group: TensorGroup
) -> DecoderWeights:
    """This rank's part, quantised layer by layer, so that only one is held in full unless all are already."""
    table = table_quantizer(model)
    embedding = table(shard_rows(weights.embedding, group), "embedding")
    head = embedding if model.tie_word_embeddings else table(shard_rows(weights.lm_head, group), "lm_head")
    quantize = layer_quantizer(model)
    pairs = enumerate(zip(islice(layers, model.num_distinct_layers), model.iter_layers(), strict=False))
    held = [quantize(shard_layer_weights(layer, spec, group, i), spec, i) for i, (layer, spec) in pairs]
    stage, norm = group.stage, weights.final_norm
    none, own = norm.new_zeros(0, len(norm)), [held[i % len(held)] for i in stage.layers(model.num_layers)]
    return DecoderWeights(embedding if stage.is_first else none, head if stage.is_last else none, norm, own)


def shard_layer_weights(weights: LayerWeights, layer: Layer, group: TensorGroup, index: int = 0) -> LayerWeights:
    if group.size * group.num_expert_ranks == 1:
        return weights
    mixer, ffn = weights.mixer, weights.ffn
    if mixer is not None and group.size > 1:
        assert isinstance(layer.mixer, Attention)
        assert isinstance(mixer, AttentionWeights)
        mixer = _attention(mixer, layer.mixer, group)
    if isinstance(ffn, FFNWeights) and group.size > 1:
        assert isinstance(layer.ffn, DenseFFN)
        ffn = _dense(ffn, layer.ffn.intermediate_size, layer.ffn.gated, group)
    elif isinstance(ffn, MoEWeights):
        assert isinstance(layer.ffn, MoEFFN)
        ffn = _experts(ffn, layer.ffn, index, group)
    return replace(weights, mixer=mixer, ffn=ffn)


def _attention(weights: AttentionWeights, mixer: Attention, group: TensorGroup) -> AttentionWeights:
    heads, kv_heads, values = mixer.num_heads, mixer.num_kv_heads, (mixer.num_heads, mixer.v_head_dim)
    sections = [(heads, mixer.head_dim), (kv_heads, mixer.head_dim), (kv_heads, mixer.v_head_dim)]
    if mixer.output_gate:
        sections.append(values)
    return replace(
        weights,
        qkv=_share(weights.qkv, sections, group),
        out=_share(weights.out, [values], group, dim=1),
        qkv_bias=None if weights.qkv_bias is None else _share(weights.qkv_bias, sections, group),
        out_bias=weights.out_bias if group.rank == 0 else None,
    )


def _dense(weights: FFNWeights, width: int, gated: bool, group: TensorGroup) -> FFNWeights:
    halves = [(width, 1)] * (1 + gated)
    return FFNWeights(
        up=_share(weights.up, halves, group),
        down=_share(weights.down, halves[:1], group, dim=1),
        up_bias=None if weights.up_bias is None else _share(weights.up_bias, halves, group),
        down_bias=weights.down_bias if group.rank == 0 else None,
    )


def _experts(weights: MoEWeights, ffn: MoEFFN, index: int, group: TensorGroup) -> MoEWeights:
    up, down, shared = _plain(weights.up), _plain(weights.down), weights.shared
    if shared is not None:
        weights = replace(weights, shared=_dense(shared, ffn.shared_intermediate_size, ffn.gated, group))
    if group.experts is None:
        halves = [(ffn.intermediate_size, 1)] * (1 + ffn.gated)
        return replace(weights, up=_share(up, halves, group, dim=1), down=_share(down, halves[:1], group, dim=2))
    placement = group.experts.placement(ffn, index, group.num_expert_ranks)
    local = LocalExperts.of(placement, group.expert_rank, weights.router.device)
    held = list(local.held)
    up_bias, down_bias = (bias if bias is None else bias[held] for bias in (weights.up_bias, weights.down_bias))
    return replace(weights, up=up[held], down=down[held], up_bias=up_bias, down_bias=down_bias, local=local)


def _share(
    weight: Weight | ExpertWeight, sections: Sequence[tuple[int, int]], group: TensorGroup, dim: int = 0
) -> Tensor:
    """This rank's part of each of `sections` (heads or rows that are shared out, the size of each) along `dim`."""
    matrix, parts, begin = _plain(weight), [], 0
    for count, size in sections:
        held = max(1, count // group.size)
        first = group.rank * count // group.size  # fewer heads than ranks: neighbours start at the same one
        parts.append(matrix.narrow(dim, begin + first * size, held * size))
        begin += count * size
    return torch.cat(parts, dim)


def _plain(weight: Weight | ExpertWeight) -> Tensor:
    """Weights are cut before they are quantised: groups and channels are those of the part."""
    if isinstance(weight, LowRankWeight):
        raise PerfmodelError(
            "low-rank factors (model_changes.low_rank) are not executed on several ranks; set tensor_parallel_size "
            "to 1."
        )
    assert isinstance(weight, Tensor)
    return weight
