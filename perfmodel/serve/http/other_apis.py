"""/v1/messages, Anthropic's, and /v1/responses: their bodies as chats, and how their answers are written. Nothing is
stored, as in vLLM by default."""

import json
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

from perfmodel.serve.http.bodies import ChatBody, RequestBody
from perfmodel.serve.http.reading import ErrorStyle, FieldError, HttpError
from perfmodel.serve.http.shapes import AnswerSet, AnswerShape, Json, TokenCounts, chat_logprobs, compact


def _event(kind: str, **fields: Any) -> bytes:
    """A server-sent event with a name."""
    return f"event: {kind}\ndata: ".encode() + compact({"type": kind, **fields}) + b"\n\n"


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    role: Literal["user", "assistant", "system"]
    content: str | list[Json]

    def as_chat(self) -> Json:
        """As a chat has it: calls of tools and their results are texts there."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        parts = []
        for part in self.content:
            if part.get("type") not in ("text", "image"):
                content = part.get("thinking", part.get("content", part.get("input", "")))
                part = {"type": "text", "text": content if isinstance(content, str) else json.dumps(content)}
            parts.append(part)
        return {"role": self.role, "content": parts}


class CountBody(RequestBody):
    """/v1/messages/count_tokens: a conversation."""

    model: str
    messages: list[_Message]
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None

    def chat(self, **more: Any) -> ChatBody:
        """The same as a chat, with `more` of its fields. Raises ValidationError as of that."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        names = {"name": "name", "description": "description", "parameters": "input_schema"}
        tools = [{"function": {ours: tool.get(theirs) for ours, theirs in names.items()}} for tool in self.tools or ()]
        given = self.tool_choice or {}
        choice: Any = {"auto": "auto", "any": "required", "none": "none"}.get(str(given.get("type")))
        if given.get("type") == "tool":
            choice = {"type": "function", "function": {"name": given.get("name")}}
        messages = system + [message.as_chat() for message in self.messages] if self.messages else []
        fields = {"model": self.model, "messages": messages, "tools": tools or None}
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
    metadata: Json | None = None

    def chat(self, **more: Any) -> ChatBody:
        same = {name: getattr(self, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
        return super().chat(**same, stop=self.stop_sequences, user=(self.metadata or {}).get("user_id"), **more)


class MessagesShape(AnswerShape):
    """A message, of which there is one answer: a text, or the use of a tool."""

    error_style: ErrorStyle = "anthropic"

    def __init__(self, chat: ChatBody, answers: AnswerSet) -> None:
        number, (self._order, self._answer, _) = answers.request_id, answers.asked[0]
        self._head = {"id": f"chatcmpl-{number}", "type": "message", "role": "assistant", "model": answers.model}
        self._called, self._call_id, reason = chat.called, f"toolu_{number}", self._answer.stop_reason
        self._stop = {"stop_reason": "end_turn", "stop_sequence": reason if isinstance(reason, str) else None}
        if self._answer.finish_reason == "length":
            self._stop["stop_reason"] = "max_tokens"
        elif isinstance(reason, str):
            self._stop["stop_reason"] = "stop_sequence"
        elif self._called is not None and not self._called.is_forced:
            self._stop["stop_reason"] = "tool_use"

    def opening(self, index: int) -> bytes:
        usage = {"input_tokens": self._order.num_prompt_tokens, "output_tokens": 0}
        empty: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        start = _event("message_start", message={**self._head, **empty})
        return start + _event("content_block_start", index=0, content_block=self._block("", {}))

    def token(self, index: int, place: int, usage: TokenCounts | None) -> bytes:
        kind, name = ("text_delta", "text") if self._called is None else ("input_json_delta", "partial_json")
        return _event("content_block_delta", index=0, delta={"type": kind, name: self._answer.pieces[place]})

    def closing(self, usage: TokenCounts) -> bytes:
        end = _event("message_delta", delta=self._stop, usage=self._counts(usage))
        return _event("content_block_stop", index=0) + end + _event("message_stop")

    def whole(self, usage: TokenCounts) -> bytes:
        text, arguments = self._answer.text, {}
        with suppress(json.JSONDecodeError):  # of arguments that were cut off, and of texts, which have none
            arguments = json.loads(text)
        sequence = {name: value for name, value in self._stop.items() if name == "stop_sequence" and value is not None}
        value = {**self._head, "content": [self._block(text, arguments)], "stop_reason": self._stop["stop_reason"]}
        return compact({**value, "usage": self._counts(usage), **sequence})

    def _block(self, text: str, arguments: Any) -> Json:
        if self._called is None:
            return {"type": "text", "text": text}
        return {"type": "tool_use", "id": self._call_id, "name": self._called.name, "input": arguments}

    def _counts(self, usage: TokenCounts) -> dict[str, int]:
        cached, created = usage.num_cached_tokens, usage.num_created_tokens
        return {
            "input_tokens": usage.num_prompt_tokens - cached - created,
            "output_tokens": usage.num_output_tokens,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
        }


_SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
_REPEATED = ("instructions", "metadata", "parallel_tool_calls", "background", "max_output_tokens", "service_tier")
_NEVER = ("max_tool_calls", "previous_response_id", "prompt", "kv_transfer_params", "ec_transfer_params")
_UNSET_TOOL = ("strict", "allowed_callers", "async", "defer_loading", "description", "output_schema")


class ResponsesBody(RequestBody):
    """What is read of a request for a response."""

    input: str | list[Json]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    text: Json | None = None
    background: bool = False
    store: bool = True
    previous_response_id: str | None = None
    metadata: Json | None = None
    user: str | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    top_logprobs: int | None = None
    include: list[str] | None = None
    reasoning: Json | None = None
    parallel_tool_calls: bool = True
    service_tier: str = "auto"
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def chat(self) -> ChatBody:
        """The same as a chat. Raises ValidationError as of that, HttpError for what needs stored responses."""
        if self.background:
            kind = "invalid_request_error" if self.store else "BadRequestError"
            raise HttpError(400, "background: responses are not stored here; leave it out", kind, "background")
        if self.previous_response_id is not None:
            raise no_response(self.previous_response_id)
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        choice, tools = self.tool_choice, [{"type": "function", "function": tool} for tool in self.tools or ()]
        if isinstance(choice, dict):
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        has_logprobs = "message.output_text.logprobs" in (self.include or ())
        form = (self.text or {}).get("format") or {"type": "text"}
        return ChatBody.model_validate(
            {
                **{name: getattr(self, name) for name in ("model", "stream", "user", *_SAMPLING)},
                "messages": system + [self._message(item) for item in items] if items else [],
                "max_tokens": self.max_output_tokens,
                "tools": tools or None,
                "tool_choice": choice if tools else None,
                "logprobs": has_logprobs,
                "top_logprobs": self.top_logprobs if has_logprobs else None,
                "response_format": {**form, "json_schema": form} if form["type"] == "json_schema" else form,
            }
        )

    def _message(self, item: Json) -> Json:
        kind = item.get("type", "message")
        if kind == "function_call":
            call = {"name": item.get("name"), "arguments": item.get("arguments")}
            return {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}
        if kind == "function_call_output":
            return {"role": "tool", "content": item.get("output")}
        if kind != "message":
            raise FieldError(f"input: got an item of type {str(kind)[:40]!r}; expected messages and function calls")
        return item

    @property
    def description(self) -> Json:
        """What a response repeats of its request."""
        unset = {"context": None, "generate_summary": None, "mode": None, "summary": None}
        text = self.text
        if text is not None and text.get("format", {}).get("type") == "json_schema":
            text = {"verbosity": None, **text, "format": {"description": None, "strict": None, **text["format"]}}
        return {
            **{name: getattr(self, name) for name in (*_REPEATED, "user")},
            **dict.fromkeys(_NEVER),
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "tool_choice": self.tool_choice or ("auto" if self.tools else "none"),
            "tools": [{**dict.fromkeys(_UNSET_TOOL), **tool} for tool in self.tools or ()],
            "text": text,
            "reasoning": None if self.reasoning is None else {**unset, **self.reasoning},
            "top_logprobs": self.top_logprobs,
            "truncation": self.truncation,
            "input_messages": None,
            "output_messages": None,
        }


def no_response(name: str) -> HttpError:
    """There is no stored response `name`: none is stored."""
    return HttpError(404, f"Response `{name[:80]}` is not stored here.", "invalid_request_error", "response_id")


class ResponsesShape(AnswerShape):
    """A response, of which there is one answer: a message, or the call of a tool.

    body, chat: the request, and the same as a chat; answers: of which there is one. Each event has its number, so no
    token has a frame"""

    def __init__(self, body: ResponsesBody, chat: ChatBody, answers: AnswerSet) -> None:
        self._body, self._chat, self._answer, number = body, chat, answers.asked[0].answer, answers.request_id
        self._vocabulary, self._called = answers.vocabulary, chat.called
        self._head = {"id": f"resp_{number}", "created_at": answers.created, "model": answers.model}
        self._item_id = f"{'msg' if chat.called is None else 'fc'}_{number}"
        self._num_events, begun = 0, self._response("in_progress", [], None)
        self.preamble = self._event("response.created", response=begun)
        self.preamble += self._event("response.in_progress", response=begun)

    def opening(self, index: int) -> bytes:
        added = self._event("response.output_item.added", item=self._item("in_progress"), output_index=0)
        if self._called is not None:
            return added
        return added + self._item_event("response.content_part.added", content_index=0, part=self._part("", []))

    def token(self, index: int, place: int, usage: TokenCounts | None) -> bytes:
        piece = self._answer.pieces[place]
        if self._called is not None:
            return self._item_event("response.function_call_arguments.delta", delta=piece)
        return self._item_event("response.output_text.delta", content_index=0, delta=piece, logprobs=[])

    def closing(self, usage: TokenCounts) -> bytes:
        text, item = self._answer.text, self._item("completed")
        if self._called is not None:
            events = self._item_event("response.function_call_arguments.done", arguments=text, name=self._called.name)
        else:
            events = self._item_event("response.output_text.done", content_index=0, logprobs=[], text=text)
            events += self._item_event("response.content_part.done", content_index=0, part=self._part(text, None))
            item["summary"] = []
        events += self._event("response.output_item.done", item=item, output_index=0)
        return events + self._event("response.completed", response=self._ended(usage))

    def whole(self, usage: TokenCounts) -> bytes:
        return compact(self._ended(usage))

    def _ended(self, usage: TokenCounts) -> Json:
        per_turn: dict[str, list[int]] = {"input_tokens_per_turn": [], "cached_tokens_per_turn": []}
        tool = {"tool_output_tokens": 0, "output_tokens_per_turn": [], "tool_output_tokens_per_turn": []}
        counts = {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, **per_turn},
            "output_tokens": usage.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0, **tool},
            "total_tokens": usage.num_tokens,
        }
        status = "incomplete" if self._answer.finish_reason == "length" else "completed"
        return self._response(status, [self._item("completed")], counts)

    def _response(self, status: str, output: list[Any], usage: Any) -> Json:
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        state = {"object": "response", "status": status, "incomplete_details": reason}
        return {**self._head, **self._body.description, **state, "output": output, "usage": usage}

    def _item(self, status: str) -> Json:
        """The message or the call, of which nothing is there yet while in progress."""
        is_done, text, logprobs = status == "completed", self._answer.text, None
        if self._called is not None:
            call = {"arguments": text if is_done else "", "call_id": f"call_{self._item_id}", "name": self._called.name}
            unset = dict.fromkeys(("async", "caller", "namespace"))
            return {"id": self._item_id, "type": "function_call", "status": status, **call, **unset}
        if (count := self._chat.num_logprobs) is not None:
            logprobs = chat_logprobs(self._vocabulary, self._answer.ids, self._answer.pieces, count)
        content = [self._part(text, logprobs)] if is_done else []
        fields = {"type": "message", "role": "assistant", "status": status, "content": content, "phase": None}
        return {"id": self._item_id, **fields}

    def _part(self, text: str, logprobs: list[Any] | None) -> Json:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._num_events += 1
        return _event(kind, sequence_number=self._num_events - 1, **fields)
