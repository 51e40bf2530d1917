"""The commands as people call them: exit status, what is on stdout, what is on stderr."""

import json
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.errors import SpecError

SCENARIO = "llama-3.1-8b-a100"
FEW = ("--set", "traffic.num_requests=40")


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    return lambda *args: runner.invoke(app, [str(arg) for arg in args])


@pytest.fixture
def document(run):
    """The JSON that a command prints; nothing else may be on stdout."""

    def get(*args):
        result = run(*args, "--json")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    return get


def test_simulate_prints_the_summary(run):
    result = run("simulate", SCENARIO, *FEW, "--details")
    assert result.exit_code == 0, result.stderr
    for wanted in ("llama-3.1-8b on 1 x a100-sxm-80gb", "Request throughput", "TTFT", "TPOT", "calibrated"):
        assert wanted in result.stdout


def test_simulate_json_has_the_agreed_names(document):
    found = document("simulate", SCENARIO, *FEW)
    assert found["completed"] == 40
    names = {
        f"{stat}_{metric}_ms" for stat in ("mean", "median", "std", "p90", "p95", "p99") for metric in ("ttft", "e2el")
    }
    names |= {"duration", "failed", "total_input_tokens", "output_throughput", "request_goodput", "origin", "interval"}
    names |= {"gpu_hours", "usd_per_million_output_tokens", "energy_j", "mfu", "mbu", "kv_cache_usage_peak"}
    names |= {"preemptions", "prefix_cache_hit_rate", "bound_share"}
    assert names <= set(found)


def test_simulate_writes_its_files(run, tmp_path):
    result = run("simulate", SCENARIO, *FEW, "--out", "made/here")
    assert result.exit_code == 0, result.stderr
    folder = tmp_path / "made" / "here"
    assert {path.name for path in folder.iterdir()} == {
        "requests.csv",
        "steps.csv",
        "result.json",
        "report.html",
        "timeline.json",
    }
    assert json.loads((folder / "result.json").read_text())["completed"] == 40
    assert len((folder / "requests.csv").read_text().splitlines()) == 41
    report = (folder / "report.html").read_text()
    assert "Roofline of one step" in report
    assert "Device memory" in report


def test_equal_seeds_give_equal_files_and_others_do_not(run, tmp_path):
    for out, seed in (("a", 3), ("b", 3), ("c", 4)):
        assert run("simulate", SCENARIO, *FEW, "--seed", seed, "--out", out).exit_code == 0
    for name in ("requests.csv", "steps.csv", "result.json", "report.html", "timeline.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert (tmp_path / "a" / "requests.csv").read_bytes() != (tmp_path / "c" / "requests.csv").read_bytes()


def test_explain_typical_step(run):
    result = run("explain", SCENARIO)
    assert result.exit_code == 0, result.stderr
    for wanted in ("Little's law", "gate_up_proj", "FLOP/B", "memory", "MBU"):
        assert wanted in result.stdout


def test_explain_sums_to_the_step(document):
    found = document("explain", SCENARIO, "--batch", 8, "--context", 2000)
    assert (found["num_decodes"], found["decode_context"]) == (8, 16000)
    assert sum(row["duration_s"] for row in found["operators"]) == pytest.approx(found["device_s"])
    assert sum(found["bound_share"].values()) == pytest.approx(1.0)


def test_explain_prefill(document):
    found = document("explain", SCENARIO, "--prefill", 2048)
    assert found["num_tokens"] == 2048
    # 2 FLOPs per parameter and token, 7.5 G active parameters less the LM head's, which one row needs
    assert found["flops"] == pytest.approx(2 * 2048 * 6.98e9, rel=0.05)


def test_explain_run(run, document):
    assert "decode" in run("explain", SCENARIO, *FEW, "--run").stdout
    found = document("explain", SCENARIO, *FEW, "--run")
    assert sum(kind["share"] for kind in found["steps"]) == pytest.approx(1.0)


@pytest.mark.parametrize("flags", [("--prefill", 5, "--batch", 2), ("--run", "--batch", 2)])
def test_explain_refuses_contradictions(run, flags):
    result = run("explain", SCENARIO, *flags)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --")


def test_roofline_writes_a_plot(run, document, tmp_path):
    result = run("roofline", SCENARIO)
    assert result.exit_code == 0, result.stderr
    assert "153.0" in result.stdout  # bf16 on an A100: 312e12 / 2039e9
    assert (tmp_path / "out" / f"roofline-{SCENARIO}.html").is_file()
    found = document("roofline", SCENARIO, "--out", "x/plot.html")
    assert Path(found["plot"]).is_file()
    assert found["ridge_flop_per_byte"]["bf16"] == pytest.approx(153.0, abs=0.1)


def test_memory(run, document):
    assert "KV blocks" in run("memory", SCENARIO).stdout
    found = document("memory", SCENARIO)
    assert found["num_kv_blocks"] > 20_000
    assert found["kv_bytes_per_token"] == 2 * 32 * 8 * 128 * 2  # K and V, layers, KV heads, head size, bf16


def test_hardware_and_models(run, document):
    assert "a100-sxm-80gb" in run("hardware", "list").stdout
    assert "312 TFLOP/s" in run("hardware", "show", "a100-sxm-80gb").stdout
    assert "infiniband-ndr" in run("hardware", "list").stdout
    assert document("hardware", "show", "infiniband-ndr")["bandwidth_bytes_per_s"] == 50e9
    assert {"a100-sxm-80gb", "h100-sxm-80gb", "cpu"} <= {device["name"] for device in document("hardware", "list")}
    assert document("hardware", "show", "a100-sxm-80gb")["declared"]["peak_flops_per_s"]["bf16"] == 312e12
    assert "llama-3.1-8b" in run("models", "list").stdout
    assert "total" in run("models", "show", "llama-3.1-8b").stdout
    assert document("models", "show", "llama-2-7b")["num_parameters"] == 6_738_415_616
    assert "mixtral-8x7b" in {model["name"] for model in document("models", "list")}


@pytest.mark.parametrize("kind", ["scenario", "hardware", "model", "traffic"])
def test_schema(run, kind):
    assert json.loads(run("schema", kind).stdout)["$schema"].startswith("https://json-schema.org")


@pytest.mark.parametrize("kind", ["operators", "serving", "steady-state", "per-request", "throughput"])
def test_validate_of_what_is_not_there_is_one_sentence(run, kind):
    result = run("validate", kind, "somewhere")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: validate {kind}")
    assert run("validate", kind, "somewhere", "--repeat", 2).stderr.startswith("error: --repeat goes with")


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (("simulate", "llama-3.1-8b-a10"), "llama-3.1-8b-a100"),
        (("hardware", "show", "h1000-sxm"), "Did you mean"),
        (("models", "show", "llama-9"), "llama-"),
        (("simulate", SCENARIO, "--set", "engine.max_num_seq=4"), "max_num_seqs"),
        (("simulate", SCENARIO, "--set", "model=llama-3.1-405b"), "Smallest that fits"),
        (("simulate", SCENARIO, "--set", "traffic.arrivals.rate=-1"), "traffic.arrivals.rate"),
        (("memory", "no/such/file.yaml"), "no such file"),
    ],
)
def test_bad_input_is_one_line_and_status_2(run, args, wanted):
    result = run(*args)
    assert result.exit_code == 2, (result.stdout, result.stderr)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert wanted in result.stderr
    assert "Traceback" not in result.stderr


def test_an_out_that_is_a_file_is_refused(run, tmp_path):
    (tmp_path / "taken").write_text("")
    result = run("simulate", SCENARIO, *FEW, "--out", "taken")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --out taken: ")


@pytest.mark.parametrize(("flags", "is_forced"), [([], False), (["--force"], True)])
@pytest.mark.parametrize(
    ("kind", "function"), [([], "fit_recorded"), (["--overheads"], "fit_recorded_for_all")], ids=["engine", "for all"]
)
def test_a_calibration_is_written_over_with_force_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    is_forced: bool,
    kind: list[str],
    function: str,
) -> None:
    """Which of the two is what the fit is given, by its parameter's name."""
    from perfmodel.evidence.fit import recorded

    real, given = getattr(recorded, function), []

    def fit(*arguments: Any, **named: Any) -> Any:
        given.append(signature(real).bind(*arguments, **named).arguments["is_forced"])
        raise SpecError("enough")

    monkeypatch.setattr(recorded, function, fit)
    CliRunner().invoke(app, ["calibrate", "--from", str(tmp_path), *kind, *flags])
    assert given == [is_forced]
