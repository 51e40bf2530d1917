"""Bodies of requests: what is read of them, what is refused in words, and what is ignored, for no time depends on it.

Ignored: temperature, top_p, top_k, min_p, seeds' effect on sampling, penalties, logit_bias, metadata, store, and fields
that nobody knows, as vLLM ignores them. What sampling costs is the scenario's `sampling`.

Refused, because their time is not modelled or their answer could not be given: logprobs, beam search, guided decoding
(response formats but text, tool choices that force a call), echo, suffix, contents that are no text.
"""

__all__ = ["ChatBody", "CompletionBody", "DetokenizeBody", "GenerationBody", "StreamOptions", "TokenizeBody"]

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from perfmodel.serve.tokens import ChatMessage, Wanted

_HIGHEST_ID = 2**63 - 1
_HIGHEST_SEED = 2**63 - 1
_MOST_STOPS = 64
_MOST_COMPLETED = 16  # tokens of a completion that asks for no number: OpenAI's API, vLLM's and SGLang's servers

TokenId = Annotated[int, Field(ge=0, le=_HIGHEST_ID)]
# The first wrong item of a list is named, and no others: of millions each would take a hundred bytes to say so.
TokenIdList = Annotated[list[TokenId], Field(fail_fast=True)]
TextList = Annotated[list[str], Field(fail_fast=True)]


class _Body(BaseModel):
    """Fields that are not named here are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    model: str | None = None


class StreamOptions(BaseModel):
    """include_usage: a last chunk with the counts of tokens; continuous_usage_stats: each chunk has them."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(_Body):
    """What both kinds of generation take."""

    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    n: int = Field(default=1, ge=1)
    best_of: int | None = None
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
    use_beam_search: bool = False
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _can_be_answered(self) -> "GenerationBody":
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError(f"best_of: found {self.best_of}, allowed as many as n ({self.n}); leave it out")
        if self.use_beam_search:
            raise ValueError("use_beam_search: beams are not modelled; leave it out")
        if self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: what they cost is not modelled; leave it out")
        kind = (self.response_format or {}).get("type", "text")
        if kind != "text":
            raise ValueError(f"response_format: found {str(kind)[:40]!r}, allowed: text; nothing guides decoding here")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: allowed only with stream: true")
        stops = self.stops
        if len(stops) > _MOST_STOPS or not all(stops):
            raise ValueError(f"stop: allowed are {_MOST_STOPS} texts at most, none of them empty")
        if self.most_tokens is not None and self.min_tokens > self.most_tokens:
            raise ValueError(f"min_tokens: found {self.min_tokens}, allowed up to max_tokens ({self.most_tokens})")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of an answer; None where the request does not say."""
        return self.max_tokens

    def wanted(self) -> Wanted:
        """What it says of its answers."""
        return Wanted(
            self.most_tokens,
            None,
            self.min_tokens,
            self.ignore_eos,
            self.stops,
            frozenset(self.stop_token_ids or ()),
            self.include_stop_str_in_output,
            self.seed,
        )


class CompletionBody(GenerationBody):
    """/v1/completions: one prompt or several, as texts or as token ids."""

    prompt: str | TextList | TokenIdList | Annotated[list[TokenIdList], Field(fail_fast=True)]
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None

    @model_validator(mode="after")
    def _is_plain(self) -> "CompletionBody":
        for name in ("logprobs", "echo", "suffix"):
            if getattr(self, name) not in (None, False):
                raise ValueError(f"{name}: not modelled here; leave it out")
        if not self.prompts or not all(len(prompt) for prompt in self.prompts):
            raise ValueError("prompt: found none, or an empty one; give at least a token")
        return self

    def wanted(self) -> Wanted:
        """What it says of its answers, which go on with the prompt."""
        return super().wanted()._replace(most_unless_asked=_MOST_COMPLETED, is_continued=True)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each prompt by itself."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if given and isinstance(given[0], int):
            return [given]
        return given  # type: ignore[return-value]  # the rest are lists of prompts


class _MessageBody(BaseModel):
    """A message; what it says beside texts is refused."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: str
    content: str | list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _is_text(self) -> "_MessageBody":
        for part in self.content if isinstance(self.content, list) else ():
            if part.get("type", "text") not in ("text", "refusal") or not isinstance(_part_text(part), str):
                kind = str(part.get("type"))[:40]
                raise ValueError(f"content: found a part of type {kind!r}, allowed: text; its tokens are not modelled")
        return self

    @property
    def text(self) -> str:
        """All that it says, tool calls included."""
        parts = self.content if isinstance(self.content, list) else [{"text": self.content or ""}]
        said = "".join(_part_text(part) for part in parts)
        calls = (self.model_extra or {}).get("tool_calls")
        return f"{said}{calls}" if calls else said


def _part_text(part: dict[str, Any]) -> Any:
    return part.get("text", part.get("refusal"))


class ChatBody(GenerationBody):
    """/v1/chat/completions. Tools are part of the prompt, which grows by their text; answers call none."""

    messages: Annotated[list[_MessageBody], Field(fail_fast=True)] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _is_plain(self) -> "ChatBody":
        if self.logprobs or self.top_logprobs:
            raise ValueError("logprobs: what they cost is not modelled; leave them out")
        if self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice: guided decoding is not modelled, so no call can be forced; use auto or none")
        return self

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of an answer; the newer name goes first."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def conversation(self) -> list[ChatMessage]:
        """The messages; tools are the first."""
        tools = [ChatMessage("tool", str(self.tools))] if self.tools else []
        return tools + [ChatMessage(message.role, message.text) for message in self.messages]


class TokenizeBody(_Body):
    """/tokenize: a text, or the messages of a conversation."""

    prompt: str | None = None
    messages: Annotated[list[_MessageBody], Field(fail_fast=True)] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @property
    def conversation(self) -> list[ChatMessage]:
        """The messages."""
        return [ChatMessage(message.role, message.text) for message in self.messages or ()]

    @model_validator(mode="after")
    def _has_one(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt, messages: give one of them")
        return self


class DetokenizeBody(_Body):
    """/detokenize: token ids."""

    tokens: TokenIdList
