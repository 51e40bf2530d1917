"""llama.cpp's file types: blocks as its own package has them, files as large as its tool says."""

import pytest

from perfmodel.errors import SpecError
from perfmodel.models.params import weight_bytes
from perfmodel.models.weights.gguf import GGML_BLOCKS, GGUF_MIXES, tensor_formats
from perfmodel.ops.formats import served_model
from perfmodel.specs import EngineSpec, load_model

# What llama.cpp's `quantize` (README and --help, 2023-2024) lists as sizes of Llama-2-7B, in GiB.
LLAMA_2_7B_GIB = {
    "q4_0": 3.56,
    "q3_k_s": 2.75,
    "q3_k_m": 3.07,
    "q3_k_l": 3.35,
    "q4_k_s": 3.59,
    "q4_k_m": 3.80,
    "q5_k_s": 4.33,
    "q5_k_m": 4.45,
    "q6_k": 5.15,
    "q8_0": 6.70,
}


def served(name, quantization):
    return served_model(load_model(name), EngineSpec(quantization=quantization))


def test_blocks_are_those_of_the_gguf_package():
    gguf = pytest.importorskip("gguf", reason="compares with the block sizes of the package gguf")
    for number, sizes in GGML_BLOCKS.items():
        kind = gguf.GGMLQuantizationType(number)
        assert sizes == (kind.name.lower(), *gguf.GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize(("quantization", "gib"), LLAMA_2_7B_GIB.items())
def test_files_of_llama_2_7b_are_as_large_as_listed(quantization, gib):
    assert sum(weight_bytes(served("llama-2-7b", quantization)).values()) / 2**30 == pytest.approx(gib, rel=0.015)


@pytest.mark.parametrize("quantization", GGUF_MIXES)
def test_every_type_serves_any_card_in_fewer_bytes_than_16_bits(quantization):
    for name in ("llama-3.1-8b", "mixtral-8x7b", "deepseek-v2-lite", "smollm2-135m"):
        plain, small = load_model(name), served(name, quantization)
        assert sum(weight_bytes(small).values()) < 0.6 * sum(weight_bytes(plain).values())


def test_which_layers_of_q4_k_m_have_six_bits():
    """llama.cpp's log of Llama-2-7B: `blk.N.attn_v` and `blk.N.ffn_down` in Q6_K for the first and last four of 32
    layers and 6, 9, ..., 27; all other tensors of layers in Q4_K."""
    formats = tensor_formats(load_model("llama-2-7b"), "q4_k_m")
    q6_layers = [*range(4), *range(6, 28, 3), *range(28, 32)]
    for tensor in ("v", "down"):
        assert [i for i, layer in enumerate(formats) if layer[tensor] == "q6_k"] == q6_layers
    assert {layer[tensor] for layer in formats for tensor in ("qk", "out", "up")} == {"q4_k"}


def test_names_are_told_in_any_case_and_a_misspelt_one_has_a_neighbour():
    assert served("llama-2-7b", "Q4_K_M") == served("llama-2-7b", "q4_k_m")
    with pytest.raises(SpecError, match="q4_k_m"):
        served("llama-2-7b", "q4_k_n")


def test_smoothquant_has_its_scales_beforehand_and_dynamic_int8_does_not():
    smooth, dynamic = (served("llama-2-7b", name).quantization for name in ("smoothquant", "int8"))
    assert smooth.inputs_come_quantized
    assert not dynamic.inputs_come_quantized
    assert (smooth.weights, smooth.activations) == (dynamic.weights, dynamic.activations)


def test_ternary_and_binary_weights_are_counted_by_their_information():
    plain = weight_bytes(load_model("llama-2-7b"))["dense_ffn"]
    assert weight_bytes(served("llama-2-7b", "ternary"))["dense_ffn"] == pytest.approx(plain * 1.58 / 16)
    assert weight_bytes(served("llama-2-7b", "binary"))["dense_ffn"] == pytest.approx(plain / 16)
