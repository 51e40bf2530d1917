"""`serve`: applications on their ports, until they are told to end, and then until their answers are out."""

__all__ = ["Listening", "serve"]

import asyncio
import logging
import resource
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import uvicorn
from starlette.types import ASGIApp

from perfmodel.errors import SpecError
from perfmodel.serve.http.bounds import BoundedProtocol
from perfmodel.serve.settings import ServerSettings

_BACKLOG = 2048
_SPARE_FILES = 64  # that the process opens beside connections
_STARTED_S = 0.005


class Listening(NamedTuple):
    """An application, and the port where it is to listen; 0: any free one."""

    app: ASGIApp
    port: int


async def serve(
    apps: Sequence[Listening], settings: ServerSettings, on_ready: Callable[[list[int]], None] = lambda _: None
) -> None:
    """Serve `apps` until SIGTERM or SIGINT: no connection is taken then, and answers under way have `drain_s` to end.
    Another signal ends at once.

    on_ready: called with the ports, once all listen

    Raises SpecError for an address that cannot be had.
    """
    sockets = [_bound(settings, each.port) for each in apps]
    _allow_files(settings.max_connections)
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # that clients leave and answers break is no news
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    servers = [uvicorn.Server(_config(each.app, settings)) for each in apps]
    running = [
        asyncio.ensure_future(server.serve(sockets=[sock])) for server, sock in zip(servers, sockets, strict=True)
    ]
    while not all(server.started for server in servers) and not any(task.done() for task in running):
        await asyncio.sleep(_STARTED_S)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(ValueError, RuntimeError, NotImplementedError):  # only the main thread is sent signals
            loop.add_signal_handler(number, _end, servers)
    on_ready([sock.getsockname()[1] for sock in sockets])
    try:
        await asyncio.gather(*running)
    finally:
        await _abandon(servers)
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(ValueError, RuntimeError, NotImplementedError):
                loop.remove_signal_handler(number)


def _end(servers: list[uvicorn.Server]) -> None:
    """The first time, let answers end; then not."""
    for server in servers:
        server.force_exit = server.should_exit
        server.should_exit = True


async def _abandon(servers: list[uvicorn.Server]) -> None:
    """What is still under way has no more time: its requests are aborted while the emulator can hear of it."""
    left = [task for server in servers for task in server.server_state.tasks]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _config(app: ASGIApp, settings: ServerSettings) -> uvicorn.Config:
    protocol: Any = partial(BoundedProtocol, settings)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=max(int(settings.drain_s), 0),
    )


def _bound(settings: ServerSettings, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(settings.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise SpecError(f"{settings.host}:{port}: nothing can listen there ({why}); choose another") from None
    sock.listen(_BACKLOG)
    sock.setblocking(False)
    return sock


def _allow_files(num_connections: int) -> None:
    """Let this process have as many files open as connections, as far as the machine lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
