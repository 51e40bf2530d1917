"""What pruning leaves of weights: the largest by magnitude, as in Han et al. 2015 (single weights, heads, columns).

Nothing is trained afterwards, and no data is looked at: quality is that of the plain cut.
"""

__all__ = ["pruned"]

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.prune import L1Unstructured

from perfmodel.models.architecture import Attention, DenseFFN, Layer
from perfmodel.models.changes.weights import kept_layers
from perfmodel.models.model_changes import ModelChanges
from perfmodel.models.spec import ModelSpec
from perfmodel_executors.kernels.weight_formats import dequantize, sparsify_24
from perfmodel_executors.models.changed.matrices import with_matrices
from perfmodel_executors.models.weights import AttentionWeights, DecoderWeights, FFNWeights, LayerWeights


def pruned(weights: DecoderWeights, before: ModelSpec, after: ModelSpec, changes: ModelChanges) -> DecoderWeights:
    """Without what `prune` leaves out: as zeros (unstructured, 2:4), or as rows, columns and layers that are gone."""
    prune = changes.prune
    assert prune is not None
    if prune.kind == "2:4":
        return with_matrices(weights, lambda matrix: dequantize(sparsify_24(matrix)).to(matrix.dtype))
    fraction = prune.fraction
    assert fraction is not None
    if prune.kind == "unstructured":
        method: Any = L1Unstructured(fraction)
        return with_matrices(weights, lambda matrix: matrix * method.compute_mask(matrix, torch.ones_like(matrix)))
    if prune.kind == "layers":
        kept = kept_layers(list(before.iter_layers()), fraction)
        return replace(weights, layers=[weights.layers[i] for i in kept])
    pairs = zip(before.iter_layers(), after.iter_layers(), strict=True)
    layers = [_narrower(layer, *pair) for layer, pair in zip(weights.layers, pairs, strict=True)]
    return replace(weights, layers=layers)


def _narrower(weights: LayerWeights, before: Layer, after: Layer) -> LayerWeights:
    mixer, ffn = weights.mixer, weights.ffn
    if (
        isinstance(mixer, AttentionWeights)
        and isinstance(before.mixer, Attention)
        and isinstance(after.mixer, Attention)
    ):
        mixer = _fewer_heads(mixer, before.mixer, after.mixer)
    if isinstance(ffn, FFNWeights) and isinstance(before.ffn, DenseFFN) and isinstance(after.ffn, DenseFFN):
        ffn = _fewer_columns(ffn, before.ffn, after.ffn.intermediate_size)
    return replace(weights, mixer=mixer, ffn=ffn)


def _fewer_heads(weights: AttentionWeights, before: Attention, after: Attention) -> AttentionWeights:
    """The KV heads with the largest weights, with the query heads that share them (of one KV head: query heads)."""
    qkv, out = _plain(weights.qkv), _plain(weights.out)
    by_query = before.num_kv_heads == 1
    num_groups = before.num_heads if by_query else before.num_kv_heads
    num_kept = after.num_heads if by_query else after.num_kv_heads
    sizes = _sections(before)
    places = [torch.arange(size) for size in sizes]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    is_shared = [by_query and i in (1, 2) for i in range(len(sizes))]  # the one K and V stay
    row_scores, column_scores = qkv.float().square().sum(1), out.float().square().sum(0)
    scores = column_scores.view(num_groups, -1).sum(1)
    for start, size, shared in zip(starts, sizes, is_shared, strict=True):
        if not shared:
            scores = scores + row_scores[start : start + size].view(num_groups, -1).sum(1)
    kept = _largest(scores, num_kept)
    rows = torch.cat(
        [
            start + (place if shared else place.view(num_groups, -1)[kept].flatten())
            for start, place, shared in zip(starts, places, is_shared, strict=True)
        ]
    )
    columns = torch.arange(out.shape[1]).view(num_groups, -1)[kept].flatten()
    bias = weights.qkv_bias
    return replace(weights, qkv=qkv[rows], out=out[:, columns], qkv_bias=None if bias is None else bias[rows])


def _sections(mixer: Attention) -> Sequence[int]:
    """Rows of q, k, v and the gate."""
    queries, values = mixer.num_heads * mixer.head_dim, mixer.num_heads * mixer.v_head_dim
    keys = mixer.num_kv_heads * mixer.head_dim
    sizes = [queries, keys, mixer.num_kv_heads * mixer.v_head_dim]
    return [*sizes, values] if mixer.output_gate else sizes


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
    """Indices of the `count` largest, ascending."""
    return scores.topk(count).indices.sort().values


def _plain(weight: object) -> Tensor:
    assert isinstance(weight, Tensor)  # changes come before factors and formats
    return weight
