"""The tensors of each kind of block: shapes, and what files call them. Random weights and readers follow this table."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from perfmodel.models import architecture
from perfmodel.models.architecture import Mixer
from perfmodel_executors.models import weights


class WeightPart(NamedTuple):
    """A tensor, if it `is_there`. name: in files, a key of NAMES; kind: what follows it there, or `matrix`, which may
    be in another format, or `norm`, to which the model may add something; rank: of two thin matrices in its place."""

    shape: tuple[int, ...]
    name: str = ""
    kind: str = "weight"
    is_there: bool = True
    rank: int | None = None


Parts = dict[str, WeightPart]


def _attention(mixer: architecture.Attention, hidden: int) -> Parts:
    heads, kv_heads, dim = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    out = heads * mixer.v_head_dim
    rows = (heads + kv_heads) * dim + kv_heads * mixer.v_head_dim + (out if mixer.output_gate else 0)
    normed = (heads, kv_heads) if mixer.qk_norm_width == "all_heads" else (1, 1)
    return {
        "qkv": WeightPart((rows, hidden), rank=mixer.qkv_rank),
        "out": WeightPart((hidden, out), "out", "matrix", rank=mixer.out_rank),
        "qkv_bias": WeightPart((rows,), "qkv", "bias", mixer.qkv_bias),
        "out_bias": WeightPart((hidden,), "out", "bias", mixer.out_bias),
        "q_norm": WeightPart((normed[0] * dim,), "q_norm", "norm", mixer.qk_norm),
        "k_norm": WeightPart((normed[1] * dim,), "k_norm", "norm", mixer.qk_norm),
        "sinks": WeightPart((heads,), "attention", "sinks", mixer.sinks),
    }


def _latent(mixer: architecture.LatentAttention, hidden: int) -> Parts:
    heads, nope, rank, thin = mixer.num_heads, mixer.qk_nope_head_dim, mixer.kv_lora_rank, mixer.q_lora_rank
    return {
        "q_down": WeightPart((thin or 0, hidden), "q_down", "matrix", thin is not None),
        "q_norm": WeightPart((thin or 0,), "q_down_norm", "norm", thin is not None),
        "q_up": WeightPart((heads * (nope + mixer.qk_rope_head_dim), thin or hidden), "q_up", "matrix"),
        "kv_down": WeightPart((rank + mixer.qk_rope_head_dim, hidden), "kv_down", "matrix"),
        "kv_norm": WeightPart((rank,), "kv_norm", "norm"),
        "keys_NPR": WeightPart((heads, nope, rank)),
        "values_NVR": WeightPart((heads, mixer.v_head_dim, rank)),
        "out": WeightPart((hidden, heads * mixer.v_head_dim), "out", "matrix"),
    }


def _linear_attention(mixer: architecture.LinearAttention, hidden: int) -> Parts:
    kv_heads, out = mixer.num_kv_heads, mixer.num_heads * mixer.v_head_dim
    rows = (mixer.num_heads + kv_heads) * mixer.head_dim + kv_heads * mixer.v_head_dim
    kind, columns = ("features", mixer.head_dim) if mixer.kind == "performer" else ("weight", mixer.size)
    return {
        "projection_KRD": WeightPart((kv_heads, mixer.size, columns), kind=kind),
        "qkv": WeightPart((rows, hidden)),
        "out": WeightPart((hidden, out)),
        "qkv_bias": WeightPart((rows,), "qkv", "bias", mixer.qkv_bias),
        "out_bias": WeightPart((hidden,), "out", "bias", mixer.out_bias),
    }


def _mamba(mixer: architecture.Mamba, hidden: int) -> Parts:
    heads, inner = mixer.num_heads, mixer.num_heads * mixer.head_dim
    channels = inner + 2 * mixer.num_groups * mixer.state_size
    rows = inner + channels + heads
    return {
        "input": WeightPart((rows, hidden), "scan_input"),
        "input_bias": WeightPart((rows,), "scan_input", "bias", mixer.proj_bias),
        "conv": WeightPart((channels, mixer.conv_kernel), "scan_conv"),
        "conv_bias": WeightPart((channels,), "scan_conv", "bias", mixer.conv_bias),
        "a_log": WeightPart((heads,), "scan", "A_log"),
        "skip": WeightPart((heads,), "scan", "D"),
        "dt_bias": WeightPart((heads,), "scan", "dt_bias"),
        "norm": WeightPart((inner,), "scan_norm"),
        "out": WeightPart((hidden, inner), "scan_out"),
        "out_bias": WeightPart((hidden,), "scan_out", "bias", mixer.proj_bias),
    }


def _delta_net(mixer: architecture.GatedDeltaNet, hidden: int) -> Parts:
    heads, values = mixer.num_value_heads, mixer.num_value_heads * mixer.value_head_dim
    channels = 2 * mixer.num_key_heads * mixer.key_head_dim + values
    return {
        "input": WeightPart((channels + values + 2 * heads, hidden)),
        "conv": WeightPart((channels, mixer.conv_kernel), "scan_conv"),
        "a_log": WeightPart((heads,), "scan", "A_log"),
        "dt_bias": WeightPart((heads,), "scan", "dt_bias"),
        "norm": WeightPart((mixer.value_head_dim,), "scan_norm"),
        "out": WeightPart((hidden, values), "scan_out"),
    }


# Kind of mixer -> its weights, and their parts by field, of (mixer, hidden size).
MIXER_PARTS: Mapping[type[Mixer], tuple[Callable[..., weights.MixerWeights], Callable[[Any, int], Parts]]] = {
    architecture.Attention: (weights.AttentionWeights, _attention),
    architecture.GatedDeltaNet: (weights.DeltaWeights, _delta_net),
    architecture.LatentAttention: (weights.LatentWeights, _latent),
    architecture.LinearAttention: (weights.LinearAttentionWeights, _linear_attention),
    architecture.Mamba: (weights.MambaWeights, _mamba),
}


def dense_parts(ffn: architecture.DenseFFN, hidden: int) -> Parts:
    rows = 2 * ffn.intermediate_size if ffn.gated else ffn.intermediate_size
    return {
        "up": WeightPart((rows, hidden), "gate_up", "matrix", rank=ffn.up_rank),
        "down": WeightPart((hidden, ffn.intermediate_size), "down", "matrix", rank=ffn.down_rank),
        "up_bias": WeightPart((rows,), "gate_up", "bias", ffn.bias),
        "down_bias": WeightPart((hidden,), "down", "bias", ffn.bias),
    }


def expert_parts(ffn: architecture.MoEFFN, hidden: int) -> Parts:
    """Parts of `MoEWeights`, without the shared experts'."""
    experts, width = ffn.num_experts, ffn.intermediate_size
    rows = 2 * width if ffn.gated else width
    chooses = "e_score_correction_bias" if ffn.routing.bias_chooses else "bias"
    has_gate = bool(ffn.shared_intermediate_size and ffn.shared_gate)
    return {
        "router": WeightPart((experts, hidden), "router"),
        "up": WeightPart((experts, rows, hidden), "experts"),
        "down": WeightPart((experts, hidden, width), "experts"),
        "shared_gate": WeightPart((1, hidden), "shared_router", is_there=has_gate),
        "router_bias": WeightPart((experts,), "router", chooses, ffn.router_bias),
        "up_bias": WeightPart((experts, rows), "experts", "gate_up_proj_bias", ffn.bias),
        "down_bias": WeightPart((experts, hidden), "experts", "down_proj_bias", ffn.bias),
    }


def shared_parts(ffn: architecture.MoEFFN, hidden: int) -> Parts:
    width = ffn.shared_intermediate_size
    return {
        "up": WeightPart((2 * width if ffn.gated else width, hidden)),
        "down": WeightPart((hidden, width), "shared_down", "matrix"),
    }
