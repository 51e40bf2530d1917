"""`Guide`: texts of a requested shape: a JSON schema, a regular expression, or one of several choices.

A schema is filled keyword by keyword. Unsupported keywords are rejected, so no text violates its schema.
"""

__all__ = ["Guide"]

import json
from collections.abc import Mapping, Sequence
from math import ceil, floor, inf
from typing import Any, Literal, NamedTuple

from perfmodel.serve.tokens.patterns import text_of_pattern

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
_UNSUPPORTED = (
    *("not", "if", "contains", "dependentRequired", "dependentSchemas", "patternProperties", "propertyNames"),
    *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef"),
)
_HIGHEST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_LOWEST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_BOUNDING = {
    *(*_HIGHEST, *_LOWEST, "multipleOf", "pattern", "uniqueItems", "required", "properties", "additionalProperties"),
    *("items", "prefixItems"),
}
_FILL_ERRORS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
_ANNOTATIONS = ("title", "description", "default", "examples", "$defs", "definitions", "$schema", "$id", "$comment")


class Guide(NamedTuple):
    """The required shape of a text.

    value: for kind "json", a schema (JSON Schema 2020-12; {} is any object); for "choice", a list of texts; for
           "regex", a regular expression
    """

    kind: Literal["json", "choice", "regex"]
    value: Any

    def text(self, number: int, filling: str = "") -> str:
        """A text of this shape. number: decides between choices; filling: a text for strings that may be anything

        Raises ValueError for an invalid or unsupported shape, whatever the number.
        """
        try:
            return self._filled(number, filling)
        except _FILL_ERRORS as error:
            if number:  # this number may have picked an unsupported alternative
                return self.text(0)
            raise ValueError(str(error) if type(error) is ValueError else "invalid or unsupported shape") from None

    def _filled(self, number: int, filling: str) -> str:
        if self.kind == "choice":
            return str(self.value[number % len(self.value)])
        if self.kind == "regex":
            return text_of_pattern(self.value, number)
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
        if unsupported := [name for name in _UNSUPPORTED if name in schema]:
            raise ValueError(f"{unsupported[0]}: not supported in schemas; leave it out")
        parts = self._parts(schema, depth)
        if parts:
            rest = {name: value for name, value in schema.items() if name not in ("$ref", "allOf", "anyOf", "oneOf")}
            for part in parts:
                rest = _merged(rest, part)
            return self.fill(rest, depth + 1)
        if "const" in schema or "enum" in schema:
            return self._listed(schema)
        return self._of_type(schema, depth)

    def _listed(self, schema: Mapping[str, Any]) -> Any:
        """One of the values in `const` or `enum`."""
        if bounds := [name for name in schema if name in _BOUNDING]:
            raise ValueError(f"enum, const: not supported together with {bounds[0]}; leave it out")
        values = [schema["const"]] if "const" in schema else schema["enum"]
        allowed = [value for value in values if "type" not in schema or _is_a(value, schema["type"])]
        if not allowed or ("enum" in schema and allowed[0] not in schema["enum"]):
            raise ValueError("enum, const, type: have no value in common")
        return allowed[self._number % len(allowed)]

    def _parts(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        """The subschemas to merge: `$ref`, all of `allOf`, one of `anyOf`, one of `oneOf`."""
        parts = [self._referred(schema["$ref"])] if "$ref" in schema else []
        parts += schema.get("allOf", ())
        for name in ("anyOf", "oneOf"):
            if options := schema.get(name):
                parts.append(options[self._number % len(options)] if depth < _MOST_DEEP // 2 else options[-1])
        return [self._resolved(part) for part in parts]

    def _resolved(self, schema: Any) -> Any:
        """The schema with `$ref` resolved at its top level."""
        for _ in range(_MOST_DEEP):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                return schema
            rest = {name: value for name, value in schema.items() if name != "$ref"}
            schema = _merged(rest, self._referred(schema["$ref"]))
        raise ValueError("$ref: the schema refers to itself without an end")

    def _of_type(self, schema: Mapping[str, Any], depth: int) -> Any:
        kind = schema.get("type", "object" if "properties" in schema else "array" if "items" in schema else "string")
        kind = kind[0] if isinstance(kind, list) and kind else kind
        if kind not in _TYPES:
            raise ValueError(f"type: got {str(kind)[:40]!r}; expected one of {', '.join(sorted(_TYPES))}")
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        if kind in ("integer", "number"):
            return _number_within(schema, kind == "integer", self._number % 100)
        return {"boolean": bool(self._number % 2), "null": None}.get(kind) if kind != "string" else self._string(schema)

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        needed = schema.get("required", list(properties))
        members = {name: self.fill(properties.get(name, others), depth + 1) for name in needed}
        _check_count(schema, "Properties", len(members))
        return members

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        firsts, others = schema.get("prefixItems", []), schema.get("items", True)
        least = len(firsts) if others is False else max(1, len(firsts))
        count = max(schema.get("minItems", 0), min(least, schema.get("maxItems", least)))
        rest = [others] * min(count - len(firsts), _MOST_VALUES + 1)
        values = [self.fill(item, depth + 1) for item in [*firsts, *rest][:count]]
        _check_count(schema, "Items", len(values))
        if schema.get("uniqueItems") and len({json.dumps(item) for item in values}) < len(values):
            raise ValueError("uniqueItems: not supported for several items; leave it out")
        return values

    def _string(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if least > _MOST_VALUES:
            raise ValueError(f"minLength: got {least}; expected at most {_MOST_VALUES}")
        if "pattern" in schema:
            text = text_of_pattern(schema["pattern"], self._number)
        elif schema.get("format") in _FORMATS:
            text = _FORMATS[schema["format"]]
        else:
            text = (self._filling or "a").ljust(least, "a")[:most]
        _check_count(schema, "Length", len(text))
        return text

    def _referred(self, name: str) -> Any:
        value = self._root
        for part in name.lstrip("#/").split("/") if name != "#" else ():
            if not isinstance(value, Mapping) or part not in value:
                raise ValueError(f"$ref: got {name[:40]!r}, which the schema does not have")
            value = value[part]
        return value


def _check_count(schema: Mapping[str, Any], what: str, count: int) -> None:
    """Raises ValueError if `count` is outside the schema's limits."""
    least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}", inf)
    if not least <= count <= most:
        raise ValueError(f"min{what}, max{what}: cannot make a text of {least} to {most}, only of {count}")


def _number_within(schema: Mapping[str, Any], is_integer: bool, otherwise: int) -> int | float:
    """A number within the schema's bounds, whole if possible. otherwise: used without a lower bound"""
    low, high = schema.get("minimum", -inf), schema.get("maximum", inf)
    above, below = schema.get("exclusiveMinimum", -inf), schema.get("exclusiveMaximum", inf)
    step = schema.get("multipleOf", 1)
    if step != int(step):  # whole numbers are multiples of 0.01, too
        if is_integer or (1 / step) % 1:
            raise ValueError(f"multipleOf: got {step}; expected a whole number, or one over a whole number")
        step = 1
    least = max(ceil(low) if low > -inf else -inf, floor(above) + 1 if above > -inf else -inf)
    most = min(floor(high) if high < inf else inf, ceil(below) - 1 if below < inf else inf)
    near = least if least > -inf else min(most, otherwise)
    value: int | float = ceil(near / step) * int(step) if least > -inf else floor(near / step) * int(step)
    if not least <= value <= most and not is_integer and "multipleOf" not in schema:
        value = (max(low, above) + min(high, below)) / 2
    if not (low <= value <= high and above < value < below):
        raise ValueError("minimum, maximum, multipleOf: value no number within these bounds")
    return value


def _is_a(value: Any, kinds: str | Sequence[str]) -> bool:
    """Whether a value has one of these JSON Schema types."""
    name = "null" if value is None else {bool: "boolean", str: "string", list: "array", dict: "object"}.get(type(value))
    is_whole = isinstance(value, int | float) and value == int(value)
    names = {name} if name else {"number", "integer"} if is_whole else {"number"}
    return bool(names & ({kinds} if isinstance(kinds, str) else set(kinds)))


def _merged(first: Mapping[str, Any], second: Any) -> dict[str, Any]:
    """The intersection of two schemas. Raises ValueError for conflicting keywords."""
    if second is True:
        return dict(first)
    if not isinstance(second, Mapping):
        raise ValueError(f"expected a JSON schema, got {str(second)[:40]!r}")
    merged = dict(first)
    for name, value in second.items():
        if name not in merged or name in _ANNOTATIONS:
            merged[name] = value
        elif name == "properties":
            both = {key: {"allOf": [merged[name][key], value[key]]} for key in value if key in merged[name]}
            merged[name] = {**merged[name], **value, **both}
        elif name in ("required", "allOf"):
            merged[name] = list(dict.fromkeys([*merged[name], *value])) if name == "required" else merged[name] + value
        elif name in _HIGHEST:
            merged[name] = max(merged[name], value)
        elif name in _LOWEST:
            merged[name] = min(merged[name], value)
        elif name == "type":
            merged[name] = _common(merged[name], value)
        elif name == "enum":
            merged[name] = [item for item in merged[name] if item in value]
        elif merged[name] != value:
            raise ValueError(f"{name}: two different values; give one")
    return merged


def _common(first: str | list[str], second: str | list[str]) -> list[str]:
    """Types in both; an integer is a number."""
    ones, others = ([kinds] if isinstance(kinds, str) else list(kinds) for kinds in (first, second))
    common = [kind for kind in ones if kind in others or (kind == "integer" and "number" in others)]
    if "integer" in others and "number" in ones and "integer" not in common:
        common.append("integer")
    if not common:
        raise ValueError(f"type: got {first} and {second}, which have no value in common")
    return common
