"""`execute --on vllm`: the protocol with the engine's process, its records and its errors. No vLLM: see fake_vllm."""

import json
import stat
import subprocess
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.errors import PerfmodelError, SpecError, UnsupportedError
from perfmodel.report.runs import read_requests, read_steps
from perfmodel.sim import Workload
from perfmodel.specs import load_scenario
from perfmodel_executors.engines.run import OnEngine, execute_all_on, execute_on

FAKE = Path(__file__).parents[1] / "data" / "fake_vllm"
RATE = 200.0


@pytest.fixture
def python(tmp_path):
    """An interpreter that has the fake vLLM."""
    file = tmp_path / "python"
    file.write_text(f'#!/bin/sh\nPYTHONPATH={FAKE} exec {sys.executable} "$@"\n', encoding="utf-8")
    file.chmod(file.stat().st_mode | stat.S_IEXEC)
    return f"vllm:{file}"


def small(*overrides):
    """Twelve short requests on the tiny model."""
    changes = (
        f"traffic.arrivals.rate={RATE}",
        "traffic.num_requests=12",
        "traffic.input_tokens={distribution: uniform, low: 4, high: 40}",
        "traffic.output_tokens={distribution: uniform, low: 1, high: 12}",
        *("engine.profile=vllm", "engine.max_num_batched_tokens=32", "engine.block_size=32"),
    )
    return load_scenario("tiny-llama-cpu", [*changes, *overrides])


def run(python, scenario, **more):
    return execute_on(python, scenario, "tiny-llama", **more)


def test_every_token_is_in_one_step_and_every_request_in_the_records(python, tmp_path):
    """A request of p + n tokens takes p + n - 1 granted tokens in all: its last one is never computed."""
    out = tmp_path / "out"
    out.mkdir()
    result = run(python, small(), out=out)
    requests, steps = read_requests(out / "requests.csv"), read_steps(out / "steps.csv")
    assert result.clock == "executed"
    assert result.summary["origin"] == "measured"
    assert sorted(requests.request_id) == list(range(12))
    granted = requests.num_prompt_tokens + requests.num_output_tokens - 1
    assert steps.num_tokens.sum() == granted.sum()
    assert (steps.num_tokens <= 32).all()
    assert (steps.end_s[:-1] <= steps.start_s[1:]).all()
    assert (requests.arrival_s <= requests.first_scheduled_s).all()
    assert (requests.first_scheduled_s < requests.first_token_s).all()
    assert set(requests.finished_s) <= set(steps.end_s)
    chunks = np.loadtxt(out / "chunks.csv", delimiter=",", skiprows=1, dtype=int)
    in_chunks = np.bincount(chunks[:, 0], weights=chunks[:, 1], minlength=len(steps))
    assert (in_chunks + steps.num_decodes == steps.num_tokens).all()


def test_arrivals_are_at_their_times(python):
    """As the workload draws them, whatever the engine does meanwhile."""
    result = run(python, small())
    by_number = np.argsort(result.requests.request_id)
    arrivals = result.requests.arrival_s[by_number]
    assert (np.diff(arrivals) > 0).all()
    assert arrivals[-1] == pytest.approx(12 / RATE, rel=1.0)
    assert result.requests.finished_s.max() > arrivals[-1]


def test_a_closed_loop_has_as_many_under_way_as_it_says(python):
    result = run(python, small("traffic.arrivals={process: closed_loop, concurrency: 3}"))
    events = sorted([(t, 1) for t in result.requests.arrival_s] + [(t, -1) for t in result.requests.finished_s])
    assert max(np.cumsum([change for _, change in events])) == 3
    assert result.summary["completed"] == 12


def test_a_later_turn_begins_with_all_that_was_said(python):
    """The prompt of a turn is longer than that of the one before it by its answer and what is new."""
    conversations = "traffic.conversations={turns: {distribution: fixed, value: 3}}"
    result = run(python, small(conversations, "traffic.arrivals={process: closed_loop, concurrency: 2}"))
    requests = result.requests
    order = np.argsort(requests.request_id)
    prompts, outputs = requests.num_prompt_tokens[order], requests.num_output_tokens[order]
    assert len(prompts) == 12
    for turn in range(12):
        if turn % 3:
            assert prompts[turn] > prompts[turn - 1] + outputs[turn - 1]


def test_equal_engines_are_started_once(python, tmp_path):
    folders = [tmp_path / name for name in ("one", "two", "other")]
    scenarios = (small(), small("seed=1"), small("engine.max_num_seqs=2"))
    seen = []
    runs = [OnEngine(each, "tiny-llama", folder) for each, folder in zip(scenarios, folders, strict=True)]
    results = execute_all_on(python, runs, lambda done, total: seen.append((done, total)))
    assert [result.summary["completed"] for result in results] == [12] * 3
    assert seen.count((1, 12)) == 3
    assert max(results[2].steps.num_running) <= 2
    used = [result.measured_on["used"]["scheduler_config"]["max_num_seqs"] for result in results]
    assert used == [16, 16, 2]


def test_drafted_tokens_are_counted(python, tmp_path):
    """Every other draft of the fake engine is right, but for those cut off at an answer's end."""
    config = "engine.speculative_config={method: ngram, num_speculative_tokens: 1, acceptance: {rate: 0.1}}"
    result = run(python, small(config, "traffic.output_tokens={distribution: fixed, value: 41}"), out=tmp_path)
    assert result.summary["acceptance_rate"] == pytest.approx(0.5, abs=0.05)
    assert result.scenario.engine.speculative_config.acceptance.per_position[0] == pytest.approx(0.5, abs=0.1)
    assert json.loads((tmp_path / "acceptance.json").read_text())["method"] == "ngram"


def test_what_ran_is_said(python):
    result = run(python, small())
    assert result.measured_on["versions"]["vllm"] == "0.30.0+fake"
    assert result.scenario.engine.version == "0.30.0"
    assert result.measured_on["arguments"]["load_format"] == "dummy"
    assert result.measured_on["arguments"]["num_gpu_blocks_override"] == 1025  # with the null block
    assert result.num_blocks == 1024
    assert result.measured_on["changed"] == {"enable_prefix_caching": False}
    assert not result.scenario.engine.enable_prefix_caching
    assert any("engine.enable_prefix_caching=false" in note for note in result.notes)
    assert "model" not in result.measured_on["arguments"]  # a folder that is gone
    json.dumps(result.to_json())


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["engine.version=0.25.1"], r"got vLLM 0\.30\.0\+fake, and the scenario is of 0\.25\.1"),
        (["engine.enforce_eager=true"], "does not start with these arguments: TypeError: .*'enforce_eager'"),
        (["engine.kv_cache=contiguous"], "engine.kv_cache: got 'contiguous', for which vLLM has no argument"),
        (["engine.profile=perfmodel"], "engine.profile: got engine"),
        (["cluster.replicas=2"], "cluster: got several replicas"),
        (["model_changes.num_kv_heads=1"], "model_changes: got a changed model"),
        (["hardware=a100-sxm-80gb"], "runs on cpu, and the scenario's hardware is a gpu"),
    ],
)
def test_what_vllm_does_not_run_is_one_sentence(python, overrides, sentence):
    with pytest.raises(PerfmodelError, match=sentence):
        run(python, small(*overrides))


def test_absent_and_broken_are_told_apart(tmp_path, python, monkeypatch):
    """An import that fails within vLLM is not an absent vLLM."""
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n', encoding="utf-8")
    bare.chmod(0o755)
    with pytest.raises(PerfmodelError, match=f"vLLM is not installed for {bare}"):
        run(f"vllm:{bare}", small())
    monkeypatch.setenv("FAKE_VLLM", "broken")
    with pytest.raises(PerfmodelError, match=r"cannot be imported: ImportError: libcudart.so.12"):
        run(python, small())


def test_the_command_ends_with_status_2(tmp_path):
    for target, sentence in (("vllm:/nowhere/python", "is no interpreter"), ("sglang", "expected vllm")):
        answer = CliRunner().invoke(app, ["execute", "tiny-llama-cpu", "--set", "engine.profile=vllm", "--on", target])
        assert answer.exit_code == 2
        assert sentence in answer.stderr
        assert "Traceback" not in answer.stderr


def test_an_interruption_keeps_what_was_measured(python, tmp_path):
    def interrupt(done, total):
        del total
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(python, small(), out=tmp_path, progress=interrupt)
    assert len(read_requests(tmp_path / "requests.csv")) == 4
    assert len(read_steps(tmp_path / "steps.csv")) > 4


def test_a_calibration_predicts_the_engine_that_it_was_fitted_to(python, tmp_path, monkeypatch):
    """The fake engine takes as long for every step: so does the fit."""
    monkeypatch.chdir(tmp_path)
    changes = ("engine.profile=vllm", "traffic.num_requests=20", "traffic.arrivals.rate=100", "engine.block_size=32")
    flags = [part for change in changes for part in ("--set", change)]
    answer = CliRunner().invoke(app, ["calibrate", "--on", python, "tiny-llama-cpu", "--name", "fake", *flags])
    assert answer.exit_code == 0, answer.stderr
    assert {file.name for file in (tmp_path / "calibrations").iterdir()} == {"engine@fake.yaml", "cpu@fake.yaml"}
    out = ["execute", "tiny-llama-cpu", "--on", python, "--out", "run", *flags, "--seed", "1"]
    assert CliRunner().invoke(app, out).exit_code == 0
    ours = [*flags, "--set", "engine.profile=fake", "--seed", "1"]
    answer = CliRunner().invoke(app, ["validate", "executor", "tiny-llama-cpu", "--measured", "run", "--json", *ours])
    assert answer.exit_code == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report["rows"] == 20 + len(read_steps(tmp_path / "run" / "steps.csv"))
    shipped = CliRunner().invoke(app, ["validate", "executor", "tiny-llama-cpu", "--measured", "run", "--json", *flags])
    before = json.loads(shipped.stdout)["metrics"]["step"]["median_ape"]
    assert report["metrics"]["step"]["median_ape"] < before / 2
    assert "cpu@fake" in json.dumps(report["provenance"]) or "cpu@vllm" in json.dumps(report["provenance"])


@pytest.fixture(scope="module")
def server():
    """The emulator, which answers as vLLM's server does."""
    command = [sys.executable, "-m", "perfmodel", "serve", "tiny-llama-cpu", "--set", "engine.profile=vllm", "--port"]
    with subprocess.Popen([*command, "0"], stderr=subprocess.PIPE, text=True) as process:
        while " listening on " not in f" {(line := process.stderr.readline())}":
            assert line, "the server has ended"
        yield f"vllm:http://127.0.0.1:{line.strip().rsplit(':', 1)[1]}"
        process.terminate()


def test_a_server_is_asked_for_the_same(server, tmp_path):
    pytest.importorskip("starlette")
    result = execute_on(server, small(), "tiny-llama", out=tmp_path)
    requests = read_requests(tmp_path / "requests.csv")
    expected = {request.request_id: request for request in Workload(small()).requests()}
    assert sorted(requests.request_id) == sorted(expected)
    for number, prompt, output in zip(
        requests.request_id, requests.num_prompt_tokens, requests.num_output_tokens, strict=True
    ):
        assert (prompt, output) == (expected[number].num_prompt_tokens, expected[number].max_output_tokens)
    assert (requests.arrival_s < requests.first_token_s).all()
    assert result.steps is None
    assert any("no step records" in note for note in result.notes)


def test_where_no_server_answers_is_one_sentence():
    with pytest.raises(PerfmodelError, match="no server answers there"):
        execute_on("vllm:http://127.0.0.1:9", small(), "tiny-llama")
    with pytest.raises(PerfmodelError, match="without a path and without TLS"):
        execute_on("vllm:https://127.0.0.1", small(), "tiny-llama")


@contextmanager
def listing_server(*cards):
    """A server on loopback that lists `cards` as models and answers at once; (its target, the bodies it was sent)."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def answer(self, text):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self):
            self.answer(json.dumps({"data": cards, "version": "0.31.0"}))

        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            token = json.dumps({"choices": [{"token_ids": [1]}]})
            self.answer(f"data: {token}\n\n" * bodies[-1]["max_tokens"])

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"vllm:http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()


CARDS = ({"id": "base", "parent": None}, {"id": "law", "parent": "base"}, {"id": "code", "parent": "base"})
ADAPTERS = ("engine.enable_lora=true", "engine.max_loras=2", "traffic.adapters={count: 2, share: 0.7}")


def test_a_server_is_asked_for_the_adapter_that_a_request_names():
    scenario = small(*ADAPTERS)
    with listing_server(*CARDS) as (target, bodies):
        execute_on(target, scenario, "tiny-llama")
        numbers = [request.adapter for request in Workload(scenario).requests()]
        expected = sorted("base" if number is None else ("law", "code")[number] for number in numbers)
        assert set(expected) == {"base", "law", "code"}
        assert sorted(body["model"] for body in bodies) == expected
        with pytest.raises(SpecError, match="got 3 adapters, and the server lists 2; start it with --enable-lora"):
            execute_on(target, small(*ADAPTERS, "traffic.adapters.count=3"), "tiny-llama")


@pytest.mark.parametrize("target", ["vllm", "vllm:http://127.0.0.1:9"])
@pytest.mark.parametrize("change", ["structured_outputs={count: 2}", "beam_width=2"])
def test_vllm_is_not_asked_plainly_for_what_is_more_than_text(target, change):
    with pytest.raises(UnsupportedError, match="vLLM is asked for plain text only; leave it out"):
        execute_on(target, small(f"traffic.{change}"), "tiny-llama")


def test_an_engine_is_not_given_weights_of_adapters():
    with pytest.raises(UnsupportedError, match="adapters, whose weights an engine is not given here; ask a server"):
        execute_on("vllm", small(*ADAPTERS), "tiny-llama")
