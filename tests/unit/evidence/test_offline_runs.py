"""Recorded offline throughput: rows as scenarios, and what a short run says of a long job."""

from pathlib import Path

import pytest

from perfmodel.errors import SpecError
from perfmodel.evidence.kinds.runs import report_throughput, validate_throughput
from perfmodel.evidence.predict.recorded import simulate_offline_runs
from perfmodel.evidence.sources.recorded import SATURATED, read_offline_runs
from perfmodel.sim import simulate

IN_FLIGHT = "trtllm_version,gpu,precision,model,tp,isl,osl,throughput_out_tok_s_total,throughput_out_tok_s_gpu\n"
STATIC = "trtllm_version,gpu,precision,model,batch_size,tp,isl,osl,metric,value\n"


def table(folder: Path, name: str, header: str, *rows: str) -> Path:
    path = folder / name
    path.write_text(header + "\n".join(rows) + "\n", encoding="utf-8")
    return path


def test_two_kinds_of_tables_are_told_apart(tmp_path):
    table(tmp_path, "a.csv", IN_FLIGHT, "0.14.0,H100-80GB-HBM3,FP8,LLaMA v3.1 8B,2,128,64,10,5")
    table(
        tmp_path,
        "b.csv",
        STATIC,
        "0.9.0,A100,FP16,GPT-J 6B,8,1,128,32,throughput_out_tok_s_gpu,500",
        "0.9.0,A100,FP16,GPT-J 6B,1,1,128,1,ttft_ms,12",
        "0.9.0,A100,FP16,nobody's model,1,1,128,1,ttft_ms,12",
        "0.9.0,A100,FP16,GPT-J 6B,one,1,128,1,ttft_ms,12",
    )
    rows, left_out = read_offline_runs(tmp_path)
    assert [(row.metrics, row.flags) for row in rows] == [
        ({"throughput": 5.0}, SATURATED),
        ({"static_throughput": 500.0}, ""),
        ({"ttft": 12.0}, ""),
    ]
    assert rows[0].scenario.model.quantization.weights == "fp8"
    assert rows[0].scenario.engine.kv_cache_dtype == "fp8"
    assert [row.scenario.engine.batching for row in rows] == ["continuous", "static", "static"]
    assert [name for name, _ in left_out] == ["b.csv:4", "b.csv:5"]


@pytest.mark.parametrize("header", ["a,b\n", ""])
def test_another_table_is_refused_in_a_sentence(tmp_path, header):
    path = table(tmp_path, "c.csv", header, "1,2")
    with pytest.raises(SpecError, match="expected a CSV of throughputs"):
        validate_throughput(path)


def test_a_folder_without_tables_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"has no \.csv"):
        validate_throughput(tmp_path)


@pytest.mark.release
@pytest.mark.parametrize("lengths", ["128,64", "2048,32"])
def test_one_round_says_what_a_long_job_does(tmp_path, lengths):
    """Of a job of many rounds, filling and draining hardly count."""
    path = table(tmp_path, "a.csv", IN_FLIGHT, f"0.14.0,L40S,FP16,Mistral 7B,1,{lengths},10,5")
    (row,), _ = read_offline_runs(path)
    (pair,) = simulate_offline_runs([row])
    traffic = row.scenario.traffic.model_copy(update={"num_requests": 40 * pair.details["batch"]})
    result = simulate(row.scenario.model_copy(update={"traffic": traffic}), keep_steps=False)
    assert pair.metrics["throughput"] == pytest.approx(result.summary["output_throughput"], rel=0.03)
    low, high = pair.intervals["throughput"]
    assert low < 1 < high


def test_a_static_batch_is_its_tokens_over_its_time(tmp_path):
    rows = [f"0.9.0,A100,FP16,GPT-J 6B,{batch},1,128,32,throughput_out_tok_s_gpu,500" for batch in (1, 16)]
    rows += ["0.9.0,A100,FP16,GPT-J 6B,1,1,2048,1,ttft_ms,12", "0.9.0,A100,FP16,GPT-J 6B,1,1,128,1,ttft_ms,12"]
    found, _ = read_offline_runs(table(tmp_path, "b.csv", STATIC, *rows))
    alone, many, long_ms, short_ms = (
        pair.metrics[metric] for pair in simulate_offline_runs(found) for metric in pair.row.metrics
    )
    assert 8 < many / alone < 16, "sixteen sequences share the weights' bytes, and each has a prompt of its own"
    assert short_ms < long_ms < 16 * short_ms


def test_what_does_not_fit_is_not_covered(tmp_path):
    rows = [f"0.14.0,L40S,FP16,{model},1,128,64,10,5" for model in ("Mistral 7B", "Mixtral 8x22B")]
    found, left_out = read_offline_runs(table(tmp_path, "a.csv", IN_FLIGHT, *rows))
    report = report_throughput(simulate_offline_runs(found), left_out)
    assert (report.rows, report.covered) == (2, 1)
    assert report.metrics["throughput"].rows == 1
    assert any("Mixtral" in note or "fit" in note for note in report.notes)
    assert report.by["device l40s"]["throughput"].rows == 1
