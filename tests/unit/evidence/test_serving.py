"""Recorded serving as scenarios, and an engine's profile found again from runs that it produced."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost import EngineProfile, HostFit, ServerFit, plan_memory
from perfmodel.errors import SpecError
from perfmodel.evidence.fit.profiles import fit_engine_profile
from perfmodel.evidence.kinds.runs import mean_backlog_wait_s, report_serving, report_steady_state, validate_per_request
from perfmodel.evidence.observation import Observation
from perfmodel.evidence.predict.recorded import (
    accelerated,
    shortened_stages,
    simulate_runs,
    simulate_steady_states,
    stage_latencies,
)
from perfmodel.evidence.sources.recorded import read_request_log, read_serving_runs
from perfmodel.evidence.sources.steady import read_steady_states, recipe_arguments
from perfmodel.sim import simulate

MEASURED = {"e2e_mean_ms": 2000.0, "ttft_mean_ms": 30.0, "e2e_p90_ms": 2200.0}


def run_entry(
    name: str, model: str, rates: tuple[float, ...], stage_s: float = 100, **server: object
) -> dict[str, object]:
    return {
        "id": name,
        "gpu": "NVIDIA H100 SXM 80GB",
        "engine": "vLLM 0.15.1",
        "model": model,
        "server": {"tensor_parallel_size": 1, "max_num_seqs": 128, "max_num_batched_tokens": 2048, "block_size": 16}
        | {"max_model_len": 4096, "gpu_memory_utilization": 0.9, "total_kv_blocks": None}
        | server,
        "workload": {
            "stages": [{"rate": rate, "duration_s": stage_s} for rate in rates],
            "num_groups": 10,
            "num_prompts_per_group": 10,
            "system_prompt_len": 100,
            "question_len": 400,
            "output_len": 101,
        },
        "measured": [{"stage": i} | MEASURED for i in range(len(rates))],
    }


def read(tmp_path: Path, *entries: object) -> tuple[list[Observation], list[tuple[str, str]]]:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(entries), encoding="utf-8")
    return read_serving_runs(path)


def test_a_run_in_a_hurry_has_the_same_requests_and_longer_answers(tmp_path: Path) -> None:
    """Its arrivals are the run's, sooner; more are in flight, so that each takes longer."""
    (run,), _ = read(tmp_path, run_entry("a", "meta-llama/Llama-3.1-8B-Instruct", (10.0,)))
    (fast,) = accelerated([run], 2.0)
    stage = fast.scenario.traffic.arrivals.stages[0]
    assert (stage.rate, stage.duration_s, fast.window) == (20.0, 50.0, (0.0, 50.0))
    slow, quick = (simulate(each.scenario).requests for each in (run, fast))
    assert slow is not None
    assert quick is not None
    assert np.sort(quick.arrival_s) == pytest.approx(np.sort(slow.arrival_s) / 2)
    assert quick.e2el_s.mean() > slow.e2el_s.mean()


def test_a_run_becomes_a_scenario(tmp_path: Path) -> None:
    entry = run_entry("a", "meta-llama/Llama-3.1-8B-Instruct", (2.0, 5.0), total_kv_blocks=7463)
    stages, left_out = read(tmp_path, entry)
    scenario = stages[0].scenario
    assert not left_out
    assert (scenario.model.name, scenario.hardware.name) == ("llama-3.1-8b", "h100-sxm-80gb")
    assert (scenario.engine.num_gpu_blocks_override, scenario.engine.max_num_seqs) == (7463, 128)
    assert [stage.window for stage in stages] == [(0.0, 100.0), (100.0, 200.0)]
    assert stages[0].metrics["itl_mean"] == pytest.approx((2000 - 30) / 100)
    result = simulate(scenario)
    assert result.summary["completed"] == 700  # exactly rate x duration of both stages
    # All prompts but the first hundred have been seen before, up to their last, partly filled block.
    assert result.summary["prefix_cache_hit_rate"] > 0.8
    assert result.requests is not None
    first, second = (stage_latencies(stage, result.requests) for stage in stages)
    assert first["ttft_mean"] != second["ttft_mean"]


def test_a_report_holds_the_plan_of_memory_against_what_a_server_logged(tmp_path: Path) -> None:
    entry = run_entry("a", "meta-llama/Llama-2-7b-hf", (2.0,), total_kv_blocks=10_000)
    (run,), _ = read(tmp_path, entry)
    (note,) = report_serving(simulate_runs(shortened_stages([run], 0.1))).notes
    free = run.scenario.engine.model_copy(update={"num_gpu_blocks_override": None})
    planned = plan_memory(run.scenario.model, run.scenario.hardware, free).num_kv_blocks
    assert f"{planned:,} KV blocks planned, 10,000 logged ({planned / 10_000 - 1:+.1%})" in note


def test_what_cannot_be_described_is_listed_with_the_reason(tmp_path: Path) -> None:
    good = run_entry("good", "meta-llama/Llama-3.1-8B-Instruct", (2.0,))
    unknown = run_entry("unknown", "nobody/nothing", (2.0,))
    incomplete = {"id": "incomplete"}
    runs, left_out = read(tmp_path, good, unknown, incomplete)
    assert [run.name for run in runs] == ["good"]
    assert [name for name, _ in left_out] == ["unknown", "incomplete"]
    assert "unknown model 'nobody/nothing'" in left_out[0][1]
    report = report_serving(simulate_runs(shortened_stages(runs, 0.1)), left_out)
    assert (report.rows, report.covered) == (3, 1)
    assert any("unknown model" in note for note in report.notes)


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1"])
def test_a_file_that_holds_no_runs_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "runs.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        read_serving_runs(path)
    assert "\n" not in str(caught.value)


@pytest.mark.release
def test_a_profile_is_found_again_from_the_runs_it_produced(tmp_path: Path) -> None:
    entries = [
        run_entry("llama", "meta-llama/Llama-3.1-8B-Instruct", (2.0, 14.0), stage_s=60),
        run_entry("nemo", "mistralai/Mistral-Nemo-Instruct-2407", (1.0, 8.0), stage_s=60),
    ]
    runs, _ = read(tmp_path, *entries)
    true = EngineProfile(
        engine="vllm",
        host=HostFit(serial_step_s=6e-4, serial_per_sequence_s=1.5e-5),
        server=ServerFit(in_s=8e-3, out_s=1e-3, out_per_sequence_s=9e-5),
        sampling_bytes_per_logit=250.0,
    )
    produced = simulate_runs(runs, profile=true)
    told = [replace(pair.row, metrics=pair.metrics) for pair in produced]
    found = fit_engine_profile(EngineProfile(engine="vllm"), told, share=1.0)
    assert found.host.serial_step_s == pytest.approx(6e-4, rel=0.2)
    assert found.server.in_s == pytest.approx(8e-3, rel=0.15)
    assert abs(found.latency_residuals.p90) < 0.01


HEADER = (
    "id,backend,backend_version,model_path,system,precision,isl,osl,lengths,concurrency,attention_tp,attention_dp,ep,"
    "mtp_unlabelled,ttft_ms,tpot_ms\n"
)


def test_steady_states_follow_their_engines_rules(tmp_path: Path) -> None:
    rows = [
        "v,vllm,0.12.0,Qwen/Qwen3-32B,h100_sxm,bf16,1024,64,uniform 0.8-1.0,4,4,1,1,False,100,10",
        "s,sglang,0.5.9,Qwen/Qwen3-32B,b200_sxm,fp8,1024,64,uniform 0.8-1.0,16,4,1,1,False,100,10",
        "t,trtllm,,Qwen/Qwen3-32B,h200_sxm,fp8,9000,64,fixed,4,4,1,1,True,100,10",
        "x,vllm,,nobody/nothing,h100_sxm,bf16,1024,64,fixed,4,4,1,1,False,100,10",
    ]
    path = tmp_path / "rows.csv"
    path.write_text(HEADER + "\n".join(rows) + "\n", encoding="utf-8")
    found, left_out = read_steady_states(path)
    engines = [row.scenario.engine for row in found]
    assert [engine.profile for engine in engines] == ["vllm", "sglang", "trtllm"]
    assert [engine.async_scheduling for engine in engines] == [False, True, True]
    assert [engine.poll_every for engine in engines] == [1, 30, 1]
    assert engines[2].max_num_batched_tokens >= 9000 + 64
    assert [row.is_reliable for row in found] == [True, True, False]
    assert [name for name, _ in left_out] == ["x"]
    report = report_steady_state(simulate_steady_states(found), left_out)
    assert (report.rows, report.covered) == (4, 3)
    assert report.metrics["tpot_mean"].rows == 2
    assert report.by["engine trtllm"]["tpot_mean"].rows == 1


def test_a_log_is_replayed_request_by_request(tmp_path: Path) -> None:
    folder = tmp_path / "rtx4090-test"
    (folder / "e2e").mkdir(parents=True)
    meta = {
        "engine_kwargs": {"model": "meta-llama/Llama-3.1-8B", "max_num_seqs": 8, "max_model_len": 4096},
        "kv_cache": {"num_gpu_blocks": 2000, "block_size": 16},
        "hardware": {"device_name": "NVIDIA GeForce RTX 4090"},
    }
    (folder / "e2e" / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    lines = ["client_arrival_s,input_toks,output_toks,first_token_s,last_token_s"]
    lines += [f"{i},{100 + i},10,{i + 0.05},{i + 0.25}" for i in range(5)]
    (folder / "e2e" / "requests.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    log = read_request_log(folder, tmp_path)
    assert log.scenario.hardware.name == "rtx-4090"
    assert log.requests is not None
    np.testing.assert_allclose(log.requests.tpot_s, 0.2 / 9)
    report = validate_per_request(folder)
    assert (report.rows, report.covered) == (5, 5)
    assert set(report.metrics) == {"e2el", "ttft", "tpot", "e2el_mean", "ttft_mean", "tpot_mean"}
    assert report.metrics["ttft_mean"].bias == pytest.approx(report.metrics["ttft"].bias)


def test_what_scripts_set_is_taken() -> None:
    """The largest concurrency that a setting holds from counts; other devices and engines have none of it."""
    assert recipe_arguments("sglang", "b200-sxm", 15) == {"poll_every": 10}
    assert recipe_arguments("sglang", "b200-sxm", 16) == {"poll_every": 30}
    assert recipe_arguments("sglang", "h100-sxm-80gb", 64) == {}
    assert recipe_arguments("trtllm", "h200-sxm", 1) == {"attention_dp_timeout_iters": 60}


# What is left over waits: queues that begin empty and are asked for more than they serve.


@given(rate=st.integers(1, 40), capacity=st.integers(1, 40), duration=st.integers(10, 400))
def test_the_mean_wait_is_that_of_each_arrival(rate: int, capacity: int, duration: int) -> None:
    """Arrival by arrival: number n comes at n / rate and starts when n have been served, n / capacity."""
    waits = [max(n / capacity - n / rate, 0.0) for n in range(rate * duration)]
    mean = sum(waits) / len(waits)
    assert mean_backlog_wait_s(rate, capacity, duration) == pytest.approx(mean, rel=0.11, abs=1e-9)


def test_a_tenth_of_the_capacity_is_half_of_the_wait() -> None:
    """4 requests/s of which 3.3 are served: 0.21 of the time; with a tenth more capacity, 3.63, it is 0.10."""
    assert mean_backlog_wait_s(4, 3.3, 1200) == pytest.approx(127.3, abs=0.1)
    assert mean_backlog_wait_s(4, 3.63, 1200) / mean_backlog_wait_s(4, 3.3, 1200) == pytest.approx(0.48, abs=0.01)
