"""`validate mlperf` and `validate served`: each device counts once, whatever stands in the table."""

import json

import pytest

from perfmodel.errors import SpecError
from perfmodel.evidence.kinds.pooled import validate_mlperf, validate_served
from perfmodel.evidence.predict.results import predict_served
from perfmodel.evidence.sources.results import devices_folder, read_mlperf_rows
from perfmodel.evidence.sources.setups import engine_of

MLPERF = (
    "id,round,accelerator,num_accelerators,model,precision,framework,scenario,tokens_per_s,osl_mean,target_qps,"
    "ttft_mean_ms,tpot_mean_ms,ttft_limit_ms,tpot_limit_ms,flags\n"
)
SERVED = (
    "id,kind,device,num_devices,engine,engine_version,model,precision,tp,isl,osl,concurrency,num_prompts,request_rate,"
    "output_tok_s,tpot_mean_ms,ttft_mean_ms,flags\n"
)


@pytest.fixture
def results(tmp_path):
    file = tmp_path / "results.csv"
    offline = "8,llama3.1-8b,fp8,vLLM 0.10.0,Offline"
    file.write_text(
        MLPERF
        + f"a,v5.1,h100-sxm-80gb,{offline},40000,128,,,,,,\n"
        + f"b,v5.1,h100-sxm-80gb,{offline},44000,128,,,,,,\n"
        + "c,v5.1,h200-sxm-141gb,8,llama2-70b-99,fp8,TensorRT 10.11,Server,33000,291,114,400,170,2000,200,\n"
        + f"d,v5.1,h100-sxm-80gb,{offline},40000,128,,,,,,same figure as a (99 and 99.9 share one run)\n"
        + f"e,v5.1,unheard-of,{offline},40000,128,,,,,,\n"
        + f"f,v5.1,h100-sxm-80gb,{offline},,,,,,,,\n"
    )
    return file


def test_rows_groups_and_reasons(results):
    report = validate_mlperf(results)
    assert (report.rows, report.covered) == (6, 4)
    assert set(report.metrics) == {"tokens_per_s", "tpot_mean", "ttft_mean"}
    assert report.metrics["tokens_per_s"].rows == 1  # two figures of one setting; the third is apart
    assert report.by["apart: flagged rows"]["tokens_per_s"].rows == 1
    assert report.by["identical settings elsewhere"]["tokens_per_s"].median_ape == pytest.approx(2 / 42)
    assert any("e: unheard-of" in note for note in report.notes)
    assert any("f: its description is incomplete: it has no figure" in note for note in report.notes)


def test_the_dimensions_that_tools_ask_for(results):
    found = validate_mlperf(results).to_json()
    for key in ("device h100-sxm-80gb", "device class accelerator", "engine trtllm", "scenario Server"):
        assert key in found["by"]
    assert any(key.startswith("model ") for key in found["by"])
    json.dumps(found, allow_nan=False)


def test_whatever_stands_in_a_table_is_predicted_or_refused_with_a_reason(tmp_path):
    """Makers, engines and models that no file names, words for numbers, and nothing at all."""
    file = tmp_path / "results.csv"
    lines = [
        "a,closed loop serving,mi325x,8,vllm,nightly,Qwen/Qwen3-32B,fp8,8,1024,256,16,64,,900,17,200,",
        "b,offline throughput,gaudi-3,1,an engine,,unheard-of-7B,bf16,1,many,few,,100,,900,,,",
        "c,open loop serving,rtx-5090-32gb,1,exllamav3,0.1,unheard-of-30B-A3B,exl3 4.0bpw,1,512,128,,20,2.5,300,9,80,",
        "d,static batch latency,rtx-4090-24gb,1,vllm,0.13,llama-3.1-8b,bf16,1,128,128,8,8,,400,,,power limit 220 W",
        "e,single stream,rtx-4090-24gb,1,llama-server,b9010,Llama-3.1-8B,gguf Q4_K_M,1,128,64,1,4,,120,8,20,",
        "f,closed loop serving,tenstorrent-wormhole,1,tt,x,unheard-of,bfp8,1,128,64,1,4,,120,8,20,",
        "g,,,,,,,,,,,,,,,,,",
        "h,closed loop serving,h200-sxm,4,sglang,0.5,gpt-oss-120b,mxfp4,nan,1e99,-3,inf,4,,120,8,20,",
    ]
    file.write_text(SERVED + "\n".join(lines) + "\n")
    report = validate_served(file)
    assert report.rows == len(lines)
    assert report.covered >= 5
    assert sum("not covered" in note for note in report.notes) == report.rows - report.covered
    json.dumps(report.to_json(), allow_nan=False)


@pytest.mark.parametrize("validate", [validate_mlperf, validate_served])
def test_a_table_of_something_else_is_refused(tmp_path, validate):
    file = tmp_path / "other.csv"
    file.write_text("id,colour\na,blue\n")
    with pytest.raises(SpecError, match="is no table of"):
        validate(file)
    with pytest.raises(SpecError, match="no such file"):
        validate(tmp_path / "missing.csv")


def test_a_submission_is_a_run_of_ten_minutes_and_its_limits_are_the_simplest_prediction(tmp_path):
    file = tmp_path / "results.csv"
    file.write_text(MLPERF + "a,v5.1,h100-sxm-80gb,1,llama3.1-8b,fp8,vLLM 0.10.0,Server,,128,20,300,20,2000,100,\n")
    ((row,), _) = read_mlperf_rows(file)
    assert row.setup.num_requests == 600 * 20
    assert row.trivial == {"tpot_mean": 100, "tpot_p99": 100, "ttft_mean": 2000, "ttft_p99": 2000}


def test_a_single_stream_is_one_request_at_a_time(tmp_path):
    """Each waits for the one before it, so nothing queues: a TTFT, and a step for each further token. Of beams, which
    are predicted by mean steps, as many decodes as a request has beams."""
    file = tmp_path / "results.csv"
    header = MLPERF.replace("flags", "latency_mean_ms,flags")
    row = "v5.1,h100-sxm-80gb,1,{},fp8,TensorRT 10.2.0,SingleStream,,{},,,,,,{},\n"
    rows = [("llama3.1-8b", 128, 900), ("gptj-99", "", 400)]
    lines = [f"{name},{row.format(name, answer, latency)}" for name, answer, latency in rows]
    file.write_text(header + "".join(lines))
    report = validate_mlperf(file)
    assert report.covered == 2
    for read in read_mlperf_rows(file)[0]:
        (prediction,) = predict_served([read], devices_folder(file))
        latencies = prediction.metrics
        steps_ms = latencies["tpot_mean"] * (read.setup.answer - 1)
        assert latencies["e2el_mean"] == pytest.approx(latencies["ttft_mean"] + steps_ms, rel=1e-3)
        assert 0.2 < latencies["e2el_mean"] / read.metrics["e2el_mean"] < 5


def test_a_framework_that_vllm_stands_in_for_has_no_version_of_its():
    assert engine_of("Text Generation Inference 2.0.4, ROCm 6.2") == ("vllm", "")
    assert engine_of("vLLM 0.9.1, Pytorch 2.7.0") == ("vllm", "0.9.1")
    assert engine_of("TensorRT 10.2.0, CUDA 12.4") == ("trtllm", "10.2.0")
