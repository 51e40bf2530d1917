"""What is not modelled is refused or noted by name: models that do not generate text, encoders, adapters, unknown
slices of GPUs, devices of an unknown architecture, options without effect."""

import json
import re

import pytest
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.files.catalog import data_dir

DECODER = {
    **{"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "intermediate_size": 1024, "vocab_size": 8192, "max_position_embeddings": 4096},
}
SCENARIO, FEW = "llama-3.1-8b-a100", "traffic.num_requests=20"
PLAN = (
    "plan={seeds: 1, num_requests: 20, max_gpus: 1, space: {tensor_parallel_size: [1], max_num_seqs: [256], "
    "max_num_batched_tokens: [2048]}}"
)


@pytest.fixture
def run():
    """Exit status and output of a command, on one line."""

    def invoke(*args):
        ran = CliRunner().invoke(app, [str(arg) for arg in args])
        return ran.exit_code, " ".join((ran.stdout + ran.stderr).split())

    return invoke


@pytest.fixture
def memory_of(run, tmp_path):
    """The output of `memory` for a config.json."""

    def memory(**fields):
        file = tmp_path / "config.json"
        file.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **DECODER, **fields}))
        return run("memory", "--model", file, "--hardware", "h100")

    return memory


def test_a_repository_of_speech_is_recognised_by_its_name(run):
    """Whether or not the Hub can be reached."""
    status, text = run("memory", "--model", "openai/whisper-large-v3", "--hardware", "h100")
    assert status == 2
    assert "openai/whisper-large-v3 transcribes speech" in text
    assert "could not be reached" not in text


@pytest.mark.parametrize("architecture", ["LlamaForTokenClassification", "Qwen2ForRewardModel"])
def test_heads_that_score_tokens_are_refused(memory_of, architecture):
    status, text = memory_of(architectures=[architecture])
    assert (status, f"{architecture} returns scores of tokens" in text) == (2, True), text


@pytest.mark.parametrize(
    ("architecture", "what"), [("MistralModel", "a vector"), ("LlamaForSequenceClassification", "2 scores")]
)
def test_decoders_without_a_language_head_say_what_they_return(memory_of, architecture, what):
    status, text = memory_of(architectures=[architecture])
    assert (status, f"returns {what} of each prompt" in text) == (0, True), text


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel", "ChatGLMModel", "InternVLChatModel"])
def test_text_models_are_accepted_under_any_class_name(memory_of, architecture):
    assert memory_of(architectures=[architecture])[0] == 0


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("memory", ()),
        ("explain", ("--batch", 4)),
        ("simulate", ("--set", FEW)),
        ("whatif", ("--set", FEW, "--vary", "traffic.arrivals.rate=1,2")),
        ("plan", ("--set", PLAN)),
    ],
)
@pytest.mark.parametrize(
    ("model", "note"),
    [("qwen2.5-vl-7b", "0.68 billion parameters beside it"), ("config", "images and audio are not modelled")],
)
def test_every_command_notes_that_a_vl_model_is_modelled_as_its_text_decoder(run, tmp_path, command, more, model, note):
    if model == "config":
        model = tmp_path / "config.json"
        outer = {"architectures": ["XForConditionalGeneration"], "model_type": "x", "vision_config": {"depth": 2}}
        model.write_text(json.dumps({**outer, "audio_config": {"layers": 2}, "text_config": DECODER}))
    limits = ("--set", "engine.max_model_len=2048", "--set", "traffic.input_tokens={distribution: fixed, value: 500}")
    status, text = run(command, SCENARIO, "--set", f"model={model}", *limits, *more)
    assert status == 0, text
    assert "is modelled as its text decoder" in text
    assert note in text


def test_a_text_model_has_no_such_note(memory_of):
    assert "text decoder" not in memory_of()[1]


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("fully_sharded_loras=true", "vllm serve that affects time and is not modelled (adapters"),
        ("attention_backend=FLASHINFER", "vllm serve that affects time and is not modelled (which kernels run"),
        ("served_model_name=me", "vllm serve that does not affect time"),
        ("num_speculative_tokens=3", "engine.speculative_config.num_speculative_tokens"),
        ("max_num_seq=3", "Did you mean 'max_num_seqs'"),
    ],
)
def test_an_unmodelled_engine_flag_is_recognised_as_a_scenario_field(run, field, reason):
    status, text = run("memory", SCENARIO, "--set", f"engine.{field}")
    assert (status, reason in text) == (2, True), text


def test_an_adapter_is_refused_as_an_adapter(run, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "meta-llama/Llama-3.1-8B"}')
    status, text = run("memory", "--model", tmp_path, "--hardware", "h100")
    assert status == 2
    assert "holds an adapter (LoRA)" in text
    assert "meta-llama/Llama-3.1-8B" in text


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("1g.10gb", "say of which, as in h100-sxm-80gb:1g.10gb"),
        ("h100:9g.10gb", "expected one of 1g.10gb"),
        ("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", "its file has no MIG profiles"),
        ("l4:1g.6gb", "its file has no MIG profiles"),
    ],
)
def test_an_unknown_slice_of_a_gpu_is_refused_as_a_slice(run, name, sentence):
    status, text = run("memory", "--model", "tiny-llama", "--hardware", name)
    assert status == 2
    assert sentence in text
    assert "Did you mean" not in text


MANIFEST = """
kind: Deployment
spec:
  template:
    spec:
      nodeSelector: {nvidia.com/gpu.product: PRODUCT}
      containers:
      - image: vllm/vllm-openai:v0.11.0
        args: [--model, meta-llama/Llama-3.1-8B-Instruct]
        resources: {limits: {RESOURCE: 1}}
"""


@pytest.mark.parametrize(
    ("product", "resource"),
    [
        ("NVIDIA-H100-80GB-HBM3", "nvidia.com/mig-3g.40gb"),
        ("NVIDIA-H100-80GB-HBM3-MIG-3g.40gb", "nvidia.com/gpu"),
    ],
)
def test_a_manifest_that_requests_a_slice_is_not_modelled_as_a_whole_gpu(run, tmp_path, product, resource):
    file = tmp_path / "deployment.yaml"
    file.write_text(MANIFEST.replace("PRODUCT", product).replace("RESOURCE", resource))
    status, text = run("new", file)
    assert status == 0
    assert "hardware: h100-sxm-80gb:3g.40gb" in text
    status, text = run("new", file, "--hardware", "h100")
    assert status == 0
    assert "--hardware h100-sxm-80gb replaces it" in text


def test_a_device_of_an_unknown_architecture_supports_the_formats_it_declares(run, tmp_path):
    """The engine's description lists the formats of known architectures only."""
    file, text = tmp_path / "custom.yaml", (data_dir("hardware") / "h100-sxm-80gb.yaml").read_text()
    for pattern, new in [("name: h100-sxm-80gb", "name: custom"), ("hopper", "custom-arch"), (r"aliases:.*\n", "")]:
        text = re.sub(pattern, new, text)
    file.write_text(text)
    for field in ("dtype=bfloat16", "quantization=fp8"):
        status, answer = run("memory", "--model", "llama-3.1-8b", "--hardware", file, "--set", f"engine.{field}")
        assert status == 0, answer
    status, answer = run("memory", "--model", "llama-3.1-8b", "--hardware", file)
    assert "Served in FP16" not in answer
    refused = run("memory", "--model", "llama-3.2-1b", "--hardware", "v100", "--set", "engine.dtype=bfloat16")
    assert refused[0] == 2
    assert "does not take weights in BF16" in refused[1]


@pytest.mark.parametrize(
    ("routing", "is_noted"), [("{distribution: uniform}", True), ("{distribution: power_law, alpha: 1.2}", False)]
)
def test_eplb_without_imbalance_is_noted_to_change_nothing(run, routing, is_noted):
    ask = ("explain", "deepseek-v3-h200", "--batch", 32, "--context", 1000, "--set", f"routing={routing}", "--set")
    (_, without), (_, balanced) = (run(*ask, f"engine.enable_eplb={value}") for value in ("false", "true"))
    note = "enable_eplb changes nothing"
    assert note not in without
    assert (note in balanced) == is_noted
    step = re.compile(r"[\d.]+ ms a step")
    assert (step.findall(without) == step.findall(balanced)) == is_noted
