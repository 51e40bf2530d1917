"""What load tools wrote (tests/data/bench) is read as they meant it: units, definitions, who failed, what ran."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfmodel.errors import SpecError
from perfmodel.evidence.observation import Observation, RequestTimes
from perfmodel.evidence.predict.bench import GivenSetup, at_real_speed, predict_runs
from perfmodel.evidence.sources.bench import read_bench_files
from perfmodel.evidence.sources.bench_run import figures_of

DATA = Path(__file__).parents[2] / "data" / "bench"
AIPERF = (DATA / "aiperf" / "profile_export_aiperf.json", DATA / "aiperf" / "profile_export.jsonl")
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
# The server that these runs were measured on: its first token after 30 ms and 20 us a prompt token, others 8 ms apart.
# Tools and a busy machine add to that, up to half of it, and take nothing away.
FIRST_MS, TOKEN_MS = 30.0, 8.0


def read(*files: Path | str) -> list[Observation]:
    runs, left_out = read_bench_files([DATA / each for each in files])
    assert not left_out
    return runs


def load(file: str) -> Any:
    return json.loads((DATA / file).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("files", "tool", "count", "by_request"),
    [
        (("vllm.json",), "vllm bench serve", 1, 0),
        (("vllm_detailed.json",), "vllm bench serve", 1, 1),
        (("sglang.jsonl",), "SGLang bench_serving", 2, 1),
        (("guidellm.json",), "GuideLLM", 2, 2),
        (AIPERF, "AIPerf", 1, 1),
        (AIPERF[:1], "AIPerf", 1, 0),
        (AIPERF[1:], "AIPerf", 1, 1),
        (("profile_export_genai_perf.json",), "GenAI-Perf", 1, 0),
        (("inferencex.json",), "InferenceX", 1, 0),
        (("mlperf_server.txt",), "MLPerf LoadGen", 1, 0),
        (("mlperf_offline.txt",), "MLPerf LoadGen", 1, 0),
        (("llama_bench.json",), "llama-bench", 2, 0),
        (("llama_bench.jsonl",), "llama-bench", 2, 0),
        (("llama_bench.csv",), "llama-bench", 2, 0),
        (("llama_bench_cpu.json",), "llama-bench", 2, 0),
        (("llama_bench_cpu.jsonl",), "llama-bench", 2, 0),
        (("llama_bench_cpu.csv",), "llama-bench", 2, 0),
        (("trtllm_bench.json",), "trtllm-bench", 1, 0),
    ],
    ids=str,
)
def test_each_format_is_recognised(files: tuple[str, ...], tool: str, count: int, by_request: int) -> None:
    runs = read(*files)
    assert [run.source for run in runs] == [tool] * count
    assert sum(run.requests is not None for run in runs) == by_request


def test_names_of_files_say_nothing(tmp_path: Path) -> None:
    for number, file in enumerate(("vllm.json", "mlperf_server.txt", "llama_bench.csv")):
        (tmp_path / f"{number}").write_bytes((DATA / file).read_bytes())
    runs, _ = read_bench_files([tmp_path / f"{number}" for number in range(3)])
    assert [run.source for run in runs] == ["vllm bench serve", "MLPerf LoadGen", "llama-bench", "llama-bench"]


@pytest.mark.parametrize(
    "files",
    [("vllm.json",), ("vllm_detailed.json",), ("sglang.jsonl",), ("guidellm.json",), AIPERF, ("mlperf_server.txt",)],
    ids=str,
)
def test_times_are_those_of_the_server_that_was_measured(files: tuple[str, ...]) -> None:
    """TPOT without the first token: with it, it would be some 9 ms instead of 8 where nothing else adds to it."""
    for run in read(*files):
        token = 4.0 if run.source == "MLPerf LoadGen" else TOKEN_MS  # what that system slept
        assert FIRST_MS < run.metrics["mean_ttft_ms"] < 2 * FIRST_MS
        assert token <= run.metrics["median_tpot_ms"] < 1.8 * token
        assert run.metrics["mean_e2el_ms"] > run.metrics["mean_ttft_ms"] + 15 * token


def test_failed_requests_are_counted_and_kept_out() -> None:
    found = {
        run.name: (run.setup.completed, run.setup.failed) for run in read("sglang.jsonl", "guidellm.json", *AIPERF)
    }
    assert found["sglang.jsonl, run 1"] == (12, 2)
    assert found["guidellm.json, benchmark 1"] == found["guidellm.json, benchmark 2"] == (7, 1)
    assert found["profile_export_aiperf.json with profile_export.jsonl"] == (13, 1)
    assert [(run.setup.completed, run.setup.failed, len(run.requests or ())) for run in read("vllm_detailed.json")] == [
        (12, 2, 12)
    ]


def test_figures_of_requests_are_the_tools_own() -> None:
    """The means that a tool has computed itself come out of its requests again."""
    detailed, stated = read("vllm_detailed.json")[0], load("vllm_detailed.json")
    for key in ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "p99_ttft_ms", "output_throughput"):
        assert detailed.metrics[key] == pytest.approx(stated[key], rel=1e-6)
    whole, alone = read(*AIPERF)[0], read(AIPERF[0])[0]
    for key in ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "p99_e2el_ms"):
        assert whole.metrics[key] == pytest.approx(alone.metrics[key], rel=1e-6)
    sglang, line = read("sglang.jsonl")[0], json.loads((DATA / "sglang.jsonl").read_text().splitlines()[0])
    # Its latency ends when the stream is closed, some microseconds behind the last token.
    assert sglang.metrics["mean_tpot_ms"] == pytest.approx(line["mean_tpot_ms"], rel=1e-3)


def test_sglangs_total_throughput_is_of_all_tokens() -> None:
    alone, line = read("sglang.jsonl")[1], json.loads((DATA / "sglang.jsonl").read_text().splitlines()[1])
    assert alone.metrics["output_throughput"] == line["output_throughput"]
    assert alone.metrics["total_token_throughput"] == line["total_throughput"]


def test_guidellm_compares_what_leaves_the_first_token_out() -> None:
    metrics = load("guidellm.json")["benchmarks"][1]["metrics"]
    run = read("guidellm.json")[1]
    ours, with_first = run.metrics["mean_tpot_ms"], metrics["time_per_output_token_ms"]["successful"]["mean"]
    own = metrics["inter_token_latency_ms"]["successful"]
    assert ours < with_first
    # Theirs ends with the last token, ours with the answer; means of requests, not of tokens.
    assert ours == pytest.approx(own["mean"], rel=0.05)
    assert any("first token" in note for note in run.setup.notes)


def test_loads_are_what_was_asked_for() -> None:
    loads = {run.name: run.load for run in read("vllm.json", "sglang.jsonl", "guidellm.json", *AIPERF)}
    assert (loads["vllm.json"].process, loads["vllm.json"].concurrency) == ("closed", 4)
    vllm = load("vllm.json")
    assert loads["vllm.json"].prompt == vllm["total_input_tokens"] / 12  # of those that were answered
    assert loads["vllm.json"].answer == vllm["total_output_tokens"] / 12
    detailed = read("vllm_detailed.json")[0].load
    assert (detailed.process, detailed.rate, detailed.num_requests) == ("open", 10, 14)
    assert (loads["sglang.jsonl, run 1"].process, loads["sglang.jsonl, run 1"].rate) == ("open", 10)
    assert loads["sglang.jsonl, run 2"].concurrency == 4
    assert [loads[f"guidellm.json, benchmark {n}"].concurrency for n in (1, 2)] == [2, 4]
    assert loads["profile_export_aiperf.json with profile_export.jsonl"].concurrency == 4
    server, offline = (read(f"mlperf_{kind}.txt")[0].load for kind in ("server", "offline"))
    assert (server.process, server.rate, offline.process) == ("open", 20, "burst")
    assert offline.answer == pytest.approx(40, rel=1e-3)  # tokens that each of its samples got
    assert read("profile_export_genai_perf.json")[0].load.concurrency == 4


def test_requests_are_in_the_order_in_which_they_were_sent() -> None:
    times = read(*AIPERF)[0].requests
    assert times is not None
    assert times.start_s is not None
    assert times.start_s[0] == 0
    assert (np.diff(times.start_s) >= 0).all()
    lines = [json.loads(line) for line in AIPERF[1].read_text().splitlines()]
    first = min(
        (line for line in lines if not line.get("error")), key=lambda line: line["metadata"]["request_start_ns"]
    )
    assert times.num_prompt_tokens[0] == first["metrics"]["input_sequence_length"]["value"]


def test_inferencex_counts_all_devices_and_seconds() -> None:
    run = read("inferencex.json")[0]
    assert run.metrics["output_throughput"] == 2 * 740
    assert run.metrics["mean_tpot_ms"] == pytest.approx(10.7)
    assert run.setup.says["engine.tensor_parallel_size"] == 2
    assert (run.setup.says["engine.quantization"], run.setup.says["engine.version"]) == ("nvfp4", "0.18.0")


def test_llama_bench_says_what_ran() -> None:
    for file in ("llama_bench.json", "llama_bench.jsonl", "llama_bench.csv"):
        prompts, tokens = read(file)
        assert prompts.setup.local is not None
        assert (prompts.setup.local.model, prompts.setup.local.gguf_type) == ("Meta-Llama-3.1-8B-Instruct", "q4_k_m")
        assert (prompts.setup.local.device, prompts.setup.local.backend, prompts.setup.local.build) == (
            "NVIDIA GeForce RTX 4090",
            "cuda",
            "b9010",
        )
        assert (prompts.metrics, tokens.metrics) == ({"prompt_tokens_per_s": 12000}, {"decode_tokens_per_s": 150})


def test_llama_bench_by_default_leaves_layers_and_attention_to_the_backend() -> None:
    """-1 of n_gpu_layers and flash_attn is "auto"; threads are no part of a prediction, which a note says."""
    for file in ("llama_bench_cpu.json", "llama_bench_cpu.jsonl", "llama_bench_cpu.csv"):
        prompts, tokens = read(file)
        for run in (prompts, tokens):
            assert run.setup.local is not None
            assert (run.setup.local.backend, run.setup.local.flash, run.setup.local.gguf_type) == ("cpu", None, "q4_1")
            assert any("1 threads" in note for note in run.setup.notes)
        assert prompts.setup.local is not None
        assert tokens.setup.local is not None
        assert (prompts.setup.local.num_prompt, tokens.setup.local.num_generated) == (64, 16)


def test_every_file_is_predicted_with_what_it_lacks_given() -> None:
    """Each by its own: the model from the file where it has one; devices are in three formats only."""
    llama = {"model": "llama-3.1-8b", "hardware": "h100", "traffic": "chat"}
    for flags, files in (
        ({"hardware": "h100"}, ("vllm.json", "guidellm.json", "profile_export_genai_perf.json")),
        (llama, ("sglang.jsonl", "mlperf_server.txt", "mlperf_offline.txt")),
        ({}, ("inferencex.json", "trtllm_bench.json", "llama_bench.csv")),
    ):
        pairs = predict_runs(read(*files), GivenSetup(None, flags), intervals=False)
        assert [pair.reason for pair in pairs] == [""] * len(pairs)
        for pair in pairs:
            assert pair.metrics.keys() & pair.row.metrics.keys()
            assert all(value > 0 for value in pair.metrics.values())


def test_prompts_share_what_the_scenario_says(tmp_path: Path) -> None:
    """No file says it: with 500 tokens of each prompt in the cache the first token comes sooner; the fact is named."""
    scenario = {"name": "own", "model": "llama-3.1-8b", "hardware": "h100", "traffic": "chat"}
    alone, shared = tmp_path / "alone.yaml", tmp_path / "shared.yaml"
    alone.write_text(json.dumps(scenario), encoding="utf-8")
    prefix = {"num_groups": 1, "shared_tokens": 500}
    lengths = {
        "input_tokens": {"distribution": "fixed", "value": 600},
        "output_tokens": {"distribution": "fixed", "value": 9},
    }
    traffic = {**lengths, "arrivals": {"process": "poisson", "rate": 1}, "num_requests": 9, "prefix": prefix}
    shared.write_text(json.dumps({**scenario, "traffic": traffic}), encoding="utf-8")
    for file in ("vllm.json", "vllm_detailed.json"):
        pairs = [predict_runs(read(file), GivenSetup(str(path)), intervals=False)[0] for path in (alone, shared)]
        facts = [{fact.name: fact for fact in pair.details["facts"]}["prompts"] for pair in pairs]
        assert [fact.is_assumed for fact in facts] == [True, False]
        assert facts[1].value == "share 500 tokens"
        assert pairs[1].metrics["mean_ttft_ms"] < pairs[0].metrics["mean_ttft_ms"]


def at_speed(data: Any, speed: float) -> Any:
    """The result of the same tool against an emulator at `speed` simulated seconds per second."""
    times = {"ttfts", "itls", "start_times", "latencies", "duration"}
    rates = {"request_throughput", "output_throughput", "total_token_throughput"}

    def changed(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return [changed(key, item) for item in value] if key in times else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            return value
        return value / speed if key.endswith("_ms") or key in times else value * speed if key in rates else value

    return {key: changed(key, value) for key, value in data.items()}


@pytest.mark.parametrize("file", ["vllm.json", "vllm_detailed.json"])
@pytest.mark.parametrize("is_stated", [False, True])
def test_results_of_an_emulator_are_rescaled_to_real_speed(file: str, is_stated: bool, tmp_path: Path) -> None:
    slow = {**at_speed(load(file), 0.5), **({"perfmodel_speed": "0.5"} if is_stated else {})}
    (tmp_path / "slow.json").write_text(json.dumps(slow), encoding="utf-8")
    given = GivenSetup(None, {"hardware": "h100"}, speed=None if is_stated else 0.5)
    (corrected,) = predict_runs(read(tmp_path / "slow.json"), given, intervals=False)
    (expected,) = predict_runs(read(file), GivenSetup(None, {"hardware": "h100"}), intervals=False)
    assert corrected.row.metrics == pytest.approx(expected.row.metrics)
    assert corrected.metrics == pytest.approx(expected.metrics, rel=1e-3)
    assert any("0.5 simulated seconds per second" in note for note in corrected.row.setup.notes)
    (misread,) = predict_runs(read(tmp_path / "slow.json"), GivenSetup(None, {"hardware": "h100"}, speed=1.0), None)
    assert bool(misread.reason) is is_stated  # the file states another speed


@pytest.mark.parametrize("speed", [0, "0", -1, "fast", None, float("inf")])
def test_an_invalid_speed_is_refused(speed: object, tmp_path: Path) -> None:
    """0 and infinity were read as 1."""
    (tmp_path / "a.json").write_text(json.dumps({**load("vllm.json"), "perfmodel_speed": speed}), encoding="utf-8")
    with pytest.raises(SpecError, match="perfmodel_speed"):
        read(tmp_path / "a.json")


def test_the_request_rate_is_rescaled_to_the_emulators_clock(tmp_path: Path) -> None:
    """Two requests per wall-clock second are four per second of a clock at half speed."""
    (tmp_path / "a.json").write_text(json.dumps({**load("vllm.json"), "request_rate": 2.0}), encoding="utf-8")
    (run,) = read(tmp_path / "a.json")
    assert at_real_speed(run, 0.5).load.rate == 4.0


def test_speed_does_not_apply_to_llama_bench() -> None:
    (pair, *_) = predict_runs(read("llama_bench.json"), GivenSetup(speed=0.5))
    assert "leave --speed out" in pair.reason


def test_what_no_file_says_is_called_assumed() -> None:
    pair = predict_runs(read("vllm_detailed.json"), GivenSetup(None, {"hardware": "h100"}), intervals=False)[0]
    said = {fact.name: fact.said_by for fact in pair.details["facts"]}
    assert (said["model"], said["hardware"], said["tensor_parallel_size"]) == ("the file", "--hardware", "the file")
    assert {said[name] for name in ("engine", "max_num_seqs", "prompts")} == {"assumed"}
    given = GivenSetup("llama-3.1-8b-h100-2048-256", {}, ["engine.max_num_seqs=64"])
    pair = predict_runs(read("vllm.json"), given, intervals=False)[0]
    said = {fact.name: fact.said_by for fact in pair.details["facts"]}
    assert (said["model"], said["max_num_seqs"], said["version of the engine"]) == ("the scenario", "--set", "assumed")


def test_percentiles_are_values_in_rank_order() -> None:
    """Of 101 requests that take 0, 1 ... 100 s, the p-th percentile is p seconds."""
    tokens, seconds = np.full(101, 10), np.arange(101.0)
    figures = figures_of(RequestTimes(None, tokens, tokens, seconds, seconds))
    for name, percent in (("median", 50), ("p90", 90), ("p95", 95), ("p99", 99)):
        for metric in ("ttft", "e2el"):
            assert figures[f"{name}_{metric}_ms"] == pytest.approx(1e3 * percent)


def test_a_run_lasts_until_its_last_request_ends() -> None:
    """Sent at 0, 1 and 2 s, answered after 5, 1 and 1.5 s: 3 requests and 60 tokens in 5 s."""
    start, e2el = np.array([0.0, 1.0, 2.0]), np.array([5.0, 1.0, 1.5])
    figures = figures_of(RequestTimes(start, np.full(3, 10), np.full(3, 20), np.full(3, 0.05), e2el))
    assert (figures["request_throughput"], figures["output_throughput"]) == (3 / 5, 60 / 5)
    assert figures["mean_tpot_ms"] == pytest.approx(1e3 * float((e2el - 0.05).mean()) / 19)


@pytest.mark.parametrize(("burstiness", "cv"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_burstiness_is_the_shape_of_gamma_distributed_gaps(tmp_path: Path, burstiness: float, cv: float) -> None:
    """The coefficient of variation of a gamma distribution is 1 / sqrt(shape)."""
    (path := tmp_path / "vllm.json").write_text(json.dumps(load("vllm_detailed.json") | {"burstiness": burstiness}))
    (run,), _ = read_bench_files([path])
    assert run.load.cv == cv


@pytest.mark.parametrize(
    ("in_flight", "process", "concurrency"), [(30.0, "burst", None), (46.0, "burst", None), (8.0, "closed", 8)]
)
def test_a_burst_is_recognised_by_half_of_its_requests_in_flight(
    tmp_path: Path, in_flight: float, process: str, concurrency: int | None
) -> None:
    """64 requests at once that all fit the batch: 32 in flight on average while they finish one after another."""
    data = load("trtllm_bench.json")
    data["request_info"] |= {"num_requests": 64, "avg_num_concurrent_requests": in_flight}
    data["world_info"]["max_batch_size"] = 256
    (path := tmp_path / "trtllm.json").write_text(json.dumps(data))
    (run,), _ = read_bench_files([path])
    assert (run.load.process, run.load.concurrency) == (process, concurrency)
