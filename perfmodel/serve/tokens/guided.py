"""`Guide`: texts of a requested shape: a JSON schema's, a regular expression's, or one of several.

A schema is filled by its keywords. One whose meaning is not written here is refused: no text is made that the schema
might not allow.
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
_UNFILLED = (
    *("not", "if", "contains", "dependentRequired", "dependentSchemas", "patternProperties", "propertyNames"),
    *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef"),
)
_HIGHEST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_LOWEST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_BOUNDING = {
    *(*_HIGHEST, *_LOWEST, "multipleOf", "pattern", "uniqueItems", "required", "properties", "additionalProperties"),
    *("items", "prefixItems"),
}
_UNFILLED_ERRORS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
_ANNOTATIONS = ("title", "description", "default", "examples", "$defs", "definitions", "$schema", "$id", "$comment")


class Guide(NamedTuple):
    """What a text has to be.

    kind: "json", and `value` is a schema (JSON Schema 2020-12; {} is any object); "choice", and it is a list of texts;
          "regex", and it is a regular expression
    """

    kind: Literal["json", "choice", "regex"]
    value: Any

    def text(self, number: int, filling: str = "") -> str:
        """A text of this shape. number: decides between choices; filling: a text for strings that may be anything

        Raises ValueError where the shape is none, or one that this does not know how to fill: for all numbers, or none.
        """
        try:
            return self._filled(number, filling)
        except _UNFILLED_ERRORS as error:
            if number:  # it has chosen what is not filled here
                return self.text(0)
            raise ValueError(str(error) if type(error) is ValueError else "is no shape that is filled here") from None

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
        if unfilled := [name for name in _UNFILLED if name in schema]:
            raise ValueError(f"{unfilled[0]}: schemas with it are not filled here; leave it out")
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
        """One of the values that a schema lists."""
        if beside := [name for name in schema if name in _BOUNDING]:
            raise ValueError(f"enum, const: not filled beside {beside[0]}; leave it out")
        values = [schema["const"]] if "const" in schema else schema["enum"]
        allowed = [value for value in values if "type" not in schema or _is_a(value, schema["type"])]
        if not allowed or ("enum" in schema and allowed[0] not in schema["enum"]):
            raise ValueError("enum, const, type: have no value in common")
        return allowed[self._number % len(allowed)]

    def _parts(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        """The schemas that it is made of, one of each alternative."""
        parts = [self._referred(schema["$ref"])] if "$ref" in schema else []
        parts += schema.get("allOf", ())
        for name in ("anyOf", "oneOf"):
            if options := schema.get(name):
                parts.append(options[self._number % len(options)] if depth < _MOST_DEEP // 2 else options[-1])
        return [self._resolved(part) for part in parts]

    def _resolved(self, schema: Any) -> Any:
        """A schema in which nothing at the first level refers to another."""
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
        found = {name: self.fill(properties.get(name, others), depth + 1) for name in needed}
        _check_count(schema, "Properties", len(found))
        return found

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        firsts, others = schema.get("prefixItems", []), schema.get("items", True)
        least = len(firsts) if others is False else max(1, len(firsts))
        count = max(schema.get("minItems", 0), min(least, schema.get("maxItems", least)))
        rest = [others] * min(count - len(firsts), _MOST_VALUES + 1)
        found = [self.fill(item, depth + 1) for item in [*firsts, *rest][:count]]
        _check_count(schema, "Items", len(found))
        if schema.get("uniqueItems") and len({json.dumps(each) for each in found}) < len(found):
            raise ValueError("uniqueItems: several items that differ are not made here; leave it out")
        return found

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
    """Raises ValueError where the text that is made here has too few of them, or too many."""
    least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}", inf)
    if not least <= count <= most:
        raise ValueError(f"min{what}, max{what}: no text of {least} to {most} is made here, but of {count}")


def _number_within(schema: Mapping[str, Any], is_integer: bool, otherwise: int) -> int | float:
    """A number that the schema allows, whole if one is."""
    low, high = schema.get("minimum", -inf), schema.get("maximum", inf)
    above, below = schema.get("exclusiveMinimum", -inf), schema.get("exclusiveMaximum", inf)
    step = schema.get("multipleOf", 1)
    if step != int(step):  # of a hundredth, say, whole numbers are multiples, too
        if is_integer or (1 / step) % 1:
            raise ValueError(f"multipleOf: got {step}; expected a whole number, or one over a whole number")
        step = 1
    least = max(ceil(low) if low > -inf else -inf, floor(above) + 1 if above > -inf else -inf)
    most = min(floor(high) if high < inf else inf, ceil(below) - 1 if below < inf else inf)
    near = least if least > -inf else min(most, otherwise)
    found: int | float = ceil(near / step) * int(step) if least > -inf else floor(near / step) * int(step)
    if not least <= found <= most and not is_integer and "multipleOf" not in schema:
        found = (max(low, above) + min(high, below)) / 2
    if not (low <= found <= high and above < found < below):
        raise ValueError("minimum, maximum, multipleOf: no number that they allow is made here")
    return found


def _is_a(value: Any, kinds: str | Sequence[str]) -> bool:
    """Whether a value is of a type of JSON Schema, or of one of several."""
    name = "null" if value is None else {bool: "boolean", str: "string", list: "array", dict: "object"}.get(type(value))
    is_whole = isinstance(value, int | float) and value == int(value)
    names = {name} if name else {"number", "integer"} if is_whole else {"number"}
    return bool(names & ({kinds} if isinstance(kinds, str) else set(kinds)))


def _merged(first: Mapping[str, Any], second: Any) -> dict[str, Any]:
    """A schema that allows what both allow. Raises ValueError for what is not put together here."""
    if second is True:
        return dict(first)
    if not isinstance(second, Mapping):
        raise ValueError(f"expected a JSON schema, got {str(second)[:40]!r}")
    found = dict(first)
    for name, value in second.items():
        if name not in found or name in _ANNOTATIONS:
            found[name] = value
        elif name == "properties":
            both = {each: {"allOf": [found[name][each], value[each]]} for each in value if each in found[name]}
            found[name] = {**found[name], **value, **both}
        elif name in ("required", "allOf"):
            found[name] = list(dict.fromkeys([*found[name], *value])) if name == "required" else found[name] + value
        elif name in _HIGHEST:
            found[name] = max(found[name], value)
        elif name in _LOWEST:
            found[name] = min(found[name], value)
        elif name == "type":
            found[name] = _common(found[name], value)
        elif name == "enum":
            found[name] = [each for each in found[name] if each in value]
        elif found[name] != value:
            raise ValueError(f"{name}: given twice, and differently; give it once")
    return found


def _common(first: str | list[str], second: str | list[str]) -> list[str]:
    """Types that both name; an integer is a number."""
    ones, others = ([each] if isinstance(each, str) else list(each) for each in (first, second))
    found = [each for each in ones if each in others or (each == "integer" and "number" in others)]
    found += [each for each in others if each == "integer" and "number" in ones and each not in found]
    if not found:
        raise ValueError(f"type: got {first} and {second}, which have no value in common")
    return found
