"""`Outlet`: what is sent of an answer, at once and from within a turn of the clock.

A task that is woken for each token costs as much as the token. So what `send` returns is turned here until it is done,
which it is without waiting while the client reads as fast as tokens come. Where it does not, the rest is left to a
task, and what comes meanwhile waits behind it.
"""

__all__ = ["Outlet"]

import asyncio
from collections import deque
from collections.abc import Coroutine, Generator
from typing import Any, cast

from starlette.types import Message, Send


class Outlet:
    """Sends over `send`, in order."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: deque[Message] = deque()
        self._task: asyncio.Task[None] | None = None

    def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Begin an answer."""
        self._put({"type": "http.response.start", "status": status, "headers": headers})
        self._send = getattr(self._send, "after_start", self._send)  # who notes beginnings need not see each token

    def body(self, data: bytes, is_last: bool = False) -> None:
        """Go on with it."""
        self._put({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def drained(self) -> None:
        """Wait until all is sent."""
        if self._task is not None:
            await self._task

    def _put(self, message: Message) -> None:
        if self._task is not None:
            self._waiting.append(message)
            return
        sending = cast(Coroutine[Any, Any, None], self._send(message))  # to look would cost more than to call
        try:
            awaited = sending.send(None)
        except StopIteration:
            return
        self._task = asyncio.get_running_loop().create_task(self._catch_up(_Suspended(sending, awaited)))

    async def _catch_up(self, suspended: "_Suspended") -> None:
        await suspended
        while self._waiting:
            await self._send(self._waiting.popleft())
        self._task = None


class _Suspended:
    """A coroutine that waits for `awaited`, to be awaited from there on."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._coroutine, self._awaited = coroutine, awaited

    def __await__(self) -> Generator[Any, Any, None]:
        yield self._awaited
        yield from self._coroutine.__await__()
