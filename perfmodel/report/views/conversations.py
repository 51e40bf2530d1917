"""Turns of conversations as a table: how prompts grow, what of them is cached, and what users wait."""

__all__ = ["conversation_tables"]

from collections.abc import Iterator, Mapping
from typing import Any

from perfmodel.report.document import Table
from perfmodel.report.numbers import format_optional

_OF_CONVERSATIONS = ("mean_duration", "p99_duration", "mean_waiting", "p99_waiting")


def conversation_tables(summary: Mapping[str, Any]) -> Iterator[Table]:
    """Turn by turn, where the requests of a run's `summary` are turns."""
    found = summary.get("conversations")
    if found is None:
        return
    rows = [
        (
            each["turn"],
            f"{each['requests']:,}",
            format_optional(each["mean_prompt_tokens"], ",.0f"),
            format_optional(None if each["cached_share"] is None else 100 * each["cached_share"], ".1f"),
            *(format_optional(each[name], ",.1f") for name in ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms")),
        )
        for each in found["turns"]
    ]
    head = ("turn", "requests", "prompt tokens", "cached (%)", "mean TTFT (ms)", "p99 TTFT (ms)", "mean TPOT (ms)")
    of_user = {name: format_optional(_seconds(found[f"{name}_ms"]), ",.1f") for name in _OF_CONVERSATIONS}
    note = (
        f"{found['conversations']:,} conversations of {format_optional(found['mean_turns'], '.1f')} turns; each lasts "
        f"{of_user['mean_duration']} s (p99 {of_user['p99_duration']} s), of which its user waits for answers "
        f"{of_user['mean_waiting']} s (p99 {of_user['p99_waiting']} s)."
    )
    yield Table(head, rows, "Turns of conversations", note=note)


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3
