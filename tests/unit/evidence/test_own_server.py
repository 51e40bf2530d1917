"""A server of one's own: its hidden numbers come back from a few load tests, and one of them moves little."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.cost import EngineProfile, load_engine_profile
from perfmodel.cost.calibrations.draws import Z_P90, Uncertainty
from perfmodel.cost.kernel_models.device import OperatorTime
from perfmodel.cost.steps.step_costs import step_costs
from perfmodel.errors import SpecError
from perfmodel.evidence.fit.parameters import Parameter, with_values
from perfmodel.evidence.fit.server_fit import UserServerFit, _Figures, fit_server, save_server_fit
from perfmodel.evidence.fit.suggested import half_widths, with_certainty
from perfmodel.evidence.predict.bench import GivenSetup
from perfmodel.evidence.sources.bench import read_bench_files
from perfmodel.files.catalog import data_dir
from perfmodel.ops.work import BatchShape
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario

DATA = Path(__file__).parents[2] / "data" / "bench"
SCENARIO = "llama-3.1-8b-h100-2048-256"
RATES, OTHERS = (1, 3, 6, 10, 15, 20), (4, 12)
METRICS = ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")
# Ten times the front end and other numbers of the host drawn about the shipped ones, as those of engines differ.
FIELDS = ("serial_step_s", "serial_per_sequence_s", "prompt_step_s")
NOISE = 0.02


def hidden_profile(seed: int) -> EngineProfile:
    rng, shipped = np.random.default_rng(seed), load_engine_profile("vllm")
    drawn = {f"host.{name}": getattr(shipped.host, name) * float(np.exp(rng.normal(0, 0.5))) for name in FIELDS}
    return with_values(shipped, {**drawn, "server.in_s": float(rng.uniform(8e-3, 2e-2))})


def served(rate: float, profile: EngineProfile, num_requests: int = 100) -> Any:
    traffic = (
        f"{{arrivals: {{process: poisson, rate: {rate}}}, num_requests: {num_requests}, "
        f"input_tokens: {{distribution: uniform, low: 100, high: 1200}}, "
        f"output_tokens: {{distribution: uniform, low: 16, high: 48}}}}"
    )
    return simulate(load_scenario(SCENARIO, [f"traffic={traffic}"]), profile=profile, keep_steps=False)


def load_test(
    path: Path, rate: float, profile: EngineProfile, rng: np.random.Generator, num_requests: int = 100
) -> Path:
    """What `vllm bench serve --save-detailed` would have measured, TTFT and TPOT of each run 2 % off."""
    requests = served(rate, profile, num_requests).requests
    first, other = np.exp(rng.normal(0, NOISE, 2))
    later = requests.num_output_tokens - 1
    gaps = (requests.e2el_s - requests.ttft_s) / later * other
    data = {
        "model_id": "llama-3.1-8b",
        "request_rate": rate,
        "completed": len(requests),
        "total_input_tokens": int(requests.num_prompt_tokens.sum()),
        "input_lens": requests.num_prompt_tokens.tolist(),
        "output_lens": requests.num_output_tokens.tolist(),
        "ttfts": (requests.ttft_s * first).tolist(),
        "itls": [[gap] * count for gap, count in zip(gaps.tolist(), later.tolist(), strict=True)],
        "start_times": requests.arrival_s.tolist(),
    }
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineProfile, UserServerFit, UserServerFit]:
    """(the hidden profile, the fit to all load tests, the fit to one of them)."""
    folder, hidden, rng = tmp_path_factory.mktemp("load"), hidden_profile(4), np.random.default_rng(104)
    files = [load_test(folder / f"rate-{rate}.json", rate, hidden, rng) for rate in RATES]
    runs, _ = read_bench_files(files)
    given = GivenSetup(SCENARIO)
    return hidden, fit_server("mine", runs, given, "vllm"), fit_server("mine", runs[2:3], given, "vllm")


@pytest.mark.release
def test_predictions_at_other_rates_come_back(fits: tuple[EngineProfile, UserServerFit, UserServerFit]) -> None:
    hidden, fit, _ = fits
    for rate in OTHERS:
        truth, found, before = (
            served(rate, profile).summary for profile in (hidden, fit.profile, load_engine_profile("vllm"))
        )
        assert before["mean_ttft_ms"] < 0.85 * truth["mean_ttft_ms"]
        for metric in METRICS:
            assert found[metric] == pytest.approx(truth[metric], rel=0.03), (rate, metric)


def test_a_host_slower_than_those_of_gpu_servers_comes_back(tmp_path: Path) -> None:
    """12 ms a step beside a device that takes 7; steps of GPU servers are fitted up to 5."""
    shipped, rng = load_engine_profile("vllm"), np.random.default_rng(7)
    hidden = with_values(shipped, {"host.hidden_step_s": 0.012})
    files = [load_test(tmp_path / f"{rate}.json", rate, hidden, rng) for rate in (1, 3, 6)]
    fit = fit_server("mine", read_bench_files(files)[0], GivenSetup(SCENARIO), "vllm")
    truth, found = (served(4, profile).summary for profile in (hidden, fit.profile))
    assert found["mean_tpot_ms"] == pytest.approx(truth["mean_tpot_ms"], rel=0.05)
    assert fit.profile.host.hidden_step_s == pytest.approx(0.012, rel=0.1)


def test_one_run_moves_less_than_it_could(fits: tuple[EngineProfile, UserServerFit, UserServerFit]) -> None:
    """Some of the way to what was measured, never all of it; more runs that agree go further."""
    _, many, one = fits
    found = one.errors["mean_ttft_ms"]
    assert 0.1 * found["shipped"] < found["fitted"] < found["shipped"]
    assert "held out" not in found
    assert any("One run changes little" in note for note in one.notes)
    shipped, alone = one.moved["server.in_s"]
    assert shipped < alone < many.moved["server.in_s"][1]


@pytest.mark.release
def test_it_says_how_far_it_is_off(fits: tuple[EngineProfile, UserServerFit, UserServerFit]) -> None:
    _, many, _ = fits
    for found in many.errors.values():
        assert found["fitted"] < 0.05
        assert found["held out"] < 0.08
    assert "each left out in turn" in many.profile.source
    assert "h100-sxm-80gb" in many.profile.source


def test_it_says_where_it_gains_nothing(fits: tuple[EngineProfile, UserServerFit, UserServerFit]) -> None:
    _, many, _ = fits
    assert not many.notes
    errors = {"mean_tpot_ms": {"shipped": 0.02, "fitted": 0.01, "held out": 0.03}}
    assert any("the engine's own profile does as well" in note for note in replace(many, errors=errors).notes)


def test_kernels_and_the_engine_stay_as_they_are(fits: tuple[EngineProfile, UserServerFit, UserServerFit]) -> None:
    _, many, _ = fits
    shipped = load_engine_profile("vllm")
    for name in ("graph_kernel_s", "sampling_bytes_per_logit", "engine"):
        assert getattr(many.profile, name) == getattr(shipped, name)
    assert many.profile.host.hidden_prompt_layer_s == shipped.host.hidden_prompt_layer_s
    assert many.profile.kernel_factor == pytest.approx(1.0, abs=0.03)


def test_slower_kernels_come_back_as_one_factor(tmp_path: Path) -> None:
    """A clock 12 % lower, which no host time explains: TPOT of loads between and beyond those measured."""
    hidden, rng = with_values(load_engine_profile("vllm"), {"kernel_factor": 1.12}), np.random.default_rng(3)
    files = [load_test(tmp_path / f"{rate}.json", rate, hidden, rng) for rate in (1, 3, 10)]
    fit = fit_server("mine", read_bench_files(files)[0], GivenSetup(SCENARIO), "vllm")
    assert fit.profile.kernel_factor == pytest.approx(1.12, rel=0.04)
    for rate in (6, 15):
        truth, fitted, before = (served(rate, item).summary for item in (hidden, fit.profile, fit.shipped))
        assert before["mean_tpot_ms"] < 0.93 * truth["mean_tpot_ms"]
        assert fitted["mean_tpot_ms"] == pytest.approx(truth["mean_tpot_ms"], rel=0.04)


def test_kernels_of_a_factor_take_that_many_times_as_long() -> None:
    """Every operator, and nothing else: the host's time stays."""
    scenario, shape = load_scenario(SCENARIO), BatchShape(8, 8, num_decodes=8, decode_context=8 * 2048)
    profiles = [with_values(load_engine_profile("vllm"), {"kernel_factor": factor}) for factor in (1.0, 1.5)]
    usual, slow = (step_costs(scenario, profile=profile).estimate(shape) for profile in profiles)
    assert slow.device_s == pytest.approx(1.5 * usual.device_s)
    assert (slow.serial_host_s, slow.hidden_host_s) == (usual.serial_host_s, usual.hidden_host_s)


def test_times_keep_what_they_consist_of() -> None:
    time = OperatorTime(3.0, 1.0, 2.0, 0.25, 0.5, "memory", 0.9)
    assert time.times(2.0) == OperatorTime(6.0, 2.0, 4.0, 0.5, 1.0, "memory", 0.9)


def test_a_further_run_is_as_sure_as_runs_and_priors_are() -> None:
    """One parameter of one figure, in proportion to it, by hand: s^2 of the run itself and 1 / (1 / s^2 + 1 / p^2) of
    the parameter, s being 0.1 and p 0.2."""
    one = np.array([1.0])
    parameter = Parameter("kernel_factor", 1.0, 0.5, 2.0)
    figures = _Figures([(parameter, 0.2)], 5 * one, one, 5 * one, np.array([[5.0]]))
    assert figures.predictive(0.1 * one, one)[0] ** 2 == pytest.approx(0.1**2 + 1 / (1 / 0.1**2 + 1 / 0.2**2))


def test_two_runs_of_a_server_know_more_than_others_do(tmp_path: Path) -> None:
    """By hand: the shipped spread counts as one run more, (s^2 + a^2 + b^2) / 3; kernels' errors are among these."""
    hidden, rng = hidden_profile(4), np.random.default_rng(5)
    files = [load_test(tmp_path / f"{rate}.json", rate, hidden, rng) for rate in (3, 10)]
    fit = fit_server("mine", read_bench_files(files)[0], GivenSetup(SCENARIO), "vllm")
    theirs, ours = fit.shipped.tpot_residuals, fit.profile.tpot_residuals
    spread = (theirs.p90 - theirs.p10) / (2 * Z_P90)
    assert ours.num_rows == 2
    assert ours.p90 >= Z_P90 * spread / 3**0.5 * 0.999
    assert ours.p90 == -ours.p10
    calibration = step_costs(load_scenario(SCENARIO)).calibration
    spreads = [Uncertainty.of(calibration, item).spread for item in (fit.shipped, fit.profile)]
    assert (spreads[0] >= 1, spreads[1]) == (True, 0.0)  # kernels' errors are among those of the server's own runs
    certainty = with_certainty(fit, load_scenario(SCENARIO)).to_json()["certainty"]
    assert certainty.keys() == {"ttft", "tpot", "e2el"}
    for figure, halves in certainty.items():
        assert halves["after"] < halves["before"], figure
        assert halves["after"] == pytest.approx(half_widths(load_scenario(SCENARIO), fit.profile)[figure])


def test_intervals_are_those_of_the_server_once_there_are_runs_enough(
    fits: tuple[EngineProfile, UserServerFit, UserServerFit],
) -> None:
    """Runs that agree within 2 % make them narrower than servers of all kinds do; one run leaves them."""
    _, many, one = fits
    shipped = load_engine_profile("vllm")
    assert many.profile.ttft_residuals.num_rows == len(RATES)
    for name in ("ttft_residuals", "tpot_residuals"):
        ours, theirs = getattr(many.profile, name), getattr(shipped, name)
        assert ours.p90 - ours.p10 < theirs.p90 - theirs.p10
        assert getattr(one.profile, name) == theirs


def test_its_name_finds_it(
    fits: tuple[EngineProfile, UserServerFit, UserServerFit], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the scenario, then in the working directory; never over a file that is there."""
    _, many, one = fits
    here, beside = tmp_path / "here", tmp_path / "beside"
    here.mkdir()
    file = save_server_fit(many, here / "calibrations")
    monkeypatch.chdir(here)
    override = ["engine.profile=mine", "traffic.num_requests=20"]
    result = simulate(load_scenario(SCENARIO, override))
    assert result.scenario.engine.profile == "vllm"
    assert result.scenario.engine.calibration == str(file)
    calibrations = result.to_json()["provenance"]["calibrations"]
    assert "engine@mine" in calibrations
    assert "engine@vllm" not in calibrations
    assert any("mine" in note for note in result.notes)
    beside.mkdir()
    (beside / "own.yaml").write_text(
        "model: llama-3.1-8b\nhardware: h100-sxm-80gb\nengine: {profile: mine}\ntraffic: chat\n", encoding="utf-8"
    )
    nearer = save_server_fit(one, beside)
    assert load_scenario(beside / "own.yaml").engine.calibration == str(nearer)
    with pytest.raises(SpecError, match="--force"):
        save_server_fit(many, beside)
    assert save_server_fit(many, beside, is_forced=True) == nearer


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file is fitted, said to change little, written once, and refused the second time before any work."""
    monkeypatch.chdir(tmp_path)
    result = str(DATA / "vllm_detailed.json")
    asked = ["calibrate", "--from", result, "--engine", "vllm", "--name", "my-h100", "--hardware", "h100"]
    found = CliRunner().invoke(app, [*asked, "--json"])
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout)
    assert any("One run changes little" in note for note in answer["notes"])
    assert any("A run has 12 requests" in note for note in answer["notes"])
    assert Path(answer["path"]) == Path("calibrations/engine@my-h100.yaml")
    again = CliRunner().invoke(app, asked)
    assert (again.exit_code, "--force" in again.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--name", "mine"], "--name goes with --from FILE..."),
        (["--from", "llama_bench.csv", "--name", "mine", "--hardware", "h100"], "say nothing of host and front end"),
        (["--from", "mlperf_offline.txt", "--name", "mine", "--hardware", "h100"], "all its requests at once"),
        (["--from", "vllm.json", "--name", "mine"], "give --hardware"),
        (["--from", "vllm.json", "--name", "mine", "--hardware", "h100", "--engine", "sglang"], "--engine is sglang"),
        (["--from", "vllm.json", "sglang.jsonl"], "--from does not read FILE..., which goes with --name or --on"),
        (["--from", "vllm.json", "--to", "somewhere"], "--from does not read --to, which goes with --name or --on"),
        (
            ["--from", "vllm.json", "--model", "x"],
            "--from does not read --model, which goes with a measurement of this",
        ),
        (
            ["--from", "vllm.json", "--routing", "--softmax"],
            "--from does not read --softmax, which goes with --from alone",
        ),
        (
            ["--from", "vllm.json", "--routing", "--engine", "vllm"],
            "--from does not read --engine, which goes with --name",
        ),
        (["--from", "vllm.json", "--name", "mine", "--out", "x"], "--name does not read --out, which goes with a meas"),
        (
            ["--from", "vllm.json", "--name", "mine", "--routing"],
            "--name does not read --routing, which goes with --from",
        ),
        (
            ["--on", "vllm", "--name", "mine", "--from", "vllm.json"],
            "--on does not read --from, which goes with --name",
        ),
        (
            ["--on", "vllm", "--name", "mine", "--scenario", "x"],
            "--on does not read --scenario, which goes with --name",
        ),
        (["--on", "vllm", "chat.yaml"], "--on goes with SCENARIO... and --name NAME"),
        (["--routing"], "calibrate does not read --routing, which goes with --from alone"),
        (["--engine", "vllm"], "calibrate does not read --engine, which goes with --name"),
        (["--force"], "calibrate does not read --force, which goes with --from or --name or --on"),
    ],
)
def test_what_cannot_be_fitted_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["calibrate", *(str(DATA / a) if (DATA / a).is_file() else a for a in arguments)])
    assert found.exit_code == 2, found.output
    assert said in " ".join(found.stderr.split())
    assert not (tmp_path / "calibrations").exists()


@pytest.mark.parametrize(
    ("flags", "file"),
    [
        (["--routing"], "routing"),
        (["--whole-runs"], "whole_runs"),
        (["--exchange"], "exchange"),
        (["--overheads"], "overheads"),
        (["--kernel-errors"], "kernel_errors"),
        (["--power"], "power"),
        (["--softmax"], "overheads"),
        (["--engine", "vllm"], "engine@vllm"),
        (["--engine", "llamacpp"], "backend@llamacpp"),
    ],
)
def test_shipped_calibrations_are_never_overwritten(flags: list[str], file: str) -> None:
    """Checked before the measurements are read; the file given here has none."""
    shipped = data_dir("calibrations") / f"{file}.yaml"
    before = shipped.read_bytes()
    result = CliRunner().invoke(app, ["calibrate", "--from", str(Path(__file__)), *flags])
    assert (result.exit_code, shipped.read_bytes()) == (2, before), result.output
    assert f"{file}.yaml: already exists; name another folder with --out, or overwrite" in " ".join(
        result.stderr.split()
    )


@pytest.mark.parametrize("name", ["vllm", "VLLM", "sglang", "datasheet", "a/b", "h100@vllm", ""])
def test_shipped_names_cannot_be_taken(name: str) -> None:
    with pytest.raises(SpecError, match="--name"):
        fit_server(name, [], GivenSetup(SCENARIO), "vllm")


def test_a_shipped_name_is_never_shadowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "engine@sglang.yaml").write_text("engine: vllm\n", encoding="utf-8")
    engine = load_scenario(SCENARIO, ["engine.profile=sglang"]).engine
    assert (engine.profile, engine.calibration) == ("sglang", None)


@pytest.mark.parametrize(
    "content", ["engine: nothing\n", "a: 1\n", "[]\n", "engine: vllm\nhost: {serial_step_s: -1}\n"]
)
def test_a_broken_file_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "engine@mine.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(SpecError, match=r"engine@mine\.yaml"):
        simulate(load_scenario(SCENARIO, ["engine.profile=mine"]))
