"""`serve_apps`: applications on their ports, until they are told to end, and then until their answers are out."""

__all__ = ["Listening", "serve_apps"]

import asyncio
import logging
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import uvicorn
from starlette.types import ASGIApp

from perfmodel.listening.bounds import BoundedProtocol, Bounds, Refusal, plain_refusal
from perfmodel.listening.sockets import allow_files, bound_socket

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

    Raises SpecError for an address that cannot be had.
    """
    sockets = [bound_socket(host, each.port) for each in apps]
    allow_files(bounds.max_connections * len(apps))
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # that clients leave and answers break is no news
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    protocol: Any = partial(BoundedProtocol, bounds, refusal, on_stalled)
    servers = [_Server(_config(each.app, protocol, drain_s)) for each in apps]
    with _told_to_end(servers):
        running = [
            asyncio.ensure_future(server.serve(sockets=[sock])) for server, sock in zip(servers, sockets, strict=True)
        ]
        while not all(server.started for server in servers) and not any(task.done() for task in running):
            await asyncio.sleep(_STARTED_S)
        on_ready([sock.getsockname()[1] for sock in sockets])
        try:
            await asyncio.gather(*running)
        finally:
            await _abandon(servers)


class _Server(uvicorn.Server):
    """One of several in a process. Each would take the process's signals for itself, and give them back to whom it had
    them from when it ends: the others would not hear the next."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to `serve_apps`."""
        yield


@contextmanager
def _told_to_end(servers: list[_Server]) -> Generator[None, None, None]:
    """Signals end `servers`: the first lets answers end, another does not."""
    loop = asyncio.get_running_loop()
    for number in _ENDING:
        with suppress(ValueError, RuntimeError, NotImplementedError):  # only the main thread is sent signals
            loop.add_signal_handler(number, _end, servers)
    try:
        yield
    finally:
        for number in _ENDING:
            with suppress(ValueError, RuntimeError, NotImplementedError):
                loop.remove_signal_handler(number)


def _end(servers: list[_Server]) -> None:
    is_second = any(server.should_exit for server in servers)
    for server in servers:
        server.force_exit, server.should_exit = is_second, True


async def _abandon(servers: list[_Server]) -> None:
    """What is still under way has no more time: its requests are aborted while those who answer can hear of it."""
    left = [task for server in servers for task in server.server_state.tasks]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _config(app: ASGIApp, protocol: Any, drain_s: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=max(int(drain_s), 0),
    )
