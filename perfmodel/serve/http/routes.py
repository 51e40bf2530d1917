"""`routes`: every path of the server, and what answers there."""

__all__ = ["PATHS", "Rendered", "path_of", "routes"]

import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from perfmodel.serve.emulator import Emulator
from perfmodel.serve.http.bodies import BatchBody, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from perfmodel.serve.http.errors import HttpError
from perfmodel.serve.http.generation import Call, Generation, Models
from perfmodel.serve.http.messages import CountBody, MessagesBody
from perfmodel.serve.http.openapi import PathRow, document
from perfmodel.serve.http.reading import read_json
from perfmodel.serve.http.responses import ResponsesBody, no_response
from perfmodel.serve.http.scoring import ScoringBody
from perfmodel.serve.metrics import HttpCounts, content_type, wants_openmetrics
from perfmodel.serve.settings import ServerSettings
from perfmodel.serve.tokens import Vocabulary, chat_prompt
from perfmodel.version import __version__

_MOST_STRINGS = 1 << 16  # of tokens, each decoded by itself
_CREATED = 1_700_000_000  # of the model, in seconds of the epoch: any moment will do


class Rendered(Protocol):
    """What is scraped. http: where requests are counted, if they are"""

    @property
    def http(self) -> HttpCounts | None: ...

    def render(self, openmetrics: bool = False) -> bytes:
        """The metrics as they are now, in Prometheus's text or OpenMetrics'."""
        ...


class _Endpoint:
    """An ASGI application for one path: to Starlette, a function would be one of a request and no more."""

    path: str

    def __init__(self, answer: Callable[[Call], Awaitable[None]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(Call(scope, receive, send))


class _Plain:
    """Routes that answer at once."""

    def __init__(
        self,
        emulator: Emulator,
        settings: ServerSettings,
        vocabulary: Vocabulary,
        generation: Generation,
        metrics: Rendered | None,
        replica: int | None,
    ) -> None:
        self._emulator, self._settings, self._vocabulary, self._replica = emulator, settings, vocabulary, replica
        self._generation, self._metrics = generation, metrics
        self._models = Models(emulator, settings)

    async def health(self, request: HttpRequest) -> Response:
        is_up = self._replica is None or self._emulator.is_up(self._replica)
        return Response(status_code=200 if is_up else 503)

    async def version(self, request: HttpRequest) -> Response:
        engine = self._emulator.scenario.engine.described.version
        return JSONResponse({"version": str(engine.asked or engine.described or __version__)})

    async def load(self, request: HttpRequest) -> Response:
        return JSONResponse({"server_load": self._generation.num_open})

    async def models(self, request: HttpRequest) -> Response:
        root, length, owner = (
            self._models.names[0],
            self._emulator.max_model_len,
            self._emulator.scenario.engine.profile,
        )
        cards = [_card(name, root, None, length, owner) for name in self._models.names]
        cards += [_card(name, name, root, None, owner) for name in self._models.adapters]
        return JSONResponse({"object": "list", "data": cards})

    async def tokenize(self, request: HttpRequest) -> Response:
        body = await read_json(request.scope, request.receive, self._settings, TokenizeBody)
        self._models.check(body.model)
        if body.prompt is None:
            ids = chat_prompt(self._vocabulary, body.conversation, body.add_generation_prompt)
        else:
            ids = self._vocabulary.encode(body.prompt)
        if body.return_token_strs and len(ids) > _MOST_STRINGS:
            raise HttpError(400, f"return_token_strs: got {len(ids)} tokens; expected at most {_MOST_STRINGS}")
        strings = [self._vocabulary.decode(ids[i : i + 1]) for i in range(len(ids))] if body.return_token_strs else None
        counted = {"count": len(ids), "max_model_len": self._emulator.max_model_len, "tokens": ids.tolist()}
        return JSONResponse({**counted, "token_strs": strings})

    async def detokenize(self, request: HttpRequest) -> Response:
        body = await read_json(request.scope, request.receive, self._settings, DetokenizeBody)
        self._models.check(body.model)
        text = self._vocabulary.decode(np.array(body.tokens, dtype=np.int64))
        return JSONResponse({"prompt": text})

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
    permission = {"id": f"modelperm-{name}", "object": "model_permission", "created": _CREATED, "organization": "*"}
    permission |= dict.fromkeys(
        ("allow_create_engine", "allow_search_indices", "allow_fine_tuning", "is_blocking"), False
    )
    permission |= {"allow_sampling": True, "allow_logprobs": True, "allow_view": True, "group": None}
    card = {"id": name, "object": "model", "created": _CREATED, "owned_by": owner, "root": root}
    return {**card, "parent": parent, "max_model_len": max_model_len, "permission": [permission]}


_GET, _POST = ("GET",), ("POST",)
# What answers is a method of `Generation`, if it has one of that name, or of `_Plain`.
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
    emulator: Emulator,
    settings: ServerSettings,
    vocabulary: Vocabulary,
    metrics: Rendered | None,
    replica: int | None,
) -> list[Route]:
    """Every route of the server, in the order of `PATHS`.

    emulator, settings: what answers; to whom, and how
    vocabulary: what prompts are counted by
    metrics:    what /metrics shows; None: it is not there
    replica:    as of `Emulator.submit`
    """
    generation = Generation(emulator, settings, vocabulary, replica)
    plain = _Plain(emulator, settings, vocabulary, generation, metrics, replica)
    return [_route(row, generation, plain) for row in PATHS]


def _route(row: PathRow, generation: Generation, plain: _Plain) -> Route:
    answer = getattr(generation, row.answer, None)
    # An endpoint of its own for each route, by which `path_of` knows it.
    endpoint = partial(getattr(plain, row.answer)) if answer is None else _Endpoint(answer)
    endpoint.path = row.path  # type: ignore[union-attr]
    route = Route(row.path, endpoint, methods=row.methods)
    if row.path == "/metrics":
        route.methods = None  # whatever the method, as a mounted application answers
    elif route.methods is not None and row.path != "/openapi.json":
        route.methods.discard("HEAD")  # which Starlette adds to GET, and FastAPI does not
    return route


def path_of(scope: Scope) -> str | None:
    """The path of the route that has answered a request, as `PATHS` has it."""
    return getattr(scope.get("endpoint"), "path", None)
