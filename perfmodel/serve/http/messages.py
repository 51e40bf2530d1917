"""/v1/messages: Anthropic's body as a chat, and how its answers are written."""

__all__ = ["CountBody", "MessagesBody", "MessagesShape"]

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

from perfmodel.serve.http.bodies import ChatBody
from perfmodel.serve.http.errors import ErrorStyle, FieldError
from perfmodel.serve.http.shapes import AnswerHead, AskedAnswer, TokenCounts, compact, text_of

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CountBody(BaseModel):
    """/v1/messages/count_tokens: a conversation."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    model: str
    messages: list[_Message]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None

    def chat(self, **more: Any) -> ChatBody:
        """The same as a chat, with `more` of its fields. Raises ValidationError as of that."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        tools = [{"type": "function", "function": _function(tool)} for tool in self.tools or ()]
        kind = (self.tool_choice or {}).get("type")
        choice: Any = _CHOICES.get(str(kind))
        if kind == "tool":
            choice = {"type": "function", "function": {"name": (self.tool_choice or {}).get("name")}}
        messages = [{"role": message.role, "content": _content(message.content)} for message in self.messages]
        fields = {"model": self.model, "messages": system + messages if messages else [], "tools": tools or None}
        return ChatBody.model_validate({**fields, "tool_choice": choice if tools else None, **more})


def _at_least_one(value: int) -> int:
    if value < 1:
        raise FieldError(f"max_tokens: got {value}; expected at least 1", "body.max_tokens")
    return value


class MessagesBody(CountBody):
    """What is read of a request for a message."""

    max_tokens: Annotated[int, AfterValidator(_at_least_one)]
    stream: bool = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None

    def chat(self, **more: Any) -> ChatBody:
        """As of a `CountBody`."""
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        user = (self.metadata or {}).get("user_id")
        return super().chat(
            **{name: getattr(self, name) for name in names}, stop=self.stop_sequences, user=user, **more
        )


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}


def _content(content: str | list[dict[str, Any]]) -> Any:
    """Contents as a chat has them: calls of tools and their results are texts there."""
    if isinstance(content, str):
        return content
    return [
        part if part.get("type") in ("text", "image") else {"type": "text", "text": _part_as_text(part)}
        for part in content
    ]


def _part_as_text(part: dict[str, Any]) -> str:
    content = part.get("thinking", part.get("content", part.get("input", "")))
    return content if isinstance(content, str) else json.dumps(content)


class MessagesShape:
    """A message, of which there is one answer: a text, or the use of a tool."""

    error_style: ErrorStyle = "anthropic"
    preamble, has_done = b"", False

    def __init__(self, chat: ChatBody, head: AnswerHead, asked: list[AskedAnswer]) -> None:
        self._answer, self._called, self._asked = asked[0].answer, chat.called, asked[0]
        self._head = {"id": f"chatcmpl-{head.request_id}", "type": "message", "role": "assistant", "model": head.model}
        self._call_id = f"toolu_{head.request_id}"

    def opening(self, index: int) -> bytes:
        """As of a `StreamShape`."""
        usage = {"input_tokens": self._asked.order.num_prompt_tokens, "output_tokens": 0}
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        block = {"type": "text", "text": ""} if self._called is None else self._use({})
        start = _event("message_start", message={**self._head, **empty})
        return start + _event("content_block_start", index=0, content_block=block)

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """As of a `StreamShape`."""
        return None

    def token(self, index: int, place: int, usage: TokenCounts | None) -> bytes:
        """As of a `StreamShape`."""
        piece = self._answer.pieces[place]
        kind, name = ("text_delta", "text") if self._called is None else ("input_json_delta", "partial_json")
        return _event("content_block_delta", index=0, delta={"type": kind, name: piece})

    def closing(self, usage: TokenCounts) -> bytes:
        """As of a `StreamShape`."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        end = _event("content_block_stop", index=0) + _event("message_delta", delta=delta, usage=_counts(usage))
        return end + _event("message_stop")

    def whole(self, usage: TokenCounts) -> bytes:
        """As of a `StreamShape`."""
        text = text_of(self._answer)
        block = {"type": "text", "text": text} if self._called is None else self._use(_parsed(text))
        value = {**self._head, "content": [block], "stop_reason": self._stop_reason, "usage": _counts(usage)}
        return compact(value if self._stop_sequence is None else {**value, "stop_sequence": self._stop_sequence})

    def _use(self, given: Any) -> dict[str, Any]:
        name = "" if self._called is None else self._called.name
        return {"type": "tool_use", "id": self._call_id, "name": name, "input": given}

    @property
    def _stop_reason(self) -> str:
        if self._answer.finish_reason == "length":
            return "max_tokens"
        if self._stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if self._called is not None and not self._called.is_forced else "end_turn"

    @property
    def _stop_sequence(self) -> str | None:
        reason = self._answer.stop_reason
        return reason if isinstance(reason, str) else None


def _parsed(text: str) -> Any:
    """What the arguments say; nothing where they were cut off."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {}


def _counts(usage: TokenCounts) -> dict[str, int]:
    cached, created = usage.num_cached_tokens, usage.num_created_tokens
    counts = {"input_tokens": usage.num_prompt_tokens - cached - created, "output_tokens": usage.num_output_tokens}
    return {**counts, "cache_creation_input_tokens": created, "cache_read_input_tokens": cached}


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + compact({"type": kind, **fields}) + b"\n\n"
