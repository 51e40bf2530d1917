"""The same depth or less with fewer weights: thin factors, shared layers, one table for words in and out; pruning.

Pruned are single weights, two of every four, heads and columns, or whole layers.
"""

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
from perfmodel.models.model_changes import LowRank, ModelChanges
from perfmodel.models.spec import ModelSpec, WeightSparsity

_TILE = 128  # columns that remain are a multiple of it, as kernels cut them
_INDEX_2_4_BITS = 2.0  # per weight kept (NVIDIA Ampere whitepaper, 2020)
_INDEX_BITS = 16.0  # per weight kept, of tiled formats (Flash-LLM, Xia et al. 2023)


def with_low_rank(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """Each linear layer as two thin ones. Projections that run as one (q, k, v; gate, up) are factored as one."""
    low_rank = changes.low_rank
    assert low_rank is not None
    layers = [
        Layer(_thin_attention(layer.mixer, model, low_rank), _thin_ffn(layer.ffn, model, low_rank))
        for layer in model.iter_layers()
    ]
    changed = with_layers(model, layers)
    if changed is model:
        raise SpecError(
            f"found components {', '.join(low_rank.components)}, of which {model.name} has none that are factored; "
            f"those are plain attention and dense_ffn."
        )
    return changed


def _thin_attention(mixer: Mixer | None, model: ModelSpec, low_rank: LowRank) -> Mixer | None:
    if not isinstance(mixer, Attention) or "attention" not in low_rank.components:
        return mixer
    d, out = model.hidden_size, mixer.num_heads * mixer.v_head_dim
    queries = mixer.num_heads * mixer.head_dim + (out if mixer.output_gate else 0)
    qkv = queries + mixer.num_kv_heads * (mixer.head_dim + mixer.v_head_dim)
    return replace(mixer, qkv_rank=_rank(d, qkv, low_rank), out_rank=_rank(out, d, low_rank))


def _thin_ffn(ffn: FeedForward | None, model: ModelSpec, low_rank: LowRank) -> FeedForward | None:
    if not isinstance(ffn, DenseFFN) or "dense_ffn" not in low_rank.components:
        return ffn
    d, ups = model.hidden_size, ffn.intermediate_size * (2 if ffn.gated else 1)
    return replace(ffn, up_rank=_rank(d, ups, low_rank), down_rank=_rank(ffn.intermediate_size, d, low_rank))


def _rank(num_in: int, num_out: int, low_rank: LowRank) -> int:
    """The rank, or the one that keeps `fraction` of the weights: r (in + out) = fraction in out."""
    if low_rank.fraction is not None:
        return max(1, int(low_rank.fraction * num_in * num_out / (num_in + num_out)))
    assert low_rank.rank is not None
    if low_rank.rank > min(num_in, num_out):
        raise SpecError(
            f"found rank={low_rank.rank} for a matrix of {num_in} x {num_out}; take at most {min(num_in, num_out)}."
        )
    return low_rank.rank


def with_shared_layers(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """`share_layers` distinct layers, used in turn (ALBERT, Lan et al. 2019): layer i has the weights of i mod n."""
    wanted = changes.share_layers
    assert wanted is not None
    layers = list(model.iter_layers())
    if wanted > len(layers):
        raise SpecError(f"found {wanted} distinct layers of {len(layers)}; take at most {len(layers)}.")
    if wanted == len(layers):
        return model
    for i, layer in enumerate(layers):
        if layer != layers[i % wanted]:
            raise SpecError(
                f"found {wanted}, but layer {i} is of another kind than layer {i % wanted}, so they cannot share "
                f"weights; take a number after which the kinds repeat."
            )
    return replace(model, num_distinct_layers=wanted, published_params=None, weights_path=None)


def with_tied_embeddings(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """One table for words in and out (Press and Wolf 2017), or two."""
    wanted = changes.tie_embeddings
    assert wanted is not None
    if wanted == model.tie_word_embeddings:
        return model
    return replace(model, tie_word_embeddings=wanted, published_params=None, weights_path=None)


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
