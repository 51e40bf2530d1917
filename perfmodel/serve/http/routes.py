"""`routes`: every path of the server, and what answers there."""

__all__ = ["Rendered", "routes"]

import json
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from perfmodel.serve.emulator import Emulator
from perfmodel.serve.http.bodies import DetokenizeBody, TokenizeBody
from perfmodel.serve.http.errors import HttpError
from perfmodel.serve.http.generation import Generation, Models
from perfmodel.serve.http.openapi import document
from perfmodel.serve.http.reading import read_json
from perfmodel.serve.metrics import content_type, wants_openmetrics
from perfmodel.serve.settings import ServerSettings
from perfmodel.serve.tokens import Vocabulary, chat_prompt
from perfmodel.version import __version__

_MOST_STRINGS = 1 << 16  # of tokens, each decoded by itself
_CREATED = 1_700_000_000  # of the model, in seconds of the epoch: any moment will do


class Rendered(Protocol):
    """What is scraped."""

    def render(self, openmetrics: bool = False) -> bytes:
        """The metrics as they are now, in Prometheus's text or OpenMetrics'."""
        ...


class _Endpoint:
    """An ASGI application for one path: to Starlette, a function would be one of a request and no more."""

    def __init__(self, answer: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)


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
        return JSONResponse({"version": str(engine.asked or engine.described or __version__), "perfmodel": __version__})

    async def load(self, request: HttpRequest) -> Response:
        return JSONResponse({"server_load": self._generation.num_open})

    async def models(self, request: HttpRequest) -> Response:
        root, length = self._models.names[0], self._emulator.max_model_len
        cards = [_card(name, root, None, length) for name in self._models.names]
        cards += [_card(name, name, root, None) for name in self._models.adapters]
        return JSONResponse({"object": "list", "data": cards})

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_json(scope, receive, self._settings, TokenizeBody)
        self._models.check(body.model)
        if body.messages is not None:
            ids = chat_prompt(self._vocabulary, body.conversation, body.add_generation_prompt)
        else:
            ids = self._vocabulary.encode(body.prompt or "")
        if body.return_token_strs and len(ids) > _MOST_STRINGS:
            raise HttpError(400, f"return_token_strs: found {len(ids)} tokens, allowed {_MOST_STRINGS}; leave it out")
        strings = [self._vocabulary.decode(ids[i : i + 1]) for i in range(len(ids))] if body.return_token_strs else None
        said = {"count": len(ids), "max_model_len": self._emulator.max_model_len, "tokens": ids.tolist()}
        await JSONResponse({**said, "token_strs": strings})(scope, receive, send)

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_json(scope, receive, self._settings, DetokenizeBody)
        self._models.check(body.model)
        text = self._vocabulary.decode(np.array(body.tokens, dtype=np.int64))
        await JSONResponse({"prompt": text})(scope, receive, send)

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
            raise HttpError(404, "Not Found")
        is_open = wants_openmetrics(request.headers.get("accept", ""))
        return Response(self._metrics.render(openmetrics=is_open), headers={"content-type": content_type(is_open)})

    async def openapi(self, request: HttpRequest) -> Response:
        return Response(json.dumps(document()), media_type="application/json")


def _card(name: str, root: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
    said = {"id": name, "object": "model", "created": _CREATED, "owned_by": "perfmodel", "root": root}
    return {**said, "parent": parent, "max_model_len": max_model_len, "permission": []}


def routes(
    emulator: Emulator,
    settings: ServerSettings,
    vocabulary: Vocabulary,
    metrics: Rendered | None,
    replica: int | None,
) -> list[Route]:
    """Every route of the server.

    emulator, settings: what answers; to whom, and how
    vocabulary: what prompts are counted by
    metrics:    what /metrics shows; None: it is not there
    replica:    as of `Emulator.submit`
    """
    generation = Generation(emulator, settings, vocabulary, replica)
    plain = _Plain(emulator, settings, vocabulary, generation, metrics, replica)
    return [
        Route("/v1/completions", _Endpoint(generation.complete), methods=["POST"]),
        Route("/v1/chat/completions", _Endpoint(generation.chat), methods=["POST"]),
        Route("/v1/models", plain.models),
        Route("/tokenize", _Endpoint(plain.tokenize), methods=["POST"]),
        Route("/detokenize", _Endpoint(plain.detokenize), methods=["POST"]),
        Route("/health", plain.health),
        Route("/ping", plain.health, methods=["GET", "POST"]),
        Route("/version", plain.version),
        Route("/load", plain.load),
        Route("/reset_prefix_cache", plain.reset_prefix_cache, methods=["POST"]),
        Route("/metrics", plain.metrics),
        Route("/openapi.json", plain.openapi),
    ]
