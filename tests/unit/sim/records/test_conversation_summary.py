"""Conversation statistics by hand: waiting times and cached share, turn by turn."""

import numpy as np
import pytest

from perfmodel.sim.records.columns import RequestColumns
from perfmodel.sim.records.summary import conversation_summary

# session, turn, arrival, first token, end, prompt, output, cached; in order of finishing
ROWS = (
    (7, 0, 0.0, 1.0, 3.0, 100, 5, 0),
    (9, 0, 2.0, 2.5, 4.5, 300, 11, 60),
    (7, 1, 10.0, 10.5, 14.0, 200, 8, 150),
    (7, 2, 20.0, 22.0, 25.0, 400, 4, 300),
)


def columns(rows) -> RequestColumns:
    session, turn, arrival, first, end, prompt, output, cached = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    number = np.arange(len(rows))
    return RequestColumns(
        request_id=number,
        arrival_s=arrival.astype(float),
        first_scheduled_s=(arrival + first) / 2,
        first_token_s=first.astype(float),
        finished_s=end.astype(float),
        num_prompt_tokens=prompt,
        num_output_tokens=output,
        num_cached_tokens=cached,
        num_preemptions=0 * number,
        replica=0 * number,
        session=session,
        turn=turn,
    )


def test_duration_and_waiting_time_of_a_conversation() -> None:
    """Of 25 s and 2.5 s in all, users wait 3 + 4 + 5 s and 2.5 s."""
    summary = conversation_summary(columns(ROWS))
    assert (summary["conversations"], summary["mean_turns"]) == (2, 2.0)
    assert summary["mean_duration_ms"] == pytest.approx((25 + 2.5) / 2 * 1e3)
    assert summary["mean_waiting_ms"] == pytest.approx((12 + 2.5) / 2 * 1e3)
    assert summary["std_duration_ms"] == pytest.approx((25 - 2.5) / 2 * 1e3)


def test_requests_latencies_and_cached_share_per_turn() -> None:
    first, second, third = conversation_summary(columns(ROWS))["turns"]
    assert [turn["turn"] for turn in (first, second, third)] == ["1", "2", "3"]
    assert [turn["requests"] for turn in (first, second, third)] == [2, 1, 1]
    assert first["mean_prompt_tokens"] == 200
    assert first["cached_share"] == pytest.approx(60 / 400)
    assert (second["cached_share"], third["cached_share"]) == (0.75, 0.75)
    assert first["mean_ttft_ms"] == pytest.approx((1.0 + 0.5) / 2 * 1e3)
    assert first["mean_tpot_ms"] == pytest.approx((2.0 / 4 + 2.0 / 10) / 2 * 1e3)
    assert third["mean_ttft_ms"] == third["p99_ttft_ms"] == pytest.approx(2000)


def test_turns_beyond_the_tenth_share_a_row() -> None:
    rows = [(1, turn, 10.0 * turn, 10.0 * turn + 1, 10.0 * turn + 2, 50, 3, 0) for turn in range(13)]
    turns = conversation_summary(columns(rows))["turns"]
    assert [turn["turn"] for turn in turns] == [*map(str, range(1, 11)), "from 11 on"]
    assert [turn["requests"] for turn in turns] == [1] * 10 + [3]
