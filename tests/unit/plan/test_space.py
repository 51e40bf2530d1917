"""The space of a plan: nothing is lost, and what is ruled out is ruled out for its reason."""

from math import prod

import pytest

from perfmodel.cost import plan_memory
from perfmodel.errors import SpecError
from perfmodel.plan.candidates import Base, at_rate
from perfmodel.plan.space import enumerate_space
from perfmodel.specs import load_scenario
from perfmodel.specs.plan import PlanSpec
from perfmodel.specs.study_file import as_overrides

BASE = Base("llama-3.1-70b-h100-tp4")


def spec(**space: object) -> PlanSpec:
    small = {"tensor_parallel_size": (4,), "max_num_seqs": (64,), "max_num_batched_tokens": (8192,)}
    return PlanSpec.model_validate({"space": {**small, **space}})


def test_every_combination_is_a_candidate_or_has_a_reason() -> None:
    axes = {
        "hardware": ("a100-sxm-80gb", "h100-sxm-80gb"),
        "tensor_parallel_size": (1, 2, 4, 8),
        "quantization": (None, "fp8"),
        "max_num_seqs": (64, 4096),
        "max_num_batched_tokens": (2048, 8192),
        "disaggregation": ("none", "1:1"),
    }
    space = enumerate_space(BASE, spec(**axes))
    assert space.num_all == prod(len(values) for values in axes.values())
    assert all(count > 0 for count in space.ruled_out.values())


def test_a_candidate_fits_as_the_memory_plan_says() -> None:
    space = enumerate_space(BASE, spec(tensor_parallel_size=(1, 4)))
    assert [c.layout.scenario.engine.tensor_parallel_size for c in space.candidates] == [4]  # 140 GB of weights
    assert space.ruled_out == {"does not fit in memory": 1}
    assert "80.0 GB" in space.examples["does not fit in memory"]


@pytest.mark.parametrize(
    ("space", "reason"),
    [
        ({"tensor_parallel_size": (16,)}, "tensor parallelism beyond the link domain"),
        ({"tensor_parallel_size": (6,)}, "attention heads do not divide by tensor_parallel_size"),
        ({"tensor_parallel_size": (8,), "pipeline_parallel_size": (4,)}, "more devices than max_gpus"),
        ({"disaggregation": ("4:1",)}, "more devices than max_gpus"),
        ({"hardware": ("a100-sxm-80gb",), "quantization": ("fp8",)}, "no units for the number format"),
        ({"data_parallel_size": (2,)}, "data-parallel ranks of a dense model are replicas"),
        ({"enable_expert_parallel": (True,)}, "expert parallelism without experts to share out"),
        ({"max_num_seqs": (9000,)}, "max_num_batched_tokens below max_num_seqs"),
        (
            {"enable_chunked_prefill": (False,), "max_num_batched_tokens": (4096,)},
            "unchunked prompts of max_model_len exceed max_num_batched_tokens",
        ),
        ({"hardware": ("gaudi-3",)}, "no price known"),
    ],
)
def test_what_cannot_serve_is_ruled_out_for_its_reason(space: dict[str, object], reason: str) -> None:
    found = enumerate_space(BASE, spec(**space))
    assert found.candidates == ()
    assert found.ruled_out == {reason: 1}


def test_a_name_that_nobody_knows_is_a_mistake_and_not_a_reason() -> None:
    with pytest.raises(SpecError, match="h100-sxm"):
        enumerate_space(BASE, spec(hardware=("h100-smx-80gb",)))


def test_the_overrides_of_a_candidate_give_the_scenario_that_was_meant() -> None:
    """Read back, the text of a candidate has its engine, its pools, its traffic, and its memory plan."""
    found = enumerate_space(BASE, spec(quantization=("fp8",), disaggregation=("2:1",), max_num_seqs=(96,)))
    (candidate,) = found.candidates
    choices = {**candidate.choices(1), **at_rate(candidate.layout.scenario, 7.5, 40)}
    scenario = load_scenario(BASE.path, as_overrides(choices))
    assert [(pool.role, pool.replicas) for pool in scenario.pools] == [("prefill", 2), ("decode", 1)]
    assert scenario.num_devices == candidate.num_devices
    assert scenario.engine.max_num_seqs == 96
    assert (scenario.traffic.arrivals.rate, scenario.traffic.num_requests) == (7.5, 40)
    assert plan_memory(scenario.model, scenario.hardware, scenario.engine) == candidate.memory


def test_traffic_without_a_rate_becomes_a_poisson_stream() -> None:
    closed = load_scenario(BASE.path, ["traffic.arrivals={process: closed_loop, concurrency: 8}"])
    assert at_rate(closed, 2.0, 5)["traffic.arrivals"] == {"process": "poisson", "rate": 2.0}
    gamma = load_scenario(BASE.path, ["traffic.arrivals={process: gamma, rate: 1, cv: 2}"])
    assert at_rate(gamma, 2.0, 5)["traffic.arrivals"] == {"process": "gamma", "cv": 2.0, "rate": 2.0}
