"""The changes of a scenario's `model_changes`: for each field a pure function from a model to the changed one.

A change that makes no sense for the model raises SpecError: one sentence with what was found, the limit, the way out.
"""

__all__ = ["CHANGES", "Change", "kept_layers", "with_sparse_attention", "with_window"]

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import ceil
from typing import TypeVar

from perfmodel.errors import SpecError
from perfmodel.models import architecture as arch
from perfmodel.models.architecture import Attention, DenseFFN, FeedForward, LatentAttention, Layer, Mixer, MoEFFN
from perfmodel.models.model_changes import LowRank, ModelChanges
from perfmodel.models.spec import ExitSpec, ModelSpec, WeightSparsity, layer_runs

Change = Callable[[ModelSpec, ModelChanges], ModelSpec]
_T = TypeVar("_T")
_F = TypeVar("_F", DenseFFN, MoEFFN)

# Blocks at the beginning that all see, and blocks drawn at random, where only the windows are given: those of BigBird's
# base models (Zaheer et al. 2020, table 8), and Longformer's without random ones.
_GLOBALS = {"bigbird": 2, "longformer": 1}
_RANDOM = {"bigbird": 3, "longformer": 0}
_CACHING = ("latent", "window", "sparse", "linear")  # changes of the attention that a state would replace
_TILE = 128  # columns that remain are a multiple of it, as kernels cut them
_INDEX_2_4_BITS = 2.0  # per weight kept (NVIDIA Ampere whitepaper, 2020)
_INDEX_BITS = 16.0  # per weight kept, of tiled formats (Flash-LLM, Xia et al. 2023)


def _with_layers(model: ModelSpec, layers: Iterable[Layer]) -> ModelSpec:
    """`model` with `layers` instead of its own; the very same model where these are equal.

    A model of another structure is no published one, and no file has its weights."""
    runs = layer_runs(layers)
    if runs == layer_runs(model.iter_layers()):
        return model
    return replace(model, layers=runs, published_params=None, weights_path=None)


def _with_attention(model: ModelSpec, change: Callable[[Attention, int], Mixer]) -> ModelSpec:
    """`model` with plain attention as `change` makes it of a layer's, and of its place among the mixers."""
    layers, place = [], 0
    for layer in model.iter_layers():
        if isinstance(layer.mixer, Attention):
            layer = replace(layer, mixer=change(layer.mixer, place))
        place += layer.mixer is not None
        layers.append(layer)
    return _with_layers(model, layers)


def _with_ffns(model: ModelSpec, kind: type[_F], change: Callable[[_F], FeedForward]) -> ModelSpec:
    """`model` with feed-forward blocks of `kind` as `change` makes them."""
    layers = (replace(x, ffn=change(x.ffn)) if isinstance(x.ffn, kind) else x for x in model.iter_layers())
    return _with_layers(model, layers)


def _plain_attention(model: ModelSpec, field: str) -> list[Attention]:
    """The model's softmax attention. Raises SpecError, with the `field` that needs it, where there is none."""
    mixers = [layer.mixer for layer, _ in model.layers if isinstance(layer.mixer, Attention)]
    if not mixers:
        kinds = sorted({type(layer.mixer).__name__ for layer, _ in model.layers if layer.mixer is not None})
        raise SpecError(
            f"got {model.name}, whose mixers are {' and '.join(kinds) or 'none'}; {field} needs layers with plain "
            f"attention (MHA, GQA or MQA), take another model or leave it out."
        )
    return mixers


def _given(setting: _T | None) -> _T:
    """The setting of a change, which is applied only where it is given."""
    assert setting is not None
    return setting


def _refuse_beside(what: str, names: tuple[str, ...], changes: ModelChanges) -> None:
    given = [name for name in names if getattr(changes, name) is not None]
    if given:
        raise SpecError(f"got {', '.join(given)} beside {what}, which leaves nothing of it; leave one of them out.")


def _with_kv_heads(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """Query heads that share `num_kv_heads` key/value heads: MQA with 1 (Shazeer 2019), GQA (Ainslie et al. 2023)."""
    wanted = _given(changes.num_kv_heads)
    for mixer in _plain_attention(model, "num_kv_heads"):
        if mixer.num_heads % wanted:
            raise SpecError(
                f"got {wanted} for {mixer.num_heads} query heads; each KV head serves as many, take a divisor of "
                f"{mixer.num_heads}."
            )
    return _with_attention(model, lambda mixer, _: replace(mixer, num_kv_heads=wanted))


def _with_latent(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """Multi-head latent attention with the model's number of heads (DeepSeek-V2, 2024)."""
    latent = _given(changes.latent)
    _plain_attention(model, "latent")
    if changes.num_kv_heads is not None:
        raise SpecError("is set beside num_kv_heads; a latent has no KV heads to share, leave one of them out.")
    return _with_attention(
        model,
        lambda mixer, _: LatentAttention(
            num_heads=mixer.num_heads,
            q_lora_rank=latent.q_lora_rank,
            kv_lora_rank=latent.kv_lora_rank,
            qk_nope_head_dim=latent.qk_nope_head_dim or mixer.head_dim,
            qk_rope_head_dim=latent.qk_rope_head_dim,
            v_head_dim=latent.v_head_dim or mixer.v_head_dim,
        ),
    )


def with_window(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """A sliding window in every n-th layer, the first of them included, with sinks (Xiao et al. 2023) beside it.

    Keys that left the window are overwritten: a rolling buffer of window + sinks tokens (Mistral 7B, 2023)."""
    _plain_attention(model, "window")

    def change(mixer: Attention, place: int) -> Attention:
        if place % changes.window_every:
            return mixer
        return replace(mixer, window=changes.window, chunk=None, num_sink_tokens=changes.sinks, is_rolling=True)

    return _with_attention(model, change)


def with_sparse_attention(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """Blocks of keys instead of all (BigBird, Zaheer et al. 2020; Longformer, Beltagy et al. 2020).

    All keys are kept: another query may see those that this one does not."""
    sparse = _given(changes.sparse)
    limited = [mixer for mixer in _plain_attention(model, "sparse") if mixer.span is not None]
    if limited:
        raise SpecError(
            f"got attention that already sees {limited[0].span} tokens at most; blocks choose among all, leave the "
            f"window or the blocks out."
        )
    if sparse.fraction == 1:
        return model
    first = _GLOBALS[sparse.pattern] if sparse.globals is None else sparse.globals
    drawn = _RANDOM[sparse.pattern] if sparse.random is None else sparse.random
    count = None if sparse.windows is None else sparse.windows + first + drawn
    sparsity = arch.BlockSparsity(sparse.block, count, sparse.fraction, first, drawn)
    return _with_attention(model, lambda mixer, _: replace(mixer, sparsity=sparsity))


def _with_linear_attention(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """Performer (Choromanski et al. 2020) or Linformer (Wang et al. 2020) in the place of softmax attention."""
    linear = _given(changes.linear)
    _plain_attention(model, "linear")
    _refuse_beside("linear attention", _CACHING[:-1], changes)
    return _with_attention(
        model,
        lambda mixer, _: arch.LinearAttention(
            kind=linear.kind,
            size=linear.size,
            num_heads=mixer.num_heads,
            num_kv_heads=mixer.num_kv_heads,
            head_dim=mixer.head_dim,
            v_head_dim=mixer.v_head_dim,
            qkv_bias=mixer.qkv_bias,
            out_bias=mixer.out_bias,
            rope=mixer.rope,
        ),
    )


def _with_ssm_layers(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """Mamba-2 (Dao and Gu 2024) for attention, all of it or all but every n-th layer (Jamba, 2024)."""
    ssm = _given(changes.ssm_layers)
    if not any(isinstance(layer.mixer, Attention | LatentAttention) for layer, _ in model.layers):
        raise SpecError(f"got {model.name}, which has no attention to replace; take another model or leave it out.")
    inner = ssm.expand * model.hidden_size
    if inner % ssm.head_dim or (inner // ssm.head_dim) % ssm.num_groups:
        raise SpecError(
            f"got head_dim={ssm.head_dim} and num_groups={ssm.num_groups} for an inner width of {inner}; take a "
            f"head_dim that divides it, and num_groups that divides the heads."
        )
    if ssm.attention_every is None:
        _refuse_beside("no attention at all", _CACHING, changes)
    mamba = arch.Mamba(
        num_heads=inner // ssm.head_dim,
        head_dim=ssm.head_dim,
        state_size=ssm.state_size,
        num_groups=ssm.num_groups,
        conv_kernel=ssm.conv_kernel,
        chunk_size=ssm.chunk_size,
    )
    layers, place = [], 0
    for layer in model.iter_layers():
        place += layer.mixer is not None
        is_kept = ssm.attention_every is not None and place % ssm.attention_every == 0
        is_attention = isinstance(layer.mixer, Attention | LatentAttention)
        layers.append(replace(layer, mixer=mamba) if is_attention and not is_kept else layer)
    return _with_layers(model, layers)


def _pruned(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """Single weights, two of every four, heads and columns, or whole layers are left out."""
    prune = _given(changes.prune)
    if prune.kind == "2:4":
        return replace(model, weight_sparsity=WeightSparsity(0.5, _INDEX_2_4_BITS, is_2_4=True))
    fraction = prune.fraction
    assert fraction is not None
    if fraction == 0 or (prune.kind == "unstructured" and prune.storage == "dense"):
        return model  # dense storage: zeros are stored, moved and multiplied as other weights are
    if prune.kind == "unstructured":
        return replace(model, weight_sparsity=WeightSparsity(1 - fraction, _INDEX_BITS))
    layers = list(model.iter_layers())
    if prune.kind == "structured":
        share = 1 - fraction
        return _with_layers(model, (Layer(_fewer_heads(x.mixer, share), _fewer_columns(x.ffn, share)) for x in layers))
    kept = kept_layers(layers, fraction)
    if not kept:
        raise SpecError(f"got fraction={fraction:g}, which leaves none of {len(layers)} layers; take a smaller one.")
    return _with_layers(model, (layers[i] for i in kept))


def kept_layers(layers: Sequence[Layer], fraction: float) -> list[int]:
    """The places that stay without round(fraction n) of the n layers of each kind, evenly spaced."""
    kept: list[int] = []
    for kind in dict.fromkeys(layers):
        places = [i for i, layer in enumerate(layers) if layer == kind]
        num_kept = len(places) - round(fraction * len(places))
        kept += [places[i * len(places) // num_kept] for i in range(num_kept)]
    return sorted(kept)


def _fewer_heads(mixer: Mixer | None, share: float) -> Mixer | None:
    """Whole KV heads go with the query heads that share them; a single KV head stays, with fewer query heads."""

    def rounded(count: int) -> int:
        return max(1, ceil(count * share - 1e-9))

    if mixer is None:
        return None
    if not isinstance(mixer, Attention | LatentAttention | arch.LinearAttention):
        raise SpecError(
            f"got a model with {type(mixer).__name__} mixers, which have no attention heads to prune; take kind: "
            f"layers or 2:4."
        )
    if isinstance(mixer, LatentAttention) or mixer.num_kv_heads == 1:
        return replace(mixer, num_heads=rounded(mixer.num_heads))
    kept = rounded(mixer.num_kv_heads)
    return replace(mixer, num_kv_heads=kept, num_heads=mixer.num_heads // mixer.num_kv_heads * kept)


def _fewer_columns(ffn: FeedForward | None, share: float) -> FeedForward | None:
    """Columns rounded up to whole tiles, never more than there are."""

    def tiles(size: int) -> int:
        return min(size, ceil(size * share / _TILE - 1e-9) * _TILE)

    if isinstance(ffn, MoEFFN):
        shared = tiles(ffn.shared_intermediate_size)
        return replace(ffn, intermediate_size=tiles(ffn.intermediate_size), shared_intermediate_size=shared)
    return None if ffn is None else replace(ffn, intermediate_size=tiles(ffn.intermediate_size))


def _with_low_rank(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """Each linear layer as two thin ones. Projections that run as one (q, k, v; gate, up) are factored as one."""
    low_rank, d = _given(changes.low_rank), model.hidden_size
    layers = []
    for layer in model.iter_layers():
        mixer, ffn = layer.mixer, layer.ffn
        if isinstance(mixer, Attention) and "attention" in low_rank.components:
            out = mixer.num_heads * mixer.v_head_dim
            queries = mixer.num_heads * mixer.head_dim + (out if mixer.output_gate else 0)
            qkv = queries + mixer.num_kv_heads * (mixer.head_dim + mixer.v_head_dim)
            mixer = replace(mixer, qkv_rank=_rank(d, qkv, low_rank), out_rank=_rank(out, d, low_rank))
        if isinstance(ffn, DenseFFN) and "dense_ffn" in low_rank.components:
            up_rank = _rank(d, ffn.intermediate_size * (2 if ffn.gated else 1), low_rank)
            ffn = replace(ffn, up_rank=up_rank, down_rank=_rank(ffn.intermediate_size, d, low_rank))
        layers.append(Layer(mixer, ffn))
    changed = _with_layers(model, layers)
    if changed is model:
        raise SpecError(
            f"got components {', '.join(low_rank.components)}, of which {model.name} has none that are factored; "
            f"those are plain attention and dense_ffn."
        )
    return changed


def _rank(num_in: int, num_out: int, low_rank: LowRank) -> int:
    """The rank, or the one that keeps `fraction` of the weights: r (in + out) = fraction in out."""
    if low_rank.fraction is not None:
        return max(1, int(low_rank.fraction * num_in * num_out / (num_in + num_out)))
    assert low_rank.rank is not None
    if low_rank.rank > min(num_in, num_out):
        raise SpecError(
            f"got rank={low_rank.rank} for a matrix of {num_in} x {num_out}; take at most {min(num_in, num_out)}."
        )
    return low_rank.rank


def _moefied(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """Dense feed-forward blocks as `num_experts` experts of 1 / `num_experts` of their width, `top_k` per token.

    Source: MoEfication, Zhang et al. 2022."""
    moefy = _given(changes.moefy)
    if not any(isinstance(layer.ffn, DenseFFN) for layer, _ in model.layers):
        raise SpecError(f"got {model.name}, which has no dense feed-forward block to split; leave it out.")

    def split(ffn: DenseFFN) -> MoEFFN:
        num_experts, columns = moefy.num_experts, ffn.intermediate_size
        if columns % num_experts:
            raise SpecError(
                f"got num_experts={num_experts} for blocks of {columns} columns; take a divisor of {columns}."
            )
        if ffn.up_rank is not None:
            raise SpecError("is set beside low_rank of dense_ffn; experts are not factored, leave one of them out.")
        width = columns // num_experts
        return MoEFFN(num_experts, moefy.top_k, width, gated=ffn.gated, activation=ffn.activation, bias=ffn.bias)

    return _with_ffns(model, DenseFFN, split)


def _with_experts(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """Mixtures with another number of experts, of them per token, or of shared width.

    Source: Dai et al. 2024 (DeepSeekMoE), section 3.1, for experts that are split."""
    experts = _given(changes.experts)
    split, shared = experts.split or 1, experts.shared_intermediate_size

    def reshaped(ffn: MoEFFN) -> MoEFFN:
        num_experts, top_k = experts.num_experts or ffn.num_experts, experts.top_k or ffn.top_k
        if top_k > num_experts:
            raise SpecError(f"got top_k={top_k} of {num_experts} experts; lower it, or raise num_experts.")
        if num_experts % ffn.num_groups:
            raise SpecError(f"got {num_experts} experts in {ffn.num_groups} groups; take a multiple of the groups.")
        width = ffn.intermediate_size
        if width % split:
            raise SpecError(f"got split={split} for experts of {width} columns; take a divisor of {width}.")
        return replace(
            ffn,
            num_experts=num_experts * split,
            top_k=top_k * split,
            intermediate_size=width // split,
            shared_intermediate_size=ffn.shared_intermediate_size if shared is None else shared,
            shared_gate=ffn.shared_gate and shared != 0,
        )

    if not any(isinstance(layer.ffn, MoEFFN) for layer, _ in model.layers):
        raise SpecError(
            f"got {model.name}, which has no mixture of experts; take another model, or split its dense blocks with "
            f"model_changes.moefy."
        )
    return _with_ffns(model, MoEFFN, reshaped)


def _with_shared_layers(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """`share_layers` distinct layers, used in turn (ALBERT, Lan et al. 2019): layer i has the weights of i mod n."""
    wanted = _given(changes.share_layers)
    layers = list(model.iter_layers())
    if wanted > len(layers):
        raise SpecError(f"got {wanted} distinct layers of {len(layers)}; take at most {len(layers)}.")
    if wanted == len(layers):
        return model
    for i, layer in enumerate(layers):
        if layer != layers[i % wanted]:
            raise SpecError(
                f"got {wanted}, but layer {i} is of another kind than layer {i % wanted}, so they cannot share "
                f"weights; take a number after which the kinds repeat."
            )
    return replace(model, num_distinct_layers=wanted, published_params=None, weights_path=None)


def _with_tied_embeddings(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """One table for words in and out (Press and Wolf 2017), or two."""
    is_tied = _given(changes.tie_embeddings)
    if is_tied == model.tie_word_embeddings:
        return model
    return replace(model, tie_word_embeddings=is_tied, published_params=None, weights_path=None)


def _with_early_exit(model: ModelSpec, changes: ModelChanges) -> ModelSpec:
    """The share of decoded tokens that reaches each layer (CALM, Schuster et al. 2022)."""
    early, num_layers = _given(changes.early_exit), model.num_layers
    for layer, _ in model.layers:
        for block, known in ((layer.mixer, Attention | LatentAttention), (layer.ffn, DenseFFN)):
            if block is not None and not isinstance(block, known):
                raise SpecError(
                    f"got a model with {type(block).__name__}; what its skipped layers would still have to do is not "
                    f"described, take a model of attention and dense feed-forward blocks."
                )
    if early.expected_share is not None:
        reach = _reach_of_share(early.expected_share, num_layers)
    else:
        leave = early.exit_probabilities or ()
        if len(leave) != num_layers:
            raise SpecError(f"got {len(leave)} exit_probabilities for {num_layers} layers; give one for each.")
        reach = tuple(max(0.0, 1.0 - gone) for gone in (0.0, *accumulate(leave[:-1])))
    return model if min(reach) == 1 else replace(model, exits=ExitSpec(reach, early.confidence == "softmax"))


def _reach_of_share(share: float, num_layers: int) -> tuple[float, ...]:
    """Reaches (1 - h)^i whose mean is `share`: behind each layer the share h of those that are there leaves.

    The first layer is always passed, so that the least share is one layer's."""
    if share == 1 or num_layers == 1:
        return (1.0,) * num_layers
    if share * num_layers < 1:
        raise SpecError(
            f"got expected_share={share:g} of {num_layers} layers, less than one; take at least {1 / num_layers:.3g}."
        )
    low, high = 0.0, 1.0
    for _ in range(60):  # bisection: the mean grows with the share that stays
        stay = (low + high) / 2
        is_below = sum(stay**i for i in range(num_layers)) < share * num_layers
        low, high = (stay, high) if is_below else (low, stay)
    return tuple(high**i for i in range(num_layers))


# Field of `ModelChanges` -> what it does, in the order in which they are applied: attention, then sizes, then use.
CHANGES: Mapping[str, Change] = {
    "num_kv_heads": _with_kv_heads,
    "latent": _with_latent,
    "window": with_window,
    "sparse": with_sparse_attention,
    "linear": _with_linear_attention,
    "ssm_layers": _with_ssm_layers,
    "prune": _pruned,
    "low_rank": _with_low_rank,
    "moefy": _moefied,
    "experts": _with_experts,
    "share_layers": _with_shared_layers,
    "tie_embeddings": _with_tied_embeddings,
    "early_exit": _with_early_exit,
}
