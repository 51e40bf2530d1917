"""Answers as JSON: how OpenAI's two kinds of generation, and scores, are written by vLLM's server, whole and in chunks.

Logprobs of made-up answers are of the right shape, fall with the rank, and are the same for the same token and place.
"""

import json
from base64 import b64encode
from collections.abc import Sequence
from itertools import accumulate, islice
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from perfmodel.serve.emulator import Order
from perfmodel.serve.http.bodies import BatchBody, ChatBody, EmbeddingBody, GenerationBody, ScoringBody
from perfmodel.serve.http.reading import ErrorStyle
from perfmodel.serve.tokens import TokenIds, Vocabulary, WrittenAnswer
from perfmodel.sim.traffic.distributions import hashed, uniform_draws

Json = dict[str, Any]
_BEST, _STEP = -0.1, -0.5  # logprobs: of the first rank, and between ranks


def _ranked(vocabulary: Vocabulary, token_id: int, text: str, count: int) -> list[tuple[int, str, float]]:
    """(token id, text, logprob) of the token itself, and of `count` - 1 others that are less likely."""
    words, count = vocabulary.words, max(count, 1)
    start, size = hashed(token_id, count), len(words.texts)
    others = (place % size for place in range(start, start + size) if int(words.ids[place % size]) != token_id)
    ranked = [(token_id, text, _BEST)]
    for rank, place in enumerate(islice(others, count - 1), 1):
        ranked.append((int(words.ids[place]), words.texts[place], _BEST + _STEP * rank))
    return ranked


def chat_logprobs(vocabulary: Vocabulary, ids: TokenIds, texts: Sequence[str], count: int) -> list[Json]:
    """Logprobs as chats and responses have them.

    ids, texts: tokens, and what each adds to the text; count: alternatives of each, words of `vocabulary`"""
    rows = []
    for token_id, text in zip(ids.tolist(), texts, strict=True):
        ranked = [
            {"token": name, "logprob": logprob, "bytes": list(name.encode())}
            for _, name, logprob in _ranked(vocabulary, token_id, text, count)
        ]
        rows.append({**ranked[0], "top_logprobs": ranked[:count]})
    return rows


def completion_logprobs(
    vocabulary: Vocabulary, ids: TokenIds, texts: Sequence[str], count: int, as_ids: bool, start: int = 0
) -> Json:
    """Logprobs as completions have them.

    vocabulary, ids, texts, count: as of `chat_logprobs`
    as_ids: tokens are written as `token_id:5`; start: characters of text before them"""
    rows = [
        [
            (f"token_id:{number}" if as_ids else name, logprob)
            for number, name, logprob in _ranked(vocabulary, token_id, text, count)
        ]
        for token_id, text in zip(ids.tolist(), texts, strict=True)
    ]
    return {
        "text_offset": list(accumulate(map(len, texts), initial=start))[:-1],
        "token_logprobs": [row[0][1] for row in rows],
        "tokens": [row[0][0] for row in rows],
        "top_logprobs": [dict(row) for row in rows],
    }


def _prompt_logprobs(vocabulary: Vocabulary, ids: TokenIds, count: int | None) -> list[Json | None] | None:
    """As vLLM has them: of each token of a prompt but the first, whose is null."""
    if count is None:
        return None
    rows: list[Json | None] = [None]
    for token_id in ids[1:].tolist():
        ranked = _ranked(vocabulary, token_id, vocabulary.decode(np.array([token_id])), count)
        rows.append(
            {
                str(number): {"logprob": logprob, "rank": rank, "decoded_token": text}
                for rank, (number, text, logprob) in enumerate(ranked, 1)
            }
        )
    return rows


class TokenCounts(NamedTuple):
    """Tokens of a request's prompts and answers, those of the prompts that a prefix cache had, and has from now on."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    num_created_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return self.num_prompt_tokens + self.num_output_tokens

    def as_json(self) -> Json:
        """In OpenAI's words, without details."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "total_tokens": self.num_tokens,
            "completion_tokens": self.num_output_tokens,
        }

    def detailed(self, **details: Any) -> Json:
        """The same with what is known of prompt tokens: those cached, and `details`."""
        return {**self.as_json(), "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens, **details}}


class AskedAnswer(NamedTuple):
    """One answer that a request asks for, and which of its prompt's answers it is."""

    order: Order
    answer: WrittenAnswer
    choice: int

    @property
    def prompt_ids(self) -> TokenIds:
        """Token ids of its prompt."""
        ids = self.order.params.token_ids
        return np.empty(0, np.int64) if ids is None else ids[: self.order.num_prompt_tokens]


class AnswerSet(NamedTuple):
    """All answers of one request, in the order of their indices (`asked`), and what they begin with.

    request_id: of the request, without what says its kind
    created:    seconds of the epoch
    model:      the name that it asked for
    vocabulary: what tokens are made of"""

    request_id: str
    created: int
    model: str
    vocabulary: Vocabulary
    asked: list[AskedAnswer]

    def head(self, id_prefix: str) -> Json:
        """What each object of OpenAI's APIs begins with."""
        return {"id": f"{id_prefix}-{self.request_id}", "created": self.created, "model": self.model}


class AnswerShape:
    """How all answers of one request are written, at once and token by token; a stream has them by their indices.

    error_style: of what goes wrong; preamble: the events of a stream before any answer
    has_done: a stream ends with [DONE], and its events have no names"""

    error_style: ErrorStyle = "openai"
    preamble, has_done = b"", False

    def whole(self, usage: TokenCounts) -> bytes:
        """All answers."""
        raise NotImplementedError

    def opening(self, index: int) -> bytes:
        """The events before the first token of answer `index`."""
        raise NotImplementedError

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """What stands before and after the text of a token of answer `index` but its last; None: it depends on it."""
        return None

    def token(self, index: int, place: int, usage: TokenCounts | None) -> bytes:
        """The events of token `place` of answer `index`; usage: the counts so far, if each chunk has them."""
        raise NotImplementedError

    def closing(self, usage: TokenCounts) -> bytes:
        """The events after all answers, but for [DONE]."""
        raise NotImplementedError


def compact(value: Any) -> bytes:
    """`value` as JSON without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()


_FINGERPRINT = {"system_fingerprint": "perfmodel"}
_MARK = "\0"  # stands for a text in the chunk that becomes a frame
_UNUSED = {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}


class _OpenAiShape(AnswerShape):
    """What chats and completions have in common: a head, chunks, the fingerprint at their end, a chunk of counts.

    body, answers: the request, and all of its answers
    id_prefix, kind, chunk_kind: of this kind of generation, as its answers say it"""

    has_done = True
    id_prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, body: GenerationBody, answers: AnswerSet) -> None:
        self._body, self._vocabulary, self._asked = body, answers.vocabulary, answers.asked
        self._head = answers.head(self.id_prefix)

    def _chunk(self, choice: Json | None, usage: Any = None, is_last: bool = False, **more: Any) -> bytes:
        """A chunk with one choice, or none after all of them; is_last: of its answer."""
        choices = [] if choice is None else [choice]
        value = {**self._head, "object": self.chunk_kind, "choices": choices, **more}
        if usage is not None:
            value["usage"] = usage
        if choice is None or (is_last and not self._body.options.include_usage):
            value |= _FINGERPRINT
        return b"data: " + compact(value) + b"\n\n"

    def _framed(self, choice: Json) -> tuple[bytes, bytes] | None:
        """What stands before and after the text in a chunk whose text is the mark, if nothing else in it changes."""
        if self._body.num_logprobs is not None or self._body.return_token_ids:
            return None
        before, after = self._chunk(choice).split(encode_basestring_ascii(_MARK).encode())
        return before, after

    def _usage_chunk(self, usage: Json) -> bytes:
        """The counts, if they are asked for."""
        return self._chunk(None, usage) if self._body.options.include_usage else b""

    def _whole(self, choices: list[Json], usage: Json, **more: Any) -> bytes:
        value = {**self._head, "object": self.kind, "choices": choices, "service_tier": None, **_FINGERPRINT}
        return compact({**value, "usage": {**usage, "completion_tokens_details": None}, **more, **_UNUSED})

    def _ids(self, ids: TokenIds) -> list[int] | None:
        return ids.tolist() if self._body.return_token_ids else None


class ChatShape(_OpenAiShape):
    """Chats, and several conversations at once."""

    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody | BatchBody, answers: AnswerSet) -> None:
        super().__init__(body, answers)
        self._call_id = f"chatcmpl-tool-{answers.request_id}"
        # Of several conversations none calls a tool, whatever they choose: vLLM takes the text as it is.
        self._role, self._called = (body.role, body.called) if isinstance(body, ChatBody) else ("assistant", None)

    def opening(self, index: int) -> bytes:
        """As of an `AnswerShape`: whose turn it is, and the name of the tool that is called."""
        asked, has_counts = self._asked[index], self._body.options.continuous_usage_stats
        usage = _in_chunk(TokenCounts(asked.order.num_prompt_tokens, 0)) if has_counts else None
        choice = {"index": index, "delta": {"role": self._role, "content": ""}, "logprobs": None, "finish_reason": None}
        opening = self._chunk(choice, usage, prompt_token_ids=self._ids(asked.prompt_ids), prompt_text=None)
        if self._called is None:
            return opening
        call = {"id": f"{self._call_id}-{index}", "type": "function", "index": 0}
        call["function"] = {"name": self._called.name}
        return opening + self._chunk(self._choice(index, {"content": None, "tool_calls": [call]}))

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        return self._framed(self._choice(index, self._delta(_MARK)))

    def token(self, index: int, place: int, usage: TokenCounts | None) -> bytes:
        answer, counts = self._asked[index].answer, None if usage is None else _in_chunk(usage)
        delta, is_last = self._delta(answer.pieces[place]), place + 1 == len(answer.pieces)
        if not is_last or self._called is None:
            return self._chunk(self._choice(index, delta, place, is_last), counts, is_last)
        last = self._chunk(self._choice(index, {}, place, is_last), counts, is_last)
        return self._chunk(self._choice(index, delta, place), counts) + last

    def _delta(self, text: str) -> Json:
        if self._called is None:
            return {"content": text}
        return {"content": None, "tool_calls": [{"index": 0, "function": {"arguments": text}}]}

    def _choice(self, index: int, delta: Json, place: int | None = None, is_last: bool = False) -> Json:
        """The choice of a chunk, which adds `delta`; place: of its token, if it is one's."""
        answer = self._asked[index].answer
        choice: Json = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if is_last:
            choice |= {"finish_reason": self._finish(answer), "stop_reason": answer.stop_reason}
        if place is None:
            return {**choice, "token_ids": None}
        choice["logprobs"] = self._logprobs(answer, place, place + 1)
        return {**choice, "token_ids": self._ids(answer.ids[place : place + 1])}

    def closing(self, usage: TokenCounts) -> bytes:
        return self._usage_chunk(usage.detailed(created_cache_tokens=usage.num_created_tokens))

    def whole(self, usage: TokenCounts) -> bytes:
        body, ids = self._body, self._asked[0].prompt_ids
        counts = usage.detailed(created_cache_tokens=usage.num_created_tokens, multimodal_tokens=None)
        if isinstance(body, BatchBody):
            counts["prompt_tokens_details"] = None
        num_prompt_logprobs = 0 if body.prompt_logprobs is None and body.echo else body.prompt_logprobs
        return self._whole(
            [self._whole_choice(index) for index in range(len(self._asked))],
            counts,
            prompt_logprobs=_prompt_logprobs(self._vocabulary, ids, num_prompt_logprobs),
            prompt_token_ids=self._ids(ids),
            prompt_text=None,
        )

    def _whole_choice(self, index: int) -> Json:
        answer, body = self._asked[index].answer, self._body
        message: Json = {"role": self._role, "content": answer.text}
        message |= dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        if body.echo and isinstance(body, ChatBody) and body.messages:
            message["content"] = body.messages[-1].text + answer.text
        if self._called is not None:
            call = {"name": self._called.name, "arguments": answer.text}
            message["content"] = ""
            message["tool_calls"] = [{"id": f"{self._call_id}-{index}", "type": "function", "function": call}]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer, 0, len(answer.pieces)),
            "finish_reason": self._finish(answer),
            "stop_reason": answer.stop_reason,
            "token_ids": self._ids(answer.ids),
            "routed_experts": None,
        }

    def _logprobs(self, answer: WrittenAnswer, start: int, end: int) -> Json | None:
        count = self._body.num_logprobs
        if count is None:
            return None
        return {"content": chat_logprobs(self._vocabulary, answer.ids[start:end], answer.pieces[start:end], count)}

    def _finish(self, answer: WrittenAnswer) -> str:
        """Why the answer ends: as in vLLM, with `stop` where a tool was to be called by its name."""
        if self._called is None or answer.finish_reason != "stop" or self._called.is_forced:
            return answer.finish_reason
        return "tool_calls"


def _in_chunk(usage: TokenCounts) -> Json:
    return {**usage.as_json(), "completion_tokens_details": None}


class CompletionShape(_OpenAiShape):
    """Completions."""

    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def opening(self, index: int) -> bytes:
        """As of an `AnswerShape`: the prompt, where it is to be echoed."""
        if not self._body.echo:
            return b""
        ids = self._asked[index].prompt_ids
        return self._chunk(_text_choice(index, self._vocabulary.decode(ids), prompt_token_ids=ids.tolist()))

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        return self._framed(_text_choice(index, _MARK))

    def token(self, index: int, place: int, usage: TokenCounts | None) -> bytes:
        asked, answer = self._asked[index], self._asked[index].answer
        is_last = place + 1 == len(answer.pieces)
        choice = _text_choice(
            index,
            answer.pieces[place],
            logprobs=self._logprobs(answer, place, place + 1),
            finish_reason=answer.finish_reason if is_last else None,
            stop_reason=answer.stop_reason if is_last else None,
            prompt_token_ids=None if place else self._ids(asked.prompt_ids),
            token_ids=self._ids(answer.ids[place : place + 1]),
        )
        return self._chunk(choice, None if usage is None else usage.as_json(), is_last)

    def closing(self, usage: TokenCounts) -> bytes:
        return self._usage_chunk(usage.detailed())

    def whole(self, usage: TokenCounts) -> bytes:
        choices = [self._whole_choice(index, asked) for index, asked in enumerate(self._asked)]
        return self._whole(choices, usage.detailed(created_cache_tokens=None, multimodal_tokens=None))

    def _whole_choice(self, index: int, asked: AskedAnswer) -> Json:
        body, vocabulary, answer, ids = self._body, self._vocabulary, asked.answer, asked.prompt_ids
        before = vocabulary.decode(ids) if body.echo else ""
        logprobs = self._logprobs(answer, 0, len(answer.pieces), len(before))
        num_prompt_logprobs = body.prompt_logprobs
        if body.echo and logprobs is not None:
            count = body.num_logprobs or 0
            texts = [vocabulary.decode(ids[place : place + 1]) for place in range(len(ids))]
            echoed = completion_logprobs(vocabulary, ids, texts, count, body.return_tokens_as_token_ids)
            echoed["token_logprobs"][0] = echoed["top_logprobs"][0] = None
            logprobs = {name: values + logprobs[name] for name, values in echoed.items()}
            num_prompt_logprobs = count if num_prompt_logprobs is None else num_prompt_logprobs
        return {
            "index": index,
            "text": before + answer.text,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "token_ids": self._ids(answer.ids),
            "prompt_logprobs": _prompt_logprobs(vocabulary, ids, num_prompt_logprobs),
            "prompt_token_ids": self._ids(ids),
            "routed_experts": None,
        }

    def _logprobs(self, answer: WrittenAnswer, start: int, end: int, offset: int = 0) -> Json | None:
        body = self._body
        if body.num_logprobs is None:
            return None
        ids, pieces = answer.ids[start:end], answer.pieces[start:end]
        offset += sum(map(len, answer.pieces[:start]))
        as_ids = body.return_tokens_as_token_ids
        return completion_logprobs(self._vocabulary, ids, pieces, body.num_logprobs, as_ids, offset)


def _text_choice(index: int, text: str, **given: Any) -> Json:
    """The choice of a chunk of a completion."""
    unset = ("logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids")
    return {"index": index, "text": text, **dict.fromkeys(unset), **given}


class ScoringShape(AnswerShape):
    """The scores, of which there is no stream."""

    def __init__(self, body: ScoringBody, answers: AnswerSet) -> None:
        self._head = answers.head("generative-scoring")
        firsts = [int(one.answer.ids[0]) for one in answers.asked]
        self._scores = [uniform_draws(first, index, 1)[0] for index, first in enumerate(firsts)]

    def whole(self, usage: TokenCounts) -> bytes:
        rows = [{"index": i, "object": "score", "score": float(score)} for i, score in enumerate(self._scores)]
        counts = {**usage.as_json(), "prompt_tokens_details": None, "completion_tokens_details": None}
        return compact({**self._head, "object": "list", "data": rows, "usage": counts})


class EmbeddingShape(AnswerShape):
    """Vectors of `size` numbers, drawn from their prompts; there is no stream of them."""

    def __init__(self, size: int, body: EmbeddingBody, answers: AnswerSet) -> None:
        self._head, self._is_packed = answers.head("embd"), body.encoding_format == "base64"
        drawn = []
        for one in answers.asked:
            ids = one.order.params.token_ids
            assert ids is not None
            seed = crc32(ids[: one.order.num_prompt_tokens].tobytes())
            drawn.append(np.random.default_rng(seed).standard_normal(size))
        self._vectors = [(vector / np.linalg.norm(vector)).astype("<f4") for vector in drawn]

    def whole(self, usage: TokenCounts) -> bytes:
        rows = [
            {"index": i, "object": "embedding", "embedding": self._written(vector)}
            for i, vector in enumerate(self._vectors)
        ]
        count = usage.num_prompt_tokens
        counts = {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0, "prompt_tokens_details": None}
        return compact({**self._head, "object": "list", "data": rows, "usage": counts})

    def _written(self, vector: NDArray[np.float32]) -> str | list[float]:
        return b64encode(vector.tobytes()).decode() if self._is_packed else vector.tolist()
