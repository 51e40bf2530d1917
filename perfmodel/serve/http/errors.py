"""Answers that say what is wrong, in the shape that vLLM's server gives them, and OpenAI's clients read.

    {"error": {"message": ..., "type": ..., "param": ..., "code": 400}}

A body that cannot be read, or has a wrong field, is a 400 there, never a 422.
"""

__all__ = ["HttpError", "error_body", "not_a_model", "send_error", "unreadable"]

import json
from collections.abc import Mapping
from http import HTTPStatus

from pydantic import ValidationError
from starlette.types import Send

_LONGEST_VALUE = 80  # characters of what was found
_MOST_SAID = 3  # of the mistakes in a body


class HttpError(Exception):
    """An answer of `status` that says `message`.

    kind:    of the error, by its name; else the status in words
    param:   the field that is to be changed
    headers: beside those of every answer
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.kind = kind or HTTPStatus(status).phrase
        self.headers = dict(headers or {})


def error_body(error: HttpError) -> bytes:
    """What is sent of `error`."""
    said = {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}
    return json.dumps({"error": said}).encode()


async def send_error(send: Send, error: HttpError) -> None:
    """Answer with `error`."""
    body = error_body(error)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def not_a_model(name: str) -> HttpError:
    """There is no model `name` here."""
    return HttpError(404, f"The model `{name[:_LONGEST_VALUE]}` does not exist.", "NotFoundError", "model")


def unreadable(error: ValidationError) -> HttpError:
    """A body with wrong fields: which, and what was expected there."""
    said, param = [], None
    for each in error.errors(include_url=False, include_context=False):
        names, message = [str(part) for part in each["loc"]], each["msg"].removeprefix("Value error, ")
        is_ours = each["type"] == "value_error"  # and says itself which field it is
        param = param or (message.partition(":")[0] if is_ours else names[0] if names else None)
        found = f"{'.'.join(names)}: found {repr(each['input'])[:_LONGEST_VALUE]}; " if names else "body: "
        said.append(message if is_ours else f"{found}{message}")
    more = f" (and {len(said) - _MOST_SAID} more)" if len(said) > _MOST_SAID else ""
    return HttpError(400, "; ".join(said[:_MOST_SAID]) + more, param=param)
