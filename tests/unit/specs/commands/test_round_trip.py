"""From an engine to vLLM's arguments and back: the same engine."""

import json
import shlex
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.specs import load_model, load_scenario
from perfmodel.specs.commands.line import Asking, read_line
from perfmodel.specs.commands.server import engine_arguments, left_out_fields
from perfmodel.specs.engine.spec import EngineSpec

COUNT = st.integers(1, 1 << 20)
DRAFTS = st.one_of(
    st.fixed_dictionaries(
        {"method": st.just("ngram"), "num_speculative_tokens": st.integers(1, 8)},
        optional={"prompt_lookup_max": st.integers(2, 9), "prompt_lookup_min": st.integers(1, 2)},
    ),
    st.fixed_dictionaries(
        {"method": st.sampled_from(["eagle", "medusa"]), "num_speculative_tokens": st.integers(1, 8)}
    ),
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "tensor_parallel_size": st.sampled_from([1, 2, 8]),
    "pipeline_parallel_size": st.sampled_from([1, 2]),
    "data_parallel_size": st.sampled_from([1, 4]),
    "enable_expert_parallel": st.booleans(),
    "all2all_backend": st.sampled_from(["deepep_low_latency", "pplx", "flashinfer_all2allv"]),
    "prefill_context_parallel_size": st.sampled_from([1, 4]),
    "enable_dbo": st.booleans(),
    "dbo_decode_token_threshold": st.integers(2, 512),
    "dbo_prefill_token_threshold": st.integers(2, 512),
    "dtype": st.sampled_from(["auto", "float32", "float16", "bfloat16"]),
    "quantization": st.sampled_from([None, "fp8", "awq", "gptq", "modelopt_fp4", "mxfp4"]),
    "kv_cache_dtype": st.sampled_from(["auto", "fp8", "fp8_e5m2", "nvfp4"]),
    "mamba_ssm_cache_dtype": st.sampled_from(["auto", "float32", "bfloat16"]),
    "max_num_seqs": st.integers(1, 1024),
    "max_num_batched_tokens": st.integers(1024, 1 << 20),
    "max_model_len": COUNT,
    "block_size": st.sampled_from([16, 32, 64]),
    "gpu_memory_utilization": st.floats(0.1, 1.0),
    "num_gpu_blocks_override": COUNT,
    "enable_chunked_prefill": st.booleans(),
    "long_prefill_token_threshold": st.integers(0, 4096),
    "scheduler_reserve_full_isl": st.booleans(),
    "enable_prefix_caching": st.booleans(),
    "disable_hybrid_kv_cache_manager": st.booleans(),
    "enforce_eager": st.booleans(),
    "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
    "async_scheduling": st.booleans(),
    "flash_attn_version": st.sampled_from([2, 3]),
    "kv_offload": st.builds(
        lambda gib: {"capacity_bytes": gib * 2**30, "load": "async", "write_policy": "write_through"},
        st.sampled_from([1, 8, 300]),
    ),
    "speculative_config": DRAFTS,
}


@settings(max_examples=80, deadline=None)
@given(st.fixed_dictionaries({}, optional=FIELDS))
def test_an_engine_s_line_is_the_engine_again(fields: dict[str, Any]) -> None:
    """How many drafted tokens are right is no argument, and is assumed again."""
    if fields.get("pipeline_parallel_size", 1) > 1:
        fields.pop("speculative_config", None)
    if "speculative_config" in fields:
        fields.pop("kv_offload", None)
    if fields.get("prefill_context_parallel_size", 1) > 1:
        fields = {name: value for name, value in fields.items() if name not in ("speculative_config", "kv_offload")}
    engine = EngineSpec(**fields)
    line = shlex.join(["vllm", "serve", "a/b", *engine_arguments(engine, load_model("llama-3.1-8b"))])
    found = read_line(line, Asking(hardware="h100-sxm-80gb"))
    assert found.unmodelled == ()
    assert found.notes == ()
    data = json.loads(json.dumps(found.data.get("engine", {})))
    data.get("speculative_config", {}).pop("acceptance", None)
    again = EngineSpec(**data)
    assert {name: getattr(again, name) for name in fields} == {name: getattr(engine, name) for name in fields}
    assert left_out_fields(engine, load_model("llama-3.1-8b")) == []


def test_what_no_argument_says_is_named() -> None:
    engine = EngineSpec(batching="static", kv_cache="contiguous", max_num_seqs=4)
    assert left_out_fields(engine, load_model("llama-3.1-8b")) == ["batching", "kv_cache"]


@pytest.mark.parametrize("draft", ["qwen3-0.6b"])
def test_a_drafter_goes_by_its_name_on_the_hub(draft: str) -> None:
    drafts = f"{{method: draft_model, model: {draft}, num_speculative_tokens: 4, acceptance: {{rate: 0.7}}}}"
    scenario = load_scenario("llama-3.1-8b-a100", ["model=qwen3-32b", f"engine.speculative_config={drafts}"])
    line = shlex.join(["vllm", "serve", "a/b", *engine_arguments(scenario.engine, scenario.model)])
    found = read_line(line, Asking(hardware="a100-sxm-80gb")).data["engine"]["speculative_config"]
    assert found["model"] == "Qwen/Qwen3-0.6B"
    assert found["num_speculative_tokens"] == 4


@pytest.mark.parametrize(("model", "method"), [("deepseek-v3", "mtp"), ("llama-3.1-8b", "eagle")])
def test_the_models_own_prediction_head_is_vllms_mtp(model: str, method: str) -> None:
    drafts = {"method": "eagle", "num_speculative_tokens": 1, "acceptance": {"rate": 0.8}}
    arguments = engine_arguments(EngineSpec(speculative_config=drafts), load_model(model))
    assert json.loads(arguments[arguments.index("--speculative-config") + 1])["method"] == method


def test_what_a_flag_for_a_tier_does_not_say_is_named() -> None:
    """--kv-offloading-size is vLLM's connector: written through, loaded beside steps, no stores behind it."""
    block: dict[str, Any] = {"capacity_bytes": 2**36, "write_policy": "write_through", "load": "async"}
    model = load_model("llama-3.1-8b")
    assert left_out_fields(EngineSpec.model_validate({"kv_offload": block}), model) == []
    block |= {"write_policy": "write_back", "secondary_tiers": [{"read_bandwidth_bytes_per_s": 1e9}]}
    unsaid = left_out_fields(EngineSpec.model_validate({"kv_offload": block}), model)
    assert unsaid == ["kv_offload.secondary_tiers", "kv_offload.write_policy"]


@pytest.mark.parametrize("policy", ["write_back", "write_through", "write_through_selective"])
def test_a_tier_is_sglang_s_hierarchical_cache(policy: str) -> None:
    """--hicache-size has whole gigabytes a rank; less than one would be taken for its ratio, so is named."""
    model, offload = load_model("llama-3.1-8b"), {"capacity_bytes": 30e9, "write_policy": policy}
    engine = EngineSpec.model_validate({"profile": "sglang", "kv_offload": offload})
    line = shlex.join(["python", "-m", "sglang.launch_server", "--model-path", "a/b"])
    found = read_line(f"{line} {shlex.join(engine_arguments(engine, model, 'sglang'))}", Asking(hardware="h100"))
    assert EngineSpec.model_validate(found.data["engine"]).kv_offload == engine.kv_offload
    assert left_out_fields(engine, model, "sglang") == []
    less = EngineSpec.model_validate({"profile": "sglang", "kv_offload": offload | {"capacity_bytes": 5e8}})
    assert "--hicache-size" not in engine_arguments(less, model, "sglang")
    assert left_out_fields(less, model, "sglang") == ["kv_offload"]
