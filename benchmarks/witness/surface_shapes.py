"""Answers without their values: status, headers that clients read, names and types of fields, the order of events.

A recording of them, and what a test compares with it.
"""

__all__ = ["Answer", "differences", "metric_families", "paths_of", "shape_of", "shape_of_answer"]

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

# Values that clients act upon; of all other fields only the type is kept.
_KEPT = {"object", "type", "code", "param", "finish_reason", "role", "status", "owned_by", "reason"}
_ENDS = ("end_turn", "max_tokens", "stop_sequence", "tool_use")  # of Anthropic's answers; OpenAI's have texts and ids
_MAPS = {"top_logprobs", "prompt_logprobs"}  # whose names are tokens
_HEADERS = ("content-type", "www-authenticate", "retry-after", "allow", "location", "x-request-id")
# Texts of errors that clients look for, as they have no code.
_SIGNS = ("maximum context length",)
_VALUES_OF = ("handler", "method", "status", "finished_reason", "reason", "source", "sleep_state")


class Answer(NamedTuple):
    """What a server has answered. headers: names in lower case"""

    status: int
    headers: Mapping[str, str]
    body: bytes


def shape_of(value: Any, name: str = "") -> Any:
    """The names and types in a JSON value; `name`: of the field that holds it. Lists have each kind of item once."""
    if isinstance(value, dict):
        if name in _MAPS and "token" not in value:
            return {"*": shape_of(next(iter(value.values())))}
        if name == "delta" and not value:
            return {"content": "str"}  # a token without a text of its own: whether there is one depends on the model
        return {key: shape_of(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return _once([shape_of(item, name if name in _MAPS else "") for item in value])
    if isinstance(value, (str, int)) and (name in _KEPT or (name == "stop_reason" and value in _ENDS)):
        return f"={value}"
    if name == "message" and isinstance(value, str):
        return next((f"text: {sign}" for sign in _SIGNS if sign in value), "str")
    return "null" if value is None else type(value).__name__


def shape_of_answer(answer: Answer, is_cut: bool = False) -> dict[str, Any]:
    """The shape of a whole answer. is_cut: the client went away, so only the beginning of a stream is there"""
    headers = {name: _header(name, answer.headers[name]) for name in _HEADERS if name in answer.headers}
    shape: dict[str, Any] = {"status": answer.status, "headers": headers}
    kind = headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        shape["events"] = _events(answer.body)[: 1 if is_cut else None]
    elif kind.startswith("application/json") and answer.body:
        shape["body"] = shape_of(json.loads(answer.body))
    elif answer.body:
        shape["body"] = "text"
    return shape


def _header(name: str, value: str) -> str:
    if name == "allow":
        return ", ".join(sorted(value.lower().split(", ")))
    return value.lower() if name == "content-type" else "text"


def _events(body: bytes) -> list[Any]:
    """Events in order, equal ones that follow each other once; those of several answers one after the other."""
    events: list[tuple[float, Any]] = []
    for part in body.decode().replace("\r\n", "\n").split("\n\n"):
        fields = dict(line.partition(":")[::2] for line in part.split("\n") if line)
        if not fields:
            continue
        data = fields.get("data", "").strip()
        value = data if data == "[DONE]" else json.loads(data)
        choices = value.get("choices") if isinstance(value, dict) else None
        order = choices[0].get("index", 0) if choices else float("inf")
        shape = value if isinstance(value, str) else shape_of(value)
        event = {"event": fields["event"].strip(), "data": shape} if "event" in fields else shape
        events.append((order, event))
    ordered = sorted(events, key=lambda pair: pair[0])
    return _runs([event for _, event in ordered])


def _runs(values: list[Any]) -> list[Any]:
    return [value for place, value in enumerate(values) if not place or value != values[place - 1]]


def _once(values: list[Any]) -> list[Any]:
    return [value for place, value in enumerate(values) if value not in values[:place]]


def metric_families(text: str) -> dict[str, Any]:
    """The families of a page of metrics: type, names of labels, values of those with few, bounds of buckets.

    Moments at which a client library made a series (`_created`) are left out.
    """
    from prometheus_client.parser import text_string_to_metric_families

    families: dict[str, Any] = {}
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):
            continue
        labels = sorted({name for sample in family.samples for name in sample.labels if name != "le"})
        shape: dict[str, Any] = {"type": family.type, "labels": labels}
        bounds = _once([sample.labels["le"] for sample in family.samples if "le" in sample.labels])
        if bounds:
            shape["bounds"] = bounds
        for name in set(labels) & set(_VALUES_OF[3:]):
            shape[name] = sorted({sample.labels[name] for sample in family.samples})
        families[family.name] = shape
    return families


def paths_of(document: Mapping[str, Any]) -> list[str]:
    """The methods and paths of an OpenAPI document."""
    return sorted(f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods)


def differences(expected: Any, actual: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """(where, what) differs between two shapes."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        for name in expected:
            if name not in actual:
                yield f"{place}.{name}", f"expected {_short(expected[name])}, not there"
            else:
                yield from differences(expected[name], actual[name], f"{place}.{name}")
        for name in actual:
            if name not in expected:
                yield f"{place}.{name}", f"not expected, got {_short(actual[name])}"
    elif isinstance(expected, list) and isinstance(actual, list):
        if len(expected) != len(actual):
            yield place, f"expected {len(expected)} kinds, got {len(actual)}"
        for number, (one, other) in enumerate(zip(expected, actual, strict=False)):
            yield from differences(one, other, f"{place}[{number}]")
    elif expected != actual:
        yield place, f"expected {_short(expected)}, got {_short(actual)}"


def _short(value: Any) -> str:
    return json.dumps(value)[:120]
