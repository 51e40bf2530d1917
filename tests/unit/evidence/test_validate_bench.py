"""`validate bench`: a file of the simulator's own run compares at no error; the command, its JSON and its refusals."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.errors import SpecError
from perfmodel.evidence.kinds.bench import _figure, validate_bench
from perfmodel.evidence.predict.bench import GivenSetup, bench_scenario
from perfmodel.evidence.sources.bench import read_bench_files
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario
from perfmodel.specs.scenario_source import as_text

DATA = Path(__file__).parents[2] / "data" / "bench"
SCENARIO = "llama-3.1-8b-h100-2048-256"


def detailed(traffic: str, slots: int | None = None) -> dict[str, Any]:
    """What `vllm bench serve --save-detailed` would write of a simulated run of the scenario."""
    result = simulate(load_scenario(SCENARIO, [f"traffic={traffic}"]))
    requests = result.requests
    assert requests is not None
    order = np.argsort(requests.request_id)
    ttft, e2el, outputs = requests.ttft_s[order], requests.e2el_s[order], requests.num_output_tokens[order]
    gaps = [
        [(whole - first) / (count - 1)] * (count - 1)
        for whole, first, count in zip(e2el.tolist(), ttft.tolist(), outputs.tolist(), strict=True)
    ]
    return {
        "model_id": "llama-3.1-8b",
        "num_prompts": len(order),
        "request_rate": "inf" if slots else 6.0,
        "max_concurrency": slots,
        "completed": len(order),
        "duration": result.summary["duration"],
        "total_input_tokens": int(requests.num_prompt_tokens.sum()),
        "total_output_tokens": int(outputs.sum()),
        "input_lens": requests.num_prompt_tokens[order].tolist(),
        "output_lens": outputs.tolist(),
        "ttfts": ttft.tolist(),
        "itls": gaps,
        "start_times": (1000.0 + requests.arrival_s[order]).tolist(),
        "errors": [""] * len(order),
    }


LENGTHS = (
    "num_requests: 24, input_tokens: {distribution: uniform, low: 200, high: 900}, "
    "output_tokens: {distribution: uniform, low: 20, high: 60}"
)


@pytest.mark.parametrize(
    ("arrivals", "slots"), [("{process: poisson, rate: 6}", None), ("{process: closed_loop, concurrency: 4}", 4)]
)
def test_the_simulators_own_run_compares_at_no_error(tmp_path: Path, arrivals: str, slots: int | None) -> None:
    """Arrivals, lengths, order and definitions all have to be taken as they were meant for every request to agree."""
    path = tmp_path / "own.json"
    path.write_text(json.dumps(detailed(f"{{arrivals: {arrivals}, {LENGTHS}}}", slots)), encoding="utf-8")
    report = validate_bench([path], GivenSetup(SCENARIO))
    for metric in ("ttft", "tpot", "e2el"):
        assert report.metrics[metric].rows == 24
        assert report.metrics[metric].p90_ape < 1e-6
    assert report.metrics["ttft_mean"].interval_coverage == 1.0


def test_every_answer_says_what_was_assumed_and_who_failed() -> None:
    files = [DATA / "vllm_detailed.json", DATA / "guidellm.json"]
    report = validate_bench(files, GivenSetup(None, {"hardware": "h100"}))
    assert (report.rows, report.covered) == (3, 3)
    for run in report.to_json()["runs"]:
        assert "engine" in run["assumed"]
        assert run["failed"] == (2 if run["run"].startswith("vllm") else 1)
        assert {"predicted", "measured", "error", "interval", "is_within"} <= set(run["figures"][0])
        assert sum(run["breakdown"]["mean_tpot_ms"]["parts"].values()) == pytest.approx(1)
    assert sum("failed or were cut off" in note for note in report.notes) == 3


def test_what_the_file_says_otherwise_is_said() -> None:
    """A scenario of another model, device or layout than the file names is simulated as it is, and not in silence."""
    report = validate_bench([DATA / "trtllm_bench.json"], GivenSetup("llama-3.1-70b-h100-tp4", {}, ()))
    said = report.to_json()["runs"][0]["notes"]
    assert any("says model meta-llama/Llama-3.1-8B-Instruct, simulated is llama-3.1-70b" in note for note in said)
    assert any("says tensor_parallel_size 1, simulated is 4" in note for note in said)
    assert not any("says hardware" in note for note in said)  # NVIDIA H100 80GB HBM3 is the scenario's


def test_each_request_is_in_the_answer() -> None:
    report = validate_bench([DATA / "vllm_detailed.json"], GivenSetup(None, {"hardware": "h100"}))
    requests = report.to_json()["runs"][0]["requests"]
    assert {metric: len(rows) for metric, rows in requests.items()} == dict.fromkeys(("ttft", "tpot", "e2el"), 12)
    stated = json.loads((DATA / "vllm_detailed.json").read_text(encoding="utf-8"))["ttfts"]
    assert [row["measured"] for row in requests["ttft"]] == [ttft for ttft in stated if ttft]


@pytest.mark.parametrize(
    ("scenario", "field", "is_replayed"),
    [("llama-3.1-8b-h100-lora", "adapters", True), ("qwen3-vl-30b-a3b-l40s-images", "images", False)],
)
def test_what_no_file_says_of_requests_is_the_scenarios(
    tmp_path: Path, scenario: str, field: str, is_replayed: bool
) -> None:
    """A LoRA server's TTFT was predicted at half of what it is, one of images at an eighth: both were left out. Prompts
    with images are drawn, since a trace would repeat them."""
    (run,), _ = read_bench_files([DATA / "vllm_detailed.json"])
    own, facts = bench_scenario(run, GivenSetup(scenario), tmp_path)
    assert getattr(own.traffic, field) == getattr(load_scenario(scenario).traffic, field)
    assert [fact.said_by for fact in facts if fact.name == field] == ["the scenario"]
    assert (own.traffic.trace is not None) is is_replayed
    assert run.requests is not None
    assert is_replayed or own.traffic.input_tokens.value == round(run.requests.num_prompt_tokens.mean())
    without, facts = bench_scenario(run, GivenSetup(scenario, overrides=[f"traffic.{field}=null"]), tmp_path)
    assert getattr(without.traffic, field) is None
    assert field not in {fact.name for fact in facts}
    answer = validate_bench([DATA / "vllm_detailed.json"], GivenSetup(scenario)).to_json()["runs"][0]
    assert answer["is_by_request"] is ("requests" in answer) is is_replayed


FIXED = {"distribution": "fixed", "value": 20}


def scenario_with(**traffic: object) -> str:
    """A scenario with such requests."""
    every = {"num_requests": 4, "input_tokens": FIXED, "output_tokens": FIXED, **traffic}
    served = {"model": "llama-3.1-8b", "hardware": "h100", "engine": {"scheduling_policy": "priority"}}
    return as_text({"name": "own", **served, "traffic": every})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("structured_outputs", {"count": 3, "share": 0.5}),
        ("priorities", [0, 2]),
        ("classes", [{"name": "chat", "share": 0.4, "slo": {"ttft_ms": 300}}, {"name": "batch", "share": 0.6}]),
    ],
)
def test_shapes_and_priorities_are_the_scenarios(tmp_path: Path, field: str, value: object) -> None:
    (run,), _ = read_bench_files([DATA / "vllm_detailed.json"])
    source = scenario_with(**{field: value})
    own, facts = bench_scenario(run, GivenSetup(source), tmp_path)
    assert getattr(own.traffic, field)
    assert getattr(own.traffic, field) == getattr(load_scenario(source).traffic, field)
    assert [fact.name for fact in facts if fact.name in ("structured_outputs", "priorities", "classes")] == [field]


@pytest.mark.parametrize(
    ("field", "value"), [("samples_per_prompt", 2), ("beam_width", 2), ("conversations", {"turns": FIXED})]
)
def test_answers_that_no_file_has_are_refused(tmp_path: Path, field: str, value: object) -> None:
    (run,), _ = read_bench_files([DATA / "vllm_detailed.json"])
    with pytest.raises(SpecError, match=f"got traffic.{field}, and a load tool's requests stand alone"):
        bench_scenario(run, GivenSetup(scenario_with(**{field: value})), tmp_path)


def test_the_command(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    files = [str(DATA / "aiperf" / name) for name in ("profile_export_aiperf.json", "profile_export.jsonl")]
    asked = ["validate", "bench", *files, "--hardware", "h100", "--set", "engine.max_num_seqs=64"]
    found = CliRunner().invoke(app, [*asked, "--report", str(page), "--json"])
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout)
    assert (answer["kind"], answer["rows"], answer["metrics"]["e2el"]["rows"]) == ("bench", 1, 13)
    assert "What the answer rests on" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench"], "give the files"),
        (["bench", "vllm.json"], "does not say on which hardware it ran; give --hardware"),
        (["bench", "sglang.jsonl", "--hardware", "h100"], "does not say which model was served; give --model"),
        (["bench", "mlperf_server.txt", "--hardware", "h100", "--model", "llama-3.1-8b"], "how long prompts were"),
        (["bench", "vllm.json", "--hardware", "h100", "--scenario", SCENARIO], "--scenario beside --hardware"),
        (["bench", "vllm.json", "--hardware", "h100", "--seed", "1"], "--seed"),
        (["bench", "vllm.json", "--hardware", "h1000"], "h1000"),
        (["serving", "vllm.json", "--hardware", "h100"], "--hardware goes with `validate bench FILE...`"),
        (["serving", "vllm.json", "llama_bench.csv"], "got 2 paths"),
        (["bench", "llama_bench.csv", "--scenario", SCENARIO], "llama-bench, which says itself what ran"),
    ],
)
def test_what_cannot_be_answered_is_one_sentence(arguments: list[str], said: str) -> None:
    shown = [str(DATA / each) if (DATA / each).is_file() else each for each in arguments]
    found = CliRunner().invoke(app, ["validate", *shown])
    assert found.exit_code == 2
    assert said in " ".join(found.stderr.split())
    assert "Traceback" not in found.output


def test_an_error_is_predicted_over_measured_minus_one() -> None:
    """110 predicted for 100 measured, with an 80 % interval of 0.8 to 1.2 times the prediction."""
    pair: Any = SimpleNamespace(
        metrics={"x": 110.0}, row=SimpleNamespace(metrics={"x": 100.0}), intervals={"x": (0.8, 1.2)}
    )
    figure = _figure(pair, "x")
    assert figure["error"] == pytest.approx(0.1)
    assert figure["interval"] == pytest.approx([88.0, 132.0])
    assert figure["is_within"]
