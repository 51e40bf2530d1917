"""`Guide`: texts of a requested shape: a JSON schema's, or one of several. Regular expressions are not filled."""

__all__ = ["Guide"]

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

_MOST_DEEP = 24  # levels of a schema that refers to itself
_MOST_VALUES = 4096  # in one text, and characters of one string
_FORMATS = {
    "date": "2026-11-25",
    "date-time": "2026-11-25T12:00:00Z",
    "time": "12:00:00Z",
    "duration": "P1D",
    "email": "a@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
_TYPES = {"object", "array", "string", "integer", "number", "boolean", "null"}


class Guide(NamedTuple):
    """What a text has to be.

    kind: "json", and `value` is a schema (JSON Schema 2020-12; {} is any object); "choice", and it is a list of texts
    """

    kind: Literal["json", "choice"]
    value: Any

    def text(self, number: int, filling: str = "") -> str:
        """A text of this shape. number: decides between choices; filling: a text for strings that may be anything

        Raises ValueError where the shape is none, or one that this does not know how to fill.
        """
        if self.kind == "choice":
            return str(self.value[number % len(self.value)])
        return json.dumps(_Filler(self.value, number, filling).fill(self.value, 0))


class _Filler:
    """Values of the schema `root`, the same for the same `number`."""

    def __init__(self, root: Any, number: int, filling: str) -> None:
        self._root, self._number, self._filling, self._left = root, number, filling, _MOST_VALUES

    def fill(self, schema: Any, depth: int) -> Any:
        """A value of `schema`, which may refer to the root."""
        self._left -= 1
        if depth > _MOST_DEEP or self._left < 0:
            raise ValueError("the schema has too many values, or refers to itself without an end")
        if schema is True or schema == {}:
            return self._filling if depth else {"answer": self._filling}
        if not isinstance(schema, Mapping):
            raise ValueError(f"expected a JSON schema, got {str(schema)[:40]!r}")
        if "$ref" in schema:
            return self.fill(self._referred(schema["$ref"]), depth + 1)
        if "const" in schema:
            return schema["const"]
        for name in ("enum", "anyOf", "oneOf", "examples"):
            if options := schema.get(name):
                chosen = options[self._number % len(options)] if depth < _MOST_DEEP // 2 else options[-1]
                return chosen if name in ("enum", "examples") else self.fill(chosen, depth + 1)
        if "allOf" in schema:
            merged: dict[str, Any] = {name: value for name, value in schema.items() if name != "allOf"}
            for part in schema["allOf"]:
                part = self._referred(part["$ref"]) if "$ref" in part else part
                properties = {**merged.get("properties", {}), **part.get("properties", {})}
                required = [*merged.get("required", ()), *part.get("required", ())]
                merged = {**merged, **part, "properties": properties, "required": required}
            return self.fill(merged, depth + 1)
        return self._of_type(schema, depth)

    def _of_type(self, schema: Mapping[str, Any], depth: int) -> Any:
        kind = schema.get("type", "object" if "properties" in schema else "array" if "items" in schema else "string")
        kind = kind[0] if isinstance(kind, list) and kind else kind
        if kind not in _TYPES:
            raise ValueError(f"type: got {str(kind)[:40]!r}; expected one of {', '.join(sorted(_TYPES))}")
        if kind == "object":
            properties = schema.get("properties", {})
            needed = schema.get("required", list(properties))
            return {name: self.fill(properties.get(name, True), depth + 1) for name in needed}
        if kind == "array":
            firsts = schema.get("prefixItems", [])
            count = min(max(schema.get("minItems", 1), len(firsts)), _MOST_VALUES + 1)
            rest = [schema.get("items", True)] * (count - len(firsts))
            return [self.fill(item, depth + 1) for item in [*firsts, *rest]]
        if kind in ("integer", "number"):
            return self._number_of(schema)
        return {"boolean": bool(self._number % 2), "null": None}.get(kind) if kind != "string" else self._string(schema)

    def _number_of(self, schema: Mapping[str, Any]) -> int | float:
        low = schema.get("minimum", schema.get("exclusiveMinimum", schema.get("maximum", self._number % 100)))
        low += "exclusiveMinimum" in schema
        step = schema.get("multipleOf", 1)
        return -(-low // step) * step  # type: ignore[no-any-return]  # of a schema's numbers

    def _string(self, schema: Mapping[str, Any]) -> str:
        if "pattern" in schema:
            raise ValueError("pattern: regular expressions cannot be filled here; leave it out")
        if schema.get("format") in _FORMATS:
            return _FORMATS[schema["format"]]
        text = self._filling or "a"
        if schema.get("minLength", 0) > _MOST_VALUES:
            raise ValueError(f"minLength: got {schema['minLength']}; expected at most {_MOST_VALUES}")
        return text.ljust(schema.get("minLength", 0), "a")[: schema.get("maxLength")]

    def _referred(self, name: str) -> Any:
        value = self._root
        for part in name.lstrip("#/").split("/"):
            if not isinstance(value, Mapping) or part not in value:
                raise ValueError(f"$ref: got {name[:40]!r}, which the schema does not have")
            value = value[part]
        return value
