"""Number formats: bytes per weight, checkpoints' settings, and an engine's `quantization` and `dtype` arguments."""

import time
from dataclasses import replace
from typing import Any

import pytest

from perfmodel.errors import SpecError
from perfmodel.files.catalog import data_dir
from perfmodel.models import load_model
from perfmodel.models.architecture import QuantizationSpec
from perfmodel.models.cards import load_card
from perfmodel.models.hf.config import model_from_config
from perfmodel.models.number_formats import bytes_per_weight, matmul_rate, with_dtype, with_quantization
from perfmodel.models.spec import COMPONENTS

ALWAYS = {"embedding", "lm_head", "router", "norms"}
MOE: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}


def read(settings: dict[str, Any]) -> QuantizationSpec:
    return model_from_config(MOE | {"quantization_config": settings}, "x").quantization


@pytest.mark.parametrize(
    ("format", "group_size", "group_rows", "expected"),
    [
        ("fp32", 0, 1, 4.0),
        ("bf16", 0, 1, 2.0),
        ("fp8", 0, 1, 1.0),
        ("fp8", 128, 128, 1.0 + 4 / 16384),  # one fp32 scale per 128 x 128 block
        ("int4", 128, 1, 0.5 + 2 / 128),  # one fp16 scale per 128 weights
        ("mxfp4", 32, 1, 0.53125),  # 4 bits and an 8-bit scale per 32
        ("nvfp4", 16, 1, 0.5625),  # 4 bits and an 8-bit scale per 16
        ("q4_k", 0, 1, 144 / 256),
    ],
)
def test_bytes_per_weight(format: str, group_size: int, group_rows: int, expected: float) -> None:
    assert bytes_per_weight(format, group_size, group_rows) == pytest.approx(expected)


def test_an_unknown_format_offers_the_nearest() -> None:
    with pytest.raises(SpecError, match="mxfp4"):
        bytes_per_weight("mxpf4")


@pytest.mark.parametrize(
    ("settings", "weights", "activations", "group"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", "fp8", (128, 128)),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8", "fp8", (0, 1)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4", None, (128, 1)),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8", None, (0, 1)),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, "int4", None, (64, 1)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", "nvfp4", (16, 1)),
        ({"quant_algo": "FP8", "producer": {"name": "modelopt"}}, "fp8", "fp8", (0, 1)),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4", None, (64, 1)),
    ],
)
def test_settings_of_checkpoints(
    settings: dict[str, Any], weights: str, activations: str | None, group: tuple[int, int]
) -> None:
    found = read(settings)
    assert (found.weights, found.activations) == (weights, activations)
    assert (found.group_size, found.group_rows) == group
    assert found.kept == ALWAYS


def test_mxfp4_is_a_format_of_experts_alone() -> None:
    """As Hugging Face's loader has it, whatever modules_to_not_convert says; gpt-oss names what stays beside them."""
    found = read({"quant_method": "mxfp4"})
    assert (found.weights, found.activations, found.group_size, found.group_rows) == ("mxfp4", None, 32, 1)
    assert found.kept == set(COMPONENTS) - {"experts"}
    assert load_model("gpt-oss-20b").quantization.kept <= found.kept
    dense = {name: value for name, value in MOE.items() if "expert" not in name} | {"model_type": "llama"}
    settings = {"quantization_config": {"quant_method": "mxfp4"}}
    assert model_from_config(dense | settings, "x").quantization.kept == ALWAYS


@pytest.mark.parametrize(
    ("weights", "inputs", "expected"),
    [
        ({"num_bits": 8, "type": "float", "strategy": "channel"}, {"num_bits": 8, "type": "float"}, ("fp8", "fp8", 0)),
        ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, None, ("int4", None, 32)),
        ({"num_bits": 8, "type": "int", "strategy": "channel"}, {"num_bits": 8, "type": "int"}, ("int8", "int8", 0)),
        (
            {"num_bits": 4, "type": "float", "group_size": 16},
            {"num_bits": 4, "type": "float", "group_size": 16},
            ("nvfp4", "nvfp4", 16),
        ),
        (
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
            {"num_bits": 8, "type": "float"},
            ("fp8", "fp8", 128),
        ),
    ],
)
def test_compressed_tensors_groups(
    weights: dict[str, Any], inputs: dict[str, Any] | None, expected: tuple[str, str | None, int]
) -> None:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    found = read({"quant_method": "compressed-tensors", "config_groups": {"group_0": group}})
    assert (found.weights, found.activations, found.group_size) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        *("(a+)+$", "(?:.*a){9}", "a*a*a*a*a*a*b", "x" * 501, "(a|aa)+b", ".?.?.?.?.?.?!", "(.|..)" * 40 + "!"),
        *("(?x)(a+) +$", "(a+)(?#[)+]$", r"[\][](a+)+[]]"),  # a flag, a comment and a class that hide a repeated group
    ],
)
def test_patterns_that_may_never_end_are_refused(pattern: str) -> None:
    """Python tries all ways to share a name out over nested repetitions: minutes for one module."""
    with pytest.raises(SpecError, match=r"got the pattern .* expected at most 500 characters, three repetitions"):
        read({"quant_method": "fp8", "ignore": [f"re:{pattern}"]})


@pytest.mark.parametrize(
    "entries", [["re:[a-z.]*[^!]*.*!"], [f"re:.*layers.{i}.*proj!" for i in range(99)], ["*a" * 400]]
)
def test_accepted_patterns_match_quickly(entries: list[str]) -> None:
    begun = time.process_time()
    assert read({"quant_method": "fp8", "ignore": entries}).kept == ALWAYS
    assert time.process_time() - begun < 2


def test_too_many_patterns_are_rejected() -> None:
    with pytest.raises(
        SpecError, match=r"got patterns of 101,000 characters .*expected at most 100,000: name the modules"
    ):
        read({"quant_method": "fp8", "ignore": [f"*{i:08}*" for i in range(10_100)]})


@pytest.mark.parametrize(
    ("ignored", "kept"),
    [
        (["lm_head", "re:.*self_attn.*"], {"attention"}),
        (["re:.*?self_attn.*?"], {"attention"}),
        (["lm_head", "model.layers.*.self_attn"], {"attention"}),
        ([f"language_model.model.layers.{i}.self_attn*" for i in range(6)], {"attention"}),
        (["model.layers.0.self_attn.q_proj"], set()),  # one layer of six
        (["gate", "e_score_correction_bias"], set()),
        (["model.layers.3.mlp.gate", "model.layers.0.input_layernorm"], set()),
        (["re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"], {"shared_experts", "dense_ffn"}),
        (["*.mlp.experts.*"], {"experts"}),
    ],
)
def test_ignored_modules_become_kept_components(ignored: list[str], kept: set[str]) -> None:
    assert read({"quant_method": "fp8", "ignore": ignored}).kept == ALWAYS | kept
    assert kept <= set(COMPONENTS)


def test_kv_cache_formats() -> None:
    fp8 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    assert read(fp8).kv_cache is None
    assert read(fp8 | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}).kv_cache == "fp8"
    assert read(fp8 | {"kv_cache_scheme": "FP8"}).kv_cache == "fp8"


@pytest.mark.parametrize(
    ("method", "weights", "activations"),
    [
        ("fp8", "fp8", "fp8"),
        ("int8", "int8", "int8"),
        ("w8a8", "int8", "int8"),
        ("awq", "int4", None),
        ("gptq", "int4", None),
        ("int4", "int4", None),
        ("w4a16", "int4", None),
        ("W4A16", "int4", None),
        ("mxfp4", "mxfp4", None),
        ("nvfp4", "nvfp4", "nvfp4"),
        ("none", None, None),
    ],
)
def test_an_engine_quantizes_a_plain_checkpoint(method: str, weights: str | None, activations: str | None) -> None:
    found = with_quantization(load_model("llama-3.1-8b"), method).quantization
    assert (found.weights, found.activations) == (weights, activations)
    assert found.kept >= ALWAYS


def test_four_bit_floats_keep_the_attention_of_a_mixture_of_experts() -> None:
    assert "attention" in with_quantization(load_model("deepseek-v3"), "nvfp4").quantization.kept
    assert "attention" not in with_quantization(load_model("llama-3.1-8b"), "nvfp4").quantization.kept


def test_nothing_asked_or_the_same_format_changes_nothing() -> None:
    model = load_model("deepseek-v3")
    assert with_quantization(model, None) is model
    assert with_quantization(model, "fp8") is model
    assert with_dtype(model, "auto") is model


def test_an_unknown_method_offers_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"got 'fp-9'.*fp8"):
        with_quantization(load_model("llama-3.1-8b"), "fp-9")


def test_dtype_of_the_engine() -> None:
    model = load_model("llama-3.1-8b")
    assert with_dtype(model, "float16").dtype == "fp16"
    with pytest.raises(SpecError, match="bfloat16"):
        with_dtype(model, "bfloat15")


def test_four_bit_floats_multiply_at_the_fp4_rate() -> None:
    assert [matmul_rate(name) for name in ("nvfp4", "mxfp4", "fp8", "bf16")] == ["fp4", "fp4", "fp8", "bf16"]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("FP8", ("fp8", "fp8", 0, 1)),
        ("FP8_PER_CHANNEL_PER_TOKEN", ("fp8", "fp8", 0, 1)),
        ("FP8_PB_WO", ("fp8", "fp8", 128, 128)),
        ("NVFP4", ("nvfp4", "nvfp4", 16, 1)),
        ("W4A8_NVFP4_FP8", ("nvfp4", "fp8", 16, 1)),
        ("W4A8_MXFP4_FP8", ("mxfp4", "fp8", 32, 1)),
        ("W4A16_AWQ", ("int4", None, 128, 1)),
        ("W4A8_AWQ", ("int4", "fp8", 128, 1)),
        ("W8A8_SQ_PER_CHANNEL", ("int8", "int8", 0, 1)),
        ("W8A16", ("int8", None, 0, 1)),
        ("MXFP8", ("mxfp8", "mxfp8", 32, 1)),
    ],
)
def test_modelopt_s_algorithms_by_their_names(algorithm: str, expected: tuple[str, str | None, int, int]) -> None:
    """modelopt/torch/export/model_config.py: SmoothQuant's is INT8, which has no such part in its name."""
    config = load_card(data_dir("models") / "tiny-llama.yaml").config
    found = model_from_config({**config, "quantization_config": {"quant_algo": algorithm}}, "x").quantization
    assert (found.weights, found.activations, found.group_size, found.group_rows) == expected


def test_an_algorithm_of_modelopt_s_that_is_not_known_is_named() -> None:
    config = load_card(data_dir("models") / "tiny-llama.yaml").config
    with pytest.raises(SpecError, match=r"quantization_config: .*quant_algo 'W2A2_NEW'; expected names with"):
        model_from_config({**config, "quantization_config": {"quant_algo": "W2A2_NEW"}}, "x")


def test_quantized_weights_leave_the_cache_in_its_format() -> None:
    cached = replace(QuantizationSpec(), kv_cache="int4", kv_group_size=64, kv_recent=((128, "bf16"),))
    model = replace(load_model("tiny-llama"), quantization=cached)
    quantization = with_quantization(model, "w4a16").quantization
    assert (quantization.weights, quantization.kv_cache, quantization.kv_group_size, quantization.kv_recent) == (
        "int4", "int4", 64, ((128, "bf16"),),
    )  # fmt: skip
