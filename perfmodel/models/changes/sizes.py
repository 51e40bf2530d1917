"""The same depth with other weights: thin factors, shared layers, one table for words in and out."""

__all__ = ["with_low_rank", "with_shared_layers", "with_tied_embeddings"]

from dataclasses import replace

from perfmodel.errors import SpecError
from perfmodel.models.architecture import Attention, DenseFFN, FeedForward, Layer, Mixer
from perfmodel.models.changes.rebuilt import with_layers
from perfmodel.models.model_changes import LowRank, ModelChanges
from perfmodel.models.spec import ModelSpec


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
