"""Metrics of a step that say the same thing twice: rates are counts over the step's time."""

import pytest

from perfmodel.cost import step_costs
from perfmodel.ops import decode_shape
from perfmodel.ops.formats import LinearFormat
from perfmodel.ops.linear import gemm
from perfmodel.planning.points import batch_shape, roofline_s, step_metrics
from perfmodel.planning.typical_step import StepSpec
from perfmodel.specs import load_hardware, load_scenario


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


def test_the_batch_of_a_step_holds_its_decodes_and_all_prompts() -> None:
    step = StepSpec(batch=4, context=1000, prefill=300, cached=50, prompts=3)
    shape = batch_shape(step, load_scenario("llama-3.1-8b-a100"))
    assert (shape.num_tokens, shape.num_samples, shape.num_decodes) == (4 + 3 * 300, 4 + 3, 4)
    assert (shape.prefills, shape.decode_context) == (((300, 50),) * 3, 4000)
    assert batch_shape(StepSpec(batch=4, context=1000), load_scenario("llama-3.1-8b-a100")).num_tokens == 4


@pytest.mark.parametrize(("rows", "bound_s"), [(1, 4096 * 4096 * 2 / 2.039e12), (65536, 2 * 65536 * 4096**2 / 312e12)])
def test_a_roofline_is_the_longer_of_compute_and_memory_time(rows: int, bound_s: float) -> None:
    """4,096 x 4,096 weights on an A100: one row is bound by memory, 65,536 rows by compute."""
    work = gemm("x", rows, 4096, 4096, LinearFormat("bf16", 2.0, 2.0, 2.0))
    assert roofline_s(work, load_hardware("a100-sxm-80gb")) == pytest.approx(bound_s, rel=1e-3)
