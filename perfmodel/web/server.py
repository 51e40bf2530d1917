"""`serve_page`: the page on a port of this machine, until ctrl-C."""

__all__ = ["serve_page"]

import asyncio
from collections.abc import Callable

from perfmodel.errors import SpecError
from perfmodel.listening import Bounds, Listening, is_loopback, serve_apps
from perfmodel.web.app import build_app
from perfmodel.web.desk import Desk

_DRAIN_S = 1.0  # a page asks again
_BOUNDS = Bounds(max_connections=256)


def serve_page(host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until interrupted.

    port:     0: one that is free
    on_ready: called with the page's address when it can be opened

    Raises SpecError where the port cannot be had, and for a host that other machines reach: who opens the page may
    start work and read what was dropped.
    """
    if not is_loopback(host):
        raise SpecError(f"--host: found {host!r}, allowed this machine's own, as 127.0.0.1, ::1 or localhost.")
    asyncio.run(_serve(host, port, on_ready))


async def _serve(host: str, port: int, on_ready: Callable[[str], None]) -> None:
    name = f"[{host}]" if ":" in host else host
    desk = Desk()
    try:
        await desk.start()
        app = build_app(host, desk)
        await serve_apps(
            [Listening(app, port)],
            host,
            _BOUNDS,
            _DRAIN_S,
            on_ready=lambda ports: on_ready(f"http://{name}:{ports[0]}"),
        )
    finally:
        await desk.close()
