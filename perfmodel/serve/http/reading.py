"""Bodies on their way in: bounded in bytes and in time, then checked."""

__all__ = ["read_body", "read_json"]

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from perfmodel.serve.http.errors import HttpError, unreadable
from perfmodel.serve.settings import ServerSettings

_MOST_DIGITS = 18  # of a length; Python reads no number of thousands of them

Body = TypeVar("Body", bound=BaseModel)


async def read_json(scope: Scope, receive: Receive, settings: ServerSettings, kind: type[Body]) -> Body:
    """The body of the request `scope`, which `receive` brings, as a `kind`, within the bounds of `settings`.

    Raises HttpError for one that is none.
    """
    media = Headers(scope=scope).get("content-type", "").split(";")[0].strip().lower()
    if media != "application/json":
        raise HttpError(400, f"content-type: found {media[:40]!r}, allowed: application/json")
    data = await read_body(scope, receive, settings)
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise unreadable(error) from None
    except RecursionError:
        raise HttpError(400, "body: nested too deep; flatten it") from None


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


def _too_large(settings: ServerSettings) -> HttpError:
    return HttpError(
        413, f"the body has more than {settings.max_body_bytes} bytes; send less", headers={"connection": "close"}
    )
