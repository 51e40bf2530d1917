"""Tokens of text: how long prompts are, which KV blocks they share, and what answers say. No seconds, no HTTP.

`ByteTokens` count by a rule where no tokenizer is given: a text is cut into pieces of four UTF-8 bytes, and each piece
is a token; what is left at its end is one more. English has about four characters a token in vocabularies of today
(OpenAI, "What are tokens and how to count them", help.openai.com, 2023). Each text of a prompt starts anew, so where a
conversation goes on, all that was said before has the tokens that it had, and its KV blocks are found again.

Ids are below 2^32, which readers of KV events take: the bytes of a piece, least first. No byte of UTF-8 is above 0xF7,
so ids whose highest byte is tell of something else: 0xF9 to 0xFB of a piece of one to three bytes, 0xFF of marks."""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import MissingExtraError, SpecError, WorkloadError
from perfmodel.serve.emulator import beyond_context
from perfmodel.serve.guided import Guide
from perfmodel.serve.settings import ServerSettings
from perfmodel.sim.traffic.distributions import draw_lengths, hashed, hashes
from perfmodel.sim.traffic.traces import read_conversations, read_trace
from perfmodel.specs.traffic import Traffic

TokenIds = NDArray[np.int64]

FIRST_SPECIAL = 0xFF << 24  # ids from here on mark where messages begin and end: no text has them
_PIECE = 4
_HIGHEST = 24  # bits below the highest byte
_NO_BYTE = 0xF8  # that byte of a piece that is not whole, less its size
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


class Words(NamedTuple):
    """What answers are made of: each a token, wherever it stands.

    texts, ids:             of words within an answer
    first_texts, first_ids: the same words at its beginning"""

    texts: list[str]
    ids: TokenIds
    first_texts: list[str]
    first_ids: TokenIds


class Vocabulary(Protocol):
    """Token ids of texts. size: ids are below it"""

    words: Words
    size: int

    def encode(self, text: str) -> TokenIds:
        """Ids of the tokens of `text`."""

    def decode(self, ids: TokenIds) -> str:
        """The text of `ids`; those that mark messages have none."""


class ByteTokens:
    """The rule: a token for each four bytes of UTF-8, and one for what is left. An id is the bytes of its piece."""

    def __init__(self) -> None:
        texts = [f"{first}{vowel}{last} " for first in _CONSONANTS for vowel in _VOWELS for last in _CONSONANTS]
        ids = np.concatenate([self.encode(text) for text in texts])
        self.words, self.size = Words(texts, ids, texts, ids), 1 << 63

    def encode(self, text: str) -> TokenIds:
        """Ids of the pieces of `text`."""
        data = text.encode("utf-8", "surrogatepass")
        whole = np.frombuffer(data, "<u4", count=len(data) // _PIECE).astype(np.int64)
        rest = len(data) % _PIECE
        if not rest:
            return whole
        return np.append(whole, int.from_bytes(data[-rest:], "little") | (_NO_BYTE + rest << _HIGHEST))

    def decode(self, ids: TokenIds) -> str:
        """The text that these pieces make; what is no UTF-8 is replaced."""
        pieces = []
        for number in ids.tolist():
            if 0 <= number < FIRST_SPECIAL:
                highest = number >> _HIGHEST
                size = highest - _NO_BYTE if highest > _NO_BYTE else _PIECE
                pieces.append(number.to_bytes(_PIECE, "little")[: min(size, _PIECE)])
        return b"".join(pieces).decode("utf-8", "replace")


_MAX_WORDS = 2048
_FEWEST_WORDS = 8
_USUAL_LETTERS = 5
_SPACES = "Ġ▁"  # how byte-level BPE and SentencePiece write the space before a word
_MAX_LOOKED_AT = 20_000


class FileTokens:
    """Token ids as the tokenizer in the file `path` has them.

    Raises SpecError for a file that is no tokenizer, MissingExtraError without `tokenizers`."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            text = "a tokenizer file needs `tokenizers`: pip install '.[serve]' in the checkout"
            raise MissingExtraError(text) from None
        if not path.is_file():
            raise SpecError(f"{path}: no such file; give the tokenizer.json of a model")
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # what the library raises has no class of its own
            raise SpecError(f"{path}: no tokenizer.json that `tokenizers` reads ({error})") from None
        self.words, self.size = self._chosen_words(path), self._tokenizer.get_vocab_size()

    def _chosen_words(self, path: Path) -> Words:
        """Words that are one token at the beginning of a text, and one after a space, and stay so beside each other.

        Where a vocabulary has too few of them, as one of single bytes, its letters, with nothing between them."""
        names = {name.lstrip(_SPACES) for name in self._tokenizer.get_vocab()}
        plain = [name for name in names if name.isascii() and name.isalpha() and name.islower()]
        plain.sort(key=lambda name: (abs(len(name) - _USUAL_LETTERS), name))
        for space in (" ", ""):
            one_token = (row for name in plain[:_MAX_LOOKED_AT] if (row := self._one_token(name, space)) is not None)
            chosen = list(islice(one_token, _MAX_WORDS))
            if len(chosen) >= _FEWEST_WORDS:
                texts, firsts, others = zip(*chosen, strict=True)
                return Words([f"{space}{text}" for text in texts], np.array(others), list(texts), np.array(firsts))
        raise SpecError(
            f"{path}: got {len(chosen)} words that are a token each; expected at least {_FEWEST_WORDS}, for answers; "
            f"give the tokenizer of a language model"
        )

    def _one_token(self, name: str, space: str) -> tuple[str, int, int] | None:
        """(word, its token at the beginning, its token after `space`)"""
        first = self._tokenizer.encode(name, add_special_tokens=False).ids
        twice = self._tokenizer.encode(f"{name}{space}{name}", add_special_tokens=False).ids
        return (name, first[0], twice[1]) if len(first) == 1 and len(twice) == 2 else None

    def encode(self, text: str) -> TokenIds:
        """Ids of the tokens of `text`, without any that a tokenizer would put before and after it."""
        clean = text.encode("utf-8", "replace").decode()
        return np.array(self._tokenizer.encode(clean, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: TokenIds) -> str:
        """The text of `ids`; ids that the tokenizer does not know have none."""
        known = [number for number in ids.tolist() if 0 <= number < FIRST_SPECIAL]
        text: str = self._tokenizer.decode(known, skip_special_tokens=True)
        return text


_LONGEST_TOKEN = 128  # characters; the longest runs of spaces that vocabularies have as one token


class BoundedTokens:
    """`vocabulary`, for a context of `max_model_len` tokens: a text that cannot fit costs no time."""

    def __init__(self, vocabulary: Vocabulary, max_model_len: int) -> None:
        self.words, self.size, self.decode = vocabulary.words, vocabulary.size, vocabulary.decode
        self._encode, self._max_model_len = vocabulary.encode, max_model_len

    def encode(self, text: str) -> TokenIds:
        """Ids of the tokens of `text`. Raises WorkloadError for a text that must have too many."""
        if len(text) > self._max_model_len * _LONGEST_TOKEN:
            raise beyond_context(self._max_model_len, f"a text of {len(text)} characters has more", "shorten it")
        return self._encode(text)


_HASH_BYTES = 8  # of what an engine sees: as many as KV events of vLLM have


def block_hashes(
    ids: TokenIds, block_size: int, salt: str | None = None, adapter: str | None = None
) -> tuple[int, ...]:
    """Hashes of the full blocks of `ids`, 64 bits each; equal ones have equal tokens before and in them.

    block_size: tokens of a block
    salt:       blocks of another salt are others, whatever their tokens
    adapter:    the LoRA adapter whose KV they hold, if any"""
    parent = sha256(repr((salt, adapter)).encode("utf-8", "surrogatepass")).digest()
    data, width = ids.tobytes(), block_size * ids.itemsize
    hashes = []
    for start in range(0, len(data) - width + 1, width):
        parent = sha256(parent + data[start : start + width]).digest()
        hashes.append(int.from_bytes(parent[:_HASH_BYTES], "big"))
    return tuple(hashes)


_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_BEGIN, _MARK, _BREAK, _END = range(FIRST_SPECIAL, FIRST_SPECIAL + 4)
_FIRST_ROLE = FIRST_SPECIAL + 16


class ChatMessage(NamedTuple):
    """Who said it, and what."""

    role: str
    text: str


def chat_prompt(vocabulary: Vocabulary, messages: Iterable[ChatMessage], has_answer: bool = True) -> TokenIds:
    """Token ids of `messages`; `has_answer`: and of the beginning of an answer."""
    parts: list[TokenIds] = []
    for message in messages:
        parts += (_header(message.role), vocabulary.encode(message.text), np.array([_END]))
    if has_answer:
        parts.append(_header("assistant"))
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _header(role: str) -> TokenIds:
    number = _ROLES.index(role) if role in _ROLES else len(_ROLES)
    return np.array([_BEGIN, _FIRST_ROLE + number, _MARK, _BREAK], dtype=np.int64)


_NUM_LENGTHS = 1 << 14  # drawn beforehand; each answer takes one by a hash
_SEEN_BEFORE = 4  # tokens that decide whether another begins with a space
_MAX_READ = 1 << 18  # of a trace's rows


class GenerationLimits(NamedTuple):
    """What a request says of its answer.

    max_tokens:     of it, at most
    default_max_tokens: as `max_tokens`, where that is not given: it may end before
    min_tokens:     of it, at least
    ignore_eos:     it does not end by itself
    stop:           texts before which it ends
    stop_token_ids: tokens at which it ends
    keeps_stop:     whether the text has what it ended at
    seed:           of its content: equal requests with equal seeds have equal answers
    is_continued:   it goes on with the prompt's text, and does not begin a text of its own
    guide:          the shape that its text has
    is_vector:      it takes no room in the context"""

    max_tokens: int | None = None
    default_max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    keeps_stop: bool = False
    seed: int | None = None
    is_continued: bool = False
    guide: Guide | None = None
    is_vector: bool = False


class LimitError(WorkloadError):
    """An answer longer than the model's context is asked for."""


class WrittenAnswer(NamedTuple):
    """ids, pieces: of its tokens, and the text that each adds; finish_reason, stop_reason: as OpenAI's and vLLM's
    servers give them."""

    ids: TokenIds
    pieces: list[str]
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """All that it says."""
        return "".join(self.pieces)


class AnswerWriter:
    """Answers in the words of `vocabulary`, as long as requests want them or as the outputs of `traffic`.

    max_model_len: the most tokens of a prompt and its answer
    settings:      what decides where a request gives max_tokens; the seed of everything drawn
    stream:        the seed of answers to requests without one, which go by their number"""

    def __init__(
        self, vocabulary: Vocabulary, traffic: Traffic, max_model_len: int, settings: ServerSettings, stream: int
    ) -> None:
        self._vocabulary = vocabulary
        self._words, self._length, self._seed = vocabulary.words, settings.answer_length, settings.seed
        self._max_model_len, self._stream = max_model_len, stream
        self._lengths = _drawn_lengths(traffic, max_model_len, settings.seed)
        self._num_written = 0

    def write(self, wanted: GenerationLimits, prompt: TokenIds, choice: int = 0) -> WrittenAnswer:
        """The answer to `prompt`, of which a request wants several (`choice`).

        Raises WorkloadError where no token of it would fit in the context."""
        self._num_written += 1
        # All draws of an answer follow from a number: with a seed, of the request; else, which request it is.
        number = hashed(self._stream, self._num_written)
        if wanted.seed is not None:
            number = hashed(hashed(self._seed, wanted.seed), (choice << 32) + crc32(prompt.tobytes()))
        num_tokens, is_cut = self._num_tokens(wanted, len(prompt), number)
        if wanted.guide is not None:
            answer = self._guided(wanted.guide, number, num_tokens)
        else:
            picked = hashes(number, num_tokens) % np.uint64(len(self._words.texts))
            ids, pieces = self._words.ids[picked], [self._words.texts[i] for i in picked.tolist()]
            if not wanted.is_continued:
                ids[0], pieces[0] = self._words.first_ids[picked[0]], self._words.first_texts[int(picked[0])]
            answer = WrittenAnswer(ids, pieces, "length" if is_cut else "stop")
        return _stopped(wanted, answer)

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
        pieces = []
        for end in range(1, min(len(ids), num_tokens) + 1):  # what token `end` - 1 adds to the text of those before it
            start = max(end - _SEEN_BEFORE, 0)
            before = self._vocabulary.decode(ids[start : end - 1])
            pieces.append(self._vocabulary.decode(ids[start:end])[len(before) :])
        return WrittenAnswer(ids[:num_tokens], pieces, "length" if len(ids) > num_tokens else "stop")

    def _num_tokens(self, wanted: GenerationLimits, num_prompt_tokens: int, number: int) -> tuple[int, bool]:
        """Tokens to generate, and whether the answer would go on."""
        longest, least = self._max_model_len, wanted.min_tokens
        room = longest - num_prompt_tokens + wanted.is_vector
        if room < 1:
            excess = f"the prompt has {num_prompt_tokens}, which leaves no room for an answer"
            raise beyond_context(longest, excess, "shorten the prompt")
        unasked = room if wanted.default_max_tokens is None else min(wanted.default_max_tokens, room)
        limit = unasked if wanted.max_tokens is None else wanted.max_tokens
        if limit > longest:
            raise LimitError(f"max_tokens: got {limit}; expected at most {longest}, the model's context")
        if limit > room:
            excess = f"{limit} were requested for a prompt of {num_prompt_tokens}"
            raise beyond_context(longest, excess, f"shorten the prompt, or ask for at most {room}")
        if least > limit:
            raise WorkloadError(f"min_tokens: got {least}; expected at most {limit}; lower it, or raise max_tokens.")
        if wanted.ignore_eos or (wanted.max_tokens is not None and self._length == "requested"):
            return limit, True
        drawn = max(int(self._lengths[number % len(self._lengths)]), least)
        return min(drawn, limit), drawn > limit


def _stopped(wanted: GenerationLimits, answer: WrittenAnswer) -> WrittenAnswer:
    """The answer up to the first stop after `min_tokens`, if any.

    As in vLLM: the token that completes a stop string is generated, and its text is not."""
    ids, pieces = answer.ids, answer.pieces
    stops: list[tuple[int, int, str | int]] = []  # tokens, characters, reason
    if wanted.stop:
        text, ends = answer.text, np.cumsum([len(piece) for piece in pieces])
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
    if not stops:
        return answer
    num_tokens, left, reason = min(stops, key=lambda stop: stop[:2])
    shown = []
    for piece in pieces[:num_tokens]:
        shown.append(piece[:left])
        left = max(left - len(piece), 0)
    return WrittenAnswer(ids[:num_tokens], shown, "stop", reason)


def _drawn_lengths(traffic: Traffic, max_model_len: int, seed: int) -> Sequence[int]:
    """Output tokens as the scenario's traffic has them."""
    if traffic.output_tokens is not None:
        drawn = draw_lengths(traffic.output_tokens, np.random.default_rng(seed), max_model_len)
        return list(islice(drawn, _NUM_LENGTHS))
    trace = traffic.trace
    assert trace is not None  # traffic has one or the other
    lengths: Iterable[int]
    if trace.has_conversations:
        conversations = read_conversations(trace.path, trace.format)
        lengths = filter(None, (turn.num_output_tokens for one in conversations for turn in one.turns))
    else:
        lengths = (row.num_output_tokens for row in read_trace(trace.path, trace.format))
    return list(islice(lengths, _MAX_READ)) or [1]
