"""Weights that are left out: single ones, two of every four, heads and columns, whole layers."""

__all__ = ["kept_layers", "pruned"]

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from perfmodel.errors import SpecError
from perfmodel.models.architecture import (
    Attention,
    DenseFFN,
    FeedForward,
    LatentAttention,
    Layer,
    LinearAttention,
    Mixer,
    MoEFFN,
)
from perfmodel.models.changes.rebuilt import with_layers
from perfmodel.models.model_changes import ModelChanges
from perfmodel.models.spec import ModelSpec, WeightSparsity

_TILE = 128  # columns that remain are a multiple of it, as kernels cut them
_INDEX_2_4_BITS = 2.0  # per weight kept (NVIDIA Ampere whitepaper, 2020)
_INDEX_BITS = 16.0  # per weight kept, of tiled formats (Flash-LLM, Xia et al. 2023)


def pruned(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """The model without what `prune` leaves out."""
    prune = changes.prune
    assert prune is not None
    if prune.kind == "2:4":
        return replace(model, weight_sparsity=WeightSparsity(0.5, _INDEX_2_4_BITS, is_2_4=True))
    fraction = prune.fraction
    assert fraction is not None
    if fraction == 0:
        return model
    if prune.kind == "unstructured":
        if prune.storage == "dense":  # zeros are stored, moved and multiplied as other weights are
            return model
        return replace(model, weight_sparsity=WeightSparsity(1 - fraction, _INDEX_BITS))
    if prune.kind == "layers":
        return _fewer_layers(model, fraction)
    return with_layers(model, (_narrower(layer, fraction) for layer in model.iter_layers()))


def _fewer_layers(model: ModelSpec, fraction: float) -> ModelSpec:
    layers = list(model.iter_layers())
    kept = kept_layers(layers, fraction)
    if not kept:
        raise SpecError(f"found fraction={fraction:g}, which leaves none of {len(layers)} layers; take a smaller one.")
    return with_layers(model, (layers[i] for i in kept))


def kept_layers(layers: Sequence[Layer], fraction: float) -> list[int]:
    """The places that stay without round(fraction n) of the n layers of each kind, evenly spaced."""
    kept: list[int] = []
    for kind in dict.fromkeys(layers):
        places = [i for i, layer in enumerate(layers) if layer == kind]
        num_kept = len(places) - round(fraction * len(places))
        kept += [places[i * len(places) // num_kept] for i in range(num_kept)]
    return sorted(kept)


def _narrower(layer: Layer, fraction: float) -> Layer:
    return Layer(_fewer_heads(layer.mixer, 1 - fraction), _fewer_columns(layer.ffn, 1 - fraction))


def _fewer_heads(mixer: Mixer | None, share: float) -> Mixer | None:
    """Whole KV heads go with the query heads that share them; a single KV head stays, with fewer query heads."""
    if isinstance(mixer, LatentAttention):
        return replace(mixer, num_heads=_whole(mixer.num_heads, share))
    if isinstance(mixer, Attention | LinearAttention):
        if mixer.num_kv_heads == 1:
            return replace(mixer, num_heads=_whole(mixer.num_heads, share))
        kept = _whole(mixer.num_kv_heads, share)
        return replace(mixer, num_kv_heads=kept, num_heads=mixer.num_heads // mixer.num_kv_heads * kept)
    if mixer is not None:
        raise SpecError(
            f"found a model with {type(mixer).__name__} mixers, which have no attention heads to prune; take kind: "
            f"layers or 2:4."
        )
    return None


def _fewer_columns(ffn: FeedForward | None, share: float) -> FeedForward | None:
    if isinstance(ffn, DenseFFN):
        return replace(ffn, intermediate_size=_tiles(ffn.intermediate_size, share))
    if isinstance(ffn, MoEFFN):
        return replace(
            ffn,
            intermediate_size=_tiles(ffn.intermediate_size, share),
            shared_intermediate_size=_tiles(ffn.shared_intermediate_size, share),
        )
    return None


def _whole(count: int, share: float) -> int:
    return max(1, ceil(count * share - 1e-9))


def _tiles(size: int, share: float) -> int:
    """`share` of `size`, rounded up to whole tiles, never above `size`."""
    return min(size, ceil(size * share / _TILE - 1e-9) * _TILE)
