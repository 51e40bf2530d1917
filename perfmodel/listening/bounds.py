"""`BoundedProtocol`: connections, before there is a request to speak of: how many, how long, how much.

uvicorn bounds neither the size of headers, with httptools, nor the time that they take, nor connections that say
nothing. This stands before its protocol and hands on what is within the bounds.
"""

__all__ = ["ARRIVED", "BoundedProtocol", "Bounds", "Refusal", "plain_refusal"]

import asyncio
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

_AT_ONCE = struct.pack("ii", 1, 0)
ARRIVED = "perfmodel_arrived"  # of a scope: when the last bytes of its request came, in seconds of the loop's clock
Refusal = Callable[[int, str], tuple[str, bytes]]  # a status, and why: the type and the bytes of a body that says so


@dataclass(frozen=True)
class Bounds:
    """What connections may take of a server.

    max_header_bytes: of a request, its path included
    max_connections:  open at once
    arrival_s:        seconds for a request's headers to come in
    stalled_s:        seconds that a client may read nothing of what is sent to it before its connection is cut off
    """

    max_header_bytes: int = 64 * 2**10
    max_connections: int = 4096
    arrival_s: float = 20.0
    stalled_s: float = 60.0

    def refusal(self, scope: Scope) -> str | None:
        """Why the request `scope` is too large, with status 431; None: it is not. What comes all at once is known when
        it is complete."""
        size = sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope.get("raw_path") or b"")
        size += len(scope.get("query_string") or b"")
        return self.too_large if size > self.max_header_bytes else None

    @property
    def too_large(self) -> str:
        """What headers beyond the bound are answered."""
        return f"the headers have more than {self.max_header_bytes} bytes; send fewer"


def plain_refusal(status: int, message: str) -> tuple[str, bytes]:
    """A body that says `message` and nothing else."""
    return "text/plain; charset=utf-8", message.encode()


class BoundedProtocol(asyncio.Protocol):
    """One connection within `bounds`, beyond which it is answered as `refusal` says. `on_stalled` is called when it is
    cut off as its client does not read. The other parameters are those of uvicorn's protocols."""

    def __init__(
        self,
        bounds: Bounds,
        refusal: Refusal,
        on_stalled: Callable[[], None],
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """See `BoundedProtocol`: bounds, refusal, on_stalled; config, server_state, app_state, _loop."""
        self._bounds, self._refusal, self._on_stalled = bounds, refusal, on_stalled
        self._connections = server_state.connections
        self._inner = HttpToolsProtocol(config, server_state, app_state, _loop)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.Handle | None = None
        self._num_bytes = 0  # of headers that are not complete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As of a protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._connections) >= self._bounds.max_connections:
            self._refuse(503, f"{self._bounds.max_connections} connections are open; try again")
            return
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` says whenever something is not taken
        self._inner.connection_made(transport)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        """As of a protocol. A request has arrived when its last byte has."""
        now, cycle = asyncio.get_running_loop().time(), self._inner.cycle
        if cycle is None or cycle.response_complete:
            self._num_bytes += len(data)
            if self._timer is None:
                self._wait_for_headers()
        self._inner.data_received(data)
        if self._inner.cycle is not None and not self._inner.cycle.response_started:
            self._inner.cycle.scope[ARRIVED] = now  # type: ignore[literal-required]  # ours
        if self._inner.cycle is not cycle:
            self._num_bytes = 0
            self._stop_waiting()
        elif self._num_bytes > self._bounds.max_header_bytes:
            self._refuse(431, self._bounds.too_large)

    def eof_received(self) -> None:
        """As of a protocol."""
        self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """As of a protocol."""
        self._stop_waiting()
        self._stop_watching()
        if self._inner.transport is not None:
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """As of a protocol. What is left is watched from when the rest of the message is there, too."""
        self._stalled = asyncio.get_running_loop().call_soon(self._look_again, sys.maxsize)
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """As of a protocol."""
        self._stop_watching()
        self._inner.resume_writing()

    def _stop_watching(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _look_again(self, before: int) -> None:
        """Cut it off unless some of the `before` unsent bytes are gone: nothing is added while writing is paused."""
        assert self._transport is not None
        now = self._transport.get_write_buffer_size()
        if now < before:
            self._stalled = asyncio.get_running_loop().call_later(self._bounds.stalled_s, self._look_again, now)
        else:
            self._on_stalled()
            sock = self._transport.get_extra_info("socket")
            if sock is not None:  # else the kernel would keep what it has not sent
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            self._transport.abort()

    def _wait_for_headers(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._bounds.arrival_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        self._refuse(408, f"the headers took more than {self._bounds.arrival_s:g} s to come")

    def _refuse(self, status: int, message: str) -> None:
        media, body = self._refusal(status, message)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {media}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self._stop_waiting()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(head.encode() + body)
            self._transport.close()
