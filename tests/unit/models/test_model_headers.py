"""Headers of weights files, written here byte by byte: the same model as from its config.json."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from perfmodel.errors import SpecError
from perfmodel.models import load_model
from perfmodel.models.architecture import Attention, LatentAttention, MoEFFN
from perfmodel.models.params import weight_bytes
from perfmodel.models.spec import ModelSpec

GGUF_TYPES = {"u32": (4, "<I"), "f32": (6, "<f"), "bool": (7, "<?")}


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    if isinstance(value, list) and value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(gguf_string(item) for item in value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 4, len(value)) + struct.pack(f"<{len(value)}I", *value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<II", 4, value)


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], int]]) -> Path:
    body = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        body += gguf_string(key) + gguf_value(value)
    for name, (shape, kind) in tensors.items():
        body += gguf_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, 0)
    path.write_bytes(body)
    return path


LLAMA_META: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "Tiny Llama",
    "llama.block_count": 8,
    "llama.context_length": 4096,
    "llama.embedding_length": 512,
    "llama.feed_forward_length": 1408,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
}
Q4_K, Q8_0, BF16 = 12, 8, 30
LLAMA_TENSORS = {
    "token_embd.weight": ((512, 8192), BF16),
    "output.weight": ((512, 8192), BF16),
    "blk.0.attn_q.weight": ((512, 512), BF16),
    "blk.0.ffn_down.weight": ((1408, 512), BF16),
}


def facts(model: ModelSpec) -> tuple[Any, ...]:
    return model.layers, model.vocab_size, model.hidden_size, model.tie_word_embeddings, model.dtype


def test_a_gguf_header_is_the_same_model_as_its_card(tmp_path: Path) -> None:
    model = load_model(write_gguf(tmp_path / "tiny.gguf", LLAMA_META, LLAMA_TENSORS))
    assert facts(model) == facts(load_model("tiny-llama"))
    assert model.name == "tiny-llama"
    assert model.quantization.weights is None


def test_a_gguf_in_blocks_says_how_many_bits(tmp_path: Path) -> None:
    tensors = LLAMA_TENSORS | {
        "blk.0.attn_q.weight": ((512, 512), Q8_0),
        "blk.0.ffn_up.weight": ((512, 1408), BF16),
        "blk.0.ffn_down.weight": ((1408, 512), Q4_K),
        "blk.0.ffn_gate.weight": ((512, 1408), Q4_K),
    }
    del tensors["output.weight"]
    model = load_model(write_gguf(tmp_path / "tiny.gguf", LLAMA_META, tensors))
    assert model.quantization.weights == "q4_k"
    assert model.tie_word_embeddings
    assert dict(model.quantization.bits) == {"attention": 8.5, "dense_ffn": (2 * 4.5 + 16) / 3}
    assert {"embedding", "lm_head"} <= model.quantization.kept  # a table of words in BF16


def test_the_format_of_a_file_is_that_of_most_weights_not_most_tensors(tmp_path: Path) -> None:
    small = {f"blk.0.attn_{name}.weight": ((512, 512), Q8_0) for name in ("q", "k", "v", "output")}
    large = {f"blk.0.ffn_{name}.weight": ((512, 1408), Q4_K) for name in ("gate", "up", "down")}
    model = load_model(write_gguf(tmp_path / "tiny.gguf", LLAMA_META, LLAMA_TENSORS | small | large))
    assert model.quantization.weights == "q4_k"


def test_a_table_of_words_in_blocks_is_counted_so(tmp_path: Path) -> None:
    tensors = LLAMA_TENSORS | dict.fromkeys(("token_embd.weight", "output.weight"), ((512, 8192), Q8_0))
    tensors |= {f"blk.0.ffn_{name}.weight": ((512, 1408), Q4_K) for name in ("gate", "up", "down")}
    model = load_model(write_gguf(tmp_path / "tiny.gguf", LLAMA_META, tensors))
    assert weight_bytes(model)["embedding"] == weight_bytes(model)["lm_head"] == 512 * 8192 * 34 / 32


def test_a_gguf_of_deepseek_has_latent_attention_and_experts(tmp_path: Path) -> None:
    arch = "deepseek2"
    below = {
        "block_count": 27,
        "context_length": 163840,
        "embedding_length": 2048,
        "feed_forward_length": 10944,
        "attention.head_count": 16,
        "attention.head_count_kv": 1,
        "attention.key_length": 576,
        "attention.value_length": 512,
        "attention.key_length_mla": 192,
        "attention.value_length_mla": 128,
        "attention.kv_lora_rank": 512,
        "rope.dimension_count": 64,
        "leading_dense_block_count": 1,
        "expert_count": 64,
        "expert_used_count": 6,
        "expert_shared_count": 2,
        "expert_feed_forward_length": 1408,
        "vocab_size": 102400,
    }
    meta = {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in below.items()}}
    model = load_model(write_gguf(tmp_path / "lite.gguf", meta, {}))
    assert model.layers == load_model("deepseek-v2-lite").layers
    assert isinstance(model.layers[1][0].mixer, LatentAttention)
    assert isinstance(model.layers[1][0].ffn, MoEFFN)


def test_lists_with_one_entry_per_layer_are_read_where_they_agree(tmp_path: Path) -> None:
    same = LLAMA_META | {"llama.attention.head_count_kv": [2] * 8}
    assert load_model(write_gguf(tmp_path / "a.gguf", same, LLAMA_TENSORS)).layers == load_model("tiny-llama").layers
    other = LLAMA_META | {"llama.attention.head_count_kv": [2, 4] * 4}
    with pytest.raises(SpecError, match=r"head_count_kv differs between layers"):
        load_model(write_gguf(tmp_path / "b.gguf", other, LLAMA_TENSORS))


@pytest.mark.parametrize("depth", [1, 2000])
def test_nested_lists_are_rejected(tmp_path: Path, depth: int) -> None:
    """llama.cpp does not read them either; Python would recurse to the depth in the file."""
    path = write_gguf(tmp_path / "x.gguf", {**LLAMA_META, "last": 1}, {})
    one = gguf_value(1)
    nested = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 1) + one[4:]
    path.write_bytes(path.read_bytes().removesuffix(one) + nested)
    with pytest.raises(SpecError, match=r"x\.gguf: the GGUF header is cut off or damaged"):
        load_model(path)


def test_an_empty_tensor_is_rejected_and_a_scalar_has_one_element(tmp_path: Path) -> None:
    """ggml takes the product of the dimensions, which is 1 for a scalar."""
    empty = LLAMA_TENSORS | {"blk.0.attn_q.weight": ((0, 4096), 12)}
    with pytest.raises(
        SpecError, match=r"tensor 'blk.0.attn_q.weight': got the shape \(0, 4096\); expected at least one"
    ):
        load_model(write_gguf(tmp_path / "x.gguf", LLAMA_META, empty))
    scalar = LLAMA_TENSORS | {"blk.0.attn_q.scale": ((), 0)}
    plain = load_model(write_gguf(tmp_path / "a.gguf", LLAMA_META, LLAMA_TENSORS))
    assert load_model(write_gguf(tmp_path / "b.gguf", LLAMA_META, scalar)).layers == plain.layers
    words = LLAMA_TENSORS | {"token_embd.weight": ((), 0)}
    assert load_model(write_gguf(tmp_path / "c.gguf", LLAMA_META, words)).vocab_size == 1


def test_damaged_ggufs_are_one_sentence(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", LLAMA_META, LLAMA_TENSORS)
    whole = path.read_bytes()
    for cut in range(4, len(whole), 37):
        path.write_bytes(whole[:cut])
        with pytest.raises(SpecError, match=r"x\.gguf: the GGUF header is cut off"):
            load_model(path)
    path.write_bytes(b"PK\x03\x04" + whole)
    with pytest.raises(SpecError, match="not a GGUF file"):
        load_model(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60))
    with pytest.raises(SpecError, match="cut off or damaged"):
        load_model(path)


def safetensors(tensors: dict[str, tuple[int, ...]], dtype: str = "BF16") -> bytes:
    header = {name: {"dtype": dtype, "shape": list(shape), "data_offsets": [0, 0]} for name, shape in tensors.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return struct.pack("<Q", len(text)) + text


def llama_tensors(num_layers: int = 8) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (8192, 512), "lm_head.weight": (8192, 512)}
    for index in range(num_layers):
        prefix = f"model.layers.{index}"
        tensors |= {
            f"{prefix}.self_attn.q_proj.weight": (512, 512),
            f"{prefix}.self_attn.k_proj.weight": (128, 512),
            f"{prefix}.self_attn.v_proj.weight": (128, 512),
            f"{prefix}.self_attn.o_proj.weight": (512, 512),
            f"{prefix}.mlp.gate_proj.weight": (1408, 512),
            f"{prefix}.self_attn.q_norm.weight": (64,),
        }
    return tensors


def test_shapes_alone_tell_a_llama_like_model(tmp_path: Path) -> None:
    path = tmp_path / "tiny.safetensors"
    path.write_bytes(safetensors(llama_tensors()))
    model = load_model(path)
    mixer = model.layers[0][0].mixer
    assert isinstance(mixer, Attention)
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.qk_norm) == (8, 2, 64, True)
    assert (model.num_layers, model.vocab_size, model.hidden_size, model.dtype) == (8, 8192, 512, "bf16")
    assert not model.tie_word_embeddings
    assert "assumed" in model.source


def test_an_index_gathers_its_shards(tmp_path: Path) -> None:
    tensors = llama_tensors()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        (tmp_path / file).write_bytes(safetensors({name: tensors[name] for name in part}))
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert load_model(index).num_layers == 8
    assert load_model(tmp_path / "model-00001-of-00002.safetensors").layers == load_model(index).layers


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 3, None])
def test_an_index_names_files_beside_it_alone(tmp_path: Path, name: Any) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": name}}))
    with pytest.raises(SpecError, match=r"weight_map: got .* expected the name of a file beside it"):
        load_model(index)


def test_a_config_beside_the_file_has_the_say(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors(llama_tensors()))
    config = {
        "model_type": "mixtral",
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 704,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 8192,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(tmp_path / "model.safetensors").layers == load_model("tiny-moe").layers


def test_shapes_that_do_not_tell_enough_ask_for_the_config(tmp_path: Path) -> None:
    path = tmp_path / "moe.safetensors"
    path.write_bytes(safetensors({"model.embed_tokens.weight": (10, 4), "model.layers.0.mlp.experts.0.w1": (4, 4)}))
    with pytest.raises(SpecError, match=r"config\.json beside it"):
        load_model(path)
    path.write_bytes(b"\x10")
    with pytest.raises(SpecError, match="cut off or damaged"):
        load_model(path)
    path.write_bytes(struct.pack("<Q", 1 << 50))
    with pytest.raises(SpecError, match="not a safetensors file"):
        load_model(path)


@pytest.mark.parametrize("entry", [3, None, {}, {"dtype": "BF16", "shape": 0.5}, {"dtype": "BF16", "shape": [0, 512]}])
def test_a_tensor_without_a_shape_is_refused(tmp_path: Path, entry: Any) -> None:
    header = {"model.embed_tokens.weight": {"dtype": "BF16", "shape": [8, 8]}, "model.layers.0.x": entry}
    text = json.dumps(header).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(SpecError, match=r"tensor model.layers.0.x: has no dtype and shape"):
        load_model(str(path))
