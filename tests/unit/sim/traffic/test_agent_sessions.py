"""Recorded sessions of agents: what waits for what, what is shared, what is conserved."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.errors import SpecError, WorkloadError
from perfmodel.sim import simulate
from perfmodel.sim.records.result import RunResult
from perfmodel.sim.traffic.conversations import ideal_cached_tokens
from perfmodel.sim.traffic.traces import RecordedConversation, engine_blocks, read_conversations
from perfmodel.specs import Scenario, load_scenario

ENGINE = (
    "model=llama-3.1-8b",
    "hardware=h100-sxm-80gb",
    "engine={max_model_len: 131072, block_size: 64, profile: vllm}",
)


def request(start: float, first: int, count: int, **fields: Any) -> dict[str, Any]:
    """A request of `count` blocks, numbered from `first`, and ten tokens more."""
    blocks = list(range(first, first + count))
    return {"t": start, "in": 64 * count + 10, "out": 20, "hash_ids": blocks, "api_time": 4.0, **fields}


# 0 asks; 1 and 2 begin after its answer, side by side; 3 waits for 2, which ends last, and begins as 0 did, then anew.
FORKED = [
    request(0, 1, 10),
    request(10, 1, 12, think_time=6.0, api_time=20.0),
    request(12, 1, 11, think_time=0.0, api_time=30.0),
    request(50, 1, 9, think_time=8.0) | {"hash_ids": [1, 2, 3, 4, 90, 91, 92, 93, 94]},
]


def written(folder: Path, *sessions: list[dict[str, Any]], **fields: Any) -> Path:
    path = folder / "sessions.jsonl.gz"
    lines = [json.dumps({"block_size": 64, "hash_id_scope": "local", "requests": one} | fields) for one in sessions]
    path.write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))
    return path


def recorded(folder: Path, *sessions: list[dict[str, Any]], **fields: Any) -> list[RecordedConversation]:
    return list(read_conversations(written(folder, *sessions, **fields), "agents"))


def scenario(path: Path, *more: str) -> Scenario:
    traffic = f"traffic={{arrivals: {{process: closed_loop, concurrency: 1}}, trace: {{path: {path}, format: agents}}}}"
    return load_scenario("llama-3.1-8b-h100-2048-256", (*ENGINE, traffic, *more))


def by_turn(result: RunResult, session: int = 0) -> list[tuple[float, float, int]]:
    """(arrival, end, cached tokens) of the turns of a session."""
    rows = result.requests
    assert rows.session is not None
    assert rows.turn is not None
    places = sorted((turn, place) for place, turn in enumerate(rows.turn.tolist()) if rows.session[place] == session)
    return [(float(rows.arrival_s[p]), float(rows.finished_s[p]), int(rows.num_cached_tokens[p])) for _, p in places]


def test_overlapping_requests_wait_for_the_last_answer_before_them(tmp_path: Path) -> None:
    (session,) = recorded(tmp_path, FORKED)
    assert session.hashes is not None
    assert session.hashes.after == (-1, 0, 0, 2)
    # The second pause is recorded; the third counts from the answer at 4 s, as its think time does not.
    assert [turn.pause_s for turn in session.turns] == [0, 6, 8, 8]


def test_without_the_time_of_an_answer_no_pause_is_longer_than_between_the_starts(tmp_path: Path) -> None:
    """kv-cache-tester counts think_time from the last answer with a time: 15 s here, of which 6 after the second."""
    unknown = request(9, 1, 4, think_time=5.0)
    del unknown["api_time"]
    (session,) = recorded(tmp_path, [request(0, 1, 3), unknown, request(15, 1, 5, think_time=11.0)])
    assert [turn.pause_s for turn in session.turns] == [0, 5, 6]


def test_an_overlap_of_less_than_the_whole_seconds_of_starts_is_none(tmp_path: Path) -> None:
    (session,) = recorded(tmp_path, [request(0, 1, 3, api_time=4.6), request(4, 1, 4, think_time=0.0)])
    assert session.hashes is not None
    assert session.hashes.after == (-1, 0)


def test_requests_that_overlap_the_first_begin_with_the_session(tmp_path: Path) -> None:
    path = written(tmp_path, [request(0, 1, 3, api_time=60.0), request(5, 1, 3, think_time=0.0)])
    (_, first_end, _), (second, _, _) = by_turn(simulate(scenario(path), can_leap=False))
    assert second == 5 < first_end + 5


def test_forks_run_side_by_side_and_the_join_waits_its_pause_after_the_last(tmp_path: Path) -> None:
    first, second, third, fourth = by_turn(simulate(scenario(written(tmp_path, FORKED))))
    assert second[0] == pytest.approx(first[1] + 6, abs=0.05)  # answers reach clients milliseconds after their step
    assert third[0] == pytest.approx(first[1] + 8, abs=0.05)
    assert fourth[0] == pytest.approx(third[1] + 8, abs=0.05)


def test_a_fork_finds_exactly_the_blocks_that_its_hashes_share(tmp_path: Path) -> None:
    """Ten blocks of the first for both that follow it, one more for the third from the second, four for the last."""
    path = written(tmp_path, FORKED)
    result = simulate(scenario(path))
    assert [cached // 64 for _, _, cached in by_turn(result)] == [0, 10, 11, 4]
    assert ideal_cached_tokens(scenario(path).traffic) == [[0, 640, 704, 256]]
    ideal = result.summary["conversations"]["ideal_cached_share"]
    assert ideal == pytest.approx((640 + 704 + 256) / (64 * 42 + 40))


def test_sessions_share_nothing_unless_their_hashes_are_global(tmp_path: Path) -> None:
    pair = [request(0, 1, 10)], [request(0, 1, 10)]
    local = simulate(scenario(written(tmp_path, *pair)))
    assert [by_turn(local, number)[0][2] for number in (0, 1)] == [0, 0]
    shared = scenario(written(tmp_path, *pair, hash_id_scope="global"))
    assert [by_turn(simulate(shared), number)[0][2] for number in (0, 1)] == [0, 640]
    assert ideal_cached_tokens(shared.traffic) == [[0], [640]]
    again = shared.with_({"traffic.trace.repeat": 2})
    assert by_turn(simulate(again), 2)[0][2] == 0  # a copy is another file's


def test_the_next_session_begins_when_one_ends(tmp_path: Path) -> None:
    """Three sessions of two agents: the third begins with the end of the shorter of the first two."""
    short, long = [request(0, 1, 4)], [request(0, 1, 4), request(34, 1, 5, think_time=30.0)]
    path = written(tmp_path, long, short, short)
    result = simulate(scenario(path, "traffic.arrivals.concurrency=2", "traffic.trace.repeat=1"))
    begins = [by_turn(result, number)[0][0] for number in range(3)]
    assert begins[:2] == [0, 0]
    assert begins[2] == pytest.approx(by_turn(result, 1)[0][1], abs=0.05)


def test_a_closed_loop_has_two_sessions_for_each_agent(tmp_path: Path) -> None:
    path = written(tmp_path, FORKED, FORKED)
    assert simulate(scenario(path)).summary["completed"] == 8
    result = simulate(scenario(path, "traffic.arrivals.concurrency=3"))
    assert result.summary["completed"] == 6 * 4
    with pytest.raises(WorkloadError, match=r"has 2 sessions, .*fewer than arrivals.concurrency=3; leave trace.repeat"):
        simulate(scenario(path, "traffic.arrivals.concurrency=3", "traffic.trace.repeat=1"))


def test_a_prompt_beyond_the_context_ends_its_session_and_the_answer_says_so(tmp_path: Path) -> None:
    path = written(tmp_path, [request(0, 1, 4), request(9, 1, 40), request(20, 1, 5)], [request(0, 1, 2)])
    result = simulate(scenario(path, "engine.max_model_len=2048"))
    assert result.summary["completed"] == 2
    assert any("2 requests of agents' sessions are left out" in note for note in result.notes)


def test_speedup_and_the_longest_pause_shorten_pauses_alone(tmp_path: Path) -> None:
    path = written(tmp_path, [request(0, 1, 4), request(104, 1, 5, think_time=100.0)])

    def pause(*more: str) -> float:
        first, second = by_turn(simulate(scenario(path, *more)))
        return second[0] - first[1]

    assert pause() == pytest.approx(100, abs=0.05)
    assert pause("traffic.trace.speedup=4") == pytest.approx(25, abs=0.05)
    assert pause("traffic.trace.max_pause_s=60") == pytest.approx(60, abs=0.05)
    assert pause("traffic.trace.max_pause_s=60", "traffic.trace.speedup=4") == pytest.approx(15, abs=0.05)


@st.composite
def sessions(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    drawn = []
    for _ in range(draw(st.integers(1, 3))):
        start, requests, fresh = 0.0, [], 100
        known: list[list[int]] = [[]]
        for _ in range(draw(st.integers(1, 8))):
            prefix = draw(st.sampled_from(known))
            kept = prefix[: draw(st.integers(0, len(prefix)))]
            count = draw(st.integers(1, 6))
            blocks = [*kept, *range(fresh, fresh + count)]
            fresh += count
            known.append(blocks)
            fields = {"think_time": draw(st.sampled_from([0.0, 2.0])), "api_time": draw(st.sampled_from([1.0, 9.0]))}
            size = 64 * len(blocks) + draw(st.integers(1, 63))
            requests.append({"t": start, "in": size, "out": draw(st.integers(1, 30)), "hash_ids": blocks, **fields})
            start += draw(st.integers(0, 12))
        drawn.append(requests)
    return drawn


@settings(max_examples=25, deadline=None)
@given(drawn=sessions(), agents=st.integers(1, 3), leaps=st.booleans())
def test_every_recorded_request_is_answered_once_and_none_finds_more_than_the_trace_has(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[list[dict[str, Any]]], agents: int, leaps: bool
) -> None:
    path = written(tmp_path_factory.mktemp("drawn"), *drawn)
    changes = (f"traffic.arrivals.concurrency={min(agents, len(drawn))}", "traffic.trace.repeat=1")
    result = simulate(scenario(path, *changes), can_leap=leaps)
    requests = [one for session in drawn for one in session]
    assert result.summary["completed"] == len(requests)
    assert result.summary["total_input_tokens"] == sum(one["in"] for one in requests)
    assert result.summary["total_output_tokens"] == sum(one["out"] for one in requests)
    ideal = ideal_cached_tokens(result.scenario.traffic)
    for number, session in enumerate(recorded(path.parent, *drawn)):
        assert session.hashes is not None
        rows = by_turn(result, number)
        for place, (arrival, _, cached) in enumerate(rows):
            after = session.hashes.after[place]
            began = rows[after][1] if after >= 0 else rows[0][0]
            assert arrival >= began + session.turns[place].pause_s - 1e-6
            before, later = rows[:place], rows[place + 1 :]
            if all(end < arrival for _, end, _ in before) and all(other > arrival for other, _, _ in later):
                assert cached == ideal[number][place]
    # In whatever order they are computed, what is shared is found once less than it is asked for.
    assert int(result.requests.num_cached_tokens.sum()) <= sum(map(sum, ideal))


def test_blocks_of_the_engine_are_parts_of_those_of_the_trace() -> None:
    assert engine_blocks(150, [7, 9], 64, 64) == (7, 9)
    assert engine_blocks(100, [7, 9], 64, 32) == (14, 15, 18)
    assert (
        engine_blocks(300, [7, 9], 64, 128)
        == engine_blocks(300, [7, 9], 64, 128)
        != engine_blocks(300, [7, 8], 64, 128)
    )


@pytest.mark.parametrize(
    ("session", "sentence"),
    [
        ([request(5, 1, 2), request(4, 1, 2)], "its request 1 begins before the one before it; sort them by t"),
        ([request(0, -3, 2)], "its request 0 has hash_ids other than whole numbers"),
        ([request(0, 1, 2) | {"out": 0}], "got 0 tokens, expected a whole number from 1"),
        ([request(0, 1, 2, think_time=-1.0) | {"t": -1}], "got -1 s, expected a number from 0"),
    ],
)
def test_a_bad_session_is_refused_with_its_line(tmp_path: Path, session: list[dict[str, Any]], sentence: str) -> None:
    with pytest.raises(WorkloadError, match=f"sessions.jsonl.gz:1: {sentence}"):
        recorded(tmp_path, session)


def test_a_file_that_is_no_gzip_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl.gz"
    path.write_text("{}")
    with pytest.raises(WorkloadError, match="the trace cannot be read"):
        list(read_conversations(path, "agents"))
    path.write_bytes(gzip.compress(b"{}" * 99)[:-9])
    with pytest.raises(WorkloadError, match="the trace cannot be read"):
        list(read_conversations(path, "agents"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("traffic.trace.format=csv", "got repeat or max_pause_s for a trace of csv"),
        ("traffic.arrivals={process: trace}", None),
    ],
)
def test_fields_of_sessions_beside_other_traces_are_refused(tmp_path: Path, change: str, sentence: str | None) -> None:
    path = written(tmp_path, FORKED)
    if sentence is None:  # sessions have no times of their own
        with pytest.raises(WorkloadError, match="has no arrival_s; give"):
            simulate(scenario(path, change))
        return
    with pytest.raises(SpecError, match=sentence):
        scenario(path, "traffic.arrivals={process: burst}", "traffic.trace.repeat=2", change)
