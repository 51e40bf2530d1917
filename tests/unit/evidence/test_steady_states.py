"""Recorded steady states: profiles found again from those that they produced, formats, shortened loops, two nodes."""

import csv
import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perfmodel.cost import EngineProfile, HostFit, ServerFit
from perfmodel.evidence.fit.parameters import with_facts
from perfmodel.evidence.fit.profiles import fit_steady_profile, fitting_rows, steady_log_errors
from perfmodel.evidence.kinds.runs import validate_steady_state
from perfmodel.evidence.observation import Observation, Prediction
from perfmodel.evidence.predict.recorded import simulate_steady_states, weighted_means
from perfmodel.evidence.sources.steady import read_steady_states
from perfmodel.sim import RequestColumns

HEADER = (
    "id,backend,backend_version,model_path,system,precision,isl,osl,lengths,concurrency,attention_tp,attention_dp,ep,"
    "mtp_unlabelled,ttft_ms,tpot_ms\n"
)


def rows(tmp_path: Path, system: str, engine: str = "sglang", ranks: int = 4) -> list[Observation]:
    lines = [
        f"{model}{tokens}{slots},{engine},,{model},{system},bf16,{tokens},40,uniform 0.8-1.0,{slots},{ranks},1,1,False,"
        "100,10"
        for model in ("Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B")
        for tokens in (1024, 6000)
        for slots in (2, 6)
    ]
    path = tmp_path / "rows.csv"
    path.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    found, left_out = read_steady_states(path)
    assert not left_out
    return found


def told(pairs: list[Prediction]) -> list[Observation]:
    """Rows that say what was simulated."""
    return [replace(pair.row, metrics=pair.metrics) for pair in pairs]


@pytest.mark.release
def test_a_profile_is_found_again_from_the_steady_states_it_produced(tmp_path: Path) -> None:
    true = with_facts(
        EngineProfile(
            engine="sglang",
            host=HostFit(
                serial_step_s=8e-4,
                serial_per_sequence_s=6e-6,
                prompt_step_s=1.2e-2,
                hidden_prompt_step_s=1e-2,
                hidden_prompt_layer_s=1e-3,
                hidden_prompt_moe_layer_s=9e-4,
            ),
            server=ServerFit(in_s=2e-2, in_per_prompt_token_s=1e-6),
        )
    )
    measured = told(simulate_steady_states(rows(tmp_path, "h100_sxm"), profile=true))
    assert len(fitting_rows(measured, "sglang")) == len(measured)
    found = fit_steady_profile(with_facts(EngineProfile(engine="sglang")), measured)
    for layers in ((64, 0, 0), (48, 48, 0)):  # a request alone waits for the front end, preparation and launches
        waits = [
            profile.server.in_s + profile.host.prompt_step_s + profile.host.launches_s(*layers)
            for profile in (found, true)
        ]
        assert waits[0] == pytest.approx(waits[1], rel=0.1)
    # In runs of twenty requests a step more or less moves a mean by some per cent: 0.6 ms of a step are not told, and
    # the search, which sees such jumps, ends near the truth and not at it.
    assert found.host.serial_step_s == pytest.approx(8e-4, abs=6e-4)
    errors = steady_log_errors(simulate_steady_states(measured, profile=found))
    assert np.abs(np.median(errors.reshape(-1, 2), axis=0)).max() < 0.03
    # A dense model says nothing about launches of experts: what is left out is less sure than what was fitted.
    assert found.ttft_residuals.p90 - found.ttft_residuals.p10 > np.ptp(np.quantile(errors[1::2], [0.1, 0.9]))


@pytest.mark.release
def test_what_no_row_at_face_value_determines_is_found_in_the_time_to_first_token_of_others(tmp_path: Path) -> None:
    """Latent attention in rows alone whose decodes may be speculated: a measured time per output token says nothing."""
    true = with_facts(EngineProfile(engine="trtllm", host=HostFit(hidden_prompt_latent_layer_s=3e-3)))
    path = tmp_path / "latent.csv"
    lines = [
        f"{slots},trtllm,,deepseek-ai/DeepSeek-V3,b200_sxm,fp8,1024,40,uniform 0.8-1.0,{slots},8,1,1,True,100,10"
        for slots in (1, 2)
    ]
    path.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    suspected = [
        replace(row, metrics={**row.metrics, "tpot_mean": 1.0})
        for row in told(simulate_steady_states(read_steady_states(path)[0], profile=true))
    ]
    assert not fitting_rows(suspected, "trtllm")
    clear = told(simulate_steady_states(rows(tmp_path, "b200_sxm", engine="trtllm")[:2], profile=true))
    found = fit_steady_profile(true.model_copy(update={"host": HostFit()}), [*clear, *suspected])
    assert found.host.hidden_prompt_latent_layer_s > 1e-3
    assert abs(np.mean(steady_log_errors(simulate_steady_states(suspected, profile=found))[1::2])) < 0.01
    assert found.ttft_residuals.num_rows == len(clear)


# Number formats: checkpoints as published, and formats that are not known.


def test_int4_experts_are_served_as_their_checkpoint_has_them(tmp_path: Path) -> None:
    """Kimi-K2.5 by compressed-tensors: experts in 4 bits in groups of 32; attention and shared experts in 16, and so
    the activations and the KV cache."""
    path = tmp_path / "rows.csv"
    path.write_text(
        HEADER + "a,vllm,0.19.0,moonshotai/Kimi-K2.5,h200_sxm,int4,1024,64,uniform 0.8-1.0,4,8,1,1,False,100,10\n"
        "b,vllm,0.19.0,Qwen/Qwen3-32B,h200_sxm,int4,1024,64,uniform 0.8-1.0,4,1,1,1,False,100,10\n",
        encoding="utf-8",
    )
    (kimi, dense), left_out = read_steady_states(path)
    assert not left_out
    quantization = kimi.scenario.model.quantization
    assert (quantization.weights, quantization.group_size, quantization.activations) == ("int4", 32, None)
    assert {"attention", "shared_experts"} <= quantization.kept
    assert kimi.scenario.engine.kv_cache_dtype == "auto"
    assert dense.scenario.model.quantization.weights == "int4"


def test_a_precision_that_is_not_known_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    row = "a,vllm,0.19.0,Qwen/Qwen3-32B,h200_sxm,int7,1024,64,uniform 0.8-1.0,4,1,1,1,False,100,10\n"
    path.write_text(HEADER + row, encoding="utf-8")
    assert read_steady_states(path) == ([], [("a", "precision: got 'int7'; expected bf16, fp8, fp4, int4.")])


# Shortened closed loops: means of a whole run from some of its rounds.

SLOTS = 5


def columns(ttft_s: list[float]) -> RequestColumns:
    """Rounds of requests, all of a round alike; TPOT is a tenth of TTFT."""
    ttft = np.repeat(np.array(ttft_s), SLOTS)
    n = len(ttft)
    ids, zeros, outputs = np.arange(n), np.zeros(n), np.full(n, 11)
    return RequestColumns(ids, zeros, zeros, ttft, 2 * ttft, outputs, outputs, 0 * ids, 0 * ids, 0 * ids)


@pytest.mark.parametrize("kept", [1, 2, 8])
def test_the_means_are_those_of_the_whole_run_where_its_middle_is_steady(kept: int) -> None:
    whole = columns([9.0, *[2.0] * 8, 1.0])
    ttft_s, tpot_s = weighted_means(columns([9.0, *[2.0] * kept, 1.0]), SLOTS, 10 * SLOTS)
    assert ttft_s == pytest.approx(whole.ttft_s.mean())
    assert tpot_s == pytest.approx(whole.tpot_s.mean())


# Two nodes under vLLM, as somebody measured them: MiniMax-M2.5 on sixteen B300, whose nodes have eight.

MEASURED = Path(__file__).resolve().parents[3] / "measurements" / "steady-state" / "unified.csv.gz"
FEWEST = 3


@pytest.mark.release
@pytest.mark.parametrize(("precision", "worst"), [("fp4", 0.2), ("fp8", 0.3)])
def test_tokens_on_two_nodes_take_as_long_as_recorded(tmp_path: Path, precision: str, worst: float) -> None:
    """Rows of more than eight devices, none of them fitted. Those in FP8 are too fast on one node, too, by a sixth."""
    with gzip.open(MEASURED, "rt", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["system"] == "b300_sxm" and float(row["gpus"] or 0) > 8]
    mine = [row for row in rows if row["precision"] == precision]
    assert len(rows) > FEWEST
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(mine[0]))
        writer.writeheader()
        writer.writerows(mine)
    report = validate_steady_state(tmp_path / "rows.csv").to_json()
    assert report["covered"] == len(mine)
    assert report["metrics"]["tpot_mean"]["p90_ape"] < worst
