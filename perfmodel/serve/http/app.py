"""`build_app`: an emulator as an ASGI application: every path of the server, and what answers there."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from http import HTTPStatus
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perfmodel.errors import PerfmodelError
from perfmodel.listening import Listening, serve_apps
from perfmodel.serve.emulator import Emulator, ReplicaDownError
from perfmodel.serve.http.bodies import (
    BatchBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    ScoringBody,
    TokenizeBody,
)
from perfmodel.serve.http.generation import Call, Generation
from perfmodel.serve.http.other_apis import CountBody, MessagesBody, ResponsesBody, no_response
from perfmodel.serve.http.reading import Guard, HttpError, content_length, error_body, read_json, send_error
from perfmodel.serve.metrics import HttpCounts, MetricsPage, content_type, wants_openmetrics
from perfmodel.serve.paced_clock import ClockStoppedError, PacedClock
from perfmodel.serve.settings import ServerSettings
from perfmodel.serve.tokens import chat_prompt
from perfmodel.version import __version__

_REFERENCE = "#/components/schemas/{model}"
_ERRORS = {
    "400": "what is wrong with the request",
    "401": "no key, or a wrong one",
    "403": "a page of another site asks for what changes the server",
    "404": "no such model, or path",
    "408": "the body took too long",
    "409": "requests hold KV blocks that a reset would need",
    "413": "the body is too large",
    "429": "more than the gateway's rate limit, or injected with --fail",
    "431": "the headers are too large",
    "500": "injected with --fail",
    "503": "weights are loading, or the deployment has refused or lost the request",
    "504": "no answer before the deployment's deadline",
}
_TEXT = {"type": "string"}
_ERROR_FIELDS = {"message": _TEXT, "type": _TEXT, "param": {"type": ["string", "null"]}, "code": {"type": "integer"}}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type"], "properties": _ERROR_FIELDS}},
}


class PathRow(NamedTuple):
    """A path of the server.

    methods: that it answers; answer: the name of what does
    summary: for readers; body: what it is sent; media: of its answer; is_streamed: server-sent events, too"""

    path: str
    methods: tuple[str, ...]
    answer: str
    summary: str
    body: type[BaseModel] | None = None
    media: str | None = "application/json"
    is_streamed: bool = False


@cache
def document(rows: tuple[PathRow, ...]) -> dict[str, Any]:
    """The document of these paths; the same each time."""
    bodies = sorted({row.body for row in rows if row.body is not None}, key=lambda kind: kind.__name__)
    _, schemas = models_json_schema([(kind, "validation") for kind in bodies], ref_template=_REFERENCE)
    return {
        "openapi": "3.1.0",
        "info": {"title": "perfmodel serve", "version": __version__},
        "paths": {row.path: {method.lower(): _operation(row, method) for method in row.methods} for row in rows},
        "components": {
            "schemas": {**schemas["$defs"], "Error": _ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(row: PathRow, method: str) -> dict[str, Any]:
    answered: dict[str, Any] = {"description": row.summary}
    if row.media is not None:
        answered["content"] = {row.media: {}, **({"text/event-stream": {}} if row.is_streamed else {})}
    error = {"application/json": {"schema": {"$ref": _REFERENCE.format(model="Error")}}}
    errors = {status: {"description": meaning, "content": error} for status, meaning in _ERRORS.items()}
    operation = {"summary": row.summary, "responses": {"200": answered, **errors}, "security": [{}, {"key": []}]}
    if "{" in row.path:
        named = row.path.partition("{")[2].partition("}")[0]
        operation["parameters"] = [{"name": named, "in": "path", "required": True, "schema": _TEXT}]
    if row.body is not None and method == "POST":
        schema = {"$ref": _REFERENCE.format(model=row.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


_MAX_STRINGS = 1 << 16  # of tokens, each decoded by itself
_CREATED = 1_700_000_000  # of the model, in seconds of the epoch: any moment will do


@dataclass(eq=False)
class _Endpoint:
    """An ASGI application for one path: to Starlette, a function would be one of a request and no more."""

    answer: Callable[[Call], Awaitable[None]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(Call(scope, receive, send))


class _Routes(Generation):
    """Those that answer at once, too. metrics: what /metrics shows; the others as of `Generation`"""

    def __init__(
        self, emulator: Emulator, settings: ServerSettings, replica: int | None, metrics: MetricsPage | None
    ) -> None:
        super().__init__(emulator, settings, replica)
        self._metrics = metrics

    async def health(self, request: HttpRequest) -> Response:
        return Response(status_code=200 if self._replica is None or self._emulator.is_up(self._replica) else 503)

    async def version(self, request: HttpRequest) -> Response:
        engine = self._emulator.scenario.engine.described.version
        return JSONResponse({"version": str(engine.asked or engine.described or __version__)})

    async def load(self, request: HttpRequest) -> Response:
        return JSONResponse({"server_load": self.num_open})

    async def models(self, request: HttpRequest) -> Response:
        root, owner = self._names[0], self._emulator.scenario.engine.profile
        cards = [_card(name, root, None, self._emulator.max_model_len, owner) for name in self._names]
        cards += [_card(name, name, root, None, owner) for name in self._settings.lora_names]
        return JSONResponse({"object": "list", "data": cards})

    async def tokenize(self, request: HttpRequest) -> Response:
        body = await read_json(request.scope, request.receive, self._settings, TokenizeBody)
        self._model(body.model)
        if body.prompt is None:
            ids = chat_prompt(self._vocabulary, body.conversation, body.add_generation_prompt)
        else:
            ids = self._vocabulary.encode(body.prompt)
        if body.return_token_strs and len(ids) > _MAX_STRINGS:
            raise HttpError(400, f"return_token_strs: got {len(ids)} tokens; expected at most {_MAX_STRINGS}")
        strings = [self._vocabulary.decode(ids[i : i + 1]) for i in range(len(ids))] if body.return_token_strs else None
        counted = {"count": len(ids), "max_model_len": self._emulator.max_model_len, "tokens": ids.tolist()}
        return JSONResponse({**counted, "token_strs": strings})

    async def detokenize(self, request: HttpRequest) -> Response:
        body = await read_json(request.scope, request.receive, self._settings, DetokenizeBody)
        self._model(body.model)
        return JSONResponse({"prompt": self._vocabulary.decode(np.array(body.tokens, dtype=np.int64))})

    async def reset_prefix_cache(self, request: HttpRequest) -> Response:
        emulator, replica = self._emulator, self._replica
        engines = emulator.cluster.engines if replica is None else emulator.replicas[replica].ranks
        held = sum(engine.num_used_blocks for engine in engines)
        if held:
            raise HttpError(409, f"requests hold {held} KV blocks; reset the prefix cache when none runs")
        for engine in engines:
            engine.loop.scheduler.blocks.forget_all()
        return Response(status_code=200)

    async def metrics(self, request: HttpRequest) -> Response:
        if self._metrics is None:
            raise HttpError(404, "Not Found", style="detail")
        is_open = wants_openmetrics(request.headers.get("accept", ""))
        return Response(self._metrics.render(openmetrics=is_open), headers={"content-type": content_type(is_open)})

    async def openapi(self, request: HttpRequest) -> Response:
        return Response(json.dumps(document(PATHS)), media_type="application/json")

    async def response(self, request: HttpRequest) -> Response:
        raise no_response(request.path_params["response_id"])

    async def is_scaling(self, request: HttpRequest) -> Response:
        return JSONResponse({"is_scaling_elastic_ep": False})

    async def scale(self, request: HttpRequest) -> Response:
        raise HttpError(400, "the ranks are the scenario's; to add replicas under load give it cluster.autoscaling")


def _card(name: str, root: str, parent: str | None, max_model_len: int | None, owner: str) -> dict[str, Any]:
    never = ("allow_create_engine", "allow_search_indices", "allow_fine_tuning", "is_blocking")
    permission = {"id": f"modelperm-{name}", "object": "model_permission", "created": _CREATED, "organization": "*"}
    permission |= dict.fromkeys(never, False)
    permission |= {"allow_sampling": True, "allow_logprobs": True, "allow_view": True, "group": None}
    card = {"id": name, "object": "model", "created": _CREATED, "owned_by": owner, "root": root}
    return {**card, "parent": parent, "max_model_len": max_model_len, "permission": [permission]}


_GET, _POST = ("GET",), ("POST",)
# What answers is a method of `_Routes`.
PATHS = (
    PathRow(
        "/v1/completions", _POST, "complete", "An answer that goes on with a prompt.", CompletionBody, is_streamed=True
    ),
    PathRow("/v1/chat/completions", _POST, "chat", "The next message of a conversation.", ChatBody, is_streamed=True),
    PathRow("/v1/chat/completions/batch", _POST, "batch", "The next message of several conversations.", BatchBody),
    PathRow("/v1/responses", _POST, "respond", "A response to messages.", ResponsesBody, is_streamed=True),
    PathRow("/v1/responses/{response_id}", _GET, "response", "A stored response: none is, so 404."),
    PathRow("/v1/responses/{response_id}/cancel", _POST, "response", "The same."),
    PathRow("/v1/messages", _POST, "message", "The next message, by Anthropic's API.", MessagesBody, is_streamed=True),
    PathRow("/v1/messages/count_tokens", _POST, "count_tokens", "How many tokens messages have.", CountBody),
    PathRow("/v1/models", _GET, "models", "The models that can be asked for."),
    PathRow("/v1/embeddings", _POST, "embed", "A vector of each prompt; 404 of a model of text.", EmbeddingBody),
    PathRow("/generative_scoring", _POST, "score", "How likely a label is after each item.", ScoringBody),
    PathRow("/invocations", _POST, "invoke", "A chat or a completion, of whatever model.", is_streamed=True),
    PathRow("/tokenize", _POST, "tokenize", "Token ids of a text or a conversation.", TokenizeBody),
    PathRow("/detokenize", _POST, "detokenize", "The text of token ids.", DetokenizeBody),
    PathRow("/health", _GET, "health", "200 once it answers.", media=None),
    PathRow("/ping", ("GET", "POST"), "health", "200 once it answers.", media=None),
    PathRow("/version", _GET, "version", "Of the engine that is emulated."),
    PathRow("/load", _GET, "load", "Requests that are being answered."),
    PathRow("/reset_prefix_cache", _POST, "reset_prefix_cache", "All prefix caches are empty after it.", media=None),
    PathRow("/is_scaling_elastic_ep", _POST, "is_scaling", "Whether ranks are being added: never."),
    PathRow("/scale_elastic_ep", _POST, "scale", "Ranks cannot be added, so 400."),
    PathRow("/metrics", _GET, "metrics", "Metrics under the engine's names; 404 without.", media="text/plain"),
    PathRow("/openapi.json", _GET, "openapi", "This document."),
)


def routes(
    emulator: Emulator, settings: ServerSettings, metrics: MetricsPage | None, replica: int | None
) -> list[Route]:
    """Every route of the server, in the order of `PATHS`; emulator, settings, metrics, replica: as of `build_app`."""
    server, made = _Routes(emulator, settings, replica, metrics), []
    for row in PATHS:
        if row.answer == "embed" and emulator.scenario.model.pooling is None:
            continue  # vLLM has no such path for a model of text
        answer = getattr(server, row.answer)
        # An endpoint of its own for each route, by which `_Application` knows it.
        endpoint = _Endpoint(answer) if hasattr(Generation, row.answer) else partial(answer)
        route = Route(row.path, endpoint, methods=row.methods)
        if row.path == "/metrics":
            route.methods = None  # whatever the method, as a mounted application answers
        elif route.methods is not None and row.path != "/openapi.json":
            route.methods.discard("HEAD")  # which Starlette adds to GET, and FastAPI does not
        made.append(route)
    return made


_log = logging.getLogger("perfmodel.serve")


def build_app(
    emulator: Emulator, settings: ServerSettings, metrics: MetricsPage | None = None, replica: int | None = None
) -> ASGIApp:
    """The server of `emulator`, to be run by any ASGI server on the event loop in which the emulator was started.

    settings: to whom it answers, and how
    metrics:  what /metrics shows; None: it is not there
    replica:  which of the deployment's replicas takes its requests; by default its router decides

    Raises SpecError for a tokenizer file that cannot be read."""
    guard, http = Guard(settings, emulator.clock), None if metrics is None else metrics.http
    return _Application(routes(emulator, settings, metrics, replica), guard, http, emulator.clock)


class _Application:
    """The outermost ASGI application: clients receive every failure below it as an error message.

    http: counts requests; clock: its speed is reported in response headers"""

    def __init__(self, routes: list[Route], guard: Guard, http: HttpCounts | None, clock: PacedClock) -> None:
        self._router, self._guard, self._http, self._clock = Router(routes), guard, http, clock
        self._paths: dict[object, str] = {route.endpoint: route.path for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            began, noting = time.perf_counter(), _NotingSend(send, self._clock)
            try:
                await self._answer(scope, receive, noting)
            finally:
                if self._http is not None and noting.status:
                    is_route = noting.status != HTTPStatus.METHOD_NOT_ALLOWED
                    handler = self._paths.get(scope.get("endpoint"), "none") if is_route else "none"
                    sizes = content_length(scope["headers"]), content_length(noting.headers)
                    self._http.add(handler, scope["method"], noting.status, sizes, time.perf_counter() - began)

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
            text = "the server could not answer: a bug, which its log describes"
            answer = HttpError(500, text, "InternalServerError")
        with suppress(RuntimeError):  # of a server whose client has the beginning of an answer already
            await send_error(send, answer)


class _NotingSend:
    """Wraps `send`: records the status and headers of the response, and adds what `clock` has to say: the requested
    speed in simulated seconds per second, and the seconds that it has lost so far, if any.

    after_start: the unwrapped `send`, for messages after the response has started"""

    def __init__(self, send: Send, clock: PacedClock) -> None:
        self._send = self.after_start = send
        self._clock = clock
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], message.get("headers", [])
            speed, slowed_s = [(b"x-perfmodel-speed", b"%g" % self._clock.speed)], self._clock.slowed_s
            slowed = [(b"x-perfmodel-slowed-s", b"%.3f" % slowed_s)] if slowed_s else []
            message = {**message, "headers": [*self.headers, *speed, *slowed]}
        return self._send(message)


async def serve(
    apps: Sequence[Listening],
    settings: ServerSettings,
    on_ready: Callable[[list[int]], None] = lambda _: None,
    on_stalled: Callable[[], None] = lambda: None,
) -> None:
    """Serve `apps` until SIGTERM or SIGINT, as of `serve_apps`.

    settings: where they listen, what they bound, how long answers have at the end
    on_ready, on_stalled: as of `serve_apps`

    Raises SpecError for an address that cannot be had."""

    def refusal(status: int, message: str) -> tuple[str, bytes]:
        return "application/json", error_body(HttpError(status, message))

    await serve_apps(apps, settings.host, settings, settings.drain_s, refusal, on_ready, on_stalled)
