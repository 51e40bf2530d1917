"""Drawn and recorded conversations, turn by turn."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from perfmodel.sim.traffic.traces import read_conversations
from perfmodel.sim.traffic.workload import Workload
from perfmodel.specs import Scenario, load_scenario

BASE = "llama-3.1-8b-h100-2048-256"


def conversation_turns(scenario: Scenario) -> list[list[tuple[int, int, float]]]:
    """(prompt tokens, answer tokens, seconds before) of the turns of each conversation."""
    return [
        [(request.num_prompt_tokens, request.max_output_tokens, pause / 1e12) for pause, request, _ in turns]
        for turns in Workload(scenario).conversations()
    ]


def drawn(share: float, arrivals: str = "{process: poisson, rate: 6}", count: int = 120) -> Scenario:
    conversations = (
        f"{{turns: {{distribution: fixed, value: 3}}, tool_share: {share}, "
        "tool_tokens: {distribution: fixed, value: 7}, tool_time: {mean_s: 0.5, distribution: fixed}, "
        "think_time: {mean_s: 3, distribution: fixed}}"
    )
    lengths = "input_tokens: {distribution: fixed, value: 100}, output_tokens: {distribution: fixed, value: 20}"
    traffic = f"{{arrivals: {arrivals}, num_requests: {count}, {lengths}, conversations: {conversations}}}"
    return load_scenario(BASE, [f"traffic={traffic}"])


@pytest.mark.parametrize(("share", "new", "pause"), [(0.0, 100, 3.0), (1.0, 7, 0.5)])
def test_length_and_pause_of_tool_and_user_turns(share: float, new: int, pause: float) -> None:
    second = 100 + 20 + new
    turns = [(100, 20, 0.0), (second, 20, pause), (second + 20 + new, 20, pause)]
    assert conversation_turns(drawn(share))[:40] == [turns] * 40


def test_tool_share_is_the_share_of_tool_turns() -> None:
    kinds = Counter(
        (later[0] - turn[0] - turn[1], later[2])
        for turns in conversation_turns(drawn(0.25, count=900))
        for turn, later in pairwise(turns)
    )
    assert set(kinds) == {(100, 3.0), (7, 0.5)}
    assert kinds[7, 0.5] / kinds.total() == pytest.approx(0.25, abs=0.06)


def test_stage_rates_count_requests_not_conversations() -> None:
    """6 and 12 requests a second for 10 s each: 180 requests, 60 conversations of three turns, 20 in the first."""
    stages = "{process: poisson_fixed_count, stages: [{rate: 6, duration_s: 10}, {rate: 12, duration_s: 10}]}"
    begun = [turns[0][1].arrival / 1e12 for turns in Workload(drawn(0.0, stages, 1000)).conversations()]
    assert len(begun) == 60
    assert sum(time <= 10 for time in begun) == 20


def test_speedup_shortens_the_gaps_and_pauses_of_a_trace(tmp_path: Path) -> None:
    rows = [
        {"arrival_s": start, "turns": [{"input_tokens": 8, "output_tokens": 4, "pause_s": 6}] * 2} for start in (1, 9)
    ]
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trace = f"{{path: {tmp_path}/talks.jsonl, format: conversations, speedup: 4}}"
    conversations = list(Workload(load_scenario(BASE, [f"traffic={{trace: {trace}}}"])).conversations())
    assert [conversation[0][1].arrival / 1e12 for conversation in conversations] == [0, 2]
    assert [conversation[1][0] / 1e12 for conversation in conversations] == [1.5, 1.5]


def test_consecutive_user_messages_are_one_prompt(tmp_path: Path) -> None:
    messages = [("human", "q" * 32), ("human", "r" * 20), ("gpt", "a" * 16)]
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"conversations": [{"from": sender, "value": text} for sender, text in messages]}))
    (conversation,) = read_conversations(file, "sharegpt")
    assert [(turn.num_new_tokens, turn.num_output_tokens) for turn in conversation.turns] == [((32 + 20) // 4, 4)]
