"""Answers of a requested shape: JSON that its schema allows, whatever the number that decides between choices."""

import json

import jsonschema
import pytest
from http_conversation import CHAT, HELLO, served

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
        {"type": "string", "pattern": "a+"},
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
