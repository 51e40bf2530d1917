"""Bodies of OpenAI's requests: what is read of them, what is refused in words, and what is ignored.

Ignored, as no time depends on them: temperature, top_p, top_k, min_p, penalties, logit_bias, bad_words, metadata,
store, and fields that nobody knows, as vLLM ignores them. What sampling costs is the scenario's `sampling`. Values
beyond vLLM's ranges are refused as there.

Rejected, as their time is unmodelled or they cannot be answered: beam search, grammars, non-text contents."""

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from perfmodel.serve.guided import Guide
from perfmodel.serve.http.reading import FieldError
from perfmodel.serve.tokens import ChatMessage, GenerationLimits

_HIGHEST_ID = 2**63 - 1
_HIGHEST_SEED = 2**63 - 1
_MAX_STOPS = 64
_MAX_COMPLETED = 16  # tokens of a completion that asks for no number: OpenAI's API, vLLM's and SGLang's servers
_MAX_LOGPROBS = 20  # alternatives per token: vLLM's --max-logprobs

TokenId = Annotated[int, Field(ge=0, le=_HIGHEST_ID)]
# The first wrong item of a list is named, and no others: of millions each would take a hundred bytes to say so.
TokenIdList = Annotated[list[TokenId], Field(fail_fast=True)]
TextList = Annotated[list[str], Field(fail_fast=True)]


def _refuse(*checks: tuple[Any, str, str | None]) -> None:
    """Raises FieldError for the first of the (what is wrong, message, param) that holds."""
    for is_wrong, message, param in checks:
        if is_wrong:
            raise FieldError(message, param)


class RequestBody(BaseModel):
    """Fields that are not named here are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    model: str | None = None


class StreamOptions(BaseModel):
    """include_usage: a last chunk with the counts of tokens; continuous_usage_stats: each chunk has them."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class _ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None


class CalledTool(NamedTuple):
    """The tool that an answer calls. is_forced: by its name, where any would do otherwise"""

    name: str
    schema: Any
    is_forced: bool


class GenerationBody(RequestBody):
    """What both kinds of generation take."""

    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    n: int = Field(default=1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | TextList | None = None
    stop_token_ids: TokenIdList | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = Field(default=None, ge=-_HIGHEST_SEED - 1, le=_HIGHEST_SEED)
    user: str | None = None
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(default=None, min_length=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0)
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = Field(default=None, min_length=1)
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    use_beam_search: bool = False
    prompt_logprobs: int | None = Field(default=None, ge=-1, le=_MAX_LOGPROBS)
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    echo: bool = False
    response_format: _ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None  # until vLLM 0.12; `structured_outputs` since
    guided_choice: list[str] | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _can_be_answered(self) -> "GenerationBody":
        is_greedy, most, least = self.temperature == 0 and not self.use_beam_search, self.most_tokens, self.min_tokens
        same = f"n: got {self.n} with temperature 0, whose answers are all the same; expected 1"
        with_stream = "prompt_logprobs: not in a stream; leave it or stream out"
        options = "stream_options: only with stream: true"
        stops = f"stop: expected at most {_MAX_STOPS} texts, none of them empty"
        fewer = f"min_tokens: got {least}; expected at most max_tokens ({most})"
        _refuse(
            (self.n > 1 and is_greedy, same, None),
            (self.use_beam_search, "use_beam_search: beams are not modelled; leave it out", None),
            (self.stream and self.prompt_logprobs is not None, with_stream, "prompt_logprobs"),
            (self.stream_options is not None and not self.stream, options, "stream_options"),
            (len(self.stops) > _MAX_STOPS or not all(self.stops), stops, None),
            (most is not None and least > most, fewer, None),
        )
        try:
            if (guide := self.guide) is not None:
                guide.text(0)
        except FieldError:
            raise
        except (ValueError, RecursionError) as error:
            raise FieldError(f"structured_outputs: {error}") from None
        return self

    @property
    def guide(self) -> Guide | None:
        """The shape that the answer is to have. Raises FieldError for one that cannot be filled."""
        if self.structured_outputs is not None:
            return _structured(self.structured_outputs)
        older = {name: getattr(self, f"guided_{name}") for name in ("json", "choice", "regex", "grammar")}
        if any(value is not None for value in older.values()):
            return _structured({name: value for name, value in older.items() if value is not None})
        form = self.response_format
        if form is None or form.type == "text":
            return None
        tags = "response_format: structural tags are not modelled; use json_schema"
        schema = (form.json_schema or {}).get("schema") if form.type == "json_schema" else {}
        _refuse(
            (form.type == "structural_tag", tags, "response_format"),
            (schema is None, "response_format: json_schema has no schema; give one", "response_format"),
        )
        return Guide("json", _parsed(schema))

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def options(self) -> StreamOptions:
        """What its stream has beside tokens."""
        return self.stream_options or StreamOptions()

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of an answer; None where the request does not say."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives each token's logprobs have; None: there are no logprobs."""
        return None

    def wanted(self) -> GenerationLimits:
        """What it says of its answers."""
        return GenerationLimits(
            self.most_tokens,
            None,
            self.min_tokens,
            self.ignore_eos,
            self.stops,
            frozenset(self.stop_token_ids or ()),
            self.include_stop_str_in_output,
            self.seed,
            guide=self.guide,
        )


def _structured(given: dict[str, Any]) -> Guide:
    """The shape that `structured_outputs` asks for."""
    names = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    kinds = [name for name in names if given.get(name) not in (None, False)]
    if len(kinds) != 1:
        expected = "expected one of json, regex, choice, json_object"
        raise FieldError(f"structured_outputs: got {', '.join(kinds) or 'none'}; {expected}")
    (kind,) = kinds
    if kind in ("json", "json_object"):
        return Guide("json", _parsed(given["json"]) if kind == "json" else {})
    if kind == "choice" and isinstance(given["choice"], list):
        return Guide("choice", given["choice"])
    if kind == "regex":
        return Guide("regex", given["regex"])
    raise FieldError(f"structured_outputs: answers by a {kind} are not made here; use json, regex or choice")


def _parsed(schema: Any) -> Any:
    return json.loads(schema) if isinstance(schema, str) else schema


class CompletionBody(GenerationBody):
    """/v1/completions: one prompt or several, as texts or as token ids."""

    prompt: str | TokenIdList | TextList | Annotated[list[TokenIdList], Field(fail_fast=True)] | None = None
    logprobs: int | None = None
    suffix: str | None = None
    prompt_embeds: Any = None

    @model_validator(mode="after")
    def _is_plain(self) -> "CompletionBody":
        count, prompts, place = self.logprobs, self.prompts, None if self.prompt == [] else "prompt"
        is_beyond = count is not None and not 0 <= count <= _MAX_LOGPROBS
        _refuse(
            (self.prompt_embeds is not None, "prompt_embeds: not modelled here; give a prompt", "prompt_embeds"),
            (self.suffix, "suffix: not modelled here, as in vLLM; leave it out", None),
            (is_beyond, f"logprobs: got {count}; expected 0 to {_MAX_LOGPROBS}", "logprobs"),
            (not prompts or not all(prompts), "prompt: got none, or an empty one; give at least a token", place),
        )
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def wanted(self) -> GenerationLimits:
        return super().wanted()._replace(default_max_tokens=_MAX_COMPLETED, is_continued=True)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each prompt by itself."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if given and isinstance(given[0], int):
            return [given]
        return given or []  # type: ignore[return-value]  # the rest are lists of prompts


class _MessageBody(BaseModel):
    """A message; what it says beside texts is refused."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: str
    content: str | list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _is_text(self) -> "_MessageBody":
        for part in self.content if isinstance(self.content, list) else ():
            if part.get("type", "text") not in _TEXT_PARTS or not isinstance(_part_text(part), str):
                kind = str(part.get("type"))[:40]
                raise FieldError(f"content: got a part of type {kind!r}; expected text: its tokens are not modelled")
        return self

    @property
    def text(self) -> str:
        """All that it says, tool calls included."""
        parts = self.content if isinstance(self.content, list) else [{"text": self.content or ""}]
        calls = (self.model_extra or {}).get("tool_calls")
        return "".join(_part_text(part) for part in parts) + (str(calls) if calls else "")


_TEXT_PARTS = ("text", "refusal", "input_text", "output_text")


def _part_text(part: dict[str, Any]) -> Any:
    return part.get("text", part.get("refusal"))


class _Function(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    name: str
    parameters: dict[str, Any] | None = None


class _Tool(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    type: str = "function"
    function: _Function


def _conversation_of(messages: Iterable[_MessageBody], tools: Iterable[_Tool] | None) -> list[ChatMessage]:
    """A conversation, of which the tools are the first message."""
    texts = [ChatMessage("tool", json.dumps([tool.model_dump() for tool in tools]))] if tools else []
    return texts + [ChatMessage(message.role, message.text) for message in messages]


class _TurnBody(RequestBody):
    """The turn after a conversation: a new message, or the rest of the last."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _has_one_turn(self) -> "_TurnBody":
        if self.continue_final_message and self.add_generation_prompt:
            raise FieldError("continue_final_message: not with add_generation_prompt, which begins another message")
        return self


class _ConversationBody(GenerationBody, _TurnBody):
    """What chats take in addition to their messages. Tools are part of the prompt, which grows by their text."""

    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    chat_template: str | None = None

    @model_validator(mode="after")
    def _is_plain(self) -> "_ConversationBody":
        count, choice = self.top_logprobs, self.tool_choice
        names = [tool.function.name for tool in self.tools or ()]
        is_right = choice in (None, "none") or (names and (choice in ("auto", "required") or _named(choice) in names))
        expected = "none, auto, required, or one of the tools" if names else "no tool_choice, as there are no tools"
        range_, most = "expected 0 or more, and logprobs: true", f"got {count}; expected at most {_MAX_LOGPROBS}"
        template = "chat_template: a request's own is not trusted, as in vLLM by default; leave it out"
        _refuse(
            (count is not None and (count < 0 or not self.logprobs), f"top_logprobs: {range_}", "top_logprobs"),
            ((count or 0) > _MAX_LOGPROBS, f"top_logprobs: {most}", "logprobs"),
            (self.chat_template is not None, template, None),
            (self.tools == [], "tools: got an empty list; leave it out", "tools"),
            (not is_right, f"tool_choice: got {str(choice)[:80]!r}; expected {expected}", "tool_choice"),
        )
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def called(self) -> CalledTool | None:
        """The tool that the answer has to call, if any: the first where any will do."""
        if self.tool_choice in (None, "none", "auto") or not self.tools:
            return None
        is_forced = isinstance(self.tool_choice, dict)
        name = _named(self.tool_choice) if is_forced else self.tools[0].function.name
        functions = (tool.function for tool in self.tools if tool.function.name == name)
        return next((CalledTool(one.name, one.parameters or {}, is_forced) for one in functions), None)

    @property
    def guide(self) -> Guide | None:
        # A tool's arguments go first.
        return super().guide if self.called is None else Guide("json", self.called.schema)


def _named(choice: Any) -> str | None:
    """The tool that `tool_choice` names."""
    function = choice.get("function") if isinstance(choice, dict) else None
    return function.get("name") if isinstance(function, dict) else None


class ChatBody(_ConversationBody):
    """/v1/chat/completions."""

    messages: Annotated[list[_MessageBody], Field(fail_fast=True)] | None

    @model_validator(mode="after")
    def _has_messages(self) -> "ChatBody":
        if not self.messages:
            raise FieldError("messages: got none; give at least one")
        return self

    @property
    def role(self) -> str:
        """The role of whoever answers."""
        return "assistant" if self.add_generation_prompt else (self.messages or [])[-1].role

    @property
    def conversation(self) -> list[ChatMessage]:
        return _conversation_of(self.messages or (), self.tools)


class BatchBody(_ConversationBody):
    """/v1/chat/completions/batch: several conversations, each with one answer."""

    messages: Annotated[list[Annotated[list[_MessageBody], Field(min_length=1)]], Field(fail_fast=True, min_length=1)]

    @model_validator(mode="after")
    def _has_one_answer(self) -> "BatchBody":
        if self.n != 1:
            raise FieldError(f"n: got {self.n}; expected 1 of each conversation", "n")
        return self

    @property
    def conversations(self) -> list[list[ChatMessage]]:
        """The messages of each conversation."""
        return [_conversation_of(messages, self.tools) for messages in self.messages]


class TokenizeBody(_TurnBody):
    """/tokenize: a text, or the messages of a conversation."""

    prompt: str | None = None
    messages: Annotated[list[_MessageBody], Field(fail_fast=True)] | None = None
    tools: list[_Tool] | None = None
    return_token_strs: bool = False

    @property
    def conversation(self) -> list[ChatMessage]:
        return _conversation_of(self.messages or (), self.tools)

    @model_validator(mode="after")
    def _has_one(self) -> "TokenizeBody":
        if self.prompt is None and self.messages is None:
            raise FieldError("prompt, messages: got neither; give one of them", "body.prompt")
        return self


class DetokenizeBody(RequestBody):
    """/detokenize: token ids."""

    tokens: TokenIdList


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

    def wanted(self) -> GenerationLimits:
        """As of a `GenerationBody`: one token of each."""
        return GenerationLimits(max_tokens=1, ignore_eos=True)


class EmbeddingBody(GenerationBody):
    """/v1/embeddings: one prompt or several, as texts or as token ids."""

    input: str | TokenIdList | TextList | Annotated[list[TokenIdList], Field(fail_fast=True)] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> "EmbeddingBody":
        is_none = not self.prompts or not all(self.prompts)
        _refuse(
            (is_none, "input: got none, or an empty one; give at least a token", "input"),
            (self.dimensions is not None, "dimensions: not modelled here; leave it out", "dimensions"),
        )
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each prompt by itself."""
        return CompletionBody.model_construct(prompt=self.input).prompts

    def wanted(self) -> GenerationLimits:
        """As of a `GenerationBody`: what is returned of each counts as one token."""
        return GenerationLimits(max_tokens=1, ignore_eos=True, is_vector=True)
