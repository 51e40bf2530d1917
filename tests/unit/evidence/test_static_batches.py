"""Static batches of several makers' devices (`validate served` on a table of LLM-Inference-Bench's columns)."""

import csv
import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from perfmodel.cost import EngineProfile, HostFit, load_engine_profile, profile_of
from perfmodel.cost.calibrations.whole_runs import ArchitectureFit, WholeRunFits, is_older, whole_run_calibration
from perfmodel.errors import SpecError
from perfmodel.evidence.fit.profiles import fit_older_host
from perfmodel.evidence.fit.whole_runs import fit_whole_runs
from perfmodel.evidence.kinds.pooled import validate_served
from perfmodel.evidence.observation import Observation
from perfmodel.evidence.predict.results import predict_row, predict_served
from perfmodel.evidence.sources.local import DeviceTable
from perfmodel.evidence.sources.results import is_batch_table, read_served_rows
from perfmodel.evidence.sources.setups import scenario_of
from perfmodel.sim import simulate
from perfmodel.specs import EngineSpec, load_hardware

HEADER = (
    "id,experiment,device,num_devices,engine,model,isl,osl,batch_size,latency_s,tokens_per_s,setting,ttft_s,"
    "power_mean_w"
)
A100, LLAMA = "Nvidia A100 GPU", "meta-llama/Llama-2-7b-hf"
LINES = (
    f"a,static batch,{A100},1,vLLM,{LLAMA},128,128,16,2.0,2048,,,",
    f"b,static batch,Nvidia H100 GPU,2,llama.cpp,{LLAMA},128,64,16,1.5,128,,,",
    f"c,with first token,{A100},1,TensorRT-LLM,{LLAMA},1024,1,16,23.0,,,0.97,",
    f"d,power,{A100},1,TensorRT-LLM,{LLAMA},128,128,1,1.5,170.7,,,222",
    f"e,KV cache on or off,Habana Gaudi2,1,Deepspeed,{LLAMA},128,128,1,0.9,284,With KV Cache,,",
    f"f,KV cache on or off,Habana Gaudi2,1,Deepspeed,{LLAMA},128,128,1,9.0,28,Without KV Cache,,",
    "g,static batch,AMD MI300X GPU,1,vLLM,nobody/Unheard-of-7B,128,128,1,2.1,119,,,",
    f"h,parallelism,{A100},4,TensorRT-LLM,mistralai/Mixtral-8x7B-v0.1,128,128,1,1.1,232,EP,,",
    f"i,parallelism,{A100},4,TensorRT-LLM,mistralai/Mixtral-8x7B-v0.1,128,128,1,1.1,232,Hybrid TP = 2 and EP = 2,,",
    f"j,parallelism,{A100},4,TensorRT-LLM,{LLAMA},128,128,1,1.0,256,Hybird Tensor (2) and Pipeline (2) Parallelism,,",
    f'k,formats,{A100},1,vLLM,{LLAMA},128,128,1,1.7,150,"Weight = fp16, KV Cache = fp8",,',
    f"l,KV block size,{A100},1,vLLM,{LLAMA},128,128,1,1.7,150,32,,",
    f"m,static batch,AMD MI300X GPU,1,vLLM,{LLAMA},128,128,16,1.45,2824,,,",
)


@pytest.fixture
def table(tmp_path):
    file = tmp_path / "static_batches.csv"
    file.write_text("\n".join((HEADER, *LINES)) + "\n")
    return file


def rows_of(table):
    rows, left_out = read_served_rows(table)
    return {row.name: row for row in rows}, dict(left_out)


def latency_ms(setup, folder, **changes):
    return predict_row(Observation("", replace(setup, **changes), {}), folder).metrics["batch_latency"]


def test_rows_are_what_their_columns_say(table):
    """By hand: 16 requests of 128 + 128 tokens in 2 s; first tokens after 0.97 s, beside a latency of other answers; 32
    tokens a block."""
    rows, _ = rows_of(table)
    assert is_batch_table(table)
    assert (rows["a"].setup.num_requests, rows["a"].setup.prompt, rows["a"].setup.answer) == (16, 128, 128)
    assert rows["a"].metrics == {"batch_latency": 2000}
    assert rows["c"].metrics == {"batch_ttft": 970}
    assert rows["d"].metrics == {"batch_latency": 1500, "mean_power_w": 222}
    assert rows["l"].setup.block_size == 32
    assert (rows["k"].setup.kv_dtype, rows["k"].setup.precision) == ("fp8", "fp16")
    assert rows["e"].setup.is_static
    assert not rows["a"].setup.is_static  # vLLM starts what the KV cache holds, and the rest as room comes


def test_degrees_of_parallelism(table):
    rows, left_out = rows_of(table)
    degrees = {name: rows[name].labels["parallelism"] for name in "ahj"}
    assert degrees == {"a": "TP 1, PP 1", "h": "TP 4, PP 1, experts shared out", "j": "TP 2, PP 2"}
    assert "experts spread over 2 of 4 devices" in left_out["i"]


def test_llama_cpp_computes_one_sequence_and_its_batch_is_of_the_prompts_steps(table):
    """128 prompt tokens take 128 steps with n_batch 1, 8 with 16: latency falls with it, where batches grow."""
    rows, _ = rows_of(table)
    setup = rows["b"].setup
    assert (setup.num_requests, setup.max_num_batched_tokens, setup.pp, setup.tp) == (1, 16, 2, 1)
    scenario, _ = scenario_of("", setup, DeviceTable(table.parent), 1)
    assert simulate(scenario, keep_steps=True).summary["num_steps"] == 128 / 16 + 64 - 1
    alone, few, many = (latency_ms(setup, table.parent, max_num_batched_tokens=count) for count in (1, 16, 64))
    assert alone > few > many


def test_what_cannot_be_predicted_is_counted_and_named(table):
    report = validate_served(table)
    assert (report.rows, report.covered) == (len(LINES), len(LINES) - 3)
    for words in ("f: without KV cache", "g: unknown model nobody/Unheard-of-7B", "i: got experts spread"):
        assert any(words in note for note in report.notes)
    assert {"framework vLLM", "scenario static batch", "parallelism TP 2, PP 2", "device gaudi2"} <= report.by.keys()
    assert report.metrics["batch_latency"].trivial_ape is not None


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ("128,,1,2.0,,,,", "osl: got ''; expected a number from 1 on"),
        ("128,128,1,2.0,,PP = 3,,", "got 3 pipeline stages on 4 devices"),
        ("128,128,1,,,,,", "it has no figure to compare with"),
    ],
)
def test_rows_without_lengths_figures_or_whole_stages_are_left_out(tmp_path, cells, reason):
    file = tmp_path / "static_batches.csv"
    file.write_text(f"{HEADER}\na,static batch,{A100},4,vLLM,{LLAMA},{cells}\n")
    rows, left_out = rows_of(file)
    assert not rows
    assert reason in left_out["a"]


def test_tables_of_other_columns_are_refused(tmp_path):
    file = tmp_path / "other.csv"
    file.write_text("id,device,engine,model,latency_s\na,a100,vllm,llama-2-7b,2\n")
    with pytest.raises(SpecError, match="is no table of serving results: column kind is missing"):
        read_served_rows(file)


def test_tokens_are_conserved_and_latency_grows_with_batch_and_answer(table):
    """Output tokens per second times the batch's latency are its output tokens."""
    rows, _ = rows_of(table)
    for name in ("a", "d", "e", "m"):
        setup = rows[name].setup
        made = predict_row(rows[name], table.parent).metrics
        assert made["output_tokens_per_s"] * made["batch_latency"] / 1e3 == pytest.approx(128 * setup.num_requests)
        assert made["batch_ttft"] < made["batch_latency"]
        batches = [latency_ms(setup, table.parent, num_requests=n, concurrency=n) for n in (1, 8, 32)]
        answers = [latency_ms(setup, table.parent, answer=tokens) for tokens in (16, 64, 256)]
        for times in (batches, answers):
            assert times == sorted(set(times))


def test_a_batch_of_one_token_ends_with_its_first_tokens(table):
    rows, _ = rows_of(table)
    made = predict_row(rows["c"], table.parent).metrics
    assert made["batch_ttft"] == pytest.approx(made["batch_latency"])


# ---------------------------------------------------------------- hosts and builds of older versions

V0 = HostFit(serial_step_s=3e-3, serial_per_sequence_s=2e-4, replays_graphs=True)


def test_a_version_has_the_host_of_the_program_that_it_was():
    profile = EngineProfile(engine="vllm", older={"0.8": V0, "0.6": HostFit(serial_step_s=1.0)})
    hosts = {text: profile.at(text).host for text in (None, "0.5.4", "0.6", "0.7.3", "0.8.0", "0.19", "nightly")}
    assert hosts.pop("0.5.4").serial_step_s == 1.0
    assert [text for text, host in hosts.items() if host == V0] == ["0.6", "0.7.3"]
    assert profile_of(EngineSpec(version="0.6.1")).host == load_engine_profile("vllm").older["0.8"]


def test_v0_computes_prompts_in_steps_of_their_own_and_v1_beside_decodes():
    old, new, chunked = (
        EngineSpec(version="0.6.1"),
        EngineSpec(version="0.8.5"),
        EngineSpec(version="0.6.1", enable_chunked_prefill=True),
    )
    assert [engine.rules.prefill_exclusive for engine in (old, new, chunked)] == [True, False, False]
    assert [engine.rules.chunks_prompts for engine in (old, new, chunked)] == [False, True, True]


def test_a_fit_finds_the_host_that_batches_were_made_with(table):
    """Few sequences tell what a step takes, many what each of them does."""
    rows, _ = rows_of(table)
    begin = load_engine_profile("vllm")
    made = []
    for count in (1, 4, 16, 64):
        setup = replace(rows["a"].setup, num_requests=count, concurrency=count, answer=32)
        scenario, _ = scenario_of("", setup, DeviceTable(table.parent), 1)
        profile = EngineProfile(engine="vllm", host=V0.model_copy(update={"hidden_prompt_layer_s": 0.0}))
        duration_s = simulate(scenario, profile=profile).summary["duration"]
        made.append(replace(rows["a"], setup=setup, metrics={"batch_latency": 1e3 * duration_s}))
    launches = {name: 0.0 for name in HostFit.model_fields if "prompt" in name}
    bare = begin.model_copy(update={"host": begin.host.model_copy(update=launches)})
    profile, count = fit_older_host(bare, [*made, rows["m"]], table.parent)  # MI300X has no kernel tables
    assert count == len(made)
    assert profile.older["0.8"].serial_step_s == pytest.approx(V0.serial_step_s, rel=0.15)
    assert profile.older["0.8"].serial_per_sequence_s == pytest.approx(V0.serial_per_sequence_s, rel=0.15)
    assert profile.host == bare.host
    with pytest.raises(SpecError, match=r"no static batches of vllm before 0\.8"):
        fit_older_host(begin, [rows["m"]], table.parent)


def test_older_builds_of_an_architecture_are_fitted_apart(table):
    rows, _ = rows_of(table)
    slow = ArchitectureFit(compute_fraction=0.06, memory_fraction=0.6, launch_s=1e-5, step_s=2e-3)
    fits = WholeRunFits(architectures={"cdna3": ArchitectureFit()}, older={"cdna3": slow})
    made = []
    for count, prompt, answer in ((1, 64, 32), (4, 64, 32), (16, 64, 32), (16, 1024, 2), (16, 2048, 2)):
        setup = replace(rows["m"].setup, num_requests=count, concurrency=count, prompt=prompt, answer=answer)
        row = replace(rows["m"], setup=setup, group=repr(setup))
        metrics = {"batch_latency": predict_row(row, table.parent, fits).metrics["batch_latency"]}
        made.append(replace(row, metrics=metrics))
    fitted = fit_whole_runs(made, table.parent)
    assert not fitted.architectures
    assert fitted.older["cdna3"].compute_fraction == pytest.approx(slow.compute_fraction, rel=0.15)
    assert fitted.older["cdna3"].memory_fraction == pytest.approx(slow.memory_fraction, rel=0.2)


def test_older_builds_say_nothing_of_newer_ones_nor_of_other_architectures():
    new, old = ArchitectureFit(compute_fraction=0.6), ArchitectureFit(compute_fraction=0.06)
    fits = WholeRunFits(architectures={"cdna3": new}, older={"cdna3": old})

    def reached(device, version):
        return whole_run_calibration(load_hardware(device), "vllm", fits, version=version).default.compute_fraction

    assert [reached("mi300x", version) for version in ("0.6.1", "0.6.2", "0.4.3", "0.10", None)] == [0.06] + 4 * [0.6]
    assert reached("mi250", "0.6.1") == 0.6
    assert not is_older("sglang", "0.1")


# ---------------------------------------------------------------- the published rows

PUBLISHED = Path(__file__).parents[4] / "shared" / "truth" / "serving" / "static_batches.csv.gz"


@pytest.mark.skipif(not PUBLISHED.is_file(), reason="the cited measurements are not at hand")
def test_every_published_row_is_read_or_named_and_its_rate_is_of_all_its_tokens():
    rows, left_out = read_served_rows(PUBLISHED)
    with gzip.open(PUBLISHED, "rt", encoding="utf-8") as stream:
        entries = {entry["id"]: entry for entry in csv.DictReader(stream)}
    assert len(rows) + len(left_out) == len(entries)
    for row in rows:
        setup, rate = row.setup, entries[row.name]["tokens_per_s"]
        if rate and "batch_latency" in row.metrics:
            tokens = setup.num_requests * (setup.prompt + setup.answer)
            assert 1e3 * tokens / row.metrics["batch_latency"] == pytest.approx(float(rate), rel=0.02)


@pytest.mark.skipif(not PUBLISHED.is_file(), reason="the cited measurements are not at hand")
def test_gh200_under_vllm_0_6_whose_host_is_known_from_other_devices():
    """None of its kernels was measured, H100's were; a tenth off in the median is what the host's fit is worth."""
    rows = [row for row in read_served_rows(PUBLISHED)[0] if row.setup.device == "gh200" and row.setup.engine == "vllm"]
    pairs = [pair for pair in predict_served(rows[::8], PUBLISHED.parent) if "batch_latency" in pair.metrics]
    errors = sorted(
        abs(pair.metrics["batch_latency"] / pair.row.metrics["batch_latency"] - 1)
        for pair in pairs
        if "batch_latency" in pair.row.metrics
    )
    assert errors[len(errors) // 2] < 0.1
