"""`document`: what the server answers, as an OpenAPI 3.1 document, from the same schemas that bodies are checked by."""

__all__ = ["document"]

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from perfmodel.serve.http.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from perfmodel.version import __version__

_REFERENCE = "#/components/schemas/{model}"
_POSTS: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionBody, "An answer that goes on with a prompt, whole or as server-sent events."),
    "/v1/chat/completions": (ChatBody, "The next message of a conversation, whole or as server-sent events."),
    "/tokenize": (TokenizeBody, "Token ids of a text or a conversation."),
    "/detokenize": (DetokenizeBody, "The text of token ids."),
}
_GETS = {
    "/v1/models": ("The models that can be asked for.", "application/json"),
    "/health": ("200 once it answers.", None),
    "/ping": ("200 once it answers.", None),
    "/version": ("Of the engine that is emulated, and of perfmodel.", "application/json"),
    "/load": ("Requests that are being answered.", "application/json"),
    "/metrics": ("Metrics under the engine's names; 404 without.", "text/plain"),
    "/openapi.json": ("This document.", "application/json"),
}
_STREAMED = {"/v1/completions", "/v1/chat/completions"}
_ERRORS = {
    "400": "what is wrong with the request",
    "401": "no key, or a wrong one",
    "403": "a page of another site asks for what changes the server",
    "404": "no such model, or path",
    "408": "the body took too long",
    "413": "the body is too large",
    "429": "more than the gateway's rate limit, or injected with --fail",
    "431": "the headers are too large",
    "500": "injected with --fail",
    "503": "weights are loading, or the deployment has refused or lost the request",
    "504": "no answer before the deployment's deadline",
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}


@cache
def document() -> dict[str, Any]:
    """The document; always the same."""
    bodies = [kind for kind, _ in _POSTS.values()]
    _, schemas = models_json_schema([(kind, "validation") for kind in bodies], ref_template=_REFERENCE)
    paths: dict[str, Any] = {path: {"post": _post(path, kind, said)} for path, (kind, said) in _POSTS.items()}
    for path, (said, media) in _GETS.items():
        paths[path] = {"get": _operation(said, {media: {}} if media else None)}
    paths["/ping"]["post"] = _operation(_GETS["/ping"][0], None)
    refused = {"409": _error("requests hold KV blocks")}
    paths["/reset_prefix_cache"] = {"post": _operation("All prefix caches are empty after it.", None, refused)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "perfmodel serve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": _ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _post(path: str, kind: type[BaseModel], said: str) -> dict[str, Any]:
    media: dict[str, Any] = {"application/json": {}}
    if path in _STREAMED:
        media["text/event-stream"] = {}
    schema = {"$ref": _REFERENCE.format(model=kind.__name__)}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {**_operation(said, media), "requestBody": body}


def _operation(said: str, media: dict[str, Any] | None, more: dict[str, Any] | None = None) -> dict[str, Any]:
    answered: dict[str, Any] = {"description": said}
    if media is not None:
        answered["content"] = media
    errors = {status: _error(meaning) for status, meaning in _ERRORS.items()}
    return {"summary": said, "responses": {"200": answered, **errors, **(more or {})}, "security": [{}, {"key": []}]}


def _error(meaning: str) -> dict[str, Any]:
    schema = {"$ref": _REFERENCE.format(model="Error")}
    return {"description": meaning, "content": {"application/json": {"schema": schema}}}
