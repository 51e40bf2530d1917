"""The weights of a decoder, random by seed.

Each matrix is normal with variance 1 / fan-in, so that activations keep their scale and logits stay finite at any
depth. Seeds make equal weights on every machine: drawn in fp32 on the CPU, then rounded to the dtype.
"""

__all__ = ["AttentionWeights", "DecoderWeights", "FFNWeights", "LayerWeights", "MoEWeights", "random_weights"]

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from perfmodel.specs.model.architecture import Attention, DenseFFN, Layer, MoEFFN
from perfmodel.specs.model.spec import ModelSpec


@dataclass(slots=True)
class AttentionWeights:
    """qkv: [(N + K) * H + K * H_v, C], then the gate's N * H_v rows if there is one; out: [C, N * H_v]."""

    qkv: Tensor
    out: Tensor
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(slots=True)
class FFNWeights:
    """up: [2F, C] as [gate | up] when gated, else [F, C]; down: [C, F]."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(slots=True)
class MoEWeights:
    """router: [E, C]; up: [E, 2I or I, C]; down: [E, C, I]; the shared experts are one dense block."""

    router: Tensor
    up: Tensor
    down: Tensor
    shared: FFNWeights | None = None
    shared_gate: Tensor | None = None


@dataclass(slots=True)
class LayerWeights:
    """A mixer and a feed-forward block, each behind its norm; None where the layer has none."""

    mixer_norm: Tensor
    ffn_norm: Tensor
    mixer: AttentionWeights | None = None
    ffn: FFNWeights | MoEWeights | None = None


@dataclass(slots=True)
class DecoderWeights:
    """embedding: [V, C]; lm_head: [V, C] (the same tensor when tied)."""

    embedding: Tensor
    lm_head: Tensor
    final_norm: Tensor
    layers: list[LayerWeights] = field(default_factory=list)


class _Draw:
    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int) -> Tensor:
        values = torch.randn(*shape, generator=self.generator)
        return values.div_(math.sqrt(shape[-1])).to(self.dtype)

    def bias(self, wanted: bool, size: int) -> Tensor | None:
        return torch.randn(size, generator=self.generator).mul_(0.02).to(self.dtype) if wanted else None

    def ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self.dtype)


def random_weights(model: ModelSpec, dtype: torch.dtype, seed: int) -> DecoderWeights:
    """Weights of the whole model; equal for equal (model, dtype, seed)."""
    draw = _Draw(dtype, seed)
    embedding = draw.matrix(model.vocab_size, model.hidden_size)
    head = embedding if model.tie_word_embeddings else draw.matrix(model.vocab_size, model.hidden_size)
    layers = [_layer(draw, model.hidden_size, layer) for layer in model.iter_layers()]
    return DecoderWeights(embedding, head, draw.ones(model.hidden_size), layers)


def _layer(draw: _Draw, hidden: int, layer: Layer) -> LayerWeights:
    weights = LayerWeights(draw.ones(hidden), draw.ones(hidden))
    if isinstance(layer.mixer, Attention):
        weights.mixer = _attention(draw, hidden, layer.mixer)
    if isinstance(layer.ffn, DenseFFN):
        weights.ffn = _dense(draw, hidden, layer.ffn.intermediate_size, layer.ffn.gated, layer.ffn.bias)
    elif isinstance(layer.ffn, MoEFFN):
        weights.ffn = _moe(draw, hidden, layer.ffn)
    return weights


def _attention(draw: _Draw, hidden: int, mixer: Attention) -> AttentionWeights:
    rows = (mixer.num_heads + mixer.num_kv_heads) * mixer.head_dim + mixer.num_kv_heads * mixer.v_head_dim
    out = mixer.num_heads * mixer.v_head_dim
    if mixer.output_gate:
        rows += out
    return AttentionWeights(
        qkv=draw.matrix(rows, hidden),
        out=draw.matrix(hidden, out),
        qkv_bias=draw.bias(mixer.qkv_bias, rows),
        out_bias=draw.bias(mixer.out_bias, hidden),
        q_norm=draw.ones(mixer.head_dim) if mixer.qk_norm else None,
        k_norm=draw.ones(mixer.head_dim) if mixer.qk_norm else None,
    )


def _dense(draw: _Draw, hidden: int, width: int, gated: bool, bias: bool) -> FFNWeights:
    rows = 2 * width if gated else width
    return FFNWeights(
        up=draw.matrix(rows, hidden),
        down=draw.matrix(hidden, width),
        up_bias=draw.bias(bias, rows),
        down_bias=draw.bias(bias, hidden),
    )


def _moe(draw: _Draw, hidden: int, ffn: MoEFFN) -> MoEWeights:
    rows = 2 * ffn.intermediate_size if ffn.gated else ffn.intermediate_size
    shared = None
    if ffn.shared_intermediate_size:
        shared = _dense(draw, hidden, ffn.shared_intermediate_size, ffn.gated, False)
    return MoEWeights(
        router=draw.matrix(ffn.num_experts, hidden),
        up=draw.matrix(ffn.num_experts, rows, hidden),
        down=draw.matrix(ffn.num_experts, hidden, ffn.intermediate_size),
        shared=shared,
        shared_gate=draw.matrix(1, hidden) if shared is not None and ffn.shared_gate else None,
    )
