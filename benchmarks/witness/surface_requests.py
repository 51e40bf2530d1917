"""The requests that both servers are sent: every path of vLLM's server, good and bad bodies, streams that end early."""

__all__ = ["MODEL", "Ask", "requests"]

from collections.abc import Iterator
from typing import Any, NamedTuple

MODEL = "surface"
_LONG = "balo " * 700
_HELLO = [{"role": "user", "content": "balo benu"}]
_SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["km", "mile"]}, "far": {"type": "boolean"}},
    "required": ["unit", "far"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "distance", "description": "How far.", "parameters": _SCHEMA}}
_NAMED = {"type": "function", "function": {"name": "distance"}}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "distance", "arguments": '{"unit": "km"}'}}
_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
_COUNTED = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


class Ask(NamedTuple):
    """A request by its `name`; leaves_after: events of a stream after which the client goes away."""

    name: str
    method: str
    path: str
    body: Any = None
    headers: tuple[tuple[str, str], ...] = ()
    leaves_after: int | None = None


def requests() -> list[Ask]:
    """All of them, in the order in which they are sent. Names are unique."""
    asks = [*_plain(), *_chats(), *_completions(), *_responses(), *_messages(), *_tokens(), *_others(), *_wrong()]
    assert len({ask.name for ask in asks}) == len(asks), "a name occurs twice"
    return asks


def _plain() -> Iterator[Ask]:
    for path in ("/health", "/ping", "/version", "/load", "/v1/models", "/metrics", "/openapi.json"):
        yield Ask(f"get {path}", "GET", path)
    yield Ask("post /ping", "POST", "/ping")
    yield Ask("metrics as OpenMetrics", "GET", "/metrics", None, (("accept", "application/openmetrics-text"),))
    yield Ask("request id is echoed", "POST", "/v1/chat/completions", _chat({}), (("x-request-id", "abc"),))
    yield Ask("no model of that name", "GET", "/v1/models/surface")
    for path in ("/", "/v1", "/v1/nothing", "/v1/embeddings", "/v1/audio/transcriptions", "/v1/chat/completions/"):
        yield Ask(f"get {path}", "GET", path)
    for path in ("/v1/embeddings", "/pooling", "/classify", "/score", "/rerank", "/v1/chat/completions/"):
        yield Ask(f"post {path}", "POST", path, {"model": MODEL, "input": "balo"})


def _chat(more: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "messages": _HELLO, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}


_BOTH: dict[str, dict[str, Any]] = {
    "whole": {},
    "streamed": {"stream": True},
    "streamed with usage": _USAGE,
    "streamed with usage in each chunk": _COUNTED,
    "usage asked for without a stream": {"stream_options": {"include_usage": True}},
    "one token": {"max_tokens": 1},
    "one token, streamed": {"max_tokens": 1, "stream": True},
    "two answers": {"n": 2, "temperature": 1.0, "seed": 3},
    "two answers, streamed": {"n": 2, "temperature": 1.0, "seed": 3, "stream": True},
    "two answers, greedy": {"n": 2},
    "n of 0": {"n": 0},
    "n below 0": {"n": -1},
    "n as text": {"n": "two"},
    "n as digits": {"n": "2", "temperature": 1.0},
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens below 0": {"max_tokens": -1},
    "max_tokens as text": {"max_tokens": "many"},
    "max_tokens a fraction": {"max_tokens": 2.5},
    "max_tokens null": {"max_tokens": None, "ignore_eos": False, "stop_token_ids": list(range(300))},
    "max_tokens beyond the context": {"max_tokens": 5000},
    "min_tokens": {"min_tokens": 3},
    "min_tokens above max_tokens": {"min_tokens": 9},
    "min_tokens below 0": {"min_tokens": -1},
    "temperature below 0": {"temperature": -0.1},
    "temperature 2": {"temperature": 2.0},
    "temperature as text": {"temperature": "hot"},
    "top_p of 0": {"top_p": 0},
    "top_p of 2": {"top_p": 2},
    "top_k": {"top_k": 5, "temperature": 1.0},
    "top_k below -1": {"top_k": -2, "temperature": 1.0},
    "min_p of 2": {"min_p": 2, "temperature": 1.0},
    "presence_penalty": {"presence_penalty": 1.0},
    "presence_penalty of 3": {"presence_penalty": 3},
    "frequency_penalty of -3": {"frequency_penalty": -3},
    "repetition_penalty of 0": {"repetition_penalty": 0},
    "seed": {"seed": 7},
    "seed as text": {"seed": "seven"},
    "seed too large": {"seed": 2**70},
    "stop": {"stop": "zzzzzz"},
    "stop, a list": {"stop": ["zzzzzz", "yyyyyy"]},
    "stop, empty text": {"stop": ""},
    "stop, an empty list": {"stop": []},
    "stop, a number": {"stop": 5},
    "stop, kept": {"stop": ["zzzzzz"], "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": list(range(4096))},
    "stop_token_ids, streamed": {"stop_token_ids": list(range(4096)), "stream": True},
    "stop_token_ids, texts": {"stop_token_ids": ["a"]},
    "logit_bias": {"logit_bias": {"500": 100}},
    "logit_bias of a token that is not there": {"logit_bias": {"99999": 1}},
    "logit_bias, a list": {"logit_bias": [1]},
    "priority": {"priority": 1},
    "priority as text": {"priority": "high"},
    "cache_salt": {"cache_salt": "salt"},
    "cache_salt, empty": {"cache_salt": ""},
    "user": {"user": "somebody"},
    "field that nobody knows": {"no_such_field": 1},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 2},
    "truncate_prompt_tokens too many": {"truncate_prompt_tokens": 9999},
    "return_token_ids": {"return_token_ids": True},
    "return_token_ids, streamed": {"return_token_ids": True, "stream": True},
    "return_tokens_as_token_ids": {"return_tokens_as_token_ids": True, "logprobs": 1},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "prompt_logprobs below -1": {"prompt_logprobs": -2},
    "prompt_logprobs, streamed": {"prompt_logprobs": 1, "stream": True},
    "skip_special_tokens off": {"skip_special_tokens": False},
    "allowed_token_ids": {"allowed_token_ids": [500, 501]},
    "allowed_token_ids, none": {"allowed_token_ids": []},
    "bad_words": {"bad_words": ["balo"]},
    "beam search": {"use_beam_search": True, "n": 2},
    "unknown model": {"model": "nothing"},
    "model empty": {"model": ""},
    "model null": {"model": None},
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {
        "max_tokens": 40,
        "ignore_eos": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "d", "schema": _SCHEMA}},
    },
    "json_schema, streamed": {
        "max_tokens": 40,
        "ignore_eos": False,
        "stream": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "d", "schema": _SCHEMA}},
    },
    "json_schema missing": {"response_format": {"type": "json_schema"}},
    "response_format text": {"response_format": {"type": "text"}},
    "response_format unknown": {"response_format": {"type": "poem"}},
    "structured_outputs json": {"max_tokens": 40, "ignore_eos": False, "structured_outputs": {"json": _SCHEMA}},
    "structured_outputs choice": {
        "max_tokens": 20,
        "ignore_eos": False,
        "structured_outputs": {"choice": ["balo", "benu"]},
    },
    "structured_outputs regex": {
        "max_tokens": 20,
        "ignore_eos": False,
        "structured_outputs": {"regex": "[ab]{3}[0-9]"},
    },
    "structured_outputs grammar": {
        "max_tokens": 20,
        "ignore_eos": False,
        "structured_outputs": {"grammar": 'root ::= "balo" | "benu"'},
    },
    "structured_outputs, a wrong regex": {"structured_outputs": {"regex": "[a"}},
    "structured_outputs, a wrong grammar": {"structured_outputs": {"grammar": "root = "}},
    "structured_outputs, a wrong schema": {"structured_outputs": {"json": {"type": "nothing"}}},
    "structured_outputs, two of them": {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    "structured_outputs, none of them": {"structured_outputs": {}},
    "guided_json": {"guided_json": _SCHEMA},
    "guided_choice": {"guided_choice": ["balo"]},
    "stream as text": {"stream": "perhaps"},
}


def _chats() -> Iterator[Ask]:
    path = "/v1/chat/completions"
    for name, more in _BOTH.items():
        if name == "return_tokens_as_token_ids":
            more = {**more, "logprobs": True}
        yield Ask(f"chat: {name}", "POST", path, _chat(more))
    tools = {"tools": [_TOOL], "max_tokens": 200, "ignore_eos": False, "temperature": 1.0, "seed": 1}
    special: dict[str, dict[str, Any]] = {
        "max_completion_tokens": {"max_completion_tokens": 4},
        "logprobs": {"logprobs": True},
        "logprobs, two of the top": {"logprobs": True, "top_logprobs": 2},
        "logprobs, streamed": {"logprobs": True, "top_logprobs": 2, "stream": True},
        "top_logprobs without logprobs": {"top_logprobs": 2},
        "top_logprobs too many": {"logprobs": True, "top_logprobs": 100},
        "top_logprobs below 0": {"logprobs": True, "top_logprobs": -3},
        "logprobs, two answers": {"logprobs": True, "n": 2, "temperature": 1.0, "seed": 3},
        "echo": {"echo": True},
        "tools": {**tools, "max_tokens": 6, "ignore_eos": True},
        "tools, streamed": {**tools, "max_tokens": 6, "ignore_eos": True, "stream": True},
        "tools, auto": {**tools, "max_tokens": 6, "ignore_eos": True, "tool_choice": "auto"},
        "tools, none": {**tools, "max_tokens": 6, "ignore_eos": True, "tool_choice": "none"},
        "tools, required": {**tools, "tool_choice": "required"},
        "tools, required, streamed": {**tools, "tool_choice": "required", "stream": True},
        "tools, named": {**tools, "tool_choice": _NAMED},
        "tools, named, streamed": {**tools, "tool_choice": _NAMED, "stream": True},
        "tools, one that is not there": {**tools, "tool_choice": {"type": "function", "function": {"name": "no"}}},
        "tools, wrong choice": {**tools, "tool_choice": "perhaps"},
        "tool_choice without tools": {"tool_choice": "auto"},
        "tool_choice required without tools": {"tool_choice": "required"},
        "tools, an empty list": {"tools": []},
        "tools, one without a name": {"tools": [{"type": "function", "function": {}}]},
        "tools, a text": {"tools": "distance"},
        "parallel_tool_calls off": {**tools, "tool_choice": "required", "parallel_tool_calls": False},
        "no messages": {"messages": []},
        "messages null": {"messages": None},
        "messages, a text": {"messages": "balo"},
        "message without role": {"messages": [{"content": "balo"}]},
        "message without content": {"messages": [{"role": "user"}]},
        "message of a role that is not known": {"messages": [{"role": "nobody", "content": "balo"}]},
        "content in parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "balo"}]}]},
        "content with an image": {"messages": [{"role": "user", "content": [_IMAGE]}]},
        "content of an unknown part": {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
        "content a number": {"messages": [{"role": "user", "content": 5}]},
        "system message": {"messages": [{"role": "system", "content": "balo"}, *_HELLO]},
        "conversation": {"messages": [*_HELLO, {"role": "assistant", "content": "balo"}, *_HELLO]},
        "conversation with a tool's result": {
            "messages": [
                *_HELLO,
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "12 km"},
            ],
            **tools,
            "max_tokens": 6,
            "ignore_eos": True,
        },
        "assistant message alone": {"messages": [{"role": "assistant", "content": "balo"}]},
        "last message goes on": {
            "messages": [*_HELLO, {"role": "assistant", "content": "balo"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        "goes on and generates": {"continue_final_message": True, "add_generation_prompt": True},
        "no generation prompt": {"add_generation_prompt": False},
        "prompt too long": {"messages": [{"role": "user", "content": _LONG}]},
        "prompt too long, streamed": {"messages": [{"role": "user", "content": _LONG}], "stream": True},
        "chat_template of the request": {"chat_template": "{{ messages[0].content }}"},
        "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
        "documents": {"documents": [{"title": "balo", "text": "benu"}]},
        "reasoning_effort": {"reasoning_effort": "low"},
        "include_reasoning off": {"include_reasoning": False},
        "verbosity, store, metadata": {"store": True, "metadata": {"a": "b"}, "service_tier": "auto"},
    }
    for name, more in special.items():
        yield Ask(f"chat: {name}", "POST", path, _chat(more))
    long = {"max_tokens": 200, "stream": True}
    yield Ask("chat: aborted after three events", "POST", path, _chat(long), (), 3)
    yield Ask("chat: whole after an abort", "POST", path, _chat({}))


def _completion(more: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "balo benu", "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}


def _completions() -> Iterator[Ask]:
    path = "/v1/completions"
    for name, more in _BOTH.items():
        yield Ask(f"completion: {name}", "POST", path, _completion(more))
    special: dict[str, dict[str, Any]] = {
        "token ids": {"prompt": [500, 501, 502]},
        "two prompts": {"prompt": ["balo", "benu"]},
        "two prompts, streamed": {"prompt": ["balo", "benu"], **_USAGE},
        "two prompts of ids": {"prompt": [[500, 501], [502]]},
        "two prompts, two answers": {"prompt": ["balo", "benu"], "n": 2, "temperature": 1.0},
        "prompt null": {"prompt": None},
        "prompt empty": {"prompt": ""},
        "prompt, an empty list": {"prompt": []},
        "prompt, a number": {"prompt": 5},
        "prompt, an object": {"prompt": {"text": "balo"}},
        "prompt of texts and ids": {"prompt": ["balo", [500]]},
        "prompt, an id that is not there": {"prompt": [999999]},
        "prompt, an id below 0": {"prompt": [-5]},
        "prompt too long": {"prompt": _LONG},
        "prompt too long in ids": {"prompt": [500] * 600},
        "prompt and answer too long": {"prompt": [500] * 510},
        "prompt too long, streamed": {"prompt": _LONG, "stream": True},
        "logprobs": {"logprobs": 1},
        "logprobs 0": {"logprobs": 0},
        "logprobs, streamed": {"logprobs": 2, "stream": True},
        "logprobs too many": {"logprobs": 100},
        "logprobs below 0": {"logprobs": -1},
        "logprobs true": {"logprobs": True},
        "echo": {"echo": True},
        "echo, streamed": {"echo": True, "stream": True},
        "echo with logprobs": {"echo": True, "logprobs": 1},
        "echo of nothing more": {"echo": True, "max_tokens": 0},
        "suffix": {"suffix": "balo"},
        "best_of": {"best_of": 2, "n": 2, "temperature": 1.0},
        "best_of above n": {"best_of": 3},
        "no max_tokens": {"max_tokens": 16},
        "add_special_tokens off": {"add_special_tokens": False},
        "prompt_embeds": {"prompt_embeds": "AAAA", "prompt": None},
    }
    for name, more in special.items():
        yield Ask(f"completion: {name}", "POST", path, _completion(more))
    yield Ask(
        "completion: aborted after two events", "POST", path, _completion({"max_tokens": 200, "stream": True}), (), 2
    )


def _responses() -> Iterator[Ask]:
    path = "/v1/responses"
    call = {"type": "function_call", "call_id": "call_1", "name": "distance", "arguments": "{}"}
    tool = {"type": "function", "name": "distance", "parameters": _SCHEMA}
    bodies: dict[str, dict[str, Any]] = {
        "whole": {},
        "streamed": {"stream": True},
        "not stored": {"store": False},
        "instructions": {"instructions": "balo"},
        "input in items": {"input": [{"role": "user", "content": "balo"}]},
        "input in parts": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "balo"}]}]},
        "input of typed messages": {"input": [{"type": "message", "role": "user", "content": "balo"}]},
        "input with a call": {
            "input": [
                {"role": "user", "content": "balo"},
                call,
                {"type": "function_call_output", "call_id": "call_1", "output": "12"},
            ]
        },
        "input empty": {"input": ""},
        "input, an empty list": {"input": []},
        "input missing": {"input": None},
        "input too long": {"input": _LONG},
        "input too long, streamed": {"input": _LONG, "stream": True},
        "unknown model": {"model": "nothing"},
        "model missing": {"model": None},
        "background": {"background": True},
        "background, not stored": {"background": True, "store": False},
        "previous response that is not there": {"previous_response_id": "resp_nothing"},
        "previous response of another form": {"previous_response_id": "nothing"},
        "tools": {"tools": [tool]},
        "tools, named": {
            "tools": [tool],
            "tool_choice": {"type": "function", "name": "distance"},
            "max_output_tokens": 200,
            "temperature": 1.0,
        },
        "tools, named, streamed": {
            "tools": [tool],
            "tool_choice": {"type": "function", "name": "distance"},
            "max_output_tokens": 200,
            "temperature": 1.0,
            "stream": True,
        },
        "json_schema": {
            "text": {"format": {"type": "json_schema", "name": "d", "schema": _SCHEMA}},
            "max_output_tokens": 40,
        },
        "max_output_tokens 0": {"max_output_tokens": 0},
        "max_output_tokens too many": {"max_output_tokens": 5000},
        "max_output_tokens as text": {"max_output_tokens": "many"},
        "temperature below 0": {"temperature": -1},
        "top_logprobs": {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
        "truncation auto": {"truncation": "auto"},
        "reasoning": {"reasoning": {"effort": "low"}},
        "metadata, user": {"metadata": {"a": "b"}, "user": "somebody"},
        "field that nobody knows": {"no_such_field": 1},
    }
    for name, more in bodies.items():
        body = {"model": MODEL, "input": "balo benu", "max_output_tokens": 6, "temperature": 0, **more}
        yield Ask(f"responses: {name}", "POST", path, body)
    yield Ask("responses: one that is not there", "GET", "/v1/responses/resp_nothing")
    yield Ask("responses: an id of another form", "GET", "/v1/responses/nothing")
    yield Ask("responses: cancel one that is not there", "POST", "/v1/responses/resp_nothing/cancel")
    yield Ask("responses: cancel an id of another form", "POST", "/v1/responses/nothing/cancel")
    long = {"model": MODEL, "input": "balo", "max_output_tokens": 200, "stream": True}
    yield Ask("responses: aborted after five events", "POST", path, long, (), 5)


def _messages() -> Iterator[Ask]:
    tool = {"name": "distance", "description": "How far.", "input_schema": _SCHEMA}
    bodies: dict[str, dict[str, Any]] = {
        "whole": {},
        "streamed": {"stream": True},
        "system": {"system": "balo"},
        "system in parts": {"system": [{"type": "text", "text": "balo"}]},
        "content in parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "balo"}]}]},
        "conversation": {"messages": [*_HELLO, {"role": "assistant", "content": "balo"}, *_HELLO]},
        "stop_sequences": {"stop_sequences": ["zzzzzz"]},
        "tools": {"tools": [tool]},
        "tools, any": {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 230},
        "tools, named, streamed": {
            "tools": [tool],
            "tool_choice": {"type": "tool", "name": "distance"},
            "max_tokens": 200,
            "stream": True,
        },
        "tools, named": {"tools": [tool], "tool_choice": {"type": "tool", "name": "distance"}, "max_tokens": 200},
        "tools, auto": {"tools": [tool], "tool_choice": {"type": "auto"}},
        "a tool's result": {
            "messages": [
                *_HELLO,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "distance", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "12 km"}]},
            ],
            "tools": [tool],
        },
        "max_tokens missing": {"max_tokens": None},
        "max_tokens 0": {"max_tokens": 0},
        "max_tokens beyond the context": {"max_tokens": 5000},
        "no messages": {"messages": []},
        "messages null": {"messages": None},
        "message of a role that is not known": {"messages": [{"role": "nobody", "content": "balo"}]},
        "prompt too long": {"messages": [{"role": "user", "content": _LONG}]},
        "prompt too long, streamed": {"messages": [{"role": "user", "content": _LONG}], "stream": True},
        "unknown model": {"model": "nothing"},
        "model missing": {"model": None},
        "temperature below 0": {"temperature": -1},
        "top_k, top_p, metadata": {"top_k": 5, "top_p": 0.9, "metadata": {"user_id": "a"}},
        "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    }
    headers = (("anthropic-version", "2023-06-01"),)
    for name, more in bodies.items():
        random = 1.0 if (more.get("max_tokens") or 0) > 100 else 0  # greedy, a random model ends no JSON
        body = {"model": MODEL, "messages": _HELLO, "max_tokens": 6, "temperature": random, **more}
        yield Ask(f"messages: {name}", "POST", "/v1/messages", body, headers)
    long = {"model": MODEL, "messages": _HELLO, "max_tokens": 200, "stream": True}
    yield Ask("messages: aborted after four events", "POST", "/v1/messages", long, headers, 4)
    counts: dict[str, dict[str, Any]] = {
        "whole": {},
        "with tools": {"tools": [tool]},
        "with system": {"system": "balo"},
        "no messages": {"messages": None},
        "unknown model": {"model": "nothing"},
    }
    for name, more in counts.items():
        body = {"model": MODEL, "messages": _HELLO, **more}
        yield Ask(f"count_tokens: {name}", "POST", "/v1/messages/count_tokens", body, headers)


def _tokens() -> Iterator[Ask]:
    texts: dict[str, dict[str, Any]] = {
        "a text": {"prompt": "balo benu"},
        "an empty text": {"prompt": ""},
        "a conversation": {"messages": _HELLO},
        "a conversation with tools": {"messages": _HELLO, "tools": [_TOOL]},
        "texts of tokens": {"prompt": "balo benu", "return_token_strs": True},
        "without special tokens": {"prompt": "balo", "add_special_tokens": False},
        "longer than the context": {"prompt": _LONG},
        "neither": {},
        "both": {"prompt": "balo", "messages": _HELLO},
        "no generation prompt": {"messages": _HELLO, "add_generation_prompt": False},
        "goes on and generates": {"messages": _HELLO, "continue_final_message": True, "add_generation_prompt": True},
        "a list": {"prompt": ["balo"]},
        "unknown model": {"prompt": "balo", "model": "nothing"},
        "model missing": {"prompt": "balo", "model": None},
    }
    for name, more in texts.items():
        yield Ask(f"tokenize: {name}", "POST", "/tokenize", {"model": MODEL, **more})
    ids: dict[str, dict[str, Any]] = {
        "ids": {"tokens": [500, 501]},
        "none": {"tokens": []},
        "missing": {},
        "texts": {"tokens": ["a"]},
        "below 0": {"tokens": [-1]},
        "not in the vocabulary": {"tokens": [999999]},
        "unknown model": {"tokens": [500], "model": "nothing"},
    }
    for name, more in ids.items():
        yield Ask(f"detokenize: {name}", "POST", "/detokenize", {"model": MODEL, **more})


def _others() -> Iterator[Ask]:
    batch = "/v1/chat/completions/batch"
    two = {"model": MODEL, "messages": [_HELLO, _HELLO], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    bodies: dict[str, dict[str, Any]] = {
        "two conversations": {},
        "one conversation": {"messages": [_HELLO]},
        "streamed": {"stream": True},
        "no conversations": {"messages": []},
        "a conversation without messages": {"messages": [[]]},
        "one that is no list": {"messages": _HELLO},
        "two answers": {"n": 2, "temperature": 1.0},
        "logprobs": {"logprobs": True, "top_logprobs": 1},
        "tools": {"tools": [_TOOL]},
        "json_schema": {
            "max_tokens": 40,
            "ignore_eos": False,
            "response_format": {"type": "json_schema", "json_schema": {"name": "d", "schema": _SCHEMA}},
        },
        "too long": {"messages": [_HELLO, [{"role": "user", "content": _LONG}]]},
        "unknown model": {"model": "nothing"},
    }
    for name, more in bodies.items():
        yield Ask(f"batch: {name}", "POST", batch, {**two, **more})
    scoring: dict[str, dict[str, Any]] = {
        "whole": {},
        "items of ids": {"query": [500], "items": [[501], [502]]},
        "softmax": {"apply_softmax": True},
        "item first": {"item_first": True},
        "no items": {"items": []},
        "items missing": {"items": None},
        "label_token_ids missing": {"label_token_ids": None},
        "label_token_ids none": {"label_token_ids": []},
        "label that is not there": {"label_token_ids": [999999]},
        "unknown model": {"model": "nothing"},
        "too long": {"query": _LONG},
    }
    for name, more in scoring.items():
        body = {"model": MODEL, "query": "balo", "items": ["benu", "balo"], "label_token_ids": [500, 501], **more}
        yield Ask(f"scoring: {name}", "POST", "/generative_scoring", body)
    invoked: dict[str, Any] = {
        "a chat": _chat({}),
        "a chat, streamed": _chat({"stream": True}),
        "a completion": _completion({}),
        "a completion, streamed": _completion({"stream": True}),
        "a prompt alone": {"model": MODEL, "prompt": "balo", "ignore_eos": True},
        "nothing": {},
        "a list": [1],
        "no JSON": "{",
        "unknown model": _chat({"model": "nothing"}),
    }
    for name, body in invoked.items():
        yield Ask(f"invocations: {name}", "POST", "/invocations", body)
    yield Ask("elastic: is it scaling", "POST", "/is_scaling_elastic_ep")
    elastic: dict[str, Any] = {
        "nothing": {},
        "a text": {"new_data_parallel_size": "two"},
        "below 0": {"new_data_parallel_size": -1},
    }
    for name, body in elastic.items():
        yield Ask(f"elastic: scale to {name}", "POST", "/scale_elastic_ep", body)
    yield Ask("elastic: no JSON", "POST", "/scale_elastic_ep", "{")


def _wrong() -> Iterator[Ask]:
    posts = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize")
    for path in posts:
        yield Ask(f"wrong: no JSON at {path}", "POST", path, "{")
        yield Ask(f"wrong: empty body at {path}", "POST", path, "")
        yield Ask(f"wrong: a list at {path}", "POST", path, [1])
        yield Ask(f"wrong: GET {path}", "GET", path)
    plain = (("content-type", "text/plain"),)
    for path in posts[:2]:
        yield Ask(f"wrong: text/plain at {path}", "POST", path, '{"model": "surface"}', plain)
        yield Ask(f"wrong: an empty object at {path}", "POST", path, {})
        yield Ask(f"wrong: DELETE {path}", "DELETE", path)
        yield Ask(f"wrong: OPTIONS {path}", "OPTIONS", path)
    for path in ("/health", "/version", "/load", "/v1/models", "/metrics", "/openapi.json"):
        yield Ask(f"wrong: POST {path}", "POST", path, {})
    yield Ask("wrong: HEAD /health", "HEAD", "/health")
