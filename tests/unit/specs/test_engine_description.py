"""The files of hardware_specs/engines: what they may say, and facts of engines that their own documents state."""

import pytest

from perfmodel.errors import SpecError
from perfmodel.files.catalog import list_names
from perfmodel.specs import load_hardware, load_scenario
from perfmodel.specs.engine.description import (
    describe_engine,
    load_engine_description,
)
from perfmodel.specs.engine.formats import format_use
from perfmodel.specs.engine.spec import EngineSpec

ENGINE = """
name: mine
title: Mine
source: its own documents
facts:
  batching: {prefill_exclusive: true}
  budgets: [{max_num_batched_tokens: 4096, max_num_seqs: 64}]
  weights: {fp8: [{on: [hopper], support: native}]}
versions:
  1.0: {source: its release notes}
  1.10:
    source: its release notes
    defaults: {gpu_memory_utilization: 0.8}
    weights: {int4: [{on: [ada], support: native}]}
  1.9: {source: its release notes, defaults: {block_size: 32}}
"""


def facts(name, version=None):
    return describe_engine(name, version).facts


def test_every_file_says_where_its_facts_are_from():
    assert {"datasheet", "perfmodel", "sglang", "trtllm", "vllm"} <= set(list_names("engines"))
    for name in list_names("engines"):
        description = load_engine_description(name)
        assert description.name == name
        assert all(part.source for part in (description, *description.versions.values()))
        assert description.at("").budgets, "a scenario without sizes needs some"


def test_each_version_changes_what_it_names_and_nothing_else(tmp_path):
    (tmp_path / "mine.yaml").write_text(ENGINE)
    path = str(tmp_path / "mine.yaml")
    first, second, third = (facts(path, version) for version in ("1.0", "1.9", "1.10"))
    assert [each.defaults.block_size for each in (first, second, third)] == [16, 32, 32]
    assert [each.defaults.gpu_memory_utilization for each in (first, second, third)] == [0.9, 0.9, 0.8]
    assert [sorted(each.weights) for each in (first, second, third)] == [["fp8"], ["fp8"], ["fp8", "int4"]]
    assert all(each.batching.prefill_exclusive and each.budgets == first.budgets for each in (first, second, third))


def test_rows_of_experts_come_before_those_of_older_versions(tmp_path):
    rows = "experts: [{formats: [%s], kernel: %s, num_kernels: 5}]"
    text = ENGINE.replace("defaults: {block_size: 32}", rows % ("fp8", "new"))
    text = text.replace("  weights: {fp8: [", f"  {rows % ('fp8, nvfp4', 'old')}\n  weights: {{fp8: [")
    (tmp_path / "mine.yaml").write_text(text)
    kernels = {v: [row.kernel for row in facts(str(tmp_path / "mine.yaml"), v).experts] for v in ("1.0", "1.10")}
    assert kernels == {"1.0": ["old"], "1.10": ["new", "old"]}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("prefil_exclusive: true", r"mine\.yaml:6: facts\.batching\.prefil_exclusive: .*'prefill_exclusive'"),
        ("sequences_on_stages: some", r"mine\.yaml:6: facts\.batching\.sequences_on_stages: .*'even_share'"),
    ],
)
def test_a_wrong_key_is_refused_with_its_place(tmp_path, wrong, sentence):
    (tmp_path / "mine.yaml").write_text(ENGINE.replace("prefill_exclusive: true", wrong))
    with pytest.raises(SpecError, match=sentence):
        load_engine_description(tmp_path / "mine.yaml")


def test_a_wrong_key_of_a_version_is_refused_with_its_place(tmp_path):
    (tmp_path / "mine.yaml").write_text(ENGINE.replace("{block_size: 32}", "{blok_size: 32}"))
    with pytest.raises(SpecError, match=r"mine\.yaml:15: versions\.1\.9\.defaults\.blok_size: .*'block_size'"):
        load_engine_description(tmp_path / "mine.yaml")


# vllm/config/vllm.py, _set_cudagraph_sizes; start-up logs of 0.21 to 0.27 print "PIECEWISE=51 (largest=512), FULL=35
# (largest=256)" for max_num_seqs of 256, V1's first versions "67/67" for sizes in steps of 8.
def test_vllms_graph_sizes():
    old, new = facts("vllm", "0.9").graphs, facts("vllm", "0.21").graphs
    assert len(old.sizes_up_to(old.most(256, 2048))) == 67
    sizes = new.sizes_up_to(new.most(256, 2048))
    assert len(sizes) == 51
    assert len([size for size in sizes if size <= 256]) == 35
    assert sizes[:5] == (1, 2, 4, 8, 16)
    assert sizes[-3:] == (480, 496, 512)
    # min(2 x max_num_seqs x (1 + drafted), 512), and no step is larger than its budget
    assert [new.most(*each) for each in ((8, 2048), (8, 2048, 3), (1024, 8192), (256, 300))] == [16, 64, 512, 300]
    assert new.sizes_up_to(new.most(1, 2048)) == (1, 2)


# TensorRT-LLM's CudaGraphConfig._generate_cuda_graph_batch_sizes with padding: 1, 2, 4, then multiples of 8 to 128.
def test_tensorrt_llms_graph_sizes():
    graphs = facts("trtllm").graphs
    assert graphs.sizes_up_to(graphs.most(2048, 8192)) == (1, 2, 4, *range(8, 129, 8))
    assert not graphs.with_prompts


def test_what_vllm_changed_and_when():
    share = {
        version: facts("vllm", version).defaults.gpu_memory_utilization for version in ("0.19.0", "0.20.2", "0.21.0")
    }
    assert share == {"0.19.0": 0.9, "0.20.2": 0.9, "0.21.0": 0.92}  # pull request 38284
    inside = [facts("vllm", version).graphs.inside_memory_share for version in ("0.20", "0.21", None)]
    assert inside == [False, True, True]  # its log: "enabled (default since v0.21.0)"
    planned = [facts("vllm", version).defaults.async_scheduling for version in ("0.13.0", "0.14.0")]
    assert planned == [False, True]  # release notes of v0.14.0


# docs.vllm.ai, "FP8 W8A8": "Ada Lovelace, Hopper, and Blackwell GPUs are supported for W8A8. Turing/Ampere GPUs are
# supported for W8A16 (weight-only FP8) utilizing Marlin kernels." NVFP4: pull request 49376, Marlin off Blackwell.
@pytest.mark.parametrize(
    ("device", "form", "support"),
    [
        ("t4", "fp8", "weight_only"),
        ("a100-sxm-80gb", "fp8", "weight_only"),
        ("l40s", "fp8", "native"),
        ("h100-sxm-80gb", "fp8", "native"),
        ("mi300x", "fp8", "native"),
        ("a100-sxm-80gb", "nvfp4", "weight_only"),
        ("h100-sxm-80gb", "nvfp4", "weight_only"),
        ("b200-sxm", "nvfp4", "native"),
        ("a100-sxm-80gb", "int4", "weight_only"),
        ("a100-sxm-80gb", "int8", "native"),
        ("mi300x", "nvfp4", "refused"),
        ("t4", "bf16", "refused"),
        ("a100-sxm-80gb", "int3", None),  # no format that the description knows
    ],
)
def test_vllms_formats_by_generation(device, form, support):
    found = format_use(EngineSpec(profile="vllm"), load_hardware(device), form)
    assert found.support == support
    assert (found.kernel == "Marlin") == (support == "weight_only")


def test_formats_of_others_differ():
    ampere, hopper = load_hardware("a100-sxm-80gb"), load_hardware("h100-sxm-80gb")
    # TensorRT-LLM's support matrix: Ampere has no FP8; SGLang took NVFP4 off Blackwell with pull request 19652.
    assert format_use(EngineSpec(profile="trtllm"), ampere, "fp8").support == "refused"
    assert format_use(EngineSpec(profile="trtllm"), hopper, "nvfp4").support == "refused"
    assert format_use(EngineSpec(profile="sglang", version="0.5.9"), hopper, "nvfp4").support == "refused"
    assert format_use(EngineSpec(profile="sglang", version="0.5.10"), hopper, "nvfp4").support == "weight_only"
    assert format_use(EngineSpec(profile="vllm"), ampere, "fp8", of="kv_cache").support == "emulated"
    assert format_use(EngineSpec(profile="vllm"), hopper, "fp8", of="kv_cache").support == "native"


SCENARIO = """
model: llama-3.1-8b
hardware: a100-sxm-80gb
engine:
  max_model_len: 4096
  {line}
traffic:
  arrivals: {{process: poisson, rate: 2.0}}
  num_requests: 10
  input_tokens: {{distribution: fixed, value: 200}}
  output_tokens: {{distribution: fixed, value: 50}}
"""


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("profile: vlm", r"mine\.yaml:6: engine\.profile: unknown engine 'vlm'.*Did you mean 'vllm'\?"),
        ("kv_cache_dtype: fp88", r"mine\.yaml:6: engine\.kv_cache_dtype: .*'fp88'.*Did you mean 'fp8'"),
        ("version: 0.99", r"mine\.yaml:6: engine\.version: 0\.99 is newer than 0\.\d+, the newest described.*0\.\d+"),
        ("version: 0.2", r"mine\.yaml:6: engine\.version: 0\.2 is older than 0\.6, the oldest described.*0\.6"),
        ("version: banana", r"mine\.yaml:6: engine\.version: 'banana' is not a version"),
    ],
)
def test_unknown_names_are_refused_with_file_line_field_and_the_nearest(tmp_path, line, sentence):
    (tmp_path / "mine.yaml").write_text(SCENARIO.format(line=line))
    with pytest.raises(SpecError, match=sentence):
        load_scenario(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("engine.profile=sglng", r"--set engine\.profile=sglng: engine\.profile: unknown engine .*'sglang'"),
        ("engine.version=9", r"--set engine\.version=9: engine\.version: 9 is newer than"),
        ("engine.kv_cache_dtype=int44", r"--set engine\.kv_cache_dtype=int44: engine\.kv_cache_dtype: .*'int4'"),
    ],
)
def test_what_is_set_is_checked_alike(setting, sentence):
    with pytest.raises(SpecError, match=sentence):
        load_scenario("llama-3.1-8b-a100", [setting])


def test_a_version_is_text_even_where_yaml_reads_a_number(tmp_path):
    """0.10 is not 0.1: in the file, and where it is set."""
    (tmp_path / "mine.yaml").write_text(SCENARIO.format(line="version: 0.10"))
    assert load_scenario(tmp_path / "mine.yaml").engine.version == "0.10"
    assert load_scenario("llama-3.1-8b-a100", ["engine.version=0.20"]).engine.version == "0.20"


def test_an_engine_without_versions_takes_none():
    with pytest.raises(SpecError, match=r"engine\.version: datasheet has no versions; leave it out"):
        load_scenario("llama-3.1-8b-a100", ["engine.profile=datasheet", "engine.version=1.0"])
