"""What stands beside a simulated answer."""

from types import SimpleNamespace

import numpy as np
import pytest

from perfmodel import load_scenario, simulate
from perfmodel.sim.records.columns import RequestColumns
from perfmodel.sim.records.notes import eager_notes, run_notes


@pytest.mark.parametrize(("model", "is_said"), [("qwen2.5-vl-7b", True), ("tiny-llama", False)])
def test_a_model_with_an_encoder_is_said_to_be_served_text(model: str, is_said: bool) -> None:
    changes = [f"model={model}", "engine.max_model_len=2048", "traffic.num_requests=3"]
    notes = simulate(load_scenario("llama-3.1-8b-a100", changes)).notes
    assert any(f"{model} is served text" in note and "is not modelled" in note for note in notes) == is_said


def test_launches_without_graphs_are_the_steps_where_those_are_short_and_hidden_where_they_are_long() -> None:
    scenario = load_scenario("llama-3.1-8b-a100", ("engine.enforce_eager=true",))
    (short,), (long,) = eager_notes(scenario, 1e-4), eager_notes(scenario, 1.0)
    assert "that is what decode steps take here (0.1 ms on average)" in short
    assert "costs little or nothing" in long
    assert "(here 1000.0 ms on average)" in long
    assert not eager_notes(load_scenario("llama-3.1-8b-a100"), 1e-4)


def test_tokens_of_a_step_are_those_computed_of_prompts_and_answers_over_all_steps() -> None:
    """3 x (1,000 - 400 + 200) tokens in 24 steps of each of 2 ranks: 100 a step and rank, 200 where experts meet."""
    settings = (
        "model=tiny-moe",
        "engine.data_parallel_size=2",
        "engine.max_model_len=2048",
        "routing.capacity_factor=1",
    )
    scenario, zeros = load_scenario("llama-3.1-8b-a100", settings), np.zeros(3, np.int64)
    requests = RequestColumns(zeros, *[zeros + 0.0] * 4, zeros + 1000, zeros + 200, zeros + 400, zeros, zeros)
    used = SimpleNamespace(origin="calibrated", device="a device")
    (note,) = [note for note in run_notes(scenario, used, requests, 24) if "capacity_factor" in note]  # type: ignore[arg-type]
    assert "of 200 tokens, the mean of this run" in note
    dense = load_scenario("llama-3.1-8b-a100", ("routing.capacity_factor=1",))
    assert any("has no mixture of experts" in note for note in run_notes(dense, used, requests, 24))  # type: ignore[arg-type]
