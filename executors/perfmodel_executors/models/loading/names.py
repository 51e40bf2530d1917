"""Names of a decoder's tensors in Hugging Face's safetensors files and in GGUF files, and how they lie there.

Other than computed: rotated pairs, fused products, interleaved gates, experts in MXFP4.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from perfmodel.models.architecture import Rope

_E8M0_BIAS = 127


def rotated_rows(rows: Tensor, num_heads: int, rope: Rope | None) -> Tensor:
    """Rows of `num_heads` heads, [N * H, ...] (or of one, for a norm), as our rotation pairs them: (i, i + H/2).

    A file pairs (i, i + d/2) of the first d elements, or their neighbours; those that do not rotate fill the halves.
    """
    if rope is None:
        return rows
    dim = rows.shape[0] // num_heads
    order = _order(dim, rope)
    return rows if order is None else rows.view(num_heads, dim, *rows.shape[1:])[:, order].reshape(rows.shape)


def _order(head_dim: int, rope: Rope) -> Tensor | None:
    rotated = head_dim if rope.dim is None else rope.dim
    if rotated == head_dim and not rope.is_interleaved:
        return None
    places = torch.arange(rotated)
    first, second = (places[0::2], places[1::2]) if rope.is_interleaved else places.chunk(2)
    rest = torch.arange(rotated, head_dim).chunk(2) if rotated < head_dim else (places[:0], places[:0])
    return torch.cat((first, rest[0], second, rest[1]))


def split_pairs(rows: Tensor, dim: int) -> Tensor:
    """Gates and ups that lie in turn along `dim`, as [gates | ups]."""
    places = torch.arange(rows.shape[dim], device=rows.device)
    return rows.index_select(dim, torch.cat((places[0::2], places[1::2])))


def halved(q_and_gate: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Rows that hold each head's query and then its gate, as all queries and all gates (Qwen3-Next)."""
    heads = q_and_gate.view(num_heads, 2, -1, *q_and_gate.shape[1:])
    return heads[:, 0].reshape(-1, *q_and_gate.shape[1:]), heads[:, 1].reshape(-1, *q_and_gate.shape[1:])


class TensorName(NamedTuple):
    """Without `.weight` or `.bias`; {} is the layer's number, and {expert} an expert's.

    also: what other checkpoints call it, of which the first that is there goes before `hugging_face`
    """

    hugging_face: str
    gguf: str = ""
    also: tuple[str, ...] = ()


_ATTENTION, _MLP, _EXPERTS = "layers.{}.self_attn", "layers.{}.mlp", "layers.{}.mlp.experts.{expert}"
_MIXER, _BLOCK = "layers.{}.mixer", "layers.{}.block_sparse_moe"

NAMES: dict[str, TensorName] = {
    "embedding": TensorName("embed_tokens", "token_embd", ("embeddings",)),
    "final_norm": TensorName("norm", "output_norm", ("norm_f",)),
    "lm_head": TensorName("lm_head", "output"),
    "mixer_norm": TensorName("layers.{}.input_layernorm", "blk.{}.attn_norm", ("layers.{}.norm",)),
    "mixer_post_norm": TensorName("layers.{}.post_attention_layernorm"),
    "q": TensorName(f"{_ATTENTION}.q_proj", "blk.{}.attn_q", (f"{_MIXER}.q_proj",)),
    "k": TensorName(f"{_ATTENTION}.k_proj", "blk.{}.attn_k", (f"{_MIXER}.k_proj",)),
    "v": TensorName(f"{_ATTENTION}.v_proj", "blk.{}.attn_v", (f"{_MIXER}.v_proj",)),
    "qkv": TensorName(f"{_ATTENTION}.qkv_proj"),
    "q_norm": TensorName(f"{_ATTENTION}.q_norm", "blk.{}.attn_q_norm"),
    "k_norm": TensorName(f"{_ATTENTION}.k_norm", "blk.{}.attn_k_norm"),
    "out": TensorName(f"{_ATTENTION}.o_proj", "blk.{}.attn_output", (f"{_MIXER}.o_proj",)),
    "attention": TensorName(_ATTENTION),
    "q_down": TensorName(f"{_ATTENTION}.q_a_proj"),
    "q_down_norm": TensorName(f"{_ATTENTION}.q_a_layernorm"),
    "q_up": TensorName(f"{_ATTENTION}.q_b_proj", also=(f"{_ATTENTION}.q_proj",)),
    "kv_down": TensorName(f"{_ATTENTION}.kv_a_proj_with_mqa"),
    "kv_norm": TensorName(f"{_ATTENTION}.kv_a_layernorm"),
    "kv_up": TensorName(f"{_ATTENTION}.kv_b_proj"),
    "scan": TensorName(_MIXER, also=("layers.{}.linear_attn",)),
    "scan_input": TensorName(f"{_MIXER}.in_proj"),
    "scan_conv": TensorName(f"{_MIXER}.conv1d", also=("layers.{}.linear_attn.conv1d",)),
    "scan_norm": TensorName(f"{_MIXER}.norm", also=("layers.{}.linear_attn.norm",)),
    "scan_out": TensorName(f"{_MIXER}.out_proj", also=("layers.{}.linear_attn.out_proj",)),
    "delta_qkvz": TensorName("layers.{}.linear_attn.in_proj_qkvz"),
    "delta_ba": TensorName("layers.{}.linear_attn.in_proj_ba"),
    "delta_qkv": TensorName("layers.{}.linear_attn.in_proj_qkv"),
    "delta_z": TensorName("layers.{}.linear_attn.in_proj_z"),
    "delta_b": TensorName("layers.{}.linear_attn.in_proj_b"),
    "delta_a": TensorName("layers.{}.linear_attn.in_proj_a"),
    "ffn_norm": TensorName(
        "layers.{}.post_attention_layernorm",
        "blk.{}.ffn_norm",
        ("layers.{}.pre_feedforward_layernorm", "layers.{}.norm"),
    ),
    "ffn_post_norm": TensorName("layers.{}.post_feedforward_layernorm"),
    "gate": TensorName(f"{_MLP}.gate_proj", "blk.{}.ffn_gate"),
    "up": TensorName(f"{_MLP}.up_proj", "blk.{}.ffn_up", (f"{_MIXER}.up_proj",)),
    "gate_up": TensorName(f"{_MLP}.gate_up_proj"),
    "down": TensorName(f"{_MLP}.down_proj", "blk.{}.ffn_down", (f"{_MIXER}.down_proj",)),
    "router": TensorName(
        f"{_MLP}.gate", "blk.{}.ffn_gate_inp", (f"{_BLOCK}.gate", _BLOCK, f"{_MLP}.router", f"{_MIXER}.gate")
    ),
    "expert_gate": TensorName(f"{_EXPERTS}.gate_proj", also=(f"{_BLOCK}.experts.{{expert}}.w1",)),
    "expert_up": TensorName(
        f"{_EXPERTS}.up_proj", also=(f"{_BLOCK}.experts.{{expert}}.w3", f"{_MIXER}.experts.{{expert}}.up_proj")
    ),
    "expert_down": TensorName(
        f"{_EXPERTS}.down_proj", also=(f"{_BLOCK}.experts.{{expert}}.w2", f"{_MIXER}.experts.{{expert}}.down_proj")
    ),
    "experts": TensorName(f"{_MLP}.experts"),
    "shared_router": TensorName(f"{_MLP}.shared_expert_gate"),
    "shared_gate": TensorName(f"{_MLP}.shared_experts.gate_proj", also=(f"{_MLP}.shared_expert.gate_proj",)),
    "shared_up": TensorName(
        f"{_MLP}.shared_experts.up_proj",
        also=(f"{_MLP}.shared_expert.up_proj", f"{_MIXER}.shared_experts.up_proj"),
    ),
    "shared_down": TensorName(
        f"{_MLP}.shared_experts.down_proj",
        also=(f"{_MLP}.shared_expert.down_proj", f"{_MIXER}.shared_experts.down_proj"),
    ),
}
