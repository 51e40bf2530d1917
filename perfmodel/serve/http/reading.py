"""Bodies on their way in: bounded in bytes and in time, then checked."""

__all__ = ["checked", "content_length", "read_any", "read_body", "read_json"]

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from perfmodel.serve.http.errors import FieldError, HttpError, unreadable
from perfmodel.serve.settings import ServerSettings

_MOST_DIGITS = 18  # of a length; Python reads no number of thousands of them

Body = TypeVar("Body", bound=BaseModel)


async def read_json(scope: Scope, receive: Receive, settings: ServerSettings, kind: type[Body]) -> Body:
    """The body of the request `scope`, which `receive` brings, as a `kind`, within the bounds of `settings`.

    Raises HttpError for one that is none.
    """
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
        raise unreadable(error, data) from None
    except FieldError as error:
        raise HttpError(400, str(error), "BadRequestError", error.param) from None
    except RecursionError:
        raise HttpError(400, "body: nested too deep; flatten it") from None


async def _json_bytes(scope: Scope, receive: Receive, settings: ServerSettings) -> bytes:
    media = Headers(scope=scope).get("content-type", "").split(";")[0].strip().lower()
    if media != "application/json":
        raise HttpError(400, f"content-type: got {media[:40]!r}; expected application/json")
    return await read_body(scope, receive, settings)


async def read_body(scope: Scope, receive: Receive, settings: ServerSettings) -> bytes:
    """All bytes of a request's body. Raises HttpError for too many or too slow ones."""
    length = Headers(scope=scope).get("content-length", "0")
    if length.isdecimal() and (len(length) > _MOST_DIGITS or int(length) > settings.max_body_bytes):
        raise _too_large(settings)
    try:
        async with asyncio.timeout(settings.arrival_s):
            return await _all_of(receive, settings)
    except TimeoutError:
        raise HttpError(
            408, f"the body took more than {settings.arrival_s:g} s to come", headers={"connection": "close"}
        ) from None


async def _all_of(receive: Receive, settings: ServerSettings) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HttpError(400, "the client has gone before its request was complete")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > settings.max_body_bytes:
            raise _too_large(settings)
        if not message.get("more_body", False):
            return b"".join(parts)


def content_length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """The Content-Length among `headers`; 0 without one that is a number."""
    length = next((value for name, value in headers if name.lower() == b"content-length"), b"0")
    return int(length) if length.isdigit() and len(length) <= _MOST_DIGITS else 0


def _too_large(settings: ServerSettings) -> HttpError:
    return HttpError(
        413, f"the body has more than {settings.max_body_bytes} bytes; send less", headers={"connection": "close"}
    )
