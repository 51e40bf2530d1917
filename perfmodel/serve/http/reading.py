"""Requests on their way in: who may ask, bodies bounded in bytes and in time, then checked; and what is answered to
those that are wrong, in the shapes that vLLM's server gives its errors, and clients read.

    {"error": {"message": ..., "type": ..., "param": ..., "code": 400}}    OpenAI's
    {"type": "error", "error": {"type": ..., "message": ...}}              Anthropic's, of /v1/messages
    {"detail": ...}                                                        of a path or method that there is not

A body that cannot be read, or has a wrong field, is a 400 there, never a 422: "Bad Request" where JSON or a type is
wrong, with the field's place in the body as `param`; "BadRequestError" where a value is, with the field's name or none.
"""

import asyncio
import hmac
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from http import HTTPStatus
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from perfmodel.listening import HostCheck, is_cross_site
from perfmodel.serve.paced_clock import PacedClock
from perfmodel.serve.settings import ServerSettings

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
_MAX_SAID = 3  # of the mistakes in a body


class FieldError(ValueError):
    """A value that a request may not have.

    param: the field, where vLLM's server names it; its place in the body (`body.prompt`) where that finds it first"""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class HttpError(Exception):
    """An answer of `status` that says `message`.

    kind:    of the error, by its name; else the status in words
    param:   the field that is to be changed
    headers: beside those of every answer
    style:   the shape of its body"""

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


def _unreadable(error: ValidationError, data: bytes) -> HttpError:
    """A body with wrong fields: which, and what was expected there. data: the body, to say where its JSON ends"""
    errors = error.errors(include_url=False)
    message = "; ".join(map(_mistake, errors[:_MAX_SAID]))
    message += f" (and {len(errors) - _MAX_SAID} more)" if len(errors) > _MAX_SAID else ""
    first, place, cause = errors[0], errors[0]["loc"], errors[0].get("ctx", {}).get("error")
    if len(place) == 1 and place[0] in _CHECKED_LATE and first["type"] in _BOUNDS:
        return HttpError(400, message, "BadRequestError", _CHECKED_LATE[str(place[0])])
    if isinstance(cause, FieldError):
        kind = None if (cause.param or "").startswith("body.") else "BadRequestError"
        return HttpError(400, message, kind, cause.param)
    # Of a field that may be one of several kinds, the kind that is right for longest.
    path = max((_field_path(one["loc"]) for one in errors if one["loc"][:1] == place[:1]), key=len)
    if first["type"] == "json_invalid":
        path = []
        try:
            json.loads(data)
        except json.JSONDecodeError as ending:  # the character at which it stops being JSON
            path = [str(ending.pos)] if data else []
        except (ValueError, RecursionError):  # no UTF-8, too deep, or a number of thousands of digits
            pass
    return HttpError(400, message, param=".".join(["body", *path]))


def _mistake(error: Any) -> str:
    if isinstance(cause := error.get("ctx", {}).get("error"), FieldError):
        return str(cause)
    names = ".".join(map(str, error["loc"]))
    return f"{names}: got {repr(error['input'])[:_LONGEST_VALUE]}; {error['msg']}" if names else f"body: {error['msg']}"


def _field_path(place: tuple[int | str, ...]) -> list[str]:
    """The names of fields and numbers of items on the way to a field, without the kinds that pydantic tries there."""
    kinds = ("str", "int")
    return [str(part) for part in place if isinstance(part, int) or (part.isidentifier() and part not in kinds)]


# vLLM's server asks for its key below /v1 alone; its /invocations and /generative_scoring generate for anybody, and its
# /reset_prefix_cache, which is there in development mode only (VLLM_SERVER_DEV_MODE=1), asks nobody.
_KEYED = ("/v1", "/reset_prefix_cache", "/invocations", "/generative_scoring")
_CHANGES = ("/reset_prefix_cache",)  # something without a body that no form could have sent
_ANYTIME = ("/metrics", "/version", "/openapi.json")  # before weights are loaded, too


class Guard:
    """Lets requests in by `settings`. clock: of the deployment, whose weights load from its beginning on"""

    def __init__(self, settings: ServerSettings, clock: PacedClock) -> None:
        self._settings, self._clock = settings, clock
        self._hosts = HostCheck(settings.host, settings.allowed_hosts)
        self._key = None if settings.api_key is None else sha256(settings.api_key.encode()).digest()

    def check(self, scope: Scope) -> None:
        """Raises HttpError for a request that is not to be answered."""
        headers, path = Headers(scope=scope), scope["path"]
        if (why := self._settings.refusal(scope)) is not None:
            raise HttpError(431, why)
        if (why := self._hosts.refusal(headers.get("host"))) is not None:
            raise HttpError(400, why)
        if self._key is not None and path.startswith(_KEYED) and scope["method"] != "OPTIONS":
            scheme, _, key = headers.get("authorization", "").partition(" ")
            is_right = hmac.compare_digest(sha256(key.encode("utf-8", "surrogateescape")).digest(), self._key)
            if scheme.lower() != "bearer" or not is_right:
                raise HttpError(401, "Unauthorized", headers={"www-authenticate": "Bearer"})
        if path in _CHANGES and is_cross_site(headers):
            raise HttpError(403, "a form, or a page of another site, asks for it; send it from a program")
        if self._settings.cold_start_s and path not in _ANYTIME:
            left = (self._settings.cold_start_s - self._clock.elapsed_s) / self._clock.speed
            if left > 0:
                after, text = {"retry-after": str(int(left) + 1)}, f"weights are loading for {left:.1f} s more"
                raise HttpError(503, text, "ServiceUnavailableError", headers=after)


_MAX_DIGITS = 18  # of a length; Python reads no number of thousands of them

Body = TypeVar("Body", bound=BaseModel)


async def read_json(scope: Scope, receive: Receive, settings: ServerSettings, kind: type[Body]) -> Body:
    """The body of the request `scope`, which `receive` brings, as a `kind`, within the bounds of `settings`.

    Raises HttpError for one that is none."""
    data = await _json_bytes(scope, receive, settings)
    return checked(lambda: kind.model_validate_json(data), data)


async def read_any(scope: Scope, receive: Receive, settings: ServerSettings) -> Any:
    """The same of any kind. Raises HttpError for what is no JSON."""
    try:
        return json.loads(await _json_bytes(scope, receive, settings))
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"body: {error}") from None


def checked(read: Callable[[], Body], data: bytes = b"") -> Body:
    """What `read` gives of a body, `data`. Raises HttpError where a field is wrong."""
    try:
        return read()
    except ValidationError as error:
        raise _unreadable(error, data) from None
    except FieldError as error:
        raise HttpError(400, str(error), "BadRequestError", error.param) from None
    except RecursionError:
        raise HttpError(400, "body: nested too deep; flatten it") from None


async def _json_bytes(scope: Scope, receive: Receive, settings: ServerSettings) -> bytes:
    """All bytes of a body. Raises HttpError for too many or too slow ones, and for what says to be no JSON."""
    headers, parts, size = Headers(scope=scope), list[bytes](), 0
    media = headers.get("content-type", "").split(";")[0].strip().lower()
    if media != "application/json":
        raise HttpError(400, f"content-type: got {media[:40]!r}; expected application/json")
    close, most = {"connection": "close"}, settings.max_body_bytes
    too_large = HttpError(413, f"the body has more than {most} bytes; send less", headers=close)
    length = headers.get("content-length", "0")
    if length.isdecimal() and (len(length) > _MAX_DIGITS or int(length) > most):
        raise too_large
    try:
        async with asyncio.timeout(settings.arrival_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise HttpError(400, "the client has gone before its request was complete")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > most:
                    raise too_large
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise HttpError(408, f"the body took more than {settings.arrival_s:g} s to come", headers=close) from None


def content_length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """The Content-Length among `headers`; 0 without one that is a number."""
    length = next((value for name, value in headers if name.lower() == b"content-length"), b"0")
    return int(length) if length.isdigit() and len(length) <= _MAX_DIGITS else 0
