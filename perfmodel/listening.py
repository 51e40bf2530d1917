"""Listening on a socket, safely: connections within bounds, Host headers, and applications until a signal ends them.

It knows HTTP as uvicorn speaks it, and not what is answered: that is an ASGI application's. uvicorn bounds neither the
size of headers, with httptools, nor the time that they take, nor connections that are silent or do not read;
`BoundedProtocol` is its protocol within bounds. starlette's
`TrustedHostMiddleware` has no addresses in figures, which a server that is bound beyond loopback answers to."""

import asyncio
import logging
import signal
import socket
import struct
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, NamedTuple

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from perfmodel.errors import SpecError

_LOCAL = ("localhost", "127.0.0.1", "[::1]", "::1")
_LONGEST_SAID = 80


class HostCheck:
    """Which Host headers are answered.

    host:          where the server listens. What is bound beyond loopback answers to any address in figures, which no
                   rebinding of a domain's name can give
    allowed_hosts: names beside those of this machine; "*" = any"""

    def __init__(self, host: str, allowed_hosts: tuple[str, ...] = ()) -> None:
        self._names = {*_LOCAL, host.lower(), *(name.lower() for name in allowed_hosts)}
        self._is_loopback = is_loopback(host)

    def refusal(self, host_header: str | None) -> str | None:
        """Why a request with this Host header is not answered; None: it is. Browsers always send one."""
        if host_header is None or "*" in self._names:
            return None
        given = host_header.lower()
        name = given.rsplit(":", 1)[0] if not given.endswith("]") and ":" in given else given
        if name in self._names or (not self._is_loopback and _address(name.strip("[]")) is not None):
            return None
        return f"Invalid host header: got {name[:_LONGEST_SAID]!r}; name it in --allowed-host"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens at `host`."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")


def is_cross_site(headers: Mapping[str, str]) -> bool:
    """Whether these headers, by their names in small letters, are those of a page from elsewhere, or of a form.

    Browsers say where a page is from (`Sec-Fetch-Site`, and before it `Origin`), and a page cannot make them say
    something else; a form has one of three content types, and is refused by them where an old browser says nothing.
    Programs that are no browsers say nothing of the kind."""
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return True
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        return True
    return headers.get("content-type", "").partition(";")[0].strip().lower() in _FORMS


_BACKLOG = 2048
_SPARE_FILES = 64  # that the process opens beside connections


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that listens at `host`; port 0: any free one. Raises SpecError for an address that cannot be had."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = infos[0]
        sock = socket.socket(family, kind, protocol)
        if sys.platform != "win32":  # where it would let another process take the port as well
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise SpecError(f"{host}:{port}: nothing can listen there ({why}); choose another") from None
    sock.listen(_BACKLOG)
    sock.setblocking(False)
    return sock


def allow_files(num_connections: int) -> None:
    """Let this process have as many files open as connections, as far as the machine lets it."""
    if sys.platform != "win32":  # whose sockets are no files
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = num_connections + _SPARE_FILES
        if soft != resource.RLIM_INFINITY and soft < wanted:
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            with suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


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
                      (nginx's send_timeout is as long)"""

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


class BoundedProtocol(HttpToolsProtocol):
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
        super().__init__(config, server_state, app_state, _loop)
        self._bounds, self._refusal, self._on_stalled = bounds, refusal, on_stalled
        self._arriving: asyncio.TimerHandle | None = None  # until headers have to be there
        self._stalled: asyncio.Handle | None = None
        self._num_bytes = 0  # of headers that are not complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        if len(self.connections) >= self._bounds.max_connections:
            self.transport = transport
            self._refuse(503, f"{self._bounds.max_connections} connections are open; try again")
            return
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` says whenever something is not taken
        super().connection_made(transport)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        """As of a protocol. A request has arrived when its last byte has."""
        now, cycle = asyncio.get_running_loop().time(), self.cycle
        if cycle is None or cycle.response_complete:
            self._num_bytes += len(data)
            if self._arriving is None:
                self._wait_for_headers()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.scope[ARRIVED] = now  # type: ignore[literal-required]  # ours
        if self.cycle is not cycle:
            self._num_bytes = 0
            self._arriving = _cancelled(self._arriving)
        elif self._num_bytes > self._bounds.max_header_bytes:
            self._refuse(431, self._bounds.too_large)

    def connection_lost(self, exc: Exception | None) -> None:
        self._arriving, self._stalled = _cancelled(self._arriving), _cancelled(self._stalled)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """As of a protocol. What is left is watched from when the rest of the message is there, too."""
        self._stalled = asyncio.get_running_loop().call_soon(self._look_again, sys.maxsize)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stalled = _cancelled(self._stalled)
        super().resume_writing()

    def _look_again(self, before: int) -> None:
        """Cut it off unless some of the `before` unsent bytes are gone: nothing is added while writing is paused."""
        now = self.transport.get_write_buffer_size()
        if now < before:
            self._stalled = asyncio.get_running_loop().call_later(self._bounds.stalled_s, self._look_again, now)
        else:
            self._on_stalled()
            sock = self.transport.get_extra_info("socket")
            if sock is not None:  # else the kernel would keep what it has not sent
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            self.transport.abort()

    def _wait_for_headers(self) -> None:
        seconds, loop = self._bounds.arrival_s, asyncio.get_running_loop()
        late = f"the headers took more than {seconds:g} s to come"
        self._arriving = loop.call_later(seconds, self._refuse, 408, late)

    def _refuse(self, status: int, message: str) -> None:
        media, body = self._refusal(status, message)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {media}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self._arriving = _cancelled(self._arriving)
        if not self.transport.is_closing():
            self.transport.write(head.encode() + body)
            self.transport.close()


def _cancelled(handle: asyncio.Handle | None) -> asyncio.TimerHandle | None:
    """What stands in the place of `handle` once it is cancelled: nothing."""
    if handle is not None:
        handle.cancel()
    return None


_STARTED_S = 0.005
_ENDING = (signal.SIGTERM, signal.SIGINT)


class Listening(NamedTuple):
    """An application, and the port where it is to listen; 0: any free one."""

    app: ASGIApp
    port: int


async def serve_apps(
    apps: Sequence[Listening],
    host: str,
    bounds: Bounds,
    drain_s: float = 30.0,
    refusal: Refusal = plain_refusal,
    on_ready: Callable[[list[int]], None] = lambda _: None,
    on_stalled: Callable[[], None] = lambda: None,
) -> None:
    """Serve `apps` until SIGTERM or SIGINT: no connection is taken then, and answers under way have `drain_s` to end.
    Another signal ends at once.

    host:     where all of them listen
    bounds:   of the connections to each
    drain_s:  seconds, once told to end, for answers under way
    refusal:  how connections beyond the bounds are answered
    on_ready: called with the ports, once all listen
    on_stalled: called whenever a client was cut off that did not read its answer

    Raises SpecError for an address that cannot be had."""
    sockets = [bound_socket(host, one.port) for one in apps]
    allow_files(bounds.max_connections * len(apps))
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # that clients leave and answers break is no news
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    config: dict[str, Any] = {
        "http": partial(BoundedProtocol, bounds, refusal, on_stalled),
        "timeout_graceful_shutdown": max(int(drain_s), 0),
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        **dict.fromkeys(("access_log", "server_header", "proxy_headers"), False),
    }
    servers = [_Server(uvicorn.Config(one.app, **config)) for one in apps]
    with _ended_by_signals(servers):
        pairs = zip(servers, sockets, strict=True)
        running = [asyncio.ensure_future(server.serve(sockets=[sock])) for server, sock in pairs]
        while not all(server.started for server in servers) and not any(task.done() for task in running):
            await asyncio.sleep(_STARTED_S)
        on_ready([sock.getsockname()[1] for sock in sockets])
        try:
            await asyncio.gather(*running)
        finally:
            # What is still under way has no more time: it is aborted while those who answer can hear of it.
            left = [task for server in servers for task in server.server_state.tasks]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)


class _Server(uvicorn.Server):
    """One of several in a process. Each would take the process's signals for itself, and give them back to whom it had
    them from when it ends: the others would not hear the next."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to `serve_apps`."""
        yield


@contextmanager
def _ended_by_signals(servers: list[_Server]) -> Generator[None, None, None]:
    """Signals end `servers`: the first lets answers end, another does not."""

    def end() -> None:
        is_second = any(server.should_exit for server in servers)
        for server in servers:
            server.force_exit, server.should_exit = is_second, True

    loop = asyncio.get_running_loop()
    for number in _ENDING:
        with suppress(ValueError, RuntimeError, NotImplementedError):  # only the main thread is sent signals
            loop.add_signal_handler(number, end)
    try:
        yield
    finally:
        for number in _ENDING:
            with suppress(ValueError, RuntimeError, NotImplementedError):
                loop.remove_signal_handler(number)
