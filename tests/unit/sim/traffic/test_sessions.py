"""Sessions of a trace: the turns of a conversation meet on one replica, and find what it has cached."""

import json
from pathlib import Path

import pytest

from perfmodel.errors import WorkloadError
from perfmodel.sim.driver import simulate
from perfmodel.specs import load_scenario


def trace(path: Path, sessions: int, turns: int) -> str:
    """Conversations whose prompts grow by 256 tokens with each turn, the turns of all taken in rotation."""
    rows = [
        {
            "arrival_s": 0.5 * (turn * sessions + session),
            "input_tokens": 256 * (turn + 1),
            "output_tokens": 8,
            "block_hashes": [session * 1000 + block for block in range(16 * (turn + 1))],
            "session_id": f"user-{session}",
        }
        for turn in range(turns)
        for session in range(sessions)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return f"traffic={{trace: {{path: {path}, format: jsonl}}}}"


def test_a_session_stays_where_it_is_and_finds_its_earlier_turns(tmp_path: Path) -> None:
    """Of prompts of 1, 2, 3, 4 x 256 tokens all but the newest 256 are there: 6 of 10 parts, whole blocks."""
    traffic = trace(tmp_path / "turns.jsonl", 20, 4)
    hits = {}
    for router in ("session_affinity", "random"):
        settings = (traffic, "cluster.replicas=5", f"cluster.router={router}")
        result = simulate(load_scenario("llama-3.1-8b-h100-2048-256", settings))
        requests = result.requests
        assert requests is not None
        homes = [set(requests.replica[requests.request_id % 20 == session]) for session in range(20)]
        if router == "session_affinity":
            assert all(len(home) == 1 for home in homes)
        hits[router] = result.summary["prefix_cache_hit_rate"]
    assert hits["session_affinity"] == pytest.approx(0.6, abs=0.001)
    assert hits["random"] < 0.4


def test_a_session_that_is_no_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"arrival_s": 0, "input_tokens": 4, "output_tokens": 1, "session_id": [1]}', encoding="utf-8")
    scenario = load_scenario("llama-3.1-8b-h100-2048-256", (f"traffic={{trace: {{path: {path}, format: jsonl}}}}",))
    with pytest.raises(WorkloadError, match=r"bad.jsonl:1: got session_id \[1\]"):
        simulate(scenario)
