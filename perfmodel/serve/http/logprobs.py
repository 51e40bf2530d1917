"""Logprobs of made-up answers: of the right shape, falling with the rank, and the same for the same token and place."""

__all__ = ["chat_logprobs", "completion_logprobs", "prompt_logprobs"]

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from perfmodel.serve.tokens import Vocabulary
from perfmodel.serve.tokens.vocabulary import TokenIds
from perfmodel.sim.traffic.distributions import hashed

_BEST, _STEP = -0.1, -0.5  # of the first rank, and between ranks


class _Alternative(NamedTuple):
    """A token that could have been, and how likely it was."""

    token_id: int
    text: str
    logprob: float


def _alternatives(vocabulary: Vocabulary, token_id: int, text: str, count: int) -> list[_Alternative]:
    """The token itself, and `count` - 1 others that are less likely."""
    words, ranked = vocabulary.words, [_Alternative(token_id, text, _BEST)]
    start = hashed(token_id, count)
    for place in range(len(words.texts)):
        if len(ranked) >= count:
            break
        other = (start + place) % len(words.texts)
        if int(words.ids[other]) != token_id:
            ranked.append(_Alternative(int(words.ids[other]), words.texts[other], _BEST + _STEP * len(ranked)))
    return ranked


def _token(one: _Alternative) -> dict[str, Any]:
    return {"token": one.text, "logprob": one.logprob, "bytes": list(one.text.encode())}


def chat_logprobs(vocabulary: Vocabulary, ids: Sequence[int], texts: Sequence[str], count: int) -> list[dict[str, Any]]:
    """As chats and responses have them: of the tokens `ids`, which add `texts`, and of the `count` best alternatives of
    each, from `vocabulary`."""
    rows = []
    for token_id, text in zip(ids, texts, strict=True):
        ranked = _alternatives(vocabulary, token_id, text, max(count, 1))
        rows.append({**_token(ranked[0]), "top_logprobs": [_token(one) for one in ranked[:count]]})
    return rows


def completion_logprobs(
    vocabulary: Vocabulary, ids: Sequence[int], texts: Sequence[str], count: int, as_ids: bool, start: int = 0
) -> dict[str, Any]:
    """As completions have them.

    vocabulary, ids, texts, count: as of `chat_logprobs`
    as_ids: tokens are written as `token_id:5`; start: characters of text before them
    """
    rows = [_alternatives(vocabulary, *pair, max(count, 1)) for pair in zip(ids, texts, strict=True)]
    named = [[f"token_id:{one.token_id}" if as_ids else one.text for one in ranked] for ranked in rows]
    return {
        "text_offset": [start + sum(map(len, texts[:place])) for place in range(len(texts))],
        "token_logprobs": [ranked[0].logprob for ranked in rows],
        "tokens": [names[0] for names in named],
        "top_logprobs": [
            {name: one.logprob for name, one in zip(names, ranked, strict=True)}
            for names, ranked in zip(named, rows, strict=True)
        ],
    }


def prompt_logprobs(vocabulary: Vocabulary, ids: TokenIds, count: int) -> list[dict[str, Any] | None]:
    """As vLLM has them: of each token of a prompt but the first, whose is null."""
    rows: list[dict[str, Any] | None] = [None]
    for token_id in ids[1:].tolist():
        ranked = _alternatives(vocabulary, token_id, vocabulary.decode(np.array([token_id])), max(count, 1))
        rows.append(
            {
                str(one.token_id): {"logprob": one.logprob, "rank": rank, "decoded_token": one.text}
                for rank, one in enumerate(ranked, 1)
            }
        )
    return rows
