"""Command lines of llama.cpp, Ollama, LMDeploy and vLLM's container."""

from functools import partial
from typing import Any

import pytest
from line_scenarios import read_engine, read_loadable

from perfmodel.errors import SpecError

LLAMA = "llama-server -m qwen3-8b-Q4_K_M.gguf"


read = partial(read_loadable, hardware="rtx-4090")
engine = partial(read_engine, hardware="rtx-4090")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("-c 8192 -np 4", {"max_num_seqs": 4, "max_model_len": 2048}),  # -c is divided among the slots
        ("-c 8192", {"max_model_len": 8192}),  # one pool shared by all slots
        ("-c 0 -np -1 -ngl 99", {}),
        ("-b 4096 -ub 1024", {"max_num_batched_tokens": 4096, "ubatch_size": 1024}),
        ("-fa off", {"attention": "standard"}),
        ("--flash-attn on", {"attention": "flash"}),
        ("-fa auto --port 8080 --host 0.0.0.0 --jinja", {}),
        ("-ctk q8_0 -ctv q8_0", {"kv_cache_dtype": "q8_0"}),
    ],
)
def test_llama_server(flags: str, expected: dict[str, Any]) -> None:
    line = read(f"{LLAMA} {flags}")
    assert line.data["model"] == "qwen3-8b"
    assert line.data["engine"] == {"profile": "llamacpp", "quantization": "q4_k_m", **expected}
    assert not line.unmodelled


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ("-ngl 20", "--gpu-layers 20"),
        ("-ctk q8_0", "--cache-type-k q8_0"),
        ("-sm row", "--split-mode row"),
        ("--cpu-moe", "--cpu-moe"),
        ("-md drafter.gguf", "--model-draft drafter.gguf"),
        ("--lora a.gguf", "--lora a.gguf"),
        ("-t 8", "--threads 8"),
    ],
)
def test_unmodelled_flags_of_llama_server_are_listed(flags: str, what: str) -> None:
    assert [flag for flag, _ in read(f"{LLAMA} {flags}").unmodelled] == [what]


@pytest.mark.parametrize(
    ("line", "model", "quantization"),
    [
        ("llama-server -hf ggml-org/Qwen3-8B-GGUF:Q8_0", "Qwen3-8B", "q8_0"),
        ("llama-server -hf unsloth/Qwen3-8B-GGUF", "Qwen3-8B", "q4_k_m"),
        ("llama-server -m /models/qwen3-8b-iq4_xs.gguf", "qwen3-8b", "iq4_xs"),
        ("ollama run gpt-oss:20b", "gpt-oss-20b", None),  # released in MXFP4
        ("llama-server -m qwen3-8b-f16.gguf", "qwen3-8b", None),
        ("ollama run llama3.1:8b", "llama-3.1-8b", "q4_k_m"),
        ("ollama run qwen3:30b-a3b", "qwen3-30b-a3b", "q4_k_m"),
        ("ollama run qwen3:30b-a3b-q8_0", "qwen3-30b-a3b", "q8_0"),
        ("ollama run hf.co/bartowski/Llama-3.2-3B-Instruct-GGUF:Q8_0", "Llama-3.2-3B-Instruct", "q8_0"),
        ("ollama run qwen3:8b-q8_0", "qwen3-8b", "q8_0"),
        ("ollama run llama3.1:70b-instruct-q4_0 --verbose", "llama-3.1-70b", "q4_0"),
    ],
)
def test_model_and_format_from_files_repositories_and_tags(line: str, model: str, quantization: str) -> None:
    scenario = read(line)
    assert (scenario.data["model"], scenario.data["engine"].get("quantization")) == (model, quantization)


def test_a_file_of_floats_has_a_dtype() -> None:
    assert engine("llama-server -m qwen3-8b-f16.gguf")["dtype"] == "float16"


def test_environment_variables_configure_the_ollama_server() -> None:
    assert engine("ollama run qwen3:8b")["max_num_seqs"] == 1
    spec = engine("OLLAMA_NUM_PARALLEL=4 OLLAMA_CONTEXT_LENGTH=8192 OLLAMA_KV_CACHE_TYPE=q8_0 ollama run qwen3:8b")
    assert (spec["max_num_seqs"], spec["max_model_len"], spec["kv_cache_dtype"]) == (4, 8192, "q8_0")
    assert "one request at a time" in " ".join(read("ollama run qwen3:8b").assumed)


def test_environment_variables_of_llama_server_equal_its_flags() -> None:
    spec = engine(f"LLAMA_ARG_CTX_SIZE=8192 LLAMA_ARG_N_PARALLEL=2 {LLAMA}")
    assert (spec["max_num_seqs"], spec["max_model_len"]) == (2, 4096)


def test_lmdeploy_is_read_and_its_engine_is_reported_as_unmodelled() -> None:
    line = read("lmdeploy serve api_server Qwen/Qwen3-8B --tp 2 --quant-policy 8 --session-len 8192 --server-port 1")
    wanted = {"tensor_parallel_size": 2, "kv_cache_dtype": "int8", "max_model_len": 8192}
    assert line.data["engine"] == wanted
    assert line.unmodelled == (("lmdeploy", "its own kernels and scheduler, for which vLLM's stand in"),)


@pytest.mark.parametrize("model", ["--model Qwen/Qwen3-8B", "Qwen/Qwen3-8B"])
def test_vllm_s_container(model: str) -> None:
    line = read(f"docker run --gpus all --ipc=host -p 8000:8000 vllm/vllm-openai:v0.11.0 {model} -tp 2")
    assert line.data["model"] == "Qwen/Qwen3-8B"
    assert line.data["engine"] == {"tensor_parallel_size": 2, "version": "0.11.0"}


def test_an_unknown_flag_is_refused_with_the_nearest_match() -> None:
    with pytest.raises(SpecError, match=r"--ctx-siz"):
        read(f"{LLAMA} --ctx-sizes 9")
