"""The trace: well-formed, capped with a word about it, phases that tile each request's life."""

import itertools
import json
from dataclasses import fields, replace

import pytest

from perfmodel.report import runs
from perfmodel.report.runs import MAX_REQUESTS, timeline_json, write_timeline


@pytest.fixture
def trace(result):
    return timeline_json(result)


def test_is_json_with_the_known_phases(result, tmp_path):
    document = json.loads(write_timeline(tmp_path / "timeline.json", result).read_text())
    assert {event["ph"] for event in document["traceEvents"]} == {"X", "C", "M"}
    assert not list(tmp_path.glob("*.partial"))


def test_every_step_is_a_slice_with_its_kind(result, trace):
    slices = [event for event in trace["traceEvents"] if event.get("cat") == "step"]
    assert len(slices) == len(result.steps)
    assert {event["name"].split(" ")[0] for event in slices} == {"decode", "mixed"}
    first = slices[0]
    assert first["args"]["steps"] == result.steps.num_steps[0]
    assert first["dur"] == pytest.approx((result.steps.end_s[0] - result.steps.start_s[0]) * 1e6, abs=1e-2)


def test_request_phases_follow_each_other(result, trace):
    phases = {}
    for event in trace["traceEvents"]:
        if event.get("cat") == "request":
            phases.setdefault(event["tid"], []).append(event)
    assert len(phases) == MAX_REQUESTS
    for tid, events in phases.items():
        for before, after in itertools.pairwise(events):
            assert before["ts"] + before["dur"] == pytest.approx(after["ts"], abs=1e-2)
        last = events[-1]
        row = result.requests.request_id.tolist().index(tid)
        assert last["ts"] + last["dur"] == pytest.approx(result.requests.finished_s[row] * 1e6, abs=1e-2)


def test_says_what_was_left_out(result, trace, monkeypatch):
    assert trace["otherData"]["requests"] == "the first 200 of 800 requests"
    assert trace["otherData"]["steps"] == "all 3,000 step records"
    monkeypatch.setattr(runs, "MAX_STEPS", 10)
    capped = timeline_json(result)
    assert capped["otherData"]["steps"] == "the first 10 of 3,000 step records"
    assert sum(event["ph"] == "C" for event in capped["traceEvents"]) == 20


def test_each_replica_is_a_process(result):
    steps = result.steps
    two = replace(steps, replica=steps.index % 2)
    assert {f.name for f in fields(two)} == {f.name for f in fields(steps)}
    trace = timeline_json(replace(result, steps=two))
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {"replica 0", "replica 1", "requests"}
