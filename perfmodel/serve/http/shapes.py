"""Answers as JSON: those of OpenAI's two kinds of generation, whole and in chunks, as vLLM's server writes them."""

__all__ = ["DONE", "AnswerShape", "TokenCounts"]

import json
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

from perfmodel.serve.tokens import WrittenAnswer

DONE = b"data: [DONE]\n\n"
_COMPACT = (",", ":")


class TokenCounts(NamedTuple):
    """Tokens of a request's prompts and answers, and those of the prompts that a prefix cache had."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None = None

    def as_json(self) -> dict[str, Any]:
        """In OpenAI's words."""
        said: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "completion_tokens": self.num_output_tokens,
        }
        if self.num_cached_tokens is not None:
            said["prompt_tokens_details"] = {"cached_tokens": self.num_cached_tokens}
        return said


class AnswerShape:
    """How one request's answers are written.

    is_chat:    of a chat, or of a completion
    request_id: of the request, without what says its kind
    created:    seconds of the epoch
    model:      the name that it asked for
    """

    def __init__(self, is_chat: bool, request_id: str, created: int, model: str) -> None:
        self.is_chat = is_chat
        self._head = {"id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}"}
        self._tail = {"created": created, "model": model}

    def whole(self, answers: list[WrittenAnswer], usage: TokenCounts) -> bytes:
        """All `answers` at once."""
        name = "chat.completion" if self.is_chat else "text_completion"
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        said = {**self._head, "object": name, **self._tail, "choices": choices, "usage": usage.as_json()}
        return json.dumps(said, separators=_COMPACT).encode()

    def _choice(self, index: int, answer: WrittenAnswer) -> dict[str, Any]:
        text = "".join(answer.pieces)
        content: dict[str, Any] = {"text": text}
        if self.is_chat:
            content = {"message": {"role": "assistant", "content": text}}
        ended = {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
        return {"index": index, **content, "logprobs": None, **ended}

    def opening(self, index: int) -> bytes:
        """The chunk before the first token of answer `index`: of a chat, whose turn it is."""
        if not self.is_chat:
            return b""
        return self._event([{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])

    def token_frame(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text of a token of answer `index` in its chunk."""
        text = "\0"
        event = self._event([self._chunk_choice(index, text, None, None)])
        before, after = event.split(encode_basestring_ascii(text).encode())
        return before, after

    def last_token(self, index: int, answer: WrittenAnswer, usage: TokenCounts | None) -> bytes:
        """The chunk of the last token of answer `index`, which says why it ends."""
        choice = self._chunk_choice(index, answer.pieces[-1], answer.finish_reason, answer.stop_reason)
        return self._event([choice], usage)

    def token(self, index: int, text: str, usage: TokenCounts) -> bytes:
        """The chunk of a token of answer `index`, with the counts so far."""
        return self._event([self._chunk_choice(index, text, None, None)], usage)

    def usage(self, usage: TokenCounts) -> bytes:
        """The chunk that has the counts alone."""
        return self._event([], usage)

    def _chunk_choice(self, index: int, text: str, finish: str | None, reason: str | int | None) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": {"content": text}} if self.is_chat else {"text": text}
        ended = {"finish_reason": finish, "stop_reason": reason}
        return {"index": index, **content, "logprobs": None, **ended}

    def _event(self, choices: list[dict[str, Any]], usage: TokenCounts | None = None) -> bytes:
        name = "chat.completion.chunk" if self.is_chat else "text_completion"
        said = {**self._head, "object": name, **self._tail, "choices": choices}
        if usage is not None:
            said["usage"] = usage.as_json()
        return b"data: " + json.dumps(said, separators=_COMPACT).encode() + b"\n\n"
