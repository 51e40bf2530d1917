"""`Guide`: texts of a requested shape: a JSON schema, a regular expression, or one of several choices.

A schema is filled keyword by keyword, and a text for a regular expression is built from Python's parse tree: no
matching takes place, so no expression is slow. Unsupported keywords are rejected, so no text violates its schema."""

import json
import re
from collections.abc import Mapping, Sequence
from math import ceil, floor, inf
from re import _constants as ops  # type: ignore[attr-defined]  # opcodes of the parse tree; since Python 3.11
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Literal, NamedTuple

_LONGEST_PATTERN = 4096
_MAX_CHARACTERS = 4096
_CANDIDATES = [chr(code) for code in (*range(ord("a"), ord("z") + 1), *range(ord(" "), ord("a")), *range(123, 0x250))]


def text_of_pattern(pattern: str, number: int) -> str:
    """A text that `pattern` matches. number: decides between alternatives

    Raises ValueError for invalid expressions, lookarounds, word boundaries, and texts of more than 4,096 characters."""
    if len(pattern) > _LONGEST_PATTERN:
        raise ValueError(f"regex: got {len(pattern):,} characters; expected at most {_LONGEST_PATTERN:,}")
    try:
        tree = _parser.parse(pattern)
    except (re.error, OverflowError) as error:
        raise ValueError(f"regex: {error}") from None
    return _Text(number).whole(tree)


class _Text:
    """Builds the text. `_groups` has the text of every group, for backreferences."""

    def __init__(self, number: int) -> None:
        self._number, self._text, self._ends_at = number, "", -1
        self._groups: dict[int, str] = {}

    def whole(self, tree: Any) -> str:
        """The text of a parsed expression."""
        self._add(tree)
        if self._ends_at not in (-1, len(self._text)):
            raise ValueError("regex: $ before the end of the text; leave it out")
        return self._text

    def _add(self, tree: Any) -> None:
        for op, argument in tree:
            self._write(op, argument)
            if len(self._text) > _MAX_CHARACTERS:
                raise ValueError(f"regex: its text is longer than {_MAX_CHARACTERS:,} characters")

    def _write(self, op: Any, argument: Any) -> None:
        before = len(self._text)
        if op is ops.LITERAL:
            self._text += chr(argument)
        elif op is ops.NOT_LITERAL:
            self._text += next(character for character in _CANDIDATES if ord(character) != argument)
        elif op is ops.ANY:
            self._text += "a"
        elif op is ops.IN:
            self._text += self._one_of(argument)
        elif op in (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT):
            self._repeat(*argument)
        elif op is ops.BRANCH:
            self._add(argument[1][self._number % len(argument[1])])
        elif op is ops.SUBPATTERN:
            group, *_, tree = argument
            self._add(tree)
            if group is not None:
                self._groups[group] = self._text[before:]
        elif op is ops.ATOMIC_GROUP:
            self._add(argument)
        elif op is ops.GROUPREF:
            self._text += self._groups.get(argument, "")
        elif op is not ops.AT:
            raise ValueError(f"regex: {str(op).lower()} is not supported; leave it out")
        elif argument in (ops.AT_END, ops.AT_END_STRING):
            self._ends_at = before
        elif argument not in (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING) or before:
            raise ValueError("regex: only ^ at the start and $ at the end are supported; leave the others out")

    def _one_of(self, items: list[tuple[Any, Any]]) -> str:
        op: Any
        value: Any
        is_negated = items[0][0] is ops.NEGATE
        items = items[is_negated:]
        op, value = items[self._number % len(items)] if items else (ops.NEGATE, None)
        if not is_negated and op in (ops.LITERAL, ops.RANGE):
            return chr(value if op is ops.LITERAL else value[0])
        matching = (one for one in _CANDIDATES if any(_is_of(one, *item) for item in items) is not is_negated)
        character = next(matching, None)
        if character is None:
            raise ValueError("regex: a set of characters has no supported character")
        return character

    def _repeat(self, low: int, high: Any, tree: Any) -> None:
        count = max(int(low), min(int(high), 1))
        if count > _MAX_CHARACTERS:
            raise ValueError(f"regex: repeats {count:,} times; expected at most {_MAX_CHARACTERS:,}")
        for _ in range(count):
            before = len(self._text)
            self._add(tree)
            if len(self._text) == before:
                return  # an empty repetition stays empty


def _is_of(character: str, op: Any, value: Any) -> bool:
    """Whether an item of a set of characters has this one."""
    if op is ops.CATEGORY:
        is_digit, is_space = character.isdecimal(), character.isspace()
        is_word = character.isalnum() or character == "_"
        digits = {ops.CATEGORY_DIGIT: is_digit, ops.CATEGORY_NOT_DIGIT: not is_digit}
        spaces = {ops.CATEGORY_SPACE: is_space, ops.CATEGORY_NOT_SPACE: not is_space}
        kinds: Mapping[Any, bool] = {**digits, **spaces, ops.CATEGORY_WORD: is_word, ops.CATEGORY_NOT_WORD: not is_word}
        return kinds[value]
    code = ord(character)
    return bool(value[0] <= code <= value[1] if op is ops.RANGE else value == code)


_MAX_DEPTH = 24  # levels of a schema that refers to itself
_MAX_VALUES = 4096  # in one text, and characters of one string
_FORMATS = {
    **{"date": "2026-11-25", "date-time": "2026-11-25T12:00:00Z", "time": "12:00:00Z", "duration": "P1D"},
    **{"email": "a@example.com", "hostname": "example.com", "uri": "https://example.com/"},
    **{"ipv4": "192.0.2.1", "ipv6": "2001:db8::1", "uuid": "00000000-0000-4000-8000-000000000000"},
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
           "regex", a regular expression"""

    kind: Literal["json", "choice", "regex"]
    value: Any

    def text(self, number: int, filling: str = "") -> str:
        """A text of this shape. number: decides between choices; filling: a text for strings that may be anything

        Raises ValueError for an invalid or unsupported shape, whatever the number."""
        try:
            if self.kind == "choice":
                return str(self.value[number % len(self.value)])
            if self.kind == "regex":
                return text_of_pattern(self.value, number)
            return json.dumps(_Filler(self.value, number, filling).fill(self.value, 0))
        except _FILL_ERRORS as error:
            if number:  # this number may have picked an unsupported alternative
                return self.text(0)
            raise ValueError(str(error) if type(error) is ValueError else "invalid or unsupported shape") from None


class _Filler:
    """Values of the schema `root`, the same for the same `number`."""

    def __init__(self, root: Any, number: int, filling: str) -> None:
        self._root, self._number, self._filling, self._left = root, number, filling, _MAX_VALUES

    def fill(self, schema: Any, depth: int) -> Any:
        """A value of `schema`, which may refer to the root."""
        self._left -= 1
        if depth > _MAX_DEPTH or self._left < 0:
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
        return self._listed(schema) if "const" in schema or "enum" in schema else self._of_type(schema, depth)

    def _listed(self, schema: Mapping[str, Any]) -> Any:
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
                parts.append(options[self._number % len(options)] if depth < _MAX_DEPTH // 2 else options[-1])
        return [self._resolved(part) for part in parts]

    def _resolved(self, schema: Any) -> Any:
        """The schema with `$ref` resolved at its top level."""
        for _ in range(_MAX_DEPTH):
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
            properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
            needed = schema.get("required", list(properties))
            members = {name: self.fill(properties.get(name, others), depth + 1) for name in needed}
            _check_count(schema, "Properties", len(members))
            return members
        if kind == "array":
            firsts, others = schema.get("prefixItems", []), schema.get("items", True)
            least = len(firsts) if others is False else max(1, len(firsts))
            count = max(schema.get("minItems", 0), min(least, schema.get("maxItems", least)))
            rest = [others] * min(count - len(firsts), _MAX_VALUES + 1)
            values = [self.fill(item, depth + 1) for item in [*firsts, *rest][:count]]
            _check_count(schema, "Items", len(values))
            if schema.get("uniqueItems") and len({json.dumps(item) for item in values}) < len(values):
                raise ValueError("uniqueItems: not supported for several items; leave it out")
            return values
        if kind == "string":
            return self._string(schema)
        if kind in ("integer", "number"):
            return _number_within(schema, kind == "integer", self._number % 100)
        return bool(self._number % 2) if kind == "boolean" else None

    def _string(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if least > _MAX_VALUES:
            raise ValueError(f"minLength: got {least}; expected at most {_MAX_VALUES}")
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
