"""What stands beside a simulated answer."""

from types import SimpleNamespace

import numpy as np

from perfmodel import load_scenario
from perfmodel.sim.records.columns import RequestColumns
from perfmodel.sim.records.result import eager_notes, run_notes


def test_eager_launches_dominate_short_steps_and_are_hidden_in_long_ones() -> None:
    scenario = load_scenario("llama-3.1-8b-a100", ("engine.enforce_eager=true",))
    (short,), (long,) = eager_notes(scenario, 1e-4), eager_notes(scenario, 1.0)
    assert "that is what decode steps take here (0.1 ms on average)" in short
    assert "costs little or nothing" in long
    assert "(here 1000.0 ms on average)" in long
    assert not eager_notes(load_scenario("llama-3.1-8b-a100"), 1e-4)


def test_mean_tokens_per_step_count_computed_prompt_and_output_tokens() -> None:
    """3 x (1,000 - 400 + 200) tokens in 24 steps on 2 ranks: 100 per step and rank, 200 at the experts."""
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
