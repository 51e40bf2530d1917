"""What became of conversations: latencies turn by turn, and each conversation as its user had it."""

__all__ = ["conversation_summary"]

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.sim.records.columns import RequestColumns
from perfmodel.sim.records.latencies import latencies, ratio

_MOST_TURNS = 10  # that get a line of their own; those beyond share one


def conversation_summary(requests: RequestColumns) -> dict[str, Any]:
    """`conversations` of the summary: how many began and how many turns they came to; `duration`, from a conversation's
    first turn to its last answer, and `waiting`, the part of it in which an answer was on its way (mean, p99 ..., in
    ms); and `turns`, each with its requests, latencies and the share of its prompts that was cached.
    """
    assert requests.session is not None
    assert requests.turn is not None
    _, numbers = np.unique(requests.session, return_inverse=True)
    count = int(numbers.max()) + 1 if len(numbers) else 0
    begun, ended = np.full(count, np.inf), np.zeros(count)
    np.minimum.at(begun, numbers, requests.arrival_s)
    np.maximum.at(ended, numbers, requests.finished_s)
    waiting = np.zeros(count)
    np.add.at(waiting, numbers, requests.e2el_s)
    last = int(requests.turn.max(initial=-1))
    masks = {str(turn + 1): requests.turn == turn for turn in range(min(last + 1, _MOST_TURNS))}
    if last >= _MOST_TURNS:
        masks[f"from {_MOST_TURNS + 1} on"] = requests.turn >= _MOST_TURNS
    return {
        "conversations": count,
        "mean_turns": ratio(len(requests), count),
        **latencies("duration", ended - begun),
        **latencies("waiting", waiting),
        "turns": [_turn(name, requests, mask) for name, mask in masks.items()],
    }


def _turn(name: str, requests: RequestColumns, mask: NDArray[np.bool_]) -> dict[str, Any]:
    mine = requests.some(np.flatnonzero(mask))
    ttft, tpot = latencies("ttft", mine.ttft_s), latencies("tpot", mine.tpot_s)
    prompts = int(mine.num_prompt_tokens.sum())
    return {
        "turn": name,
        "requests": len(mine),
        "mean_prompt_tokens": ratio(prompts, len(mine)),
        "cached_share": ratio(int(mine.num_cached_tokens.sum()), prompts),
        **{key: ttft[key] for key in ("mean_ttft_ms", "p99_ttft_ms")},
        "mean_tpot_ms": tpot["mean_tpot_ms"],
    }
