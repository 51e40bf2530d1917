"""What the tensors of Llama-like decoders are called: in Hugging Face's safetensors files, and in GGUF files."""

__all__ = ["NAMES", "TensorName"]

from typing import NamedTuple


class TensorName(NamedTuple):
    """Without `.weight` or `.bias`; {} is the layer's number."""

    hugging_face: str
    gguf: str


NAMES: dict[str, TensorName] = {
    "embedding": TensorName("embed_tokens", "token_embd"),
    "final_norm": TensorName("norm", "output_norm"),
    "lm_head": TensorName("lm_head", "output"),
    "mixer_norm": TensorName("layers.{}.input_layernorm", "blk.{}.attn_norm"),
    "q": TensorName("layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
    "k": TensorName("layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
    "v": TensorName("layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
    "q_norm": TensorName("layers.{}.self_attn.q_norm", "blk.{}.attn_q_norm"),
    "k_norm": TensorName("layers.{}.self_attn.k_norm", "blk.{}.attn_k_norm"),
    "out": TensorName("layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
    "ffn_norm": TensorName("layers.{}.post_attention_layernorm", "blk.{}.ffn_norm"),
    "gate": TensorName("layers.{}.mlp.gate_proj", "blk.{}.ffn_gate"),
    "up": TensorName("layers.{}.mlp.up_proj", "blk.{}.ffn_up"),
    "down": TensorName("layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
}
