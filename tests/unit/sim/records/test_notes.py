"""What stands beside a simulated answer."""

import pytest

from perfmodel import load_scenario, simulate


@pytest.mark.parametrize(("model", "is_said"), [("qwen2.5-vl-7b", True), ("tiny-llama", False)])
def test_a_model_with_an_encoder_is_said_to_be_served_text(model: str, is_said: bool) -> None:
    changes = [f"model={model}", "engine.max_model_len=2048", "traffic.num_requests=3"]
    notes = simulate(load_scenario("llama-3.1-8b-a100", changes)).notes
    assert any(f"{model} is served text" in note and "is not modelled" in note for note in notes) == is_said
