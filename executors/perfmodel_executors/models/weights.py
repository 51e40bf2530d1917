"""What the weights of a decoder are: one object per block, matrices in the layout [out, in], plain or quantised."""

from dataclasses import dataclass, field

from torch import Tensor

from perfmodel_executors.kernels.stored_rows import ExpertWeight
from perfmodel_executors.kernels.weight_formats import GgufWeight, Weight
from perfmodel_executors.parallel.experts import LocalExperts


@dataclass(slots=True)
class AttentionWeights:
    """qkv: [(N + K) * H + K * H_v, C], then the gate's N * H_v rows if there is one; out: [C, N * H_v]. q_norm, k_norm:
    as wide as a head, or as all heads; sinks: a logit for each query head."""

    qkv: Weight
    out: Weight
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    sinks: Tensor | None = None


@dataclass(slots=True)
class LatentWeights:
    """q_down [r_q, C] and its norm, if there are; q_up: [N * (P + r), r_q or C]; kv_down: [R + r, C], and the norm of
    its first R rows' outputs; keys [N, P, R] and values [N, V, R]: what latents expand to; out: [C, N * V]."""

    q_up: Weight
    kv_down: Weight
    kv_norm: Tensor
    keys_NPR: Tensor
    values_NVR: Tensor
    out: Weight
    q_down: Weight | None = None
    q_norm: Tensor | None = None


@dataclass(slots=True)
class MambaWeights:
    """input: [I + (I + 2 G N) + H, C], of the gate, of what is convolved (x, B, C) and of the time steps; conv:
    [I + 2 G N, taps]; a_log, skip, dt_bias: [H]; norm: [I]; out: [C, I]."""

    input: Tensor
    conv: Tensor
    a_log: Tensor
    skip: Tensor
    dt_bias: Tensor
    norm: Tensor
    out: Tensor
    input_bias: Tensor | None = None
    conv_bias: Tensor | None = None
    out_bias: Tensor | None = None


@dataclass(slots=True)
class DeltaWeights:
    """input: [2 K + V + V + H + H, C], of queries, keys, values, the gate, beta and the decay; conv: [2 K + V, taps];
    a_log, dt_bias: [H]; norm: of a value head; out: [C, V]."""

    input: Tensor
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    out: Tensor


@dataclass(slots=True)
class LinearAttentionWeights:
    """As of attention; projection: [K, m, H] random features (Performer), [K, r, r] of positions mod r (Linformer)."""

    qkv: Tensor
    out: Tensor
    projection_KRD: Tensor
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None


MixerWeights = AttentionWeights | LatentWeights | MambaWeights | DeltaWeights | LinearAttentionWeights


@dataclass(slots=True)
class FFNWeights:
    """up: [2F, C] as [gate | up] when gated, else [F, C]; down: [C, F]."""

    up: Weight
    down: Weight
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(slots=True)
class MoEWeights:
    """router: [E, C]; up: [E, 2I or I, C]; down: [E, C, I]; the shared experts are one dense block; router_bias: [E];
    up_bias, down_bias: a row for each expert; local: which experts these are, where ranks share them out whole."""

    router: Tensor
    up: Tensor | ExpertWeight
    down: Tensor | ExpertWeight
    shared: FFNWeights | None = None
    shared_gate: Tensor | None = None
    router_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    local: LocalExperts | None = None


@dataclass(slots=True)
class LayerWeights:
    """A mixer and a feed-forward block, each behind its norm, or before one; None where the layer has none."""

    mixer_norm: Tensor | None
    ffn_norm: Tensor | None
    mixer: MixerWeights | None = None
    ffn: FFNWeights | MoEWeights | None = None
    mixer_post_norm: Tensor | None = None
    ffn_post_norm: Tensor | None = None


@dataclass(slots=True)
class DecoderWeights:
    """embedding: [V, C]; lm_head: [V, C] (the same tensor when tied)."""

    embedding: Tensor | GgufWeight
    lm_head: Tensor | GgufWeight
    final_norm: Tensor
    layers: list[LayerWeights] = field(default_factory=list)
