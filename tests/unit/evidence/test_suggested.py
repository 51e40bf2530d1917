"""Load tests that are suggested: by hand for one score, and what a deployment's own load says of it."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.evidence.fit import suggested
from perfmodel.evidence.fit.suggested import half_widths, suggest_runs
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario

SCENARIO = "llama-3.1-8b-a100"


@pytest.fixture(scope="module")
def suggestion():
    return suggest_runs(load_scenario(SCENARIO), SCENARIO)


def test_slopes_are_those_of_the_interval():
    """Draws are orthogonal, so the sum of squares of the slopes is the mean square of the log ratios."""
    run = simulate(load_scenario(SCENARIO, ["traffic.num_requests=160"]), intervals=True)
    logs, slopes = run.ensemble.logs(), suggested._slopes(run)
    for figure, row in zip(suggested.FIGURES, slopes, strict=True):
        odd = (logs[figure][:, 0] - logs[figure][:, 1]) / 2
        assert np.sum(row**2) == pytest.approx(np.mean(odd**2))
    assert (slopes[0] >= -0.01).all()  # no error that makes a step longer brings a first token sooner


def test_a_run_that_measures_one_score_leaves_its_noise():
    """TTFT = e^(0.3 s): from 1 to 1 / (1 + 0.3^2 / 0.1^2) = 0.1."""
    slopes = np.zeros((2, 4))
    slopes[0, 1] = 0.3
    left = suggested._covariance(np.eye(3, 4), suggested._known(np.eye(4), slopes))
    assert np.diag(left) == pytest.approx([1.0, 0.1, 1.0])


def test_a_run_that_says_the_same_as_one_before_waits():
    """Two know the first score (the shorter one first), one the second, which matters less to the deployment."""
    deployment = np.zeros((3, 4))
    deployment[0, 0], deployment[1, 1] = 0.5, 0.3
    first, second = np.zeros((2, 4)), np.zeros((2, 4))
    first[0, 0] = second[0, 1] = 1.0
    slopes = {"again": first, "first": first, "second": second}
    durations = {"again": 60.0, "first": 50.0, "second": 900.0}
    assert list(suggested._chosen(deployment, slopes, durations)) == ["first", "second", "again"]


def test_each_run_narrows_and_none_is_named_twice(suggestion):
    assert len(suggestion.runs) == 3
    assert len({run.what for run in suggestion.runs}) == 3
    for figure, now in suggestion.now.items():
        widths = [now, *(run.widths[figure] for run in suggestion.runs)]
        assert widths == sorted(widths, reverse=True)
        assert widths[-1] < 0.7 * widths[0]
    assert suggestion.now == pytest.approx(half_widths(load_scenario(SCENARIO)))


def test_prompts_are_measured_where_their_time_is_least_known(suggestion):
    """TTFT is least certain here, so the first run has the deployment's prompts."""
    assert suggestion.now["ttft"] == max(suggestion.now.values())
    assert "prompts of 1,2" in suggestion.runs[0].what


def test_the_command_names_runs_that_a_load_tool_takes(suggestion):
    result = CliRunner().invoke(app, ["calibrate", "--suggest", "--scenario", SCENARIO, "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert [run["command"] for run in answer["runs"]] == [run.command for run in suggestion.runs]
    assert all(run.command.startswith("vllm bench serve --backend openai") for run in suggestion.runs)
    seeds = [run.command.partition("--seed ")[2].partition(" ")[0] for run in suggestion.runs]
    assert len(set(seeds)) == 3  # else prompts of one run are in the cache at the next
    assert answer["then"].endswith(f"suggested-3.json --scenario {SCENARIO} --name my-server --engine vllm")
    changes = ["engine.profile=sglang", "traffic.arrivals.rate=3"]  # load tests have their own traffic
    sglang = suggest_runs(load_scenario(SCENARIO, changes), SCENARIO, changes)
    assert sglang.then.endswith("--engine sglang --set engine.profile=sglang")
    repeated = load_scenario(SCENARIO, ["traffic.prefix={shared_tokens: 99}"])  # random prompts share nothing
    assert suggest_runs(repeated, SCENARIO).then.endswith("--engine vllm --set traffic.prefix=null")
    several = load_scenario(SCENARIO, ["traffic.samples_per_prompt=2", "traffic.priorities=[0, 1]"])  # else refused
    plain = "--engine vllm --set 'traffic.priorities=[]' --set traffic.samples_per_prompt=1"
    assert suggest_runs(several, SCENARIO).then.endswith(plain)
    loop = ("--set", "traffic.num_requests=40", "--set", "traffic.arrivals={process: closed_loop, concurrency: 8}")
    closed = CliRunner().invoke(app, ["calibrate", "--suggest", "--scenario", SCENARIO, "--json", *loop])
    assert all("--max-concurrency" in run["command"] for run in json.loads(closed.stdout)["runs"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--suggest"], "give --scenario"),
        (["--suggest", "--scenario", SCENARIO, "--name", "x"], "--name does not read --suggest"),
    ],
)
def test_what_cannot_be_suggested_is_one_sentence(arguments, sentence):
    result = CliRunner().invoke(app, ["calibrate", *arguments])
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.stderr.split())


def test_a_block_given_whole_has_none_of_the_fields_set_before():
    """`--set traffic.arrivals.rate` stayed in a traffic given anew; a device's name keeps what was set of it."""
    scenario = load_scenario(SCENARIO, ["traffic.arrivals.rate=7", "hardware.power_cap_w=300"])
    arrivals = {"process": "poisson", "rate": 2}
    lengths = {"distribution": "fixed", "value": 9}
    traffic = {"arrivals": arrivals, "num_requests": 3, "input_tokens": lengths, "output_tokens": lengths}
    changed = scenario.with_({"traffic": traffic, "hardware": "h100-sxm-80gb"})
    assert changed.traffic.arrivals.rate == 2
    assert (changed.hardware.name, changed.hardware.power_cap_w) == ("h100-sxm-80gb", 300)
