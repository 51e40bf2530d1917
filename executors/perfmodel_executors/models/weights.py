"""What the weights of a decoder are: one object per block, matrices in the layout [out, in], plain or quantised."""

__all__ = ["AttentionWeights", "DecoderWeights", "FFNWeights", "LayerWeights", "MoEWeights", "used_in_turn"]

from dataclasses import dataclass, field

from torch import Tensor

from perfmodel_executors.kernels.weight_formats import ExpertWeight, Weight


@dataclass(slots=True)
class AttentionWeights:
    """qkv: [(N + K) * H + K * H_v, C], then the gate's N * H_v rows if there is one; out: [C, N * H_v]."""

    qkv: Weight
    out: Weight
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(slots=True)
class FFNWeights:
    """up: [2F, C] as [gate | up] when gated, else [F, C]; down: [C, F]."""

    up: Weight
    down: Weight
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(slots=True)
class MoEWeights:
    """router: [E, C]; up: [E, 2I or I, C]; down: [E, C, I]; the shared experts are one dense block."""

    router: Tensor
    up: Tensor | ExpertWeight
    down: Tensor | ExpertWeight
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


def used_in_turn(distinct: list[LayerWeights], num_layers: int) -> list[LayerWeights]:
    """The weights of each of `num_layers` layers: layer i has those of i modulo the number of distinct ones."""
    return [distinct[i % len(distinct)] for i in range(num_layers)]
