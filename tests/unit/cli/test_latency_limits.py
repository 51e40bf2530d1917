"""A latency limit means the same in all commands: `--ttft` is met by 90 % of requests, `--ttft-p99` by that
percentile."""

import numpy as np
import pytest
from typer.testing import CliRunner

from perfmodel import simulate
from perfmodel.cli import app
from perfmodel.commands.runs import SimulateRequest
from perfmodel.commands.searches import PlanRequest, WhatIfRequest

FLAGS = ("--model", "tiny-llama", "--hardware", "h100", "--rate", "20")
FEW = ("traffic.num_requests=150",)
SPACE = (
    *("plan.seeds=1", "plan.num_requests=150", "plan.max_gpus=1"),
    *("plan.space={tensor_parallel_size: [1], max_num_seqs: [256], max_num_batched_tokens: [8192]}",),
)
VARY = ("traffic.arrivals.rate=20",)


def asked(**limits):
    given = {"model": "tiny-llama", "hardware": "h100", "rate": "20", **limits}
    return {"flags": tuple(given.items())}


@pytest.fixture(scope="module")
def between():
    """A TTFT limit that the p90 of the requests meets and their p99 misses."""
    requests = simulate(SimulateRequest(**asked(), overrides=FEW).load()).requests
    p90, p99 = np.quantile(requests.ttft_s, (0.9, 0.99)) * 1e3
    assert p90 * 1.1 < p99
    return f"{np.sqrt(p90 * p99):.3f}ms"


@pytest.fixture
def run():
    return lambda *args: CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.mark.release
@pytest.mark.parametrize(
    ("flag", "is_met", "words"),
    [
        ("ttft", True, "90% of {} with TTFT <= "),
        ("ttft-p90", True, "with p90 TTFT <= "),
        ("ttft-p99", False, "with p99 TTFT <= "),
    ],
)
def test_every_command_evaluates_and_names_the_same_statistic(between, tmp_path, flag, is_met, words):
    limit = asked(**{flag: between})
    ran = SimulateRequest(**limit, overrides=FEW).answer()
    assert ran.data["slo"]["is_met"] == is_met
    assert ran.data["slo"]["wanted"].startswith(words.format("requests"))
    assert f"SLO {'met' if is_met else 'missed'}" in str(ran.make_brief())
    planned = PlanRequest(**limit, overrides=(*FEW, *SPACE), store=tmp_path / "points.sqlite", workers=1).answer()
    assert (planned.result.winner is not None) == is_met
    assert words.format("them") in str(planned.make_brief())
    varied = WhatIfRequest(**limit, vary=VARY, metric=("slo_attainment",), overrides=FEW, workers=1).answer()
    assert (varied.data["load"]["within_slo"]["max_rate"] == 20) == is_met
    assert f"SLO: {words.format('requests')}" in str(varied.make_brief())


@pytest.mark.release
@pytest.mark.parametrize(("flag", "metric"), [("ttft-mean", "mean_ttft_ms"), ("itl-p99", "p99_itl_ms")])
@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_limits_on_means_and_itl_are_evaluated(flag, metric, factor, tmp_path):
    """A limit below the value of a run is missed by run and plan, one above it is met by both."""
    value = simulate(SimulateRequest(**asked(), overrides=FEW).load()).summary[metric]
    limit = asked(**{flag: f"{value * factor}ms"})
    assert SimulateRequest(**limit, overrides=FEW).answer().data["slo"]["is_met"] == (factor > 1)
    planned = PlanRequest(**limit, overrides=(*FEW, *SPACE), store=tmp_path / "points.sqlite", workers=1).answer()
    assert (planned.result.winner is not None) == (factor > 1)


def test_timed_out_requests_count_as_missed():
    """Half of the requests time out: the others meet the limit, and the run misses it."""
    times = simulate(SimulateRequest(**asked(), overrides=FEW).load()).requests.e2el_s
    impatient = (*FEW, f"cluster.gateway.timeout_s={float(np.median(times))}")
    ran = SimulateRequest(**asked(ttft="10s"), overrides=impatient).answer().data
    assert 0.2 < ran["slo_attainment"] < 0.8
    assert not ran["slo"]["is_met"]


def test_the_wanted_attainment_applies_in_every_command(between):
    """`plan.attainment` is one number of the scenario, for all commands."""
    strict = (*FEW, "plan.attainment=0.99")
    ran = SimulateRequest(**asked(ttft=between), overrides=strict).answer()
    assert not ran.data["slo"]["is_met"]
    assert "99% wanted" in str(ran.make_brief())
    varied = WhatIfRequest(**asked(ttft=between), vary=VARY, metric=("slo_attainment",), overrides=strict, workers=1)
    kept = varied.answer().data["load"]
    assert kept["attainment"] == 0.99
    assert kept["within_slo"]["max_rate"] is None


@pytest.mark.parametrize("latency", ["ttft", "tpot", "itl", "e2e"])
@pytest.mark.parametrize("statistic", ["mean", "p50", "p90", "p95", "p99"])
def test_every_latency_has_a_flag_for_every_statistic(run, latency, statistic):
    made = run("scenarios", "new", *FLAGS, f"--{latency}-{statistic}", "2s")
    assert made.exit_code == 0, made.stderr
    assert f"{latency}_{statistic}_ms: 2s" in made.stdout


def test_limits_without_units_and_falling_limits_are_refused(run):
    assert "--ttft-p99 0.5: got a number without a unit" in run("simulate", *FLAGS, "--ttft-p99", "0.5").stderr
    falling = run("simulate", *FLAGS, "--ttft-p99", "400ms", "--ttft-p90", "500ms")
    assert falling.exit_code == 2
    assert "got ttft_p99_ms 400 below ttft_p90_ms 500" in falling.stderr


def test_new_writes_a_percentile_limit(run):
    made = run("new", "vllm serve meta-llama/Llama-3.1-8B", "--hardware", "h100", "--ttft-p95", "1s")
    assert made.exit_code == 0, made.stderr
    assert "ttft_p95_ms: 1s" in made.stdout
