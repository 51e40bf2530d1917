"""Metrics of a step that say the same thing twice: rates are counts over the step's time."""

import pytest

from perfmodel.cost import step_costs
from perfmodel.ops import decode_shape
from perfmodel.planning.sweeps.metrics import step_metrics
from perfmodel.specs import load_scenario


def test_a_steps_rates_are_what_it_does_over_the_time_that_it_takes() -> None:
    """64 sequences decode on an A100 of 312 TFLOP/s and 2,039 GB/s, a token each: mfu and mbu are the shares of these
    that the step's FLOPs and bytes reach, and the roofline is the least time, the device's less than the step's."""
    scenario = load_scenario("llama-3.1-8b-a100")
    shape = decode_shape(64, 1000)
    found = step_metrics(scenario, step_costs(scenario).estimate(shape), shape)
    assert found["tokens_per_s"] == pytest.approx(64 / (found["step_ms"] / 1e3))
    assert found["tokens_per_s_per_user"] == pytest.approx(1e3 / found["step_ms"])
    assert found["mfu"] == pytest.approx(found["tflops"] / 312, rel=0.01)  # vector units count by their own peak
    assert found["mbu"] == pytest.approx(found["gb_per_s"] / 2039, rel=1e-3)
    assert 0 < found["roofline_ms"] < found["device_ms"] <= found["step_ms"]


def test_accepted_drafts_are_tokens_that_the_same_step_brings() -> None:
    scenario = load_scenario("llama-3.1-8b-a100")
    shape = decode_shape(8, 1000, queries=4)
    estimate = step_costs(scenario).estimate(shape)
    plain, drafted = (step_metrics(scenario, estimate, shape, tokens) for tokens in (1.0, 2.5))
    assert drafted["tokens_per_s_per_user"] == pytest.approx(2.5 * plain["tokens_per_s_per_user"])
    assert (drafted["tokens_per_s"] - plain["tokens_per_s"]) * plain["step_ms"] / 1e3 == pytest.approx(8 * 1.5)
