"""`AnswerWriter`: how many tokens an answer has, what they say, and why it ends.

All is settled when a request comes: the text depends on seeds alone, so where a stop string would end it is known.
"""

__all__ = ["AnswerWriter", "LimitError", "Wanted", "WrittenAnswer"]

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Literal, NamedTuple
from zlib import crc32

import numpy as np

from perfmodel.errors import WorkloadError
from perfmodel.serve.context import beyond_context
from perfmodel.serve.settings import ServerSettings
from perfmodel.serve.tokens.guided import Guide
from perfmodel.serve.tokens.vocabulary import TokenIds, Vocabulary
from perfmodel.sim.traffic.conversations import read_conversations
from perfmodel.sim.traffic.distributions import draw_lengths, hashed, hashes
from perfmodel.sim.traffic.traces import read_trace
from perfmodel.specs.traffic import Traffic

_NUM_LENGTHS = 1 << 14  # drawn beforehand; each answer takes one by a hash
_SEEN_BEFORE = 4  # tokens that decide whether another begins with a space
_MOST_READ = 1 << 18  # of a trace's rows


class Wanted(NamedTuple):
    """What a request says of its answer.

    max_tokens:     of it, at most
    most_unless_asked: as `max_tokens`, where that is not given: it may end before
    min_tokens:     of it, at least
    ignore_eos:     it does not end by itself
    stop:           texts before which it ends
    stop_token_ids: tokens at which it ends
    keeps_stop:     whether the text has what it ended at
    seed:           of its content: equal requests with equal seeds have equal answers
    is_continued:   it goes on with the prompt's text, and does not begin a text of its own
    guide:          the shape that its text has
    """

    max_tokens: int | None = None
    most_unless_asked: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    keeps_stop: bool = False
    seed: int | None = None
    is_continued: bool = False
    guide: Guide | None = None


class LimitError(WorkloadError):
    """An answer longer than the model's context is asked for."""


class WrittenAnswer(NamedTuple):
    """ids, pieces: of its tokens, and the text that each adds; finish_reason, stop_reason: as OpenAI's and vLLM's
    servers give them."""

    ids: TokenIds
    pieces: list[str]
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = None


class AnswerWriter:
    """Answers in the words of `vocabulary`, as long as requests want them or as the outputs of `traffic`.

    max_model_len: the most tokens of a prompt and its answer
    settings:      what decides where a request gives max_tokens; the seed of everything drawn
    stream:        the seed of answers to requests without one, which go by their number
    """

    def __init__(
        self, vocabulary: Vocabulary, traffic: Traffic, max_model_len: int, settings: ServerSettings, stream: int
    ) -> None:
        self._vocabulary = vocabulary
        self._words, self._length, self._seed = vocabulary.words, settings.answer_length, settings.seed
        self._max_model_len, self._stream = max_model_len, stream
        self._lengths = _drawn_lengths(traffic, max_model_len, settings.seed)
        self._num_written = 0

    def write(self, wanted: Wanted, prompt: TokenIds, choice: int = 0) -> WrittenAnswer:
        """The answer to `prompt`, of which a request wants several (`choice`).

        Raises WorkloadError where no token of it would fit in the context.
        """
        number = self._number(wanted, prompt, choice)
        num_tokens, is_cut = self._num_tokens(wanted, len(prompt), number)
        if wanted.guide is not None:
            answer = self._guided(wanted.guide, number, num_tokens)
            ended = _first_end(wanted, answer.ids, answer.pieces)
            return answer if ended is None else _ended(wanted, answer.ids, answer.pieces, *ended)
        picked = hashes(number, num_tokens) % np.uint64(len(self._words.texts))
        ids, pieces = self._words.ids[picked], [self._words.texts[i] for i in picked.tolist()]
        if not wanted.is_continued:
            ids[0], pieces[0] = self._words.first_ids[picked[0]], self._words.first_texts[int(picked[0])]
        ended = _first_end(wanted, ids, pieces)
        if ended is not None:
            return _ended(wanted, ids, pieces, *ended)
        return WrittenAnswer(ids, pieces, "length" if is_cut else "stop")

    def _guided(self, guide: Guide, number: int, num_tokens: int) -> WrittenAnswer:
        """A text of the shape `guide`, whose strings fill about `num_tokens`; cut off where it is longer."""
        shortest = len(self._vocabulary.encode(guide.text(number)))
        first, step = number % len(self._words.texts), 7
        texts = [self._words.texts[(first + step * i) % len(self._words.texts)] for i in range(num_tokens)]
        ids = self._vocabulary.encode(guide.text(number, "".join(texts[: max(num_tokens - shortest, 1)]).strip()))
        if len(ids) > num_tokens:  # several strings share what there is
            ids = self._vocabulary.encode(guide.text(number, texts[0].strip()))
        if not len(ids):  # an empty answer still generates its end token
            return WrittenAnswer(self._words.ids[:1], [""], "stop")
        pieces = [self._piece(ids, end) for end in range(1, min(len(ids), num_tokens) + 1)]
        return WrittenAnswer(ids[:num_tokens], pieces, "length" if len(ids) > num_tokens else "stop")

    def _piece(self, ids: TokenIds, end: int) -> str:
        """What token `end` - 1 adds to the text of those before it."""
        start = max(end - _SEEN_BEFORE, 0)
        before = self._vocabulary.decode(ids[start : end - 1])
        return self._vocabulary.decode(ids[start:end])[len(before) :]

    def _number(self, wanted: Wanted, prompt: TokenIds, choice: int) -> int:
        """What all draws of this answer follow from: with a seed, the request; else, which request it is."""
        self._num_written += 1
        if wanted.seed is None:
            return hashed(self._stream, self._num_written)
        return hashed(hashed(self._seed, wanted.seed), (choice << 32) + crc32(prompt.tobytes()))

    def _num_tokens(self, wanted: Wanted, num_prompt_tokens: int, number: int) -> tuple[int, bool]:
        """Tokens to generate, and whether the answer would go on."""
        room = self._max_model_len - num_prompt_tokens
        if room < 1:
            found = f"the prompt has {num_prompt_tokens}, which leaves no room for an answer"
            raise beyond_context(self._max_model_len, found, "shorten the prompt")
        unasked = room if wanted.most_unless_asked is None else min(wanted.most_unless_asked, room)
        limit = unasked if wanted.max_tokens is None else wanted.max_tokens
        if limit > self._max_model_len:
            raise LimitError(f"max_tokens: got {limit}; expected at most {self._max_model_len}, the model's context")
        if limit > room:
            found = f"{limit} were requested for a prompt of {num_prompt_tokens}"
            raise beyond_context(self._max_model_len, found, f"shorten the prompt, or ask for at most {room}")
        if wanted.min_tokens > limit:
            raise WorkloadError(
                f"min_tokens: found {wanted.min_tokens}, allowed at most {limit}; lower it, or raise max_tokens."
            )
        if wanted.ignore_eos or (wanted.max_tokens is not None and self._length == "requested"):
            return limit, True
        drawn = max(int(self._lengths[number % len(self._lengths)]), wanted.min_tokens)
        return min(drawn, limit), drawn > limit


def _first_end(wanted: Wanted, ids: TokenIds, pieces: Sequence[str]) -> tuple[int, int, str | int] | None:
    """(tokens, characters, reason) up to the first stop after `min_tokens`, if any.

    As in vLLM: the token that completes a stop string is generated, and its text is not.
    """
    stops: list[tuple[int, int, str | int]] = []
    if wanted.stop:
        text, ends = "".join(pieces), np.cumsum([len(piece) for piece in pieces])
        first = int(ends[min(wanted.min_tokens, len(pieces)) - 1]) + 1 if wanted.min_tokens else 0
        for stop in wanted.stop:
            begin = text.find(stop, max(first - len(stop), 0))
            if begin >= 0:
                num_tokens = int(np.searchsorted(ends, begin + len(stop))) + 1
                stops.append((num_tokens, begin + len(stop) * wanted.keeps_stop, stop))
    if wanted.stop_token_ids:
        places = np.flatnonzero(np.isin(ids, list(wanted.stop_token_ids)))
        for place in places[places >= wanted.min_tokens][:1].tolist():
            num_characters = sum(map(len, pieces[: place + wanted.keeps_stop]))
            stops.append((place + 1, num_characters, int(ids[place])))
    return min(stops, key=lambda stop: stop[:2], default=None)


def _ended(
    wanted: Wanted, ids: TokenIds, pieces: list[str], num_tokens: int, num_characters: int, reason: str | int
) -> WrittenAnswer:
    """The answer up to a stop."""
    shown, left = [], num_characters
    for piece in pieces[:num_tokens]:
        shown.append(piece[:left])
        left = max(left - len(piece), 0)
    return WrittenAnswer(ids[:num_tokens], shown, "stop", reason)


def _drawn_lengths(traffic: Traffic, max_model_len: int, seed: int) -> Sequence[int]:
    """Output tokens as the scenario's traffic has them."""
    if traffic.output_tokens is not None:
        drawn = draw_lengths(traffic.output_tokens, np.random.default_rng(seed), max_model_len)
        return list(islice(drawn, _NUM_LENGTHS))
    return list(islice(_recorded_lengths(traffic), _MOST_READ)) or [1]


def _recorded_lengths(traffic: Traffic) -> Iterator[int]:
    trace = traffic.trace
    assert trace is not None  # traffic has one or the other
    if not trace.has_conversations:
        yield from (row.num_output_tokens for row in read_trace(trace.path, trace.format))
        return
    for conversation in read_conversations(trace.path, trace.format):
        yield from (turn.num_output_tokens for turn in conversation.turns if turn.num_output_tokens)
