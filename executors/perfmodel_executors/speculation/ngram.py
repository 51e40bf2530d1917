"""Prompt lookup: what followed the last time that the text ended like this.

Saxena 2023, as in vLLM: the longest suffix of `longest` to `shortest` tokens that came before, its earliest place, and
what followed there. Nothing is drafted where no suffix came before. Lists are searched as bytes: microseconds for
thousands of tokens.
"""

from array import array
from collections.abc import Sequence

from perfmodel_executors.models.batch import TokenSegment
from perfmodel_executors.speculation.proposer import Drafting, PlainProposer

_BYTES = array("i").itemsize


def lookup(tokens: Sequence[int], longest: int, shortest: int, count: int) -> list[int]:
    """At most `count` tokens that followed the longest suffix found earlier in `tokens`; empty if there is none."""
    text = array("i", tokens).tobytes()
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        suffix = text[-length * _BYTES :]
        place = text.find(suffix, 0, len(text) - _BYTES)  # at least one token must have followed
        while place >= 0 and place % _BYTES:
            place = text.find(suffix, place + 1, len(text) - _BYTES)
        if place >= 0:
            follows = place // _BYTES + length
            return list(tokens[follows : follows + count])
    return []


class NgramProposer(PlainProposer):
    """Needs no model and no KV."""

    depends_on_text = True
    runner = None

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest = longest
        self._shortest = shortest

    def reserve_for(self, block_tables: Sequence[Sequence[int]]) -> None:
        """Nothing is written."""

    def propose(self, drafting: Sequence[Drafting], chunks: Sequence[TokenSegment]) -> list[list[int]]:
        return [
            lookup(each.tokens, self._longest, self._shortest, each.depth) if each.depth else [] for each in drafting
        ]
