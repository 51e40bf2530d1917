"""A fleet's report shows the fleet: replicas, failures, load and cost by pool, classes; long tails on log axes."""

from itertools import pairwise

import numpy as np
import pytest

from perfmodel.report.document import Plot
from perfmodel.report.plots.run import engine_names, latency_figure, pool_names
from perfmodel.report.views.run import run_view
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario

STAGES = "traffic.arrivals.stages=[{rate: 4, duration_s: 40}, {rate: 30, duration_s: 60}, {rate: 4, duration_s: 40}]"
POOLS = (
    "cluster.pools=[{name: stable, share: 0.9, replicas: 1, autoscaling: {target: 20, max_replicas: 4, interval_s: 5, "
    "cold_start_s: 5, scale_down_delay_s: 10}}, {name: fp8, share: 0.1, engine: {quantization: fp8}}]"
)
FAILURES = "cluster.failures={events: [{at_s: 60, pool: 0, replica: 0, down_s: 20}], start_s: 5}"


@pytest.fixture(scope="module")
def fleet():
    return simulate(load_scenario("llama-3.1-8b-h100-fleet", [STAGES, POOLS, FAILURES]))


@pytest.fixture(scope="module")
def figures(fleet):
    return {block.title: block.draw() for block in run_view(fleet).flat if isinstance(block, Plot)}


def names(figure):
    return [trace.get("name") for trace in figure["data"]]


def test_replicas_over_time_add_up_to_what_is_paid_for(fleet, figures):
    """The area under the dotted line is the device hours: replicas are paid for from the beginning of their start."""
    stable, fp8 = fleet.summary["pools"]
    assert stable["failed_at_s"] == [60.0]
    end_s = fleet.summary["duration"]
    rows = [*stable["replicas_over_time"], [end_s, 0, 0]]
    area = sum((later[0] - row[0]) * row[2] for row, later in pairwise(rows))
    assert area / 3600 == pytest.approx(stable["gpu_hours"])
    assert max(row[2] for row in rows) == stable["replicas_peak"] > 1
    drawn = figures["Replicas over time"]
    assert {"stable", "fp8", "failures of stable"} <= set(names(drawn))
    (cross,) = (trace for trace in drawn["data"] if trace["name"] == "failures of stable")
    assert cross["x"] == [60.0]
    assert fp8["usd_total"] == pytest.approx(2.5 * fp8["gpu_hours"])


def test_costs_by_pool_add_up_to_the_bill(fleet, figures):
    assert sum(pool["usd_total"] for pool in fleet.summary["pools"]) == pytest.approx(fleet.summary["usd_total"])
    assert [bar["y"][0] for bar in figures["Cost by pool"]["data"]] == ["stable", "fp8"]


def test_pools_have_their_names_in_legends(fleet, figures):
    assert {"stable, running", "fp8, running"} <= set(names(figures["Requests in each pool"]))
    assert {"stable 0", "fp8"} <= set(names(figures["KV cache in use"]))
    assert {"chat", "batch", "limit of chat, 500 ms"} <= set(names(figures["TTFT by class"]))
    assert set(engine_names(fleet.summary["pools"])) >= set(np.unique(fleet.steps.replica).tolist())


def test_names_of_pools_differ():
    assert pool_names([{"role": "unified"}, {"role": "unified"}]) == ["unified", "unified 1"]
    assert pool_names([{"name": "a", "shadow": True}, {"role": "decode", "deployment": "d"}]) == [
        "a (shadow)",
        "d decode",
    ]


def test_a_long_tail_takes_a_logarithmic_axis(fleet):
    """Half of the requests within a twelfth of the axis would be a line along its edge."""
    requests = fleet.requests
    slow = np.where(np.arange(len(requests)) == 0, 1e3, requests.first_token_s)
    tailed = latency_figure(
        type(requests)(**{n: getattr(requests, n) for n in requests.names} | {"first_token_s": slow}),
        fleet.scenario.slo,
    )
    even = requests.some(np.flatnonzero(requests.ttft_s < 2 * np.median(requests.ttft_s)))
    assert tailed["layout"]["xaxis"]["type"] == "log"
    assert latency_figure(even, fleet.scenario.slo)["layout"]["xaxis"].get("type") != "log"


def test_requests_within_the_slo_add_up_to_the_share_of_the_run(fleet, figures):
    """Shares of intervals, weighed by the requests that arrive in them, are the share of all that were answered."""
    (trace,) = figures["Requests within the SLO"]["data"]
    edges = np.linspace(0, fleet.summary["duration"], 61)
    sent = np.histogram(fleet.requests.arrival_s, edges)[0]
    assert len(trace["y"]) == (sent > 0).sum()
    within = np.dot(trace["y"], sent[sent > 0]) / 100
    num_sent = fleet.summary["completed"] + fleet.summary["failed"] + fleet.summary["timed_out"]
    assert within == pytest.approx(fleet.summary["slo_attainment"] * num_sent, abs=0.5)
