"""The weights of a changed model (`model_changes`), made of those in its file; a sentence for what would need training.
Pruning leaves the largest by magnitude, as in Han et al. 2015 (single weights, heads, columns)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.prune import L1Unstructured

from perfmodel.errors import PerfmodelError
from perfmodel.models.architecture import Attention, DenseFFN, Layer
from perfmodel.models.changes import CHANGES, kept_layers
from perfmodel.models.model_changes import ModelChanges
from perfmodel.models.spec import ChangedFrom, ModelSpec
from perfmodel_executors.kernels.weight_formats import LowRankWeight, Weight, dequantize, sparsify_24
from perfmodel_executors.models.weights import AttentionWeights, DecoderWeights, FFNWeights, LayerWeights


def _with_matrices(weights: DecoderWeights, change: Callable[[Tensor, str, int], Weight]) -> DecoderWeights:
    """Plain matrices of attention and dense blocks as `change` makes them of (matrix, its field, its layer)."""

    def changed(block: Any, index: int, *names: str) -> Any:
        plain = {name: getattr(block, name) for name in names if isinstance(getattr(block, name), Tensor)}
        return replace(block, **{name: change(weight, name, index) for name, weight in plain.items()})

    layers = []
    for index, layer in enumerate(weights.layers):
        mixer = changed(layer.mixer, index, "qkv", "out") if isinstance(layer.mixer, AttentionWeights) else layer.mixer
        ffn = changed(layer.ffn, index, "up", "down") if isinstance(layer.ffn, FFNWeights) else layer.ffn
        layers.append(replace(layer, mixer=mixer, ffn=ffn))
    return replace(weights, layers=layers)


def _sections(mixer: Attention) -> list[int]:
    values = mixer.num_heads * mixer.v_head_dim if mixer.output_gate else 0
    dim, kv_heads = mixer.head_dim, mixer.num_kv_heads
    return [mixer.num_heads * dim, kv_heads * dim, kv_heads * mixer.v_head_dim, values]


def _with_kv_heads(weights: LayerWeights, before: Layer, after: Layer) -> LayerWeights:
    """Each KV head the mean of those that it replaces (Ainslie et al. 2023); the training that follows is left out."""
    mixer, old, new = weights.mixer, before.mixer, after.mixer
    if not (isinstance(mixer, AttentionWeights) and isinstance(old, Attention) and isinstance(new, Attention)):
        return weights

    def means(rows: Tensor) -> Tensor:
        """Means of neighbours, or copies where there are more heads after than before."""
        heads = rows.view(old.num_kv_heads, -1, *rows.shape[1:])
        if new.num_kv_heads >= old.num_kv_heads:
            return heads.repeat_interleave(new.num_kv_heads // old.num_kv_heads, 0).flatten(0, 1)
        groups = heads.view(new.num_kv_heads, -1, *heads.shape[1:])
        return groups.float().mean(1).to(rows.dtype).flatten(0, 1)

    def merged(rows: Tensor) -> Tensor:
        q, k, v, gates = torch.split(rows, _sections(old))
        return torch.cat((q, means(k), means(v), gates))

    bias = None if mixer.qkv_bias is None else merged(mixer.qkv_bias)
    return replace(weights, mixer=replace(mixer, qkv=merged(_plain(mixer.qkv)), qkv_bias=bias))


def with_low_rank(weights: DecoderWeights, _: ModelSpec, after: ModelSpec, __: ModelChanges) -> DecoderWeights:
    """Each factored matrix by its largest singular values (Eckart and Young 1936), their roots on either side."""
    specs = list(after.iter_layers())

    def thin(matrix: Tensor, name: str, index: int) -> Weight:
        rank = getattr(specs[index].mixer if name in ("qkv", "out") else specs[index].ffn, f"{name}_rank")
        if rank is None:
            return matrix
        left, values, right = torch.linalg.svd(matrix.float(), full_matrices=False)
        root = values[:rank].sqrt()
        inputs, outputs = root[:, None] * right[:rank], left[:, :rank] * root
        return LowRankWeight(inputs.to(matrix.dtype).contiguous(), outputs.to(matrix.dtype).contiguous())

    return _with_matrices(weights, thin)


def with_tied_table(weights: DecoderWeights, _: ModelSpec, after: ModelSpec, __: ModelChanges) -> DecoderWeights:
    """The embedding as LM head, or a copy of its own."""
    assert isinstance(weights.lm_head, Tensor), "a model is changed before it is quantised"
    return replace(weights, lm_head=weights.embedding if after.tie_word_embeddings else weights.lm_head.clone())


def pruned(weights: DecoderWeights, before: ModelSpec, after: ModelSpec, changes: ModelChanges) -> DecoderWeights:
    """Without what `prune` leaves out: as zeros (unstructured, 2:4), or as rows, columns and layers that are gone."""
    prune = changes.prune
    assert prune is not None
    if prune.kind == "2:4":
        return _with_matrices(weights, lambda matrix, *_: dequantize(sparsify_24(matrix)).to(matrix.dtype))
    fraction = prune.fraction
    assert fraction is not None
    if prune.kind == "unstructured":
        method: Any = L1Unstructured(fraction)
        return _with_matrices(weights, lambda matrix, *_: matrix * method.compute_mask(matrix, torch.ones_like(matrix)))
    if prune.kind == "layers":
        kept = kept_layers(list(before.iter_layers()), fraction)
        return replace(weights, layers=[weights.layers[i] for i in kept])
    layers = []
    for own, old, new in zip(weights.layers, before.iter_layers(), after.iter_layers(), strict=True):
        mixer, ffn, was, now = own.mixer, own.ffn, old.mixer, new.mixer
        if isinstance(mixer, AttentionWeights) and isinstance(was, Attention) and isinstance(now, Attention):
            mixer = _fewer_heads(mixer, was, now)
        if isinstance(ffn, FFNWeights) and isinstance(old.ffn, DenseFFN) and isinstance(new.ffn, DenseFFN):
            ffn = _fewer_columns(ffn, old.ffn, new.ffn.intermediate_size)
        layers.append(replace(own, mixer=mixer, ffn=ffn))
    return replace(weights, layers=layers)


def _fewer_heads(weights: AttentionWeights, before: Attention, after: Attention) -> AttentionWeights:
    """The KV heads with the largest weights, with the query heads that share them (of one KV head: query heads)."""
    qkv, out = _plain(weights.qkv), _plain(weights.out)
    by_query = before.num_kv_heads == 1
    num_groups = before.num_heads if by_query else before.num_kv_heads
    num_kept = after.num_heads if by_query else after.num_kv_heads
    row_scores, scores = qkv.float().square().sum(1), out.float().square().sum(0).view(num_groups, -1).sum(1)
    sections, start = [], 0  # (rows by group, or the one K and V, which stay)
    for i, size in enumerate(filter(None, _sections(before))):
        rows, is_shared = torch.arange(start, start + size), by_query and i in (1, 2)
        if not is_shared:
            rows = rows.view(num_groups, -1)
            scores = scores + row_scores[rows].sum(1)
        sections.append((rows, is_shared))
        start += size
    kept = _largest(scores, num_kept)
    kept_rows = torch.cat([rows if is_shared else rows[kept].flatten() for rows, is_shared in sections])
    columns = torch.arange(out.shape[1]).view(num_groups, -1)[kept].flatten()
    bias = None if weights.qkv_bias is None else weights.qkv_bias[kept_rows]
    return replace(weights, qkv=qkv[kept_rows], out=out[:, columns], qkv_bias=bias)


def _fewer_columns(weights: FFNWeights, before: DenseFFN, width: int) -> FFNWeights:
    """The intermediate columns with the largest weights before and behind them."""
    up, down = _plain(weights.up), _plain(weights.down)
    halves = up.chunk(2) if before.gated else (up,)
    scores = down.float().square().sum(0) + sum(half.float().square().sum(1) for half in halves)
    kept = _largest(scores, width)
    bias = weights.up_bias
    if bias is not None:
        bias = torch.cat([half[kept] for half in (bias.chunk(2) if before.gated else (bias,))])
    return replace(weights, up=torch.cat([half[kept] for half in halves]), down=down[:, kept], up_bias=bias)


def _largest(scores: Tensor, count: int) -> Tensor:
    return scores.topk(count).indices.sort().values


def _plain(weight: object) -> Tensor:
    assert isinstance(weight, Tensor)  # changes come before factors and formats
    return weight


# (weights, model before, model after, all changes) -> weights of the model after; None: another use of the same
WeightChange = Callable[[DecoderWeights, ModelSpec, ModelSpec, ModelChanges], DecoderWeights] | None

# Fields of `ModelChanges` whose weights follow from those of the model before, without training.
WEIGHT_CHANGES: Mapping[str, WeightChange] = {
    "num_kv_heads": lambda weights, before, after, _: replace(
        weights, layers=list(map(_with_kv_heads, weights.layers, before.iter_layers(), after.iter_layers()))
    ),
    "prune": pruned,
    "low_rank": with_low_rank,
    "share_layers": lambda weights, _, after, __: replace(
        weights, layers=list(islice(cycle(weights.layers[: after.num_distinct_layers]), after.num_layers))
    ),
    "tie_embeddings": with_tied_table,
    **dict.fromkeys(("window", "sparse", "early_exit")),
}


def changed_weights(weights: DecoderWeights, changed_from: ChangedFrom) -> DecoderWeights:
    """The weights after all changes, of the original's plain ones, which may be overwritten. Raises PerfmodelError for
    a change into weights that only training could find."""
    model, changes = changed_from.original, changed_from.changes
    for field, change in CHANGES.items():
        if getattr(changes, field) is None:
            continue
        if field not in WEIGHT_CHANGES:
            raise PerfmodelError(
                f"model_changes.{field}: the weights of {model.name} cannot be turned into those without training; "
                f"execute the model's config.json, with random weights."
            )
        after, of_weights = change(model, changes), WEIGHT_CHANGES[field]
        weights = weights if of_weights is None else of_weights(weights, model, after, changes)
        model = after
    return replace(weights)
