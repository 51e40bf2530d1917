"""Fewer KV heads, thin factors, shared layers and tables, made of the weights that there are."""

__all__ = ["with_kv_heads", "with_low_rank", "with_shared_layers", "with_tied_table"]

from dataclasses import replace

import torch
from torch import Tensor

from perfmodel.models.architecture import Attention, DenseFFN, Layer
from perfmodel.models.model_changes import ModelChanges
from perfmodel.models.spec import ModelSpec
from perfmodel_executors.kernels.weight_formats import LowRankWeight, Weight
from perfmodel_executors.models.weights import (
    AttentionWeights,
    DecoderWeights,
    FFNWeights,
    LayerWeights,
    used_in_turn,
)


def with_kv_heads(
    weights: DecoderWeights, before: ModelSpec, after: ModelSpec, changes: ModelChanges
) -> DecoderWeights:
    """Each KV head the mean of those that it replaces (Ainslie et al. 2023); the training that follows is left out."""
    triples = zip(weights.layers, before.iter_layers(), after.iter_layers(), strict=True)
    return replace(weights, layers=[_with_kv_heads(*triple) for triple in triples])


def _with_kv_heads(weights: LayerWeights, before: Layer, after: Layer) -> LayerWeights:
    mixer, old, new = weights.mixer, before.mixer, after.mixer
    if not (isinstance(mixer, AttentionWeights) and isinstance(old, Attention) and isinstance(new, Attention)):
        return weights

    def merged(rows: Tensor) -> Tensor:
        gate = old.num_heads * old.v_head_dim if old.output_gate else 0
        sizes = [old.num_heads * old.head_dim, old.num_kv_heads * old.head_dim, old.num_kv_heads * old.v_head_dim, gate]
        q, k, v, gates = torch.split(rows, sizes)
        return torch.cat((q, _means(k, old, new), _means(v, old, new), gates))

    assert isinstance(mixer.qkv, Tensor)
    bias = mixer.qkv_bias
    return replace(
        weights, mixer=replace(mixer, qkv=merged(mixer.qkv), qkv_bias=None if bias is None else merged(bias))
    )


def _means(rows: Tensor, before: Attention, after: Attention) -> Tensor:
    """Rows of the KV heads before -> of those after: means of neighbours, or copies where there are more."""
    heads = rows.view(before.num_kv_heads, -1, *rows.shape[1:])
    if after.num_kv_heads >= before.num_kv_heads:
        return heads.repeat_interleave(after.num_kv_heads // before.num_kv_heads, 0).flatten(0, 1)
    groups = heads.view(after.num_kv_heads, -1, *heads.shape[1:])
    return groups.float().mean(1).to(rows.dtype).flatten(0, 1)


def with_low_rank(
    weights: DecoderWeights, before: ModelSpec, after: ModelSpec, changes: ModelChanges
) -> DecoderWeights:
    """Each factored matrix by its largest singular values (Eckart and Young 1936), their roots on either side."""
    pairs = zip(weights.layers, after.iter_layers(), strict=True)
    return replace(weights, layers=[_thin_layer(layer, spec) for layer, spec in pairs])


def _thin_layer(layer: LayerWeights, spec: Layer) -> LayerWeights:
    mixer, ffn = layer.mixer, layer.ffn
    if isinstance(mixer, AttentionWeights) and isinstance(spec.mixer, Attention):
        mixer = replace(mixer, qkv=_thin(mixer.qkv, spec.mixer.qkv_rank), out=_thin(mixer.out, spec.mixer.out_rank))
    if isinstance(ffn, FFNWeights) and isinstance(spec.ffn, DenseFFN):
        ffn = replace(ffn, up=_thin(ffn.up, spec.ffn.up_rank), down=_thin(ffn.down, spec.ffn.down_rank))
    return replace(layer, mixer=mixer, ffn=ffn)


def _thin(weight: Weight, rank: int | None) -> Weight:
    if rank is None or not isinstance(weight, Tensor):
        return weight
    left, values, right = torch.linalg.svd(weight.float(), full_matrices=False)
    root = values[:rank].sqrt()
    inputs, outputs = root[:, None] * right[:rank], left[:, :rank] * root
    return LowRankWeight(inputs.to(weight.dtype).contiguous(), outputs.to(weight.dtype).contiguous())


def with_shared_layers(
    weights: DecoderWeights, before: ModelSpec, after: ModelSpec, changes: ModelChanges
) -> DecoderWeights:
    """The first layers, used in turn."""
    return replace(weights, layers=used_in_turn(weights.layers[: after.num_distinct_layers], after.num_layers))


def with_tied_table(
    weights: DecoderWeights, before: ModelSpec, after: ModelSpec, changes: ModelChanges
) -> DecoderWeights:
    """The embedding as LM head, or a copy of its own."""
    head = weights.lm_head
    assert isinstance(head, Tensor), "a model is changed before it is quantised"
    return replace(weights, lm_head=weights.embedding if after.tie_word_embeddings else head.clone())
