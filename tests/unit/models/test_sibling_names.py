"""Names of checkpoints: those that share a card's shape, and those in another number format."""

from pathlib import Path

import pytest

from perfmodel.specs import load_model

NAMES = (Path(__file__).parent / "hub_names.txt").read_text(encoding="utf-8").split()


@pytest.mark.parametrize(
    ("asked", "card", "weights"),
    [
        ("nvidia/Llama-3.3-70B-Instruct-NVFP4", "llama-3.1-70b", "nvfp4"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "llama-3.1-70b", "fp8"),
        ("Qwen/Qwen3-32B-AWQ", "qwen3-32b", "int4"),
        ("llama-3.1-8b-fp8", "llama-3.1-8b", "fp8"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "llama-3.1-8b", "int4"),
        ("RedHatAI/Llama-3.3-70B-Instruct-quantized.w8a8", "llama-3.1-70b", "int8"),
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", "llama-3.1-8b", "int4"),
        ("Qwen/Qwen2.5-32B-Instruct-GPTQ-Int8", "qwen2.5-32b", "int8"),
    ],
)
def test_a_number_format_at_the_end_of_a_name_is_that_of_the_weights(asked, card, weights):
    model, plain = load_model(asked), load_model(card)
    assert (model.name, model.quantization.weights) == (asked, weights)
    assert (model.layers, plain.quantization.weights) == (plain.layers, None)


def test_a_card_of_its_own_goes_before_the_format_in_its_name():
    assert load_model("nvidia/Qwen3-235B-A22B-NVFP4").name == "qwen3-235b-a22b-nvfp4"


@pytest.mark.parametrize(
    ("sibling", "card"),
    [
        ("moonshotai/Kimi-K2-Thinking", "kimi-k2.5"),
        ("nvidia/DeepSeek-R1-0528-NVFP4-v2", "deepseek-v3.1-nvfp4"),
        ("MiniMaxAI/MiniMax-M2.1", "minimax-m2.5"),
    ],
)
def test_siblings_of_one_shape_are_one_card(sibling, card):
    assert load_model(sibling).name == card


@pytest.mark.parametrize("name", NAMES)
def test_names_that_people_ask_for_resolve_without_a_network(name):
    """Instruct models, re-releases, siblings in other number formats."""
    assert load_model(name).num_layers > 0


def test_who_scales_fp8_in_blocks_says_so():
    assert load_model("Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8").quantization.group_rows == 128
    assert load_model("RedHatAI/Qwen3-32B-FP8-dynamic").quantization.group_rows == 1
