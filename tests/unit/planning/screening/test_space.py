"""The space of a plan: nothing is lost, and what is ruled out is ruled out for its reason."""

from math import prod

import pytest

from perfmodel.cost import plan_memory
from perfmodel.errors import SpecError
from perfmodel.planning.service import at_rate
from perfmodel.planning.space import Base, enumerate_space
from perfmodel.planning.spec import PlanSpec
from perfmodel.specs import load_scenario
from perfmodel.specs.overrides import as_overrides

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


def test_formats_are_ruled_out_by_the_rule_that_every_command_has():
    """FP8 on an A100 is weight-only in vLLM (Marlin), so it can serve; TensorRT-LLM does not start."""
    fp8_on_ampere = spec(hardware=("a100-sxm-80gb",), quantization=("fp8",), tensor_parallel_size=(4,))
    assert len(enumerate_space(BASE, fp8_on_ampere).candidates) == 1
    refused = enumerate_space(Base(BASE.path, ("engine.profile=trtllm",)), fp8_on_ampere)
    reason = "the engine does not take the number format on the device"
    assert refused.ruled_out == {reason: 1}


@pytest.mark.parametrize(
    ("space", "reason"),
    [
        ({"tensor_parallel_size": (16,)}, "tensor parallelism beyond the link domain"),
        ({"tensor_parallel_size": (6,)}, "attention heads do not divide by tensor_parallel_size"),
        ({"tensor_parallel_size": (8,), "pipeline_parallel_size": (4,)}, "more devices than max_gpus"),
        ({"disaggregation": ("4:1",)}, "more devices than max_gpus"),
        (
            {"hardware": ("mi300x",), "quantization": ("nvfp4",)},
            "the engine does not take the number format on the device",
        ),
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


def test_an_unchunked_prompt_may_be_as_long_as_a_step() -> None:
    base = Base(BASE.path, ("engine.max_model_len=4096",))
    unchunked = {"enable_chunked_prefill": (False,), "max_num_batched_tokens": (4095, 4096)}
    space = enumerate_space(base, spec(**unchunked))
    assert [candidate.max_num_batched_tokens for candidate in space.candidates] == [4096]
    assert space.ruled_out == {"unchunked prompts of max_model_len exceed max_num_batched_tokens": 1}


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


APART = {
    "disaggregation": ("none", "1:1", "2:1"),
    "prefill": {"hardware": ("h100-sxm-80gb",), "tensor_parallel_size": (2, 4), "max_num_batched_tokens": (16384,)},
    "decode": {"hardware": ("h200-sxm",), "max_num_seqs": (64, 128)},
}


def test_engines_for_prompts_and_for_answers_are_chosen_apart() -> None:
    """One unified candidate, and two ratios of two batches of decode engines and two sizes of prefill engines."""
    found = enumerate_space(BASE, spec(quantization=("fp8",), hardware=("a100-sxm-80gb", "h100-sxm-80gb"), **APART))
    assert found.num_all == 2 + 2 * 2 * 2
    apart = [candidate for candidate in found.candidates if candidate.ratio is not None]
    assert {c.layout.scenario.hardware.name for c in apart} == {"h200-sxm"}
    assert {c.prefill_layout.scenario.engine.tensor_parallel_size for c in apart} == {2, 4}
    assert {c.num_devices for c in apart} == {4 + 2, 4 + 4, 4 + 2 * 2, 4 + 2 * 4}
    assert all(c.layout.scenario.engine.tensor_parallel_size == 4 for c in apart)


def test_the_pools_of_a_candidate_are_what_was_meant() -> None:
    found = enumerate_space(BASE, spec(quantization=("fp8",), **APART))
    candidate = next(c for c in found.candidates if c.ratio == (2, 1) and c.max_num_seqs == 128)
    scenario = load_scenario(BASE.path, candidate.overrides(3))
    prefill, decode = scenario.pools
    assert (prefill.role, prefill.replicas, decode.role, decode.replicas) == ("prefill", 6, "decode", 3)
    assert prefill.hardware is not None
    assert prefill.hardware.name == "h100-sxm-80gb"
    assert (decode.hardware or scenario.hardware).name == "h200-sxm"
    assert (prefill.engine.max_num_batched_tokens, decode.engine.max_num_batched_tokens) == (16384, 8192)
    assert (prefill.engine.max_num_seqs, decode.engine.max_num_seqs) == (128, 128)
    assert {prefill.engine.quantization, decode.engine.quantization} == {"fp8"}
    assert scenario.num_devices == 3 * candidate.num_devices


def test_equal_engines_are_one_candidate_however_they_are_listed() -> None:
    """Pools that may have what all have: no field of their own is written."""
    same = {"disaggregation": ("1:1",), "prefill": {"tensor_parallel_size": (4,)}}
    (listed,) = enumerate_space(BASE, spec(quantization=("fp8",), **same)).candidates
    (plain,) = enumerate_space(BASE, spec(quantization=("fp8",), disaggregation=("1:1",))).candidates
    assert listed.prefill is None
    assert listed.choices(1) == plain.choices(1)


def test_pools_without_a_ratio_and_devices_with_changed_facts_are_refused() -> None:
    with pytest.raises(ValueError, match="ratio in disaggregation"):
        spec(prefill={"hardware": ("h100-sxm-80gb",)})
    changed = Base(BASE.path, ("hardware.hbm.bandwidth=2x",))
    with pytest.raises(SpecError, match="changes one device"):
        enumerate_space(changed, spec(**APART))


def test_a_candidate_is_named_in_words() -> None:
    """Devices and cut, formats of what, requests and tokens of a step; of prefill engines what differs."""
    found = enumerate_space(
        BASE,
        spec(hardware=("h100-sxm-80gb",), quantization=("fp8",), kv_cache_dtype=("fp8",), max_num_seqs=(32,)),
    )
    (candidate,) = found.candidates
    tokens = f"{candidate.max_num_batched_tokens:,} tokens a step"
    assert candidate.label == f"h100-sxm-80gb TP4, FP8 weights, FP8 KV cache, up to 32 requests, {tokens}"
    apart = enumerate_space(BASE, spec(disaggregation=("2:1",), prefill={"max_num_batched_tokens": (16384,)}))
    (candidate,) = apart.candidates
    assert "2 prefill to 1 decode" in candidate.label
    assert candidate.label.endswith("(prefill: 16,384 tokens a step)")


def test_speculation_is_a_choice_like_others() -> None:
    """With and without drafts; beside pools there are none, for that reason."""
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "acceptance": {"rate": 0.6}}
    found = enumerate_space(BASE, spec(speculation=(None, drafts), disaggregation=("none", "1:1")))
    assert found.num_all == 4
    assert found.ruled_out == {"speculation beside prefill and decode pools": 1}
    (drafting,) = [c for c in found.candidates if c.layout.scenario.engine.speculative_config is not None]
    assert "ngram" in drafting.label
    config = load_scenario(BASE.path, drafting.overrides(2)).engine.speculative_config
    assert config is not None
    assert config.num_speculative_tokens == 4


def test_tensor_parallelism_stays_on_a_node_unless_asked_for() -> None:
    """Nodes of four: TP8 is beyond them; with link_domain 16 it is a candidate, over the scenario's network."""
    nodes = Base(BASE.path, ("cluster.network={link: infiniband-hdr, devices_per_node: 4}",))
    (reason,) = enumerate_space(nodes, spec(tensor_parallel_size=(8,))).ruled_out
    assert reason == "tensor parallelism beyond the link domain"
    asked = spec(tensor_parallel_size=(8,)).model_copy(update={"link_domain": 16})
    (candidate,) = enumerate_space(nodes, asked).candidates
    for scenario in (candidate.layout.scenario, load_scenario(nodes.path, [*nodes.overrides, *candidate.overrides(1)])):
        assert (scenario.hardware.devices_per_node, scenario.hardware.network_link.name) == (4, "infiniband-hdr")


def test_cores_of_the_host_are_every_candidate_s() -> None:
    """They were left out in silence, and finalists had a core for each process."""
    few = Base(BASE.path, ("cluster.host.cores=2",))
    (candidate,) = enumerate_space(few, spec()).candidates
    for scenario in (candidate.layout.scenario, load_scenario(few.path, [*few.overrides, *candidate.overrides(1)])):
        assert scenario.hardware.host is not None
        assert scenario.hardware.host.cores == 2


def test_sizes_that_are_tried_by_default_are_powers_of_two() -> None:
    """As people write them; devices, too, of which a node has 8."""
    space = PlanSpec().space
    for sizes in (space.tensor_parallel_size, space.max_num_seqs, space.max_num_batched_tokens):
        assert len(sizes) > 3
        assert all(size & (size - 1) == 0 for size in sizes)


@pytest.mark.parametrize(("most", "count"), [(3, 0), (4, 1), (5, 1)])
def test_a_candidate_may_use_all_allowed_devices(most: int, count: int) -> None:
    wanted = spec(tensor_parallel_size=(4,)).model_copy(update={"max_gpus": most})
    assert len(enumerate_space(BASE, wanted).candidates) == count


def test_a_group_costs_the_hourly_price_of_its_devices() -> None:
    """One prefill and two decode replicas of four devices at 2.50 USD/h."""
    base = Base(BASE.path, ("price.usd_per_gpu_hour=2.5",))
    (alone,) = enumerate_space(base, spec()).candidates
    (group,) = enumerate_space(base, spec(disaggregation=("1:2",))).candidates
    assert (alone.num_devices, alone.usd_per_hour) == (4, 10.0)
    assert (group.num_devices, group.usd_per_hour, group.num_engines) == (12, 30.0, 2)


@pytest.mark.parametrize("drafts", [{}, {"method": "ngram", "num_speculative_tokens": 3, "acceptance": 0.5}])
def test_invalid_drafts_in_the_space_are_refused(drafts: dict[str, object]) -> None:
    with pytest.raises(SpecError, match=r"engine\.speculative_config"):
        enumerate_space(BASE, spec(speculation=(None, drafts)))
