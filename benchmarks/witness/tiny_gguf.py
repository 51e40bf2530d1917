"""A Llama of two layers with random weights as a GGUF file: steps of a millisecond, whose tokens nobody reads."""

__all__ = ["VOCABULARY", "write_tiny_gguf"]

from pathlib import Path

import gguf
import numpy as np

VOCABULARY = 4096
_WIDTH, _HEADS, _LAYERS, _INNER, _POSITIONS = 64, 2, 2, 128, 65536


def write_tiny_gguf(file: Path) -> None:
    """Write the model to `file`. Equal calls write equal bytes."""
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(_POSITIONS)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"w{number}" for number in range(VOCABULARY)])
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCABULARY)
    writer.add_token_merges(["w 1"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    for name, shape in _shapes():
        scale = 1.0 if name.endswith("norm.weight") else 0.05
        values = np.ones(shape) if name.endswith("norm.weight") else rng.normal(0, scale, shape)
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes() -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape, outputs first, of each tensor."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("token_embd.weight", (VOCABULARY, _WIDTH))]
    for layer in range(_LAYERS):
        square = [(f"blk.{layer}.attn_{part}.weight", (_WIDTH, _WIDTH)) for part in ("q", "k", "v", "output")]
        norms = [(f"blk.{layer}.{part}_norm.weight", (_WIDTH,)) for part in ("attn", "ffn")]
        wide = [(f"blk.{layer}.ffn_{part}.weight", (_INNER, _WIDTH)) for part in ("gate", "up")]
        shapes += [*square, *norms, *wide, (f"blk.{layer}.ffn_down.weight", (_WIDTH, _INNER))]
    return [*shapes, ("output_norm.weight", (_WIDTH,)), ("output.weight", (VOCABULARY, _WIDTH))]
