"""What an engine does not start with is refused when the scenario is read, in the same words for every command.

Formats by generation: docs.vllm.ai, "FP8 W8A8" ("Turing/Ampere GPUs are supported for W8A16 (weight-only FP8) utilizing
Marlin kernels") and "Supported Hardware"; TensorRT-LLM, "Support Matrix" (no FP8 on Ampere).
"""

import pytest
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.cost import plan_memory, step_costs
from perfmodel.errors import SpecError, UnsupportedError
from perfmodel.evidence.sources.recorded import read_offline_runs, read_serving_runs
from perfmodel.evidence.sources.steady import read_steady_states
from perfmodel.files.catalog import data_dir
from perfmodel.files.yaml_loader import load_yaml
from perfmodel.ops.formats import served_model
from perfmodel.ops.work import decode_shape
from perfmodel.planning.whatif import ask_whatif
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario
from perfmodel.specs.engine.devices import refuse_to_start

SCENARIO = "llama-3.1-8b-a100"  # 32 heads, 8 KV heads, 32 layers
FEW = "traffic.num_requests=3"


@pytest.mark.parametrize(
    ("changes", "field", "allowed"),
    [
        (["engine.quantization=nvfp4", "hardware=mi300x"], "engine.quantization", "fp8, fp8_block"),
        (["engine.quantization=fp8", "engine.profile=trtllm"], "engine.quantization", "w4a16"),
        (["engine.dtype=bfloat16", "hardware=t4"], "engine.dtype", "dtype=float16"),
        (["engine.kv_cache_dtype=fp8", "engine.profile=trtllm"], "engine.kv_cache_dtype", "auto, int8"),
        (["engine.quantization_by_layer=[{quantization: int8}]", "hardware=b200-sxm"], "quantization_by_layer", "fp8"),
        (["engine.tensor_parallel_size=3"], "engine.tensor_parallel_size", "1, 2, 4, 8, 16 or 32"),
        (["engine.tensor_parallel_size=7"], "engine.tensor_parallel_size", "1, 2, 4, 8, 16 or 32"),
        (["engine.tensor_parallel_size=64"], "engine.tensor_parallel_size", "1, 2, 4, 8, 16 or 32"),
        (["engine.pipeline_parallel_size=100"], "engine.pipeline_parallel_size", "1 to 32"),
        (["engine.block_size=7"], "engine.block_size", "16, 32"),
        (["engine.enable_expert_parallel=true"], "engine.enable_expert_parallel", "leave it out"),
    ],
)
def test_what_an_engine_does_not_start_with_is_refused_with_what_works(changes, field, allowed):
    with pytest.raises(UnsupportedError) as refused:
        load_scenario(SCENARIO, changes)
    assert field in str(refused.value)
    assert allowed in str(refused.value)
    assert refused.value.reason


def test_pools_are_asked_one_by_one():
    pools = "cluster.pools=[{role: prefill, engine: {tensor_parallel_size: 3}}, {role: decode}]"
    with pytest.raises(SpecError, match=r"cluster\.pools\.0\.engine\.tensor_parallel_size: got 3"):
        load_scenario("llama-3.1-70b-h100-disaggregated", [pools])


def test_the_engine_of_this_project_and_the_datasheet_take_any_block():
    for profile in ("perfmodel", "datasheet"):
        assert load_scenario(SCENARIO, ["engine.block_size=7", f"engine.profile={profile}"]).engine.block_size == 7


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_weight_only_formats_are_priced_and_named_so_by_every_command(name):
    """Marlin reads the narrow weights and multiplies in 16 bits: all that differs from W16A16 is the weights' bytes."""
    scenario = load_scenario(SCENARIO, [FEW, f"engine.quantization={name}", "engine.dtype=bfloat16"])
    rows = {row.work.name: row.work for row in step_costs(scenario).estimate(decode_shape(8, 512)).rows}
    assert {rows[each].rate for each in ("qkv_proj", "down_proj")} == {"bf16"}
    assert rows["down_proj"].format == f"{name}_wo"
    assert not any("quant" in each for each in rows)  # no kernel quantizes activations
    assert any("weight-only in vllm" in note and "Marlin" in note for note in simulate(scenario).notes)
    native = load_scenario(
        SCENARIO, [FEW, "hardware=h100" if name == "fp8" else "hardware=b200", f"engine.quantization={name}"]
    )
    rows = {row.work.name: row.work for row in step_costs(native).estimate(decode_shape(8, 512)).rows}
    assert rows["down_proj"].rate == ("fp8" if name == "fp8" else "fp4")
    assert not any("weight-only" in note for note in simulate(native).notes)
    assert plan_memory(native.model, native.hardware, native.engine).weight_bytes == pytest.approx(
        plan_memory(scenario.model, scenario.hardware, scenario.engine).weight_bytes
    )


def test_a_bf16_checkpoint_is_served_in_fp16_where_the_engine_has_no_bf16():
    scenario = load_scenario(
        SCENARIO, [FEW, "engine.dtype=auto", "hardware=t4", "model=qwen3-1.7b", "engine.max_model_len=8192"]
    )
    assert scenario.model.dtype == "fp16"
    assert any("Served in FP16" in note for note in simulate(scenario).notes)


def test_a_what_if_says_what_is_refused():
    with pytest.raises(SpecError, match="does not take weights in FP8"):
        ask_whatif(SCENARIO, ["engine.max_num_seqs=16,32"], ["engine.quantization=fp8", "engine.profile=trtllm"])


def test_scenarios_of_the_repository_start():
    for file in sorted((data_dir("scenarios")).rglob("*.yaml")):
        if "hardware" in load_yaml(file).data:  # a scenario, no study or figures
            load_scenario(file)


@pytest.mark.release
def test_what_was_recorded_on_engines_is_not_refused(shared):
    """A recorded run shows that the engine takes the format: where one is refused, the description is wrong."""
    truth = shared / "truth"
    runs = [row.scenario for row in read_serving_runs(truth / "serving" / "vllm_runs.json")[0]]
    for name in ("steady_state.csv.gz", "steady_state_disaggregated.csv.gz"):
        runs += [row.scenario for row in read_steady_states(truth / "serving" / name)[0]]
    runs += [row.scenario for row in read_offline_runs(truth / "throughput")[0]]
    assert len(runs) > 1000
    for scenario in runs:
        for pool in scenario.pools:
            model = served_model(pool.model or scenario.model, pool.engine)
            refuse_to_start(model, pool.engine, pool.hardware or scenario.hardware)


@pytest.mark.parametrize("command", ["simulate", "explain", "memory", "whatif"])
def test_every_command_says_what_is_weight_only(command):
    flags = ["--set", "engine.quantization=fp8", "--set", FEW]
    vary = ["--vary", "engine.max_num_seqs=16,32"] if command == "whatif" else []
    ran = CliRunner().invoke(app, [command, SCENARIO, *flags, *vary])
    assert ran.exit_code == 0, ran.output
    assert "is weight-only in vllm" in " ".join(ran.output.split())
    refused = CliRunner().invoke(app, [command, SCENARIO, *flags, *vary, "--set", "engine.profile=trtllm"])
    assert refused.exit_code == 2
    assert "does not take weights in FP8" in " ".join(refused.output.split())
