"""Every matrix of a decoder's layers, one after the other: what the linear layers multiply by."""

__all__ = ["with_matrices"]

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from perfmodel_executors.kernels.weight_formats import Weight
from perfmodel_executors.models.weights import AttentionWeights, DecoderWeights, FFNWeights, LayerWeights

_COMPONENTS = frozenset({"attention", "dense_ffn"})


def with_matrices(
    weights: DecoderWeights, change: Callable[[Tensor], Weight], components: frozenset[str] = _COMPONENTS
) -> DecoderWeights:
    """`weights` with the plain matrices of `components` as `change` makes them; those of experts stay."""
    return replace(weights, layers=[_layer(layer, change, components) for layer in weights.layers])


def _layer(layer: LayerWeights, change: Callable[[Tensor], Weight], components: frozenset[str]) -> LayerWeights:
    mixer, ffn = layer.mixer, layer.ffn
    if isinstance(mixer, AttentionWeights) and "attention" in components:
        mixer = replace(mixer, qkv=_one(mixer.qkv, change), out=_one(mixer.out, change))
    if isinstance(ffn, FFNWeights) and "dense_ffn" in components:
        ffn = replace(ffn, up=_one(ffn.up, change), down=_one(ffn.down, change))
    return replace(layer, mixer=mixer, ffn=ffn)


def _one(weight: Weight, change: Callable[[Tensor], Weight]) -> Weight:
    return change(weight) if isinstance(weight, Tensor) else weight
