"""Lines of SGLang and TensorRT-LLM, and of the load tests that people run against any server."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from line_scenarios import read_engine, read_loadable
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.errors import SpecError

SGLANG = "python3 -m sglang.launch_server --model-path Qwen/Qwen3-8B"
TRTLLM = "trtllm-serve Qwen/Qwen3-30B-A3B"


read = partial(read_loadable, hardware="h200-sxm")
engine = partial(read_engine, hardware="h200-sxm")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--tp 4", {"tensor_parallel_size": 4}),
        ("--tp-size 8 --dp 8 --enable-dp-attention", {"tensor_parallel_size": 1, "data_parallel_size": 8}),
        ("--disable-radix-cache", {"enable_prefix_caching": False}),
        ("--disable-cuda-graph", {"enforce_eager": True}),
        ("--disable-overlap-schedule", {"async_scheduling": False}),
        ("--enable-mixed-chunk", {"prefill_exclusive": False}),
        ("--chunked-prefill-size 4096", {"max_num_batched_tokens": 4096}),
        ("--chunked-prefill-size -1", {"enable_chunked_prefill": False}),
        ("--max-running-requests 64 --page-size 64", {"max_num_seqs": 64, "block_size": 64}),
        (
            "--enable-hierarchical-cache --hicache-size 30 --hicache-write-policy write_back",
            {"kv_offload": {"capacity_bytes": 30_000_000_000, "write_policy": "write_back"}},
        ),
        ("--context-length 8K --kv-cache-dtype fp8_e4m3", {"max_model_len": 8192, "kv_cache_dtype": "fp8_e4m3"}),
    ],
)
def test_sglang(flags: str, expected: dict[str, Any]) -> None:
    """server_args.py; with attention DP the ranks of --tp-size are split into those of --dp-size."""
    assert engine(f"{SGLANG} {flags}") == {"profile": "sglang", **expected}


def test_sglang_s_replicas_and_drafts() -> None:
    assert read(f"{SGLANG} --dp 2").data["cluster"] == {"replicas": 2}
    steps = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    drafts = engine(f"{SGLANG} --speculative-algorithm EAGLE3 {steps}")["speculative_config"]
    assert (drafts["method"], drafts["num_speculative_tokens"]) == ("eagle", 3)
    ngram = engine(f"{SGLANG} --speculative-algorithm NGRAM --speculative-num-draft-tokens 12")["speculative_config"]
    assert (ngram["method"], ngram["num_speculative_tokens"]) == ("ngram", 12)
    tree = read(f"{SGLANG} --speculative-algorithm EAGLE {steps} --speculative-eagle-topk 4")
    assert [what for what, _ in tree.unmodelled] == ["--speculative-eagle-topk 4"]
    with pytest.raises(SpecError, match="expected a multiple"):
        read(f"{SGLANG} --tp 2 --dp 4 --enable-dp-attention")


def test_host_memory_as_a_multiple_of_the_device_s_is_not_modelled() -> None:
    """server_args.py: --hicache-size overrides --hicache-ratio, by default 2, of blocks that a line does not know."""
    found = read(f"{SGLANG} --enable-hierarchical-cache --hicache-ratio 3")
    assert [what for what, _ in found.unmodelled] == ["--hicache-ratio 3", "--enable-hierarchical-cache"]
    assert "kv_offload" not in found.data["engine"]


def test_pairs_of_sglang_servers() -> None:
    pools = read(f"{SGLANG} --disaggregation-mode prefill\n{SGLANG} --disaggregation-mode decode").data["cluster"]
    assert [each["role"] for each in pools["pools"]] == ["prefill", "decode"]


def test_trtllm_with_its_yaml(tmp_path: Path) -> None:
    """The file counts before the line (commands/serve.py: it "overwrites the parameters")."""
    (tmp_path / "extra.yaml").write_text(
        "enable_attention_dp: true\nattention_dp_config: {enable_balance: true, timeout_iters: 50}\n"
        "kv_cache_config: {dtype: fp8, enable_block_reuse: false, free_gpu_memory_fraction: 0.8}\n"
        "cuda_graph_config: {enable_padding: true, max_batch_size: 512}\nmax_batch_size: 256\n"
        "speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 1}\n",
        encoding="utf-8",
    )
    line = f"mpirun -n 8 trtllm-llmapi-launch {TRTLLM} --tp_size 8 --ep_size 8 --max_batch_size 64"
    found = read(f"{line} --extra_llm_api_options extra.yaml", tmp_path)
    drafts = found.data["engine"].pop("speculative_config")
    assert (drafts["method"], drafts["num_speculative_tokens"]) == ("eagle", 1)
    assert found.data["engine"] == {
        "profile": "trtllm",
        "tensor_parallel_size": 1,
        "data_parallel_size": 8,
        "enable_expert_parallel": True,
        "attention_dp_timeout_iters": 50,
        "kv_cache_dtype": "fp8",
        "enable_prefix_caching": False,
        "max_num_seqs": 256,
    }
    unmodelled = " ".join(what for what, _ in found.unmodelled)
    assert "free_gpu_memory_fraction" in unmodelled
    assert "cuda_graph_config.max_batch_size" in unmodelled
    assert any("--max-batch-size 64" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda_graph_config: null", {"enforce_eager": True}),
        ("disable_overlap_scheduler: true", {"async_scheduling": False}),
        ("scheduler_config: {capacity_scheduler_policy: MAX_UTILIZATION}", {"reserve_output": False}),
        ("enable_chunked_prefill: true\nkv_cache_config: {tokens_per_block: 32}", {"enable_chunked_prefill": True}),
    ],
)
def test_fields_of_trtllm_s_yaml(text: str, expected: dict[str, Any]) -> None:
    found = engine(f"cat > e.yaml <<EOF\n{text}\nEOF\n{TRTLLM} --config e.yaml")
    assert expected.items() <= found.items()


def test_an_unknown_field_of_a_yaml_is_named() -> None:
    with pytest.raises(SpecError, match=r"e\.yaml.*Did you mean 'max-batch-size'"):
        read(f"cat > e.yaml <<EOF\nmax_batchsize: 3\nEOF\n{TRTLLM} --config e.yaml")


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (
            "guidellm benchmark --target http://x --rate-type constant --rate 5 --max-requests 40 "
            "--data prompt_tokens=256,output_tokens=128",
            {"arrivals": {"process": "constant", "rate": 5.0}, "num_requests": 40},
        ),
        (
            "guidellm run --profile kind=poisson,rate=2 --constraint kind=max_requests,count=30 "
            "--data kind=synthetic_text,prompt_tokens=256,output_tokens=128",
            {"arrivals": {"process": "poisson", "rate": 2.0}, "num_requests": 30},
        ),
        (
            """guidellm benchmark --profile concurrent --rate 16 --data '{"prompt_tokens":256,"output_tokens":128}'""",
            {"arrivals": {"process": "closed_loop", "concurrency": 16}},
        ),
        (
            "guidellm benchmark --profile throughput --data prompt_tokens=256,output_tokens=128 --max-requests 9",
            {"arrivals": {"process": "burst"}, "num_requests": 9},
        ),
        (
            "aiperf profile -m x --url http://x --concurrency 8 --request-count 64 --isl 256 --osl 128 --streaming",
            {"arrivals": {"process": "closed_loop", "concurrency": 8}, "num_requests": 64},
        ),
        (
            "aiperf profile --model x --request-rate 4 --synthetic-input-tokens-mean 256 --output-tokens-mean 128",
            {"arrivals": {"process": "poisson", "rate": 4.0}},
        ),
        (
            "python -m sglang.bench_serving --dataset-name random --random-input 256 --random-output 128 "
            "--random-range-ratio 1.0 --num-prompts 7 --request-rate 3",
            {"arrivals": {"process": "poisson", "rate": 3.0}, "num_requests": 7},
        ),
        (
            "python benchmark_serving.py --dataset-name random --random-input-len 256 --random-output-len 128 "
            "--max-concurrency 4 --num-prompts 7",
            {"arrivals": {"process": "closed_loop", "concurrency": 4}, "num_requests": 7},
        ),
    ],
)
def test_load_tests(load: str, expected: dict[str, Any]) -> None:
    """Arrivals, their number, and prompts of 256 tokens with answers of 128."""
    traffic = read(f"{SGLANG}\n{load}").data["traffic"]
    assert expected.items() <= traffic.items()
    assert traffic["input_tokens"] == {"distribution": "fixed", "value": 256}
    assert traffic["output_tokens"] == {"distribution": "fixed", "value": 128}


def test_sglang_s_random_lengths_and_shared_prefixes() -> None:
    """From the ratio of the length up to all of it (compute_random_lens); prompts of each group times groups."""
    load = "python -m sglang.bench_serving --dataset-name random --random-input-len 1000 --random-range-ratio 0.5"
    traffic = read(f"{SGLANG}\n{load}").data["traffic"]
    assert traffic["input_tokens"] == {"distribution": "uniform", "low": 500, "high": 1000}
    shared = "python -m sglang.bench_serving --dataset-name generated-shared-prefix --gsp-num-groups 4"
    traffic = read(f"{SGLANG}\n{shared} --gsp-system-prompt-len 100 --gsp-question-len 20").data["traffic"]
    assert traffic["prefix"] == {"num_groups": 4, "shared_tokens": 100}
    assert traffic["input_tokens"]["value"] == 120
    assert traffic["num_requests"] == 64


def test_answers_that_a_line_leaves_open_are_assumed() -> None:
    found = read(f"{SGLANG}\naiperf profile -m x --concurrency 8 --isl 256")
    assert found.data["traffic"]["output_tokens"] == {"distribution": "fixed", "value": 128}
    assert "answers of 128 tokens, as the line has no --osl" in found.assumed
    sharegpt = read(f"{SGLANG}\nvllm bench serve --dataset-name sharegpt --request-rate 2")
    assert "lengths of ShareGPT as traffic chat-sharegpt has them" in sharegpt.assumed


@pytest.mark.parametrize(
    ("load", "said"),
    [
        ("guidellm benchmark --profile sweep --data prompt_tokens=1", "many runs at rates that it finds itself"),
        ("guidellm benchmark --profile constant --rate 1 --data file.jsonl", "give prompt_tokens="),
        ("guidellm benchmark --profile constant --data prompt_tokens=1", "needs --rate"),
        ("guidellm benchmark --profile constant --rate many --data prompt_tokens=1", "got 'many'"),
        ("guidellm benchmark --profile constant --rate inf --data prompt_tokens=1", "got 'inf'"),
        ("guidellm benchmark --profile constant --rate 1 --data prompt_tokens=few", "got 'few'"),
        ("guidellm run --profile kind=constant,rate=1 --constraint kind=max_requests --data prompt_tokens=1", "'None'"),
        ("vllm bench serve --goodput ttft:nan", "got 'nan'"),
        ("aiperf profile --public-dataset aimo", "give --traffic"),
        ("aiperf profile --concurency 2", "Did you mean 'concurrency'"),
    ],
)
def test_what_a_load_test_does_not_say(load: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        read(f"{SGLANG}\n{load}")


def test_the_command_s_own_contract(tmp_path: Path) -> None:
    """YAML on stdout, warnings on stderr, exit 2 for what is wrong and for --strict; - on both ends of a pipe."""
    line = "vllm serve meta-llama/Llama-3.1-8B-Instruct --cpu-offload-gb 2"
    flags = ["--hardware", "h100", "--traffic", "chat-sharegpt", "--rate", "2", "--ttft", "1s"]
    ran = CliRunner().invoke(app, ["new", "-", *flags], input=line)
    assert ran.exit_code == 0, ran.output
    assert "cpu-offload-gb 2: affects time and is not modelled" in ran.stderr
    again = CliRunner().invoke(app, ["memory", "-", "--json"], input=ran.stdout)
    assert again.exit_code == 0, again.output
    refused = CliRunner().invoke(app, ["new", line, *flags, "--strict"])
    assert refused.exit_code == 2
    assert "--strict" in refused.stderr
    script = tmp_path / "serve.sh"
    script.write_text(f"#!/bin/sh\nexec {line}\n", encoding="utf-8")
    assert CliRunner().invoke(app, ["new", str(script), *flags]).stdout.splitlines()[1:] == ran.stdout.splitlines()[1:]
    missing = CliRunner().invoke(app, ["new", "nowhere.sh", *flags])
    assert (missing.exit_code, "no such file" in missing.stderr) == (2, True)
    for text in ("", "{", "- a\n", "model: [", "name: x\nmodel: nobody/knows\n"):
        bad = CliRunner().invoke(app, ["simulate", "-"], input=text)
        assert bad.exit_code == 2, text
        assert bad.stderr.startswith("error: ")


def test_arguments_of_what_a_line_has_not() -> None:
    """A drafter's model with n-grams, lengths of other data: not passed over."""
    drafts = """--speculative-config '{"method": "ngram", "num_speculative_tokens": 2, "model": "a/b"}'"""
    found = read(f"vllm serve Qwen/Qwen3-8B {drafts}")
    assert [what for what, _ in found.unmodelled] == ["--speculative-config.model a/b"]
    load = "vllm bench serve --dataset-name random --sonnet-input-len 3 --random-input-len 4"
    assert "--sonnet-input-len 3" in read(f"{SGLANG}\n{load}").irrelevant
