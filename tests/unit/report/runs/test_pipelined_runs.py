"""What reports and commands say of engines with several stages, whose steps overlap in time."""

import json
from itertools import pairwise

import numpy as np
import pytest
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.planning.typical_step import mean_step
from perfmodel.report.runs import timeline_json
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario

SCENARIO = "llama-3.1-8b-h100-2048-256"


@pytest.fixture(scope="module")
def result():
    closed_loop = "traffic.arrivals={process: closed_loop, concurrency: 24}"
    overrides = ["engine.pipeline_parallel_size=4", "traffic.num_requests=48", closed_loop]
    return simulate(load_scenario(SCENARIO, overrides))


def test_no_two_steps_of_a_track_overlap_and_there_are_as_many_tracks_as_stages(result) -> None:
    tracks: dict[int, list[tuple[float, float]]] = {}
    for event in timeline_json(result)["traceEvents"]:
        if event.get("cat") == "step":
            tracks.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert sorted(tracks) == [0, 1, 2, 3]
    for slices in tracks.values():
        assert all(one[1] <= two[0] + 0.01 for one, two in pairwise(sorted(slices)))


def test_the_mean_step_is_of_all_plans_that_are_under_way(result) -> None:
    """Nearly 24 sequences decode at a time, in plans of some six."""
    assert result.steps is not None
    choice = mean_step(result)
    assert choice is not None
    moments = np.linspace(1.0, float(result.steps.end_s.max()) - 1.0, 500)
    is_on = (result.steps.start_s[:, None] <= moments) & (moments < result.steps.end_s[:, None])
    in_flight = float((is_on * result.steps.num_decodes[:, None]).sum(axis=0).mean())
    assert choice.shape.num_decodes == pytest.approx(in_flight, rel=0.15)


def test_explain_says_what_the_stages_take_and_what_is_lost() -> None:
    arguments = ["explain", SCENARIO, "--set", "engine.pipeline_parallel_size=4", "--batch", "2"]
    document = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    pipeline = document["pipeline"]
    assert len(pipeline["stage_s"]) == 4
    assert pipeline["num_plans"] == 2
    assert pipeline["latency_s"] == document["duration_s"]
    assert 0.4 < pipeline["bubble_share"] < 0.6
    text = " ".join(CliRunner().invoke(app, arguments).stdout.split())
    assert f"bubbles {pipeline['bubble_share']:.1%}" in text
    assert "Fewer sequences than stages leave 2 of them idle" in text
