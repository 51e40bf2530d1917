"""What engines let into a step, by their descriptions; and engines of recorded runs."""

import pytest

from perfmodel.cost import scenario_fits
from perfmodel.evidence.observation import recorded_engine
from perfmodel.specs import load_hardware, load_scenario
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.engine.speculation import SpeculativeConfig


# vLLM v1: prompts and decodes together, prompts in chunks. SGLang: extends first, alone. TensorRT-LLM: prompts whole,
# and room for all that a request may generate (guaranteed no evict).
@pytest.mark.parametrize(
    ("profile", "rules"),
    [("vllm", (False, False, True)), ("sglang", (True, False, True)), ("trtllm", (False, True, False))],
)
def test_engines_batch_as_their_code_does_unless_the_scenario_says_otherwise(profile, rules):
    found = EngineSpec(profile=profile).rules
    assert (found.prefill_exclusive, found.reserves_output, found.chunks_prompts) == rules
    turned = EngineSpec(
        profile=profile,
        prefill_exclusive=not rules[0],
        reserve_output=not rules[1],
        enable_chunked_prefill=not rules[2],
    ).rules
    assert (turned.prefill_exclusive, turned.reserves_output, turned.chunks_prompts) == tuple(
        not rule for rule in rules
    )


# Of 64 sequences on 4 stages: vLLM 64 in all; SGLang 64 in all, 16 in each micro-batch (pp_max_micro_batch_size);
# TensorRT-LLM 64 in each stage's batch, 256 in all.
@pytest.mark.parametrize(("profile", "limits"), [("vllm", (64, 0)), ("sglang", (64, 16)), ("trtllm", (256, 64))])
def test_sequences_on_pipeline_stages(profile, limits):
    assert EngineSpec(profile=profile, max_num_seqs=64, pipeline_parallel_size=4).sequence_limits == limits
    assert EngineSpec(profile=profile, max_num_seqs=64).sequence_limits == (64, 0)


def test_steps_are_captured_up_to_what_the_engine_captures():
    """vLLM: min(2 x max_num_seqs x (1 + drafted tokens), 512, max_num_batched_tokens), with prompts; nothing eagerly.
    TensorRT-LLM, and SGLang before 0.5.10, capture steps that only decode, so that steps with prompts are launched."""
    found = {}
    for text in ("engine.max_num_seqs=8", "engine.max_num_seqs=256", "engine.profile=trtllm"):
        found[text.partition("=")[2]] = captured_with_prompts("llama-3.1-8b-a100", text)
    assert found == {"8": 16, "256": 512, "trtllm": 0}
    assert EngineSpec(max_num_seqs=8, enforce_eager=True).captured_tokens == 0


def captured_with_prompts(name: str, *overrides: str) -> int:
    return scenario_fits(load_scenario(name, list(overrides)))[0].host.captured_tokens


@pytest.mark.parametrize(
    ("version", "override", "tokens"),
    [
        ("0.5.9", "", 0),
        ("0.5.10", "", 8192),  # chunked_prefill_size
        ("0.5.10", "model=deepseek-v3", 2048),  # latents
        ("0.5.10", "model=qwen3-vl-8b", 0),  # an encoder
        ("0.5.10", "engine.pipeline_parallel_size=2", 0),
        ("0.5.10", "engine.data_parallel_size=2", 0),
        ("0.5.10", "engine.enforce_eager=true", 0),
        ("0.5.10", "engine.speculative_config={method: ngram, num_speculative_tokens: 3}", 0),
    ],
)
def test_sglang_captures_steps_with_prompts_by_version_and_deployment(version, override, tokens):
    """SGLang, "Piecewise CUDA Graph" (docs.sglang.io): on by default since 0.5.10, "Defaults to
    chunked_prefill_size (non-MLA) or 2048 (MLA)", and the list of what it is disabled with."""
    engine = ("engine.profile=sglang", f"engine.version={version}", "engine.max_num_batched_tokens=8192")
    assert (
        captured_with_prompts("llama-3.1-8b-a100", "hardware=h100", *engine, *([override] if override else []))
        == tokens
    )


def test_a_recorded_run_has_the_defaults_of_its_version():
    hardware = load_hardware("h100-sxm-80gb")
    versions = ("0.12.0", "0.19.0", "0.21.0")
    engines = [recorded_engine("vllm", version, hardware, {"max_num_seqs": 8}) for version in versions]
    assert [engine.async_scheduling for engine in engines] == [False, True, True]
    assert [engine.gpu_memory_utilization for engine in engines] == [0.9, 0.9, 0.92]
    assert all(engine.max_num_seqs == 8 for engine in engines)
    # Without a version, or by the name of a build: of the time of the records, before the share meant something else.
    for stated in ("", "nightly-5b8c30d62b754b57", "gpt-oss-dev"):
        assert recorded_engine("vllm", stated, hardware, {}).gpu_memory_utilization == 0.9


def test_a_recorded_run_of_an_undescribed_version_has_the_nearest_and_wider_intervals():
    scenario = load_scenario("llama-3.1-8b-a100")
    known, older, newer = (
        scenario.model_copy(update={"engine": recorded_engine("vllm", version, scenario.hardware, {})})
        for version in ("0.19.0", "0.5.3", "7.0")
    )
    assert older.engine.async_scheduling is False
    assert newer.engine.gpu_memory_utilization == 0.92
    spread = scenario_fits(known)[0].spread
    assert scenario_fits(older)[0].spread == scenario_fits(newer)[0].spread > spread


def test_max_num_seqs_may_equal_the_token_budget() -> None:
    assert EngineSpec(max_num_batched_tokens=64, max_num_seqs=64).max_num_seqs == 64
    with pytest.raises(ValueError, match="is below max_num_seqs"):
        EngineSpec(max_num_batched_tokens=63, max_num_seqs=64)


def test_cuda_graphs_count_the_decode_and_mixed_batch_sizes() -> None:
    """Four sequences with one token and three drafts: decode graphs up to 16 of 1, 2, 4, 8, 16, 24, 32, mixed ones for
    all."""
    drafts = SpeculativeConfig.model_validate({"method": "ngram", "num_speculative_tokens": 3})
    plain, drafting = EngineSpec(max_num_seqs=4), EngineSpec(max_num_seqs=4, speculative_config=drafts)
    assert (plain.captured_tokens, plain.num_graphs) == (8, 3 + 4)
    assert (drafting.captured_tokens, drafting.num_graphs) == (32, 5 + 7)


def test_devices_of_a_replica_are_the_product_of_its_parallel_sizes() -> None:
    degrees = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 4}
    assert EngineSpec(**degrees).num_devices == 24
    assert EngineSpec(profile="llamacpp", layer_split=2).num_devices == 2
