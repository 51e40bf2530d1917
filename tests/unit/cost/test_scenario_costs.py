"""Whoever predicts a step predicts the same: `explain` and the simulator share one set-up."""

from typing import get_args

import pytest

from perfmodel.cost import EngineProfile, HostFit, step_costs
from perfmodel.errors import PerfmodelError
from perfmodel.models.spec import SamplingMethod
from perfmodel.ops import StepGraph
from perfmodel.ops.elementwise import BYTES_PER_LOGIT, sample
from perfmodel.ops.work import decode_shape
from perfmodel.planning.typical_step import estimate_choice
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario

ONE_REQUEST = [
    "traffic.num_requests=1",
    "traffic.input_tokens={distribution: fixed, value: 1000}",
    "traffic.output_tokens={distribution: fixed, value: 2}",
]


def test_explain_times_a_step_as_the_simulator_does() -> None:
    """A lone request's steps are a prefill of its prompt, and a decode with one answered token beside the prompt."""
    scenario = load_scenario("llama-3.1-8b-a100", ONE_REQUEST)
    steps = simulate(scenario, keep_steps=True).steps
    assert steps is not None
    durations = (steps.end_s - steps.start_s).tolist()
    explained = [estimate_choice(scenario, prefill=1000), estimate_choice(scenario, batch=1, context=1001)]
    assert durations == pytest.approx([report.estimate.duration_s for report in explained], rel=2e-3)


def test_the_engines_profile_counts() -> None:
    scenario = load_scenario("llama-3.1-8b-a100", ONE_REQUEST)
    profile = EngineProfile(engine="vllm", host=HostFit(serial_step_s=1.0), sampling_bytes_per_logit=123.0)
    costs = step_costs(scenario, profile=profile)
    assert costs.calibration.host.serial_step_s == 1.0
    greedy = step_costs(load_scenario("llama-3.1-8b-a100", ["sampling.method=greedy"]), profile=profile)

    def sampled(graph: StepGraph) -> float:
        work = next(node for node in graph.nodes if node.name == "sample").work(decode_shape(1, 1))
        return work.hbm_bytes / 128256

    assert sampled(costs.graph) == 123.0
    assert sampled(greedy.graph) == BYTES_PER_LOGIT["greedy"]


def test_methods_that_cannot_be_costed_are_refused() -> None:
    for method in get_args(SamplingMethod):
        assert load_scenario("llama-3.1-8b-a100", [f"sampling.method={method}"]).sampling.method == method
        assert sample(1, 1000, method).hbm_bytes == 1000 * BYTES_PER_LOGIT[method]
    with pytest.raises(PerfmodelError, match=r"sampling\.method: got 'beam'; expected"):
        load_scenario("llama-3.1-8b-a100", ["sampling.method=beam"])
    with pytest.raises(PerfmodelError, match="got 'beam'; expected greedy, random, top_k, top_p"):
        sample(1, 1000, "beam")


def test_explain_routes_to_experts_as_the_simulator_does() -> None:
    """A skewed routing loads the slowest rank more; `explain` must see it."""
    name, parallel = "qwen3-30b-a3b-h100", ["engine.tensor_parallel_size=4", "engine.enable_expert_parallel=true"]
    skew = "routing={distribution: power_law, alpha: 1.2}"
    even, skewed = (
        estimate_choice(load_scenario(name, [*parallel, *more]), prefill=8192).estimate.duration_s
        for more in ((), (skew,))
    )
    assert skewed > even
