"""`serve_page`: the page on a port of this machine, until ctrl-C."""

__all__ = ["serve_page"]

import asyncio
import socket
from collections.abc import Callable

import uvicorn

from perfmodel.errors import SpecError
from perfmodel.web.app import build_app


def serve_page(host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until interrupted.

    port:     0: one that is free
    on_ready: called with the page's address when it can be opened

    Raises SpecError where the port cannot be had.
    """
    listening = _listening(host, port)
    config = uvicorn.Config(build_app(host), log_level="warning", access_log=False, server_header=False)
    server = _Server(config)
    found = listening.getsockname()[1]
    server.on_ready = lambda: on_ready(f"http://{f'[{host}]' if ':' in host else host}:{found}")
    asyncio.run(server.serve(sockets=[listening]))


class _Server(uvicorn.Server):
    on_ready: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_ready()


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"--port {port}: cannot listen on {host}:{port}: {reason}; 0 takes a free one.") from None
    found.set_inheritable(False)
    return found
