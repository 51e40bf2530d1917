"""The rate that a plan is for, and traffic at another rate: of a trace its own bursts, closer together."""

import json

import numpy as np
import pytest

from perfmodel.errors import SpecError
from perfmodel.planning.service import at_rate, demand_of, wanted_rate
from perfmodel.planning.spec import PlanSpec
from perfmodel.sim.traffic.workload import Workload
from perfmodel.specs import load_scenario
from perfmodel.specs.overrides import as_overrides

TIMES = [0.0, 0.1, 0.2, 4.0, 4.1, 8.0]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [{"arrival_s": at, "input_tokens": 100 + i, "output_tokens": 10} for i, at in enumerate(TIMES)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


def scenario_of(trace, *more):
    text = f"traffic={{trace: {{path: {trace}, format: jsonl}}}}"
    return load_scenario("llama-3.1-8b-a100", [text, *more])


def arrivals(scenario):
    return np.array([request.arrival for request in Workload(scenario).requests()]) / 1e12


def test_a_trace_is_planned_for_at_its_mean_rate(trace):
    assert wanted_rate(scenario_of(trace), PlanSpec()) == pytest.approx(5 / 8.0)
    assert wanted_rate(scenario_of(trace, "traffic.num_requests=4"), PlanSpec()) == pytest.approx(3 / 4.0)
    assert wanted_rate(scenario_of(trace, "traffic.duration_s=4.05"), PlanSpec()) == pytest.approx(3 / 4.0)
    assert wanted_rate(scenario_of(trace), PlanSpec(rate=7.0)) == 7.0


@pytest.mark.parametrize("more", [(), ("traffic.duration_s=4.05",), ("traffic.trace.speedup=3",)])
def test_at_another_rate_its_gaps_are_shorter_and_its_bursts_stay(trace, more):
    scenario = scenario_of(trace, *more)
    own = arrivals(scenario)
    rate = wanted_rate(scenario, PlanSpec())
    fields = as_overrides(at_rate(scenario, 2.5 * rate, num_requests=3))
    faster = arrivals(scenario_of(trace, *more, *fields))
    np.testing.assert_allclose(faster, own / 2.5, atol=1e-9)


def test_stages_are_planned_for_at_their_highest_rate():
    stages = "[{rate: 2, duration_s: 60}, {rate: 7, duration_s: 5}, {rate: 3, duration_s: 60}]"
    scenario = load_scenario("llama-3.1-8b-a100", [f"traffic.arrivals={{stages: {stages}}}"])
    assert wanted_rate(scenario, PlanSpec()) == 7


def test_the_mean_decode_context_weighs_requests_by_output_tokens(tmp_path):
    """Outputs of 10 tokens after prompts of 100, and of 90 after 1,000: contexts of 105 in a tenth of the steps, and of
    1,045 in the others."""
    path = tmp_path / "trace.jsonl"
    lengths = [(100, 10), (1000, 90)] * 50
    rows = [{"arrival_s": i, "input_tokens": a, "output_tokens": b} for i, (a, b) in enumerate(lengths)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    demand = demand_of(scenario_of(path))
    assert demand.context == pytest.approx(0.1 * 105 + 0.9 * 1045)
    assert (demand.mean_prompt, demand.mean_outputs) == (550, 50)


def test_answers_end_where_the_context_is_full():
    """Prompts of 900 leave room for 100 of 200 tokens; on average a sequence has 950 while it decodes."""
    lengths = [
        f"traffic.{name}_tokens={{distribution: fixed, value: {n}}}" for name, n in (("input", 900), ("output", 200))
    ]
    demand = demand_of(load_scenario("llama-3.1-8b-a100", ["engine.max_model_len=1000", *lengths]))
    assert (demand.mean_prompt, demand.mean_outputs, demand.context) == (900, 100, 950)


def test_requests_that_come_at_once_have_no_rate(trace):
    with pytest.raises(SpecError, match="come at once"):
        wanted_rate(scenario_of(trace, "traffic.num_requests=1"), PlanSpec())
