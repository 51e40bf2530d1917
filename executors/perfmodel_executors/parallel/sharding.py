"""Which part of the weights a rank holds, cut as the cost model counts it (`perfmodel.ops.sharding`). Columns of a
product's output are shared out where the next product sums over them; that gives partial sums, which the ranks add up,
and its bias stays with the first rank. Experts are cut so, too, or shared out whole."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from perfmodel.cost.memory.footprint import shard_layer
from perfmodel.errors import PerfmodelError
from perfmodel.models.architecture import Attention, DenseFFN, Layer, MoEFFN
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.routing import Placement
from perfmodel.ops.sharding import Sharding
from perfmodel_executors.kernels.stored_rows import ExpertWeight
from perfmodel_executors.kernels.weight_formats import GgufWeight, LowRankWeight, Weight
from perfmodel_executors.models.quantized import refuse
from perfmodel_executors.models.weights import AttentionWeights, DecoderWeights, FFNWeights, LayerWeights, MoEWeights
from perfmodel_executors.parallel.experts import ExpertSharing, LocalExperts
from perfmodel_executors.parallel.group import PipelineStage, TensorGroup


def shard_model(model: ModelSpec, num_ranks: int, experts: ExpertSharing | None = None) -> ModelSpec:
    """The model with the heads and widths of one rank; vocabulary and hidden size are those of the whole. experts: as
    of a `TensorGroup`. Raises PerfmodelError where they cannot be shared out evenly."""
    if num_ranks == 1:
        return model
    check_divisible(model, num_ranks, experts)
    copies = 0 if experts is None else experts.num_copies
    shard = Sharding(tp=num_ranks, is_expert_parallel=experts is not None, num_redundant_experts=copies)
    return replace(model, layers=tuple((shard_layer(layer, shard), count) for layer, count in model.layers))


def stage_model(model: ModelSpec, stage: PipelineStage) -> ModelSpec:
    if stage.num_stages == 1:
        return model
    layers = list(model.iter_layers())
    return replace(model, layers=tuple((layers[index], 1) for index in stage.layers(model.num_layers)))


def check_divisible(model: ModelSpec, num_ranks: int, experts: ExpertSharing | None = None) -> None:
    """Raises PerfmodelError for heads or widths that `num_ranks` does not divide (engines refuse these too). experts:
    as of a `TensorGroup`."""
    sentence = (
        "weights in llama.cpp's blocks are not executed on several ranks; set tensor_parallel_size to 1, or "
        "engine.quantization to none."
    )
    refuse(model.name, {sentence: model.quantization.method == "gguf"})
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
        how = "is not executed on several ranks; set tensor_parallel_size to 1."
        refuse(model.name, {f"{what} {how}": applies for what, applies in missing.items()})
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


def shard_rows(table_VC: Tensor | GgufWeight, group: TensorGroup) -> Tensor | GgufWeight:
    if group.size == 1:
        return table_VC
    assert isinstance(table_VC, Tensor), "in blocks on several ranks"
    rows = -(-table_VC.shape[0] // group.size)
    part = table_VC[group.rank * rows : (group.rank + 1) * rows]
    if part.shape[0] == rows:
        return part.clone()
    return torch.cat((part, table_VC.new_zeros(rows - part.shape[0], table_VC.shape[1])))


def stage_weights(weights: DecoderWeights, stage: PipelineStage) -> DecoderWeights:
    if stage.num_stages == 1:
        return weights
    held = stage.layers(len(weights.layers))
    none = weights.final_norm.new_zeros(0, len(weights.final_norm))
    return DecoderWeights(
        weights.embedding if stage.is_first else none,
        weights.lm_head if stage.is_last else none,
        weights.final_norm,
        weights.layers[held.start : held.stop],
    )


def shard_layer_weights(weights: LayerWeights, layer: Layer, group: TensorGroup, index: int = 0) -> LayerWeights:
    if group.size == 1:
        return weights
    mixer, ffn, experts = weights.mixer, weights.ffn, group.experts
    if mixer is not None:
        assert isinstance(layer.mixer, Attention)
        assert isinstance(mixer, AttentionWeights)
        mixer = _attention(mixer, layer.mixer, group)
    if ffn is not None:
        assert layer.ffn is not None
        gated = layer.ffn.gated
        if isinstance(ffn, FFNWeights):
            ffn = _dense(ffn, gated, group)
        else:
            assert isinstance(layer.ffn, MoEFFN)
            shared = None if ffn.shared is None else _dense(ffn.shared, gated, group)
            if experts is None:
                up, down = _halves(_plain(ffn.up), 1, gated, group), _cut(_plain(ffn.down), 2, group)
                ffn = replace(ffn, up=up, down=down, shared=shared)
            else:
                placement = experts.placement(layer.ffn, index, group.size)
                ffn = replace(_whole_experts(ffn, group, placement), shared=shared)
    return replace(weights, mixer=mixer, ffn=ffn)


def _attention(weights: AttentionWeights, mixer: Attention, group: TensorGroup) -> AttentionWeights:
    heads, kv_heads = mixer.num_heads, mixer.num_kv_heads
    sections = [(heads, mixer.head_dim), (kv_heads, mixer.head_dim), (kv_heads, mixer.v_head_dim)]
    if mixer.output_gate:
        sections.append((heads, mixer.v_head_dim))
    return replace(
        weights,
        qkv=_heads(_plain(weights.qkv), sections, group),
        out=_cut(_plain(weights.out), 1, group),
        qkv_bias=None if weights.qkv_bias is None else _heads(weights.qkv_bias, sections, group),
        out_bias=weights.out_bias if group.rank == 0 else None,
    )


def _heads(rows: Tensor, sections: Sequence[tuple[int, int]], group: TensorGroup) -> Tensor:
    parts, begin = [], 0
    for count, dim in sections:
        held = max(1, count // group.size)
        first = group.rank * count // group.size  # fewer heads than ranks: neighbours start at the same one
        parts.append(rows[begin + first * dim : begin + (first + held) * dim])
        begin += count * dim
    return torch.cat(parts)


def _dense(weights: FFNWeights, gated: bool, group: TensorGroup) -> FFNWeights:
    return FFNWeights(
        up=_halves(_plain(weights.up), 0, gated, group),
        down=_cut(_plain(weights.down), 1, group),
        up_bias=None if weights.up_bias is None else _halves(weights.up_bias, 0, gated, group),
        down_bias=weights.down_bias if group.rank == 0 else None,
    )


def _whole_experts(weights: MoEWeights, group: TensorGroup, placement: Placement) -> MoEWeights:
    local = LocalExperts.of(placement, group.rank, weights.router.device)
    held = list(local.held)
    return replace(
        weights,
        up=_plain(weights.up)[held],
        down=_plain(weights.down)[held],
        up_bias=None if weights.up_bias is None else weights.up_bias[held],
        down_bias=None if weights.down_bias is None else weights.down_bias[held],
        local=local,
    )


def _halves(up: Tensor, dim: int, gated: bool, group: TensorGroup) -> Tensor:
    """This rank's share of gate and up each, side by side again."""
    return torch.cat([_cut(half, dim, group) for half in (up.chunk(2, dim) if gated else (up,))], dim)


def _cut(matrix: Tensor, dim: int, group: TensorGroup) -> Tensor:
    size = matrix.shape[dim] // group.size
    return matrix.narrow(dim, group.rank * size, size).clone(memory_format=torch.contiguous_format)


def _plain(weight: Weight | ExpertWeight) -> Tensor:
    """Weights are cut before they are quantised: groups and channels are those of the part."""
    if isinstance(weight, LowRankWeight):
        raise PerfmodelError(
            "low-rank factors (model_changes.low_rank) are not executed on several ranks; set tensor_parallel_size "
            "to 1."
        )
    assert isinstance(weight, Tensor)
    return weight
