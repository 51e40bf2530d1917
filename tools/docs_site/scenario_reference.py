"""The page of a scenario's fields: type, unit, default and meaning of each, from its JSON Schema and its specs."""

__all__ = ["scenario_page", "sections", "unit_of"]

import json
import re
from collections.abc import Iterator
from typing import Any

from docs_site.tables import as_code, in_cell, table
from perfmodel import specs
from perfmodel.specs.json_schema import every_spec, refs_of, summary_of

_UNITS = (
    ("requests_per_s", "requests/s"),
    ("_bytes_per_s", "B/s"),
    ("_flops_per_s", "FLOP/s"),
    ("_tokens_per_s", "tokens/s"),
    ("_words_per_minute", "words/min"),
    ("_usd_per_gpu_hour", "USD/h"),
    ("_usd_per_hour", "USD/h"),
    ("usd_per_gpu_hour", "USD/h"),
    ("usd_per_hour", "USD/h"),
    ("_ms_per_input_token", "ms/token"),
    ("_s_per_token", "s/token"),
    ("_bytes", "B"),
    ("_tokens", "tokens"),
    ("_seconds", "s"),
    ("_ms", "ms"),
    ("_us", "µs"),
    ("_hz", "Hz"),
    ("_s", "s"),
    ("_w", "W"),
    ("_j", "J"),
)
_HEADER = ("field", "type", "unit", "default", "meaning")
_TOP = "Scenario"


def scenario_page() -> str:
    """What the page has below its introduction."""
    schema = specs.schema("scenario")
    return "".join(_section(name, body) for name, body in sections(schema))


def sections(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, schema) of the scenario and of each object in it, in the order in which a reader meets them."""
    yield _TOP, schema
    for name in _reached(schema, schema["properties"]):
        if "properties" in schema["$defs"][name]:
            yield name, schema["$defs"][name]


def _reached(schema: dict[str, Any], node: Any, seen: list[str] | None = None) -> list[str]:
    """Definitions in the order in which a reader of the fields meets them."""
    seen = [] if seen is None else seen
    for name in refs_of(node):
        if name not in seen:
            seen.append(name)
            _reached(schema, schema["$defs"][name], seen)
    return seen


def _section(name: str, body: dict[str, Any]) -> str:
    cls = every_spec().get(name)
    summary = summary_of(cls) if cls is not None else body.get("description", "")
    summary = "" if name == _TOP else summary  # of the object that a file becomes, not of the file
    required = set(body.get("required", ())) | ({"model", "hardware", "traffic"} if name == _TOP else set())
    rows = [
        (
            as_code(field),
            _type(node),
            unit_of(field, node),
            _default(field, node, required),
            in_cell(node.get("description", "")),
        )
        for field, node in body["properties"].items()
    ]
    return f"## {name}\n\n{_prose(summary)}\n\n{table(_HEADER, rows)}\n"


def _prose(told: str) -> str:
    """Docstrings as Markdown: indented lines are formulas."""
    return re.sub(r"(?m)^(?! )(.*<.*)$", lambda match: match[1].replace("<", "&lt;"), told)


def _meaning(node: dict[str, Any]) -> str:
    return in_cell(node.get("description", ""))


def _default(field: str, node: dict[str, Any], required: set[str]) -> str:
    if field in required:
        return "required"
    value = node.get("default")
    if isinstance(value, dict):
        return "see there"
    return "" if value in (None, []) else as_code(_shortened(json.dumps(value, ensure_ascii=False)))


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _type(node: dict[str, Any]) -> str:
    choices = list(dict.fromkeys(_choices(node)))
    return " or ".join(choices) + _limits(node)


def _choices(node: dict[str, Any]) -> Iterator[str]:
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        yield f"[{name}](#{name.lower()})"
    elif "anyOf" in node or "oneOf" in node:
        for item in node.get("anyOf") or node["oneOf"]:
            if item.get("type") != "null":
                yield from _choices(item)
    elif "enum" in node:
        yield ", ".join(as_code(entry) for entry in node["enum"])
    elif "const" in node:
        yield as_code(node["const"])
    elif node.get("type") == "array":
        items = node.get("items") or {}
        yield f"list of {' or '.join(dict.fromkeys(_choices(items))) or 'values'}" if items else "list"
    elif node.get("type") == "object":
        values = node.get("additionalProperties")
        inner = " or ".join(_choices(values)) if isinstance(values, dict) else ""
        yield f"mapping to {inner}" if inner else "mapping"
    elif isinstance(node.get("type"), list):
        yield "quantity"
    elif "pattern" in node:
        return  # a count with a suffix, which the page says once
    elif "type" in node:
        yield {"string": "text", "boolean": "yes or no", "integer": "whole number"}.get(node["type"], node["type"])


def _limits(node: dict[str, Any]) -> str:
    """What a number may be, where the schema says it: `>= 0`, `<= 1`."""
    for item in (node, *node.get("anyOf", ())):
        signs = (("exclusiveMinimum", "&gt; "), ("minimum", "≥ "), ("exclusiveMaximum", "&lt; "), ("maximum", "≤ "))
        # What is there against slips of the finger alone is not worth a reader's time.
        limits = [f"{sign}{item[key]:g}" for key, sign in signs if key in item and abs(item[key]) < 1e9]
        if limits:
            return ", " + ", ".join(limits)
    return ""


def unit_of(field: str, node: dict[str, Any]) -> str:
    """The unit of a plain number in the field, as its name has it."""
    kinds = {item.get("type") for item in (node, *node.get("anyOf", ())) if isinstance(item.get("type"), str)}
    if field == "rate" and "number" in kinds and "string" in kinds:
        return "requests/s"
    if kinds <= {"boolean", "string", "null"} and not any(
        isinstance(item.get("type"), list) for item in (node, *node.get("anyOf", ()))
    ):
        return ""
    return next((unit for ending, unit in _UNITS if field.endswith(ending)), "")
