"""`build_app`: an emulator as an ASGI application."""

__all__ = ["build_app"]

import asyncio
import logging
import time
from collections.abc import Awaitable
from contextlib import suppress
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perfmodel.errors import PerfmodelError
from perfmodel.serve.emulator import Emulator, ReplicaDownError
from perfmodel.serve.http.errors import HttpError, send_error
from perfmodel.serve.http.guard import Guard
from perfmodel.serve.http.reading import content_length
from perfmodel.serve.http.routes import Rendered, path_of, routes
from perfmodel.serve.metrics import HttpCounts
from perfmodel.serve.paced_clock import ClockStoppedError, PacedClock
from perfmodel.serve.settings import ServerSettings
from perfmodel.serve.tokens import BoundedTokens, ByteTokens, FileTokens

_log = logging.getLogger("perfmodel.serve")


def build_app(
    emulator: Emulator, settings: ServerSettings, metrics: Rendered | None = None, replica: int | None = None
) -> ASGIApp:
    """The server of `emulator`, to be run by any ASGI server on the event loop in which the emulator was started.

    settings: to whom it answers, and how
    metrics:  what /metrics shows; None: it is not there
    replica:  which of the deployment's replicas takes its requests; by default its router decides

    Raises SpecError for a tokenizer file that cannot be read.
    """
    vocabulary = ByteTokens() if settings.tokenizer_file is None else FileTokens(settings.tokenizer_file)
    bounded = BoundedTokens(vocabulary, emulator.max_model_len)
    router = Router(routes(emulator, settings, bounded, metrics, replica), redirect_slashes=True)
    guard, http = Guard(settings, emulator.clock), None if metrics is None else metrics.http
    return _Application(router, guard, http, emulator.clock)


class _Application:
    """The outermost ASGI application: clients receive every failure below it as an error message.

    http: counts requests; clock: its speed is reported in response headers
    """

    def __init__(self, router: Router, guard: Guard, http: HttpCounts | None, clock: PacedClock) -> None:
        self._router, self._guard, self._http, self._clock = router, guard, http, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            began, noting = time.perf_counter(), _NotingSend(send, self._clock)
            try:
                await self._answer(scope, receive, noting)
            finally:
                if self._http is not None and noting.status:
                    self._count(self._http, scope, noting, time.perf_counter() - began)

    def _count(self, http: HttpCounts, scope: Scope, noted: "_NotingSend", seconds: float) -> None:
        handler = path_of(scope) if noted.status != HTTPStatus.METHOD_NOT_ALLOWED else None
        sizes = content_length(scope["headers"]), content_length(noted.headers)
        http.add(handler or "none", scope["method"], noted.status, sizes, seconds)

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # so that the router raises what it does not find
        try:
            self._guard.check(scope)
            await self._router(scope, receive, send)
            return
        except HttpError as error:
            answer = error
        except HTTPException as error:
            answer = HttpError(error.status_code, str(error.detail), headers=error.headers, style="detail")
        except (ReplicaDownError, ClockStoppedError) as error:
            answer = HttpError(503, str(error), "ServiceUnavailableError")
        except PerfmodelError as error:
            answer = HttpError(400, str(error), "BadRequestError")
        except asyncio.CancelledError:
            return  # the server ends, and has waited long enough
        except Exception:
            _log.exception("a request could not be answered: a bug of perfmodel")
            answer = HttpError(
                500, "the server could not answer: a bug, which its log describes", "InternalServerError"
            )
        with suppress(RuntimeError):  # of a server whose client has the beginning of an answer already
            await send_error(send, answer)


def _speed_headers(clock: PacedClock) -> list[tuple[bytes, bytes]]:
    """The requested speed in simulated seconds per second, and the seconds that the clock has lost so far, if any."""
    headers = [(b"x-perfmodel-speed", b"%g" % clock.speed)]
    return [*headers, (b"x-perfmodel-slowed-s", b"%.3f" % clock.slowed_s)] if clock.slowed_s else headers


class _NotingSend:
    """Wraps `send`: records the status and headers of the response, and adds the speed headers of `clock`.

    after_start: the unwrapped `send`, for messages after the response has started
    """

    def __init__(self, send: Send, clock: PacedClock) -> None:
        self._send = self.after_start = send
        self._clock = clock
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], message.get("headers", [])
            message = {**message, "headers": [*self.headers, *_speed_headers(self._clock)]}
        return self._send(message)
