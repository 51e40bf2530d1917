"""Names of a decoder's tensors in Hugging Face's safetensors files and in GGUF files, and how they lie there. Other
than computed: rotated pairs, fused products, interleaved gates, experts in MXFP4."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from perfmodel.models.architecture import Rope


def rotated_rows(rows: Tensor, num_heads: int, rope: Rope | None) -> Tensor:
    """Rows of `num_heads` heads, [N * H, ...] (or of one, for a norm), as our rotation pairs them: (i, i + H/2). A file
    pairs (i, i + d/2) of the first d elements, or their neighbours; those that do not rotate fill the halves."""
    dim = rows.shape[0] // num_heads
    rotated = dim if rope is None or rope.dim is None else rope.dim
    if rope is None or (rotated == dim and not rope.is_interleaved):
        return rows
    places, rest = torch.arange(rotated), torch.arange(rotated, dim).tensor_split(2)
    first, second = (places[0::2], places[1::2]) if rope.is_interleaved else places.chunk(2)
    order = torch.cat((first, rest[0], second, rest[1]))
    return rows.view(num_heads, dim, *rows.shape[1:])[:, order].reshape(rows.shape)


def split_pairs(rows: Tensor, dim: int) -> Tensor:
    """Gates and ups that lie in turn along `dim`, as [gates | ups]."""
    places = torch.arange(rows.shape[dim], device=rows.device)
    return rows.index_select(dim, torch.cat((places[0::2], places[1::2])))


def halved(q_and_gate: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Rows that hold each head's query and then its gate, as all queries and all gates (Qwen3-Next)."""
    heads = q_and_gate.view(num_heads, 2, -1, *q_and_gate.shape[1:])
    return heads[:, 0].reshape(-1, *q_and_gate.shape[1:]), heads[:, 1].reshape(-1, *q_and_gate.shape[1:])


class TensorName(NamedTuple):
    """Without `.weight` or `.bias`; {} is the layer's number, and {expert} an expert's. also: what other checkpoints
    call it, of which the first that is there goes before `hugging_face`."""

    hugging_face: str
    gguf: str = ""
    also: tuple[str, ...] = ()


_ATTENTION, _MLP, _EXPERTS = "layers.{}.self_attn", "layers.{}.mlp", "layers.{}.mlp.experts.{expert}"
_MIXER, _BLOCK, _LINEAR = "layers.{}.mixer", "layers.{}.block_sparse_moe", "layers.{}.linear_attn"
_POST, _SHARED = "layers.{}.post_attention_layernorm", (f"{_MLP}.shared_expert", f"{_MIXER}.shared_experts")


def _in(block: str, name: str, gguf: str = "", *also: str) -> TensorName:
    return TensorName(f"{block}.{name}", gguf and f"blk.{{}}.{gguf}", also)


_attention, _mlp = partial(_in, _ATTENTION), partial(_in, _MLP)


def _expert(name: str, mixtral: str, *also: str) -> TensorName:
    return TensorName(f"{_EXPERTS}.{name}", also=(f"{_BLOCK}.experts.{{expert}}.{mixtral}", *also))


def _scan(name: str) -> TensorName:
    return TensorName(f"{_MIXER}.{name}", also=(f"{_LINEAR}.{name}",))


NAMES: dict[str, TensorName] = {
    "embedding": TensorName("embed_tokens", "token_embd", ("embeddings",)),
    "final_norm": TensorName("norm", "output_norm", ("norm_f",)),
    "lm_head": TensorName("lm_head", "output"),
    "mixer_norm": TensorName("layers.{}.input_layernorm", "blk.{}.attn_norm", ("layers.{}.norm",)),
    "mixer_post_norm": TensorName(_POST),
    "q": _attention("q_proj", "attn_q", f"{_MIXER}.q_proj"),
    "k": _attention("k_proj", "attn_k", f"{_MIXER}.k_proj"),
    "v": _attention("v_proj", "attn_v", f"{_MIXER}.v_proj"),
    "qkv": _attention("qkv_proj"),
    "q_norm": _attention("q_norm", "attn_q_norm"),
    "k_norm": _attention("k_norm", "attn_k_norm"),
    "out": _attention("o_proj", "attn_output", f"{_MIXER}.o_proj"),
    "attention": TensorName(_ATTENTION),
    "q_down": _attention("q_a_proj"),
    "q_down_norm": _attention("q_a_layernorm"),
    "q_up": _attention("q_b_proj", "", f"{_ATTENTION}.q_proj"),
    "kv_down": _attention("kv_a_proj_with_mqa"),
    "kv_norm": _attention("kv_a_layernorm"),
    "kv_up": _attention("kv_b_proj"),
    "scan": TensorName(_MIXER, also=(_LINEAR,)),
    "scan_input": TensorName(f"{_MIXER}.in_proj"),
    "scan_conv": _scan("conv1d"),
    "scan_norm": _scan("norm"),
    "scan_out": _scan("out_proj"),
    **{f"delta_{name}": TensorName(f"{_LINEAR}.in_proj_{name}") for name in ("qkvz", "ba", "qkv", "z", "b", "a")},
    "ffn_norm": TensorName(_POST, "blk.{}.ffn_norm", ("layers.{}.pre_feedforward_layernorm", "layers.{}.norm")),
    "ffn_post_norm": TensorName("layers.{}.post_feedforward_layernorm"),
    "gate": _mlp("gate_proj", "ffn_gate"),
    "up": _mlp("up_proj", "ffn_up", f"{_MIXER}.up_proj"),
    "gate_up": _mlp("gate_up_proj"),
    "down": _mlp("down_proj", "ffn_down", f"{_MIXER}.down_proj"),
    "router": _mlp("gate", "ffn_gate_inp", f"{_BLOCK}.gate", _BLOCK, f"{_MLP}.router", f"{_MIXER}.gate"),
    "expert_gate": _expert("gate_proj", "w1"),
    "expert_up": _expert("up_proj", "w3", f"{_MIXER}.experts.{{expert}}.up_proj"),
    "expert_down": _expert("down_proj", "w2", f"{_MIXER}.experts.{{expert}}.down_proj"),
    "experts": _mlp("experts"),
    "shared_router": _mlp("shared_expert_gate"),
    "shared_gate": _mlp("shared_experts.gate_proj", "", f"{_MLP}.shared_expert.gate_proj"),
    **{
        f"shared_{name}": _mlp(f"shared_experts.{name}_proj", "", *(f"{block}.{name}_proj" for block in _SHARED))
        for name in ("up", "down")
    },
}
