"""Answers of a requested shape: JSON that its schema allows, whatever the number that decides between choices."""

import json
import re

import jsonschema
import pytest
from http_conversation import CHAT, COMPLETIONS, HELLO, served
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.serve.tokens import Guide

TREE = {
    "$defs": {
        "node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
    },
    "$ref": "#/$defs/node",
}
SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
    {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"const": 5}}, "additionalProperties": False},
    {"type": "array", "items": {"type": "number", "minimum": 3, "multipleOf": 2}, "minItems": 3},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}]},
    {"type": "integer", "exclusiveMinimum": 7},
    {"type": "integer", "maximum": -3},
    {"type": "string", "minLength": 12, "maxLength": 14},
    {"type": "string", "format": "date-time"},
    {"type": ["string", "null"]},
    {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    {
        "allOf": [
            {"properties": {"a": {"type": "string"}}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ],
        "type": "object",
        "required": ["a", "b"],
    },
    TREE,
    {},
    {"$defs": {"a": {"properties": {"x": {"type": "null"}}}}, "$ref": "#/$defs/a", "required": ["x"], "type": "object"},
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "anyOf": [{"required": ["b"]}]},
    {"type": "object", "required": ["a"], "additionalProperties": {"type": "integer"}},
    {"type": ["integer", "string"], "enum": [1.5, "x", None, 3]},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "minimum": 0.5, "maximum": 9, "multipleOf": 0.25},
    {"type": "integer", "minimum": 2.5, "exclusiveMaximum": 4},
    {"type": "array", "items": {"type": "null"}, "maxItems": 0},
    {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False, "minItems": 2},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$", "maxLength": 9},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=[str(number) for number in range(len(SCHEMAS))])
def test_texts_are_what_the_schema_allows(schema):
    for number in range(6):
        jsonschema.validate(json.loads(Guide("json", schema).text(number, "some words")), schema)


DEEP = {"$defs": {"a": {"properties": {"x": {"$ref": "#/$defs/a"}}}}, "$ref": "#/$defs/a"}
WIDE = {f"l{n}": {"properties": {str(i): {"$ref": f"#/$defs/l{n + 1}"} for i in range(99)}} for n in range(9)}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nothing"},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "pattern": "a{3}", "maxLength": 2},
        {"type": "object", "not": {"required": ["a"]}},
        {"type": "object", "minProperties": 2},
        {"type": "array", "items": {"const": 1}, "minItems": 2, "uniqueItems": True},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"allOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "allOf": [{"$ref": "#/$defs/a"}]},
        {"$ref": "#/$defs/nowhere"},
        DEEP,
        {"$defs": {**WIDE, "l9": {"type": "null"}}, "$ref": "#/$defs/l0"},
        {"type": "array", "minItems": 10**9},
        {"type": "string", "minLength": 10**9},
        {"type": "integer", "minimum": 1, "multipleOf": 0},
        {"type": "integer", "minimum": "low"},
        5,
    ],
)
def test_what_cannot_be_filled_is_refused_in_words(schema):
    body = {**HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    response = served(lambda client, _: client.post(CHAT, body))
    assert response.status == 400
    assert response.json()["error"]["message"].startswith("structured_outputs: ")


def test_an_answer_is_the_text_of_its_shape_as_long_as_was_asked_for():
    schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    body = {**HELLO, "max_tokens": 60, "structured_outputs": {"json": schema}}

    async def both(client, _):
        return (await client.post(CHAT, body)).json(), await client.post(CHAT, {**body, "stream": True})

    whole, streamed = served(both)
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    assert 50 <= whole["usage"]["completion_tokens"] <= 60
    text = "".join(event["choices"][0]["delta"]["content"] for _, event in streamed.events)
    jsonschema.validate(json.loads(text), schema)
    cut = served(lambda client, _: client.post(CHAT, {**body, "max_tokens": 3})).json()["choices"][0]
    assert cut["finish_reason"] == "length"


def test_a_tool_is_called_with_arguments_that_it_takes():
    schema = {"type": "object", "properties": {"unit": {"enum": ["km", "mile"]}}, "required": ["unit"]}
    tool = {"type": "function", "function": {"name": "distance", "parameters": schema}}
    body = {**HELLO, "max_tokens": 60, "tools": [tool], "tool_choice": "required"}
    choice = served(lambda client, _: client.post(CHAT, body)).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "distance")
    jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


@pytest.mark.parametrize(
    ("asked", "allowed"),
    [
        ({"regex": r"(a|\bb)"}, {"a"}),
        ({"json": {"anyOf": [{"const": 1}, {"not": {}}]}}, {"1"}),
        ({"choice": ["", "b"]}, {"", "b"}),
        ({"regex": "^$"}, {""}),
        ({"regex": ""}, {""}),
    ],
)
def test_every_accepted_guide_yields_an_allowed_answer(asked, allowed):
    """Whichever alternative is drawn: unsupported ones are skipped, and an empty text takes the end token alone."""

    async def several(client, _):
        body = {**HELLO, "max_tokens": 9, "structured_outputs": asked}
        return [await client.post(CHAT, body) for _ in range(8)]

    for response in served(several):
        assert response.status == 200, response.json()
        answer = response.json()
        assert answer["choices"][0]["message"]["content"] in allowed
        assert answer["usage"]["completion_tokens"] >= 1


small = st.integers(-3, 6)
KEYWORDS = {
    "minimum": small,
    "maximum": small,
    "exclusiveMinimum": small,
    "exclusiveMaximum": small,
    "multipleOf": st.sampled_from([0.5, 2, 3]),
    "minLength": st.integers(0, 4),
    "maxLength": st.integers(0, 4),
    "pattern": st.sampled_from(["^a+$", "b[0-9]?", "(c|d)e"]),
    "minItems": st.integers(0, 3),
    "maxItems": st.integers(0, 3),
    "uniqueItems": st.booleans(),
    "required": st.lists(st.sampled_from("ab"), unique=True),
    "minProperties": st.integers(0, 2),
    "maxProperties": st.integers(0, 2),
    "enum": st.lists(st.sampled_from([1, 2.5, "a", None, True]), min_size=1, unique=True),
    "type": st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null"]),
}


def with_others(inner):
    nested = {
        "properties": st.dictionaries(st.sampled_from("ab"), inner),
        "additionalProperties": inner,
        "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "allOf": st.lists(inner, min_size=1, max_size=2),
        "anyOf": st.lists(inner, min_size=1, max_size=2),
        "not": inner,
    }
    return st.fixed_dictionaries({}, optional={**KEYWORDS, **nested}) | st.booleans()


@given(st.recursive(st.fixed_dictionaries({}, optional=KEYWORDS), with_others, max_leaves=5), st.integers(0, 5))
def test_a_generated_document_validates_or_the_schema_is_refused(schema, number):
    """jsonschema validates the document."""
    try:
        text = Guide("json", schema).text(number, "words")
    except (ValueError, TypeError, ArithmeticError):
        return
    jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


PATTERNS = [
    r"^\d{4}-\d{2}-\d{2}$",
    r"(yes|no|perhaps)",
    r"[^a-z]+",
    r"[^\w]x\s",
    r"\+?[1-9]\d{1,14}",
    r"(?i)(a|b)c*?",
    r"(.)\1",
    r"^a$|^b$",
    r"(?P<one>[A-F0-9]{2})(?::(?P=one)){5}",
    r"(a+)+b",
    r"\S+@\S+\.com",
    r"",
    r"[\n\t ]{2}\D",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_regular_expression_matches_the_whole_text(pattern):
    for number in range(7):
        assert re.fullmatch(pattern, Guide("regex", pattern).text(number, "ignored"))


@pytest.mark.parametrize(
    "pattern",
    ["(", "a{5000}", "((a{100}){100}){100}", "(?!a)b", r"\bx", "a^b", "$x", "a" * 5000, "(" * 2000 + ")" * 2000],
)
def test_invalid_or_unsupported_expressions_are_refused_with_a_message(pattern):
    response = served(lambda client, _: client.post(CHAT, {**HELLO, "structured_outputs": {"regex": pattern}}))
    assert response.status == 400
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_json": {"const": "here"}}, '"here"'),
        ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
        ({"structured_outputs": {"regex": "(on|off)"}}, "on|off"),
    ],
    ids=str,
)
def test_a_guided_answer_takes_a_step_per_token(asked, pattern):
    """A token is a step, so a short guided text ends earlier."""

    async def both(client, _):
        shaped = await client.post(COMPLETIONS, {"prompt": "one", "max_tokens": 40, "stream": True, **asked})
        return shaped, await client.post(COMPLETIONS, {"prompt": "one", "max_tokens": 40, "stream": True})

    shaped, free = served(both)
    text = "".join(event["choices"][0]["text"] for _, event in shaped.events)
    assert re.fullmatch(pattern, text)
    assert shaped.events[-1][1]["choices"][0]["finish_reason"] == "stop"
    gaps = [[at for at, event in answer.events] for answer in (shaped, free)]
    if len(gaps[0]) < len(gaps[1]):
        assert gaps[0][-1] - gaps[0][0] < gaps[1][-1] - gaps[1][0]
    step_s = (gaps[1][-1] - gaps[1][0]) / (len(gaps[1]) - 1)
    assert gaps[0][-1] - gaps[0][0] == pytest.approx(step_s * (len(gaps[0]) - 1), rel=0.1, abs=1e-4)


def test_a_stop_string_ends_a_guided_answer():
    body = {"prompt": "one", "max_tokens": 40, "guided_regex": "abcdefgh[0-9]{8}", "stop": "efg"}
    choice = served(lambda client, _: client.post(COMPLETIONS, body)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abcd", "stop", "efg")
    short = served(lambda client, _: client.post(COMPLETIONS, {**body, "min_tokens": 39, "stop": "zz"}))
    assert short.status == 200
