"""`document`: what the server answers, as an OpenAPI 3.1 document, from its routes and the schemas of their bodies."""

__all__ = ["PathRow", "document"]

from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

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
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}


class PathRow(NamedTuple):
    """A path of the server.

    methods: that it answers; answer: the name of what does
    summary: for readers; body: what it is sent; media: of its answer; is_streamed: server-sent events, too
    """

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
    paths = {row.path: {method.lower(): _operation(row, method) for method in row.methods} for row in rows}
    return {
        "openapi": "3.1.0",
        "info": {"title": "perfmodel serve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": _ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(row: PathRow, method: str) -> dict[str, Any]:
    answered: dict[str, Any] = {"description": row.summary}
    if row.media is not None:
        answered["content"] = {row.media: {}, **({"text/event-stream": {}} if row.is_streamed else {})}
    errors = {status: _error(meaning) for status, meaning in _ERRORS.items()}
    operation = {"summary": row.summary, "responses": {"200": answered, **errors}, "security": [{}, {"key": []}]}
    if "{" in row.path:
        named = row.path.partition("{")[2].partition("}")[0]
        operation["parameters"] = [{"name": named, "in": "path", "required": True, "schema": {"type": "string"}}]
    if row.body is not None and method == "POST":
        schema = {"$ref": _REFERENCE.format(model=row.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _error(meaning: str) -> dict[str, Any]:
    schema = {"$ref": _REFERENCE.format(model="Error")}
    return {"description": meaning, "content": {"application/json": {"schema": schema}}}
