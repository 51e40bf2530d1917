"""Answers that say what is wrong, in the shapes that vLLM's server gives them, and clients read.

    {"error": {"message": ..., "type": ..., "param": ..., "code": 400}}    OpenAI's
    {"type": "error", "error": {"type": ..., "message": ...}}              Anthropic's, of /v1/messages
    {"detail": ...}                                                        of a path or method that there is not

A body that cannot be read, or has a wrong field, is a 400 there, never a 422: "Bad Request" where JSON or a type is
wrong, with the field's place in the body as `param`; "BadRequestError" where a value is, with the field's name or none.
"""

__all__ = ["ErrorStyle", "FieldError", "HttpError", "error_body", "in_style", "not_a_model", "send_error", "unreadable"]

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Literal

from pydantic import ValidationError
from starlette.types import Send

ErrorStyle = Literal["openai", "anthropic", "detail"]

_LONGEST_VALUE = 80  # characters of what was found
# Fields whose ranges vLLM checks after their types: a wrong one is a "BadRequestError", with these names or none.
_CHECKED_LATE = {
    **dict.fromkeys(
        ("n", "min_tokens", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    ),
    **{name: name for name in ("temperature", "top_p", "cache_salt", "allowed_token_ids", "prompt_logprobs")},
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_tokens"),
}
_BOUNDS = {"greater_than", "greater_than_equal", "less_than_equal", "too_short", "string_too_short"}
_MOST_SAID = 3  # of the mistakes in a body


class FieldError(ValueError):
    """A value that a request may not have.

    param: the field, where vLLM's server names it; its place in the body (`body.prompt`) where that finds it first
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class HttpError(Exception):
    """An answer of `status` that says `message`.

    kind:    of the error, by its name; else the status in words
    param:   the field that is to be changed
    headers: beside those of every answer
    style:   the shape of its body
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        style: ErrorStyle = "openai",
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.style = status, message, param, style
        self.kind = kind or HTTPStatus(status).phrase
        self.headers = dict(headers or {})


def error_body(error: HttpError, style: ErrorStyle | None = None) -> bytes:
    """What is sent of `error`; style: in place of its own."""
    style = style or error.style
    if style == "detail":
        return json.dumps({"detail": error.message}).encode()
    if style == "anthropic":
        return json.dumps({"type": "error", "error": {"type": error.kind, "message": error.message}}).encode()
    fields = {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}
    return json.dumps({"error": fields}).encode()


async def send_error(send: Send, error: HttpError) -> None:
    """Answer with `error`."""
    body = error_body(error)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


@contextmanager
def in_style(style: ErrorStyle) -> Iterator[None]:
    """Errors raised within have this style, but for those of bodies that cannot be read."""
    try:
        yield
    except HttpError as error:
        if error.kind != HTTPStatus(400).phrase:
            error.style = style
        raise


def not_a_model(name: str) -> HttpError:
    """There is no model `name` here."""
    return HttpError(404, f"The model `{name[:_LONGEST_VALUE]}` does not exist.", "NotFoundError", "model")


def unreadable(error: ValidationError, data: bytes = b"") -> HttpError:
    """A body with wrong fields: which, and what was expected there. data: the body, to say where its JSON ends"""
    errors = error.errors(include_url=False)
    messages = []
    for one in errors[:_MOST_SAID]:
        names = ".".join(str(part) for part in one["loc"])
        if isinstance(one.get("ctx", {}).get("error"), FieldError):
            messages.append(str(one["ctx"]["error"]))
        else:
            start = f"{names}: got {repr(one['input'])[:_LONGEST_VALUE]}; " if names else "body: "
            messages.append(f"{start}{one['msg']}")
    more = f" (and {len(errors) - _MOST_SAID} more)" if len(errors) > _MOST_SAID else ""
    name = str(errors[0]["loc"][0]) if len(errors[0]["loc"]) == 1 else ""
    if name in _CHECKED_LATE and errors[0]["type"] in _BOUNDS:
        return HttpError(400, "; ".join(messages) + more, "BadRequestError", _CHECKED_LATE[name])
    cause = errors[0].get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        kind = None if (cause.param or "").startswith("body.") else "BadRequestError"
        return HttpError(400, "; ".join(messages) + more, kind, cause.param)
    # Of a field that may be one of several kinds, the kind that is right for longest.
    places = [_field_path(one["loc"]) for one in errors if one["loc"][:1] == errors[0]["loc"][:1]]
    place = [_json_end(data)] if errors[0]["type"] == "json_invalid" else max(places, key=len)
    return HttpError(400, "; ".join(messages) + more, param=".".join(["body", *filter(None, place)]))


def _json_end(data: bytes) -> str:
    """The character at which `data` stops being JSON; none of an empty body."""
    try:
        json.loads(data)
    except json.JSONDecodeError as error:
        return str(error.pos) if data else ""
    except (ValueError, RecursionError):  # no UTF-8, too deep, or a number of thousands of digits
        pass
    return ""


def _field_path(place: tuple[int | str, ...]) -> list[str]:
    """The names of fields and numbers of items on the way to a field, without the kinds that pydantic tries there."""
    return [
        str(part) for part in place if isinstance(part, int) or (part.isidentifier() and part not in ("str", "int"))
    ]
