"""Names of checkpoints: those that share a card's shape, and those in another number format."""

import pytest

from perfmodel.specs import load_model


@pytest.mark.parametrize(
    ("asked", "card", "weights"),
    [
        ("nvidia/Llama-3.3-70B-Instruct-NVFP4", "llama-3.1-70b", "nvfp4"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "llama-3.1-70b", "fp8"),
        ("Qwen/Qwen3-32B-AWQ", "qwen3-32b", "int4"),
        ("llama-3.1-8b-fp8", "llama-3.1-8b", "fp8"),
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
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3-235b-a22b"),
        ("MiniMaxAI/MiniMax-M2.1", "minimax-m2.5"),
    ],
)
def test_siblings_of_one_shape_are_one_card(sibling, card):
    assert load_model(sibling).name == card
