"""Answers as JSON: how OpenAI's two kinds of generation, and scores, are written by vLLM's server, whole and in chunks.

Logprobs of made-up answers are of the right shape, fall with the rank, and are the same for the same token and place.
"""

import json
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple, Protocol

import numpy as np
from pydantic import model_validator

from perfmodel.serve.emulator import Order
from perfmodel.serve.http.bodies import BatchBody, CalledTool, ChatBody, CompletionBody, GenerationBody, TokenIdList
from perfmodel.serve.http.reading import ErrorStyle, FieldError
from perfmodel.serve.tokens import TokenIds, Vocabulary, Wanted, WrittenAnswer
from perfmodel.sim.traffic.distributions import hashed, uniform_draws

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


_COMPACT = (",", ":")
_MARK = "\0"
_UNSAID = ("refusal", "annotations", "audio", "function_call", "reasoning")  # of a message
_UNUSED = {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}


class TokenCounts(NamedTuple):
    """Tokens of a request's prompts and answers, those of the prompts that a prefix cache had, and has from now on."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    num_created_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        """In OpenAI's words, without details."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "completion_tokens": self.num_output_tokens,
        }


class AskedAnswer(NamedTuple):
    """One answer that a request asks for: the number of its prompt, and which of the prompt's answers it is."""

    order: Order
    answer: WrittenAnswer
    prompt: int
    choice: int

    @property
    def prompt_ids(self) -> Any:
        """Token ids of its prompt."""
        ids = self.order.params.token_ids
        return [] if ids is None else ids[: self.order.num_prompt_tokens]


class AnswerHead(NamedTuple):
    """What all answers of one request begin with.

    request_id: of the request, without what says its kind
    created:    seconds of the epoch
    model:      the name that it asked for
    fingerprint: of the server
    """

    request_id: str
    created: int
    model: str
    fingerprint: str = "perfmodel"


class WholeShape(Protocol):
    """How all answers of one request are written at once."""

    error_style: ErrorStyle

    def whole(self, usage: TokenCounts) -> bytes:
        """All answers."""
        ...


class StreamShape(WholeShape, Protocol):
    """How they are written token by token, too, in the order of their indices.

    preamble: the events of a stream before any answer; has_done: it ends with [DONE], and its events have no names
    """

    preamble: bytes
    has_done: bool

    def opening(self, index: int) -> bytes:
        """The events before the first token of answer `index`."""
        ...

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """What stands before and after the text of a token of answer `index` that is not its last; None: it depends on
        the token."""
        ...

    def token(self, index: int, place: int, usage: TokenCounts | None) -> bytes:
        """The events of token `place` of answer `index`; usage: the counts so far, if each chunk has them."""
        ...

    def closing(self, usage: TokenCounts) -> bytes:
        """The events after all answers, but for [DONE]."""
        ...


def text_of(answer: WrittenAnswer) -> str:
    """All that an answer says."""
    return "".join(answer.pieces)


def _frame(event: bytes) -> tuple[bytes, bytes]:
    """What stands before and after the text in `event`, whose text is the character 0."""
    before, after = event.split(encode_basestring_ascii(_MARK).encode())
    return before, after


def compact(value: Any) -> bytes:
    """`value` as JSON without spaces."""
    return json.dumps(value, separators=_COMPACT).encode()


def _event(value: Any) -> bytes:
    return b"data: " + compact(value) + b"\n\n"


def _with_details(usage: TokenCounts, has_created: bool, **more: Any) -> dict[str, Any]:
    created = {"created_cache_tokens": usage.num_created_tokens} if has_created else {}
    return {**usage.as_json(), "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens, **created, **more}}


class _Stream:
    """What chunks of both kinds have in common: a head, the fingerprint at their end, a chunk of counts."""

    def __init__(self, head: dict[str, Any], name: str, fingerprint: str, body: GenerationBody) -> None:
        self._head, self._end = {**head, "object": name}, {"system_fingerprint": fingerprint}
        options = body.stream_options
        self.has_usage = options is not None and options.include_usage

    def chunk(self, choice: dict[str, Any], usage: Any = None, is_last: bool = False, **more: Any) -> bytes:
        """A chunk with one choice; is_last: of its answer."""
        value = {**self._head, "choices": [choice], **more}
        if usage is not None:
            value["usage"] = usage
        return _event({**value, **self._end} if is_last and not self.has_usage else value)

    def closing(self, usage: dict[str, Any]) -> bytes:
        """The counts, if they are asked for."""
        return _event({**self._head, "choices": [], "usage": usage, **self._end}) if self.has_usage else b""


class ChatShape:
    """Chats, and several conversations at once.

    body, head, asked: the request, what its answers begin with, and all of them; vocabulary: what tokens are made of
    """

    error_style: ErrorStyle = "openai"
    preamble, has_done = b"", True

    def __init__(
        self, body: ChatBody | BatchBody, vocabulary: Vocabulary, head: AnswerHead, asked: list[AskedAnswer]
    ) -> None:
        self._body, self._asked, self._vocabulary = body, asked, vocabulary
        self._head = {"id": f"chatcmpl-{head.request_id}", "created": head.created, "model": head.model}
        self._fingerprint, self._call_id = head.fingerprint, f"chatcmpl-tool-{head.request_id}"
        self._stream = _Stream(self._head, "chat.completion.chunk", head.fingerprint, body)
        self._role = body.role if isinstance(body, ChatBody) else "assistant"
        # Of several conversations none calls a tool, whatever they choose: vLLM takes the text as it is.
        self._called: CalledTool | None = body.called if isinstance(body, ChatBody) else None

    def opening(self, index: int) -> bytes:
        """As of a `StreamShape`: whose turn it is, and the name of the tool that is called."""
        asked, usage = self._asked[index], None
        if self._body.stream_options is not None and self._body.stream_options.continuous_usage_stats:
            usage = _in_chunk(TokenCounts(asked.order.num_prompt_tokens, 0))
        ids = [int(one) for one in asked.prompt_ids] if self._body.return_token_ids else None
        choice = {"index": index, "delta": {"role": self._role, "content": ""}, "logprobs": None, "finish_reason": None}
        opening = self._stream.chunk(choice, usage, prompt_token_ids=ids, prompt_text=None)
        if self._called is None:
            return opening
        call = {
            "id": f"{self._call_id}-{index}",
            "type": "function",
            "index": 0,
            "function": {"name": self._called.name},
        }
        return opening + self._chunk(index, {"content": None, "tool_calls": [call]}, None)

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        if self._body.num_logprobs is not None or self._body.return_token_ids:
            return None
        return _frame(self._chunk(index, self._delta(_MARK), None))

    def token(self, index: int, place: int, usage: TokenCounts | None) -> bytes:
        answer, is_last = self._asked[index].answer, place + 1 == len(self._asked[index].answer.pieces)
        counts, delta = None if usage is None else _in_chunk(usage), self._delta(answer.pieces[place])
        if not is_last or self._called is None:
            return self._chunk(index, delta, place, counts, is_last)
        return self._chunk(index, delta, place, counts) + self._chunk(index, {}, place, counts, is_last)

    def _delta(self, text: str) -> dict[str, Any]:
        if self._called is None:
            return {"content": text}
        return {"content": None, "tool_calls": [{"index": 0, "function": {"arguments": text}}]}

    def _chunk(
        self, index: int, delta: dict[str, Any], place: int | None, usage: Any = None, is_last: bool = False
    ) -> bytes:
        """A chunk of token `place`, which adds `delta`; None: of no token."""
        answer, has_logprobs = self._asked[index].answer, self._body.num_logprobs is not None
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if is_last:
            choice |= {"finish_reason": self._finish(answer), "stop_reason": answer.stop_reason}
        if place is not None and has_logprobs:
            choice["logprobs"] = {"content": self._logprobs(answer, place, place + 1)}
        has_ids = place is not None and self._body.return_token_ids
        return self._stream.chunk(
            {**choice, "token_ids": [int(answer.ids[place])] if has_ids else None}, usage, is_last
        )

    def closing(self, usage: TokenCounts) -> bytes:
        return self._stream.closing(_with_details(usage, has_created=True))

    def whole(self, usage: TokenCounts) -> bytes:
        body, ids = self._body, self._asked[0].prompt_ids
        details: dict[str, Any] = _with_details(usage, has_created=True, multimodal_tokens=None)
        if isinstance(body, BatchBody):
            details["prompt_tokens_details"] = None
        counted = body.prompt_logprobs if body.prompt_logprobs is not None or not body.echo else 0
        value = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index) for index in range(len(self._asked))],
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            "usage": {**details, "completion_tokens_details": None},
            "prompt_logprobs": None if counted is None else prompt_logprobs(self._vocabulary, ids, counted),
            "prompt_token_ids": [int(one) for one in ids] if body.return_token_ids else None,
            "prompt_text": None,
        }
        return compact({**value, **_UNUSED})

    def _choice(self, index: int) -> dict[str, Any]:
        answer, body = self._asked[index].answer, self._body
        message: dict[str, Any] = {
            "role": self._role,
            "content": text_of(answer),
            "refusal": None,
            "annotations": None,
            "audio": None,
        }
        message |= {"function_call": None, "reasoning": None}
        if body.echo and isinstance(body, ChatBody) and body.messages:
            message["content"] = body.messages[-1].text + text_of(answer)
        if self._called is not None:
            call = {"name": self._called.name, "arguments": text_of(answer)}
            message["content"] = ""
            message["tool_calls"] = [{"id": f"{self._call_id}-{index}", "type": "function", "function": call}]
        has_logprobs = body.num_logprobs is not None
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": self._logprobs(answer, 0, len(answer.pieces))} if has_logprobs else None,
            "finish_reason": self._finish(answer),
            "stop_reason": answer.stop_reason,
            "token_ids": [int(one) for one in answer.ids] if body.return_token_ids else None,
            "routed_experts": None,
        }

    def _logprobs(self, answer: WrittenAnswer, start: int, end: int) -> list[dict[str, Any]]:
        ids, count = [int(one) for one in answer.ids[start:end]], self._body.num_logprobs or 0
        return chat_logprobs(self._vocabulary, ids, answer.pieces[start:end], count)

    def _finish(self, answer: WrittenAnswer) -> str:
        """Why the answer ends: as in vLLM, with `stop` where a tool was to be called by its name."""
        if self._called is None or answer.finish_reason != "stop" or self._called.is_forced:
            return answer.finish_reason
        return "tool_calls"


def _in_chunk(usage: TokenCounts) -> dict[str, Any]:
    return {**usage.as_json(), "completion_tokens_details": None}


class CompletionShape:
    """Completions. body, vocabulary, head, asked: as of a `ChatShape`"""

    error_style: ErrorStyle = "openai"
    preamble, has_done = b"", True

    def __init__(
        self, body: CompletionBody, vocabulary: Vocabulary, head: AnswerHead, asked: list[AskedAnswer]
    ) -> None:
        self._body, self._asked, self._vocabulary = body, asked, vocabulary
        self._head = {"id": f"cmpl-{head.request_id}", "created": head.created, "model": head.model}
        self._fingerprint = head.fingerprint
        self._stream = _Stream(self._head, "text_completion", head.fingerprint, body)

    def opening(self, index: int) -> bytes:
        """As of a `StreamShape`: the prompt, where it is to be echoed."""
        if not self._body.echo:
            return b""
        asked = self._asked[index]
        text = self._vocabulary.decode(asked.prompt_ids)
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
        ids = [int(one) for one in asked.prompt_ids]
        return self._stream.chunk({**choice, "prompt_token_ids": ids, "token_ids": None})

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        if self._body.num_logprobs is not None or self._body.return_token_ids:
            return None
        choice = {"index": index, "text": _MARK, "logprobs": None, "finish_reason": None, "stop_reason": None}
        return _frame(self._stream.chunk({**choice, "prompt_token_ids": None, "token_ids": None}))

    def token(self, index: int, place: int, usage: TokenCounts | None) -> bytes:
        asked, body = self._asked[index], self._body
        answer, is_last = asked.answer, place + 1 == len(asked.answer.pieces)
        has_ids = body.return_token_ids
        choice = {
            "index": index,
            "text": answer.pieces[place],
            "logprobs": None if body.num_logprobs is None else self._logprobs(answer, place, place + 1),
            "finish_reason": answer.finish_reason if is_last else None,
            "stop_reason": answer.stop_reason if is_last else None,
            "prompt_token_ids": [int(one) for one in asked.prompt_ids] if has_ids and not place else None,
            "token_ids": [int(answer.ids[place])] if has_ids else None,
        }
        return self._stream.chunk(choice, None if usage is None else usage.as_json(), is_last)

    def closing(self, usage: TokenCounts) -> bytes:
        return self._stream.closing(_with_details(usage, has_created=False))

    def whole(self, usage: TokenCounts) -> bytes:
        details = _with_details(usage, has_created=False, created_cache_tokens=None, multimodal_tokens=None)
        value = {
            **self._head,
            "object": "text_completion",
            "choices": [self._choice(index) for index in range(len(self._asked))],
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            "usage": {**details, "completion_tokens_details": None},
        }
        return compact({**value, **_UNUSED})

    def _choice(self, index: int) -> dict[str, Any]:
        asked, body, vocabulary = self._asked[index], self._body, self._vocabulary
        answer, ids = asked.answer, asked.prompt_ids
        before = vocabulary.decode(ids) if body.echo else ""
        logprobs = None if body.num_logprobs is None else self._logprobs(answer, 0, len(answer.pieces), len(before))
        counted = body.prompt_logprobs
        if body.echo and body.num_logprobs is not None:
            texts = [vocabulary.decode(ids[place : place + 1]) for place in range(len(ids))]
            echoed = completion_logprobs(
                vocabulary, [int(one) for one in ids], texts, body.num_logprobs, body.return_tokens_as_token_ids
            )
            echoed["token_logprobs"][0] = echoed["top_logprobs"][0] = None
            logprobs = {name: echoed[name] + (logprobs or {})[name] for name in echoed}
            counted = body.num_logprobs if counted is None else counted
        return {
            "index": index,
            "text": before + text_of(answer),
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "token_ids": [int(one) for one in answer.ids] if body.return_token_ids else None,
            "prompt_logprobs": None if counted is None else prompt_logprobs(vocabulary, ids, counted),
            "prompt_token_ids": [int(one) for one in ids] if body.return_token_ids else None,
            "routed_experts": None,
        }

    def _logprobs(self, answer: WrittenAnswer, start: int, end: int, offset: int = 0) -> dict[str, Any]:
        ids, pieces = [int(one) for one in answer.ids[start:end]], answer.pieces[start:end]
        as_ids, offset = self._body.return_tokens_as_token_ids, offset + sum(map(len, answer.pieces[:start]))
        return completion_logprobs(self._vocabulary, ids, pieces, self._body.num_logprobs or 0, as_ids, offset)


class ScoringBody(GenerationBody):
    """A query, and the items that it is put together with, as texts or as token ids."""

    query: str | TokenIdList | None = None
    items: list[str] | list[TokenIdList] | None = None
    label_token_ids: TokenIdList | None = None
    item_first: bool = False

    @model_validator(mode="after")
    def _is_whole(self) -> "ScoringBody":
        for name in ("query", "items", "label_token_ids"):
            if not getattr(self, name):
                raise FieldError(f"{name}: got none; give at least one")
        return self

    @property
    def parts(self) -> list[list[str | list[int]]]:
        """The texts or token ids of each prompt, one behind the other."""
        query = self.query or ""
        return [[item, query] if self.item_first else [query, item] for item in self.items or ()]

    def wanted(self) -> Wanted:
        """As of a `GenerationBody`: one token of each."""
        return Wanted(max_tokens=1, ignore_eos=True)


class ScoringShape:
    """The scores, of which there is no stream."""

    error_style: ErrorStyle = "openai"

    def __init__(self, head: AnswerHead, asked: list[AskedAnswer]) -> None:
        self._head = {"id": f"generative-scoring-{head.request_id}", "created": head.created, "model": head.model}
        self._asked = asked

    def whole(self, usage: TokenCounts) -> bytes:
        rows: list[dict[str, Any]] = []
        for index, asked in enumerate(self._asked):
            score = float(uniform_draws(int(asked.answer.ids[0]), index, 1)[0])
            rows.append({"index": index, "object": "score", "score": score})
        counts = {**usage.as_json(), "prompt_tokens_details": None, "completion_tokens_details": None}
        return compact({**self._head, "object": "list", "data": rows, "usage": counts})
