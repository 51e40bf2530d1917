"""Random HTTP requests: addresses, uploads and command lines of the page; bodies, paths and headers of the emulator.

A case is one request. Its args are the server (`page` or `emulator`), the method, the target and the headers as
`name: value`; its file is the body.
"""

__all__ = ["REQUESTS"]

import json
from functools import cache
from typing import Any
from urllib.parse import quote, urlencode

from fuzz_draws import JUNK, damaged, places_of
from fuzz_scenarios import SCENARIOS, CaseMakers, FuzzCase
from hypothesis import strategies as st

_JSON = "content-type: application/json"
_LONG_NUMBERS = ("9" * 5000, "\xb2", "-1", "1e9")


# --------------------------------------------------------------------------------------------------------- the page

_VIEW_KEYS = ("batch", "context", "prefill", "low", "high", "vary", "metric", "against", "devices", "family",
              "technique", "scenario", "seed", "nothing", "engine.nothing", "engine")  # fmt: skip
_FLAGS = ("model", "hardware", "rate", "traffic", "ttft", "tpot", "e2e")
_VALUES = (
    *("llama-3.1-8b", "deepseek-v3", "mixtral-8x7b", "h100-sxm-80gb", "2xh100", "rtx-4090", "chat", "fp8", "auto"),
    *("1", "64", "8K", "1e9", "1e999", "0", "-1", "0.5s", "100ms", "50", "nan", "llama-3.1-8b-a100", "mean_tpot_ms"),
    *("engine.max_num_seqs", "engine.quantization=fp8", "h100-sxm-80gb,l40s", "quantization", "{", "[1", "'", "../x"),
    *("/etc/passwd", "./x.json", "drop:0123456789abcdef/m.json", "drop:x", "a" * 4001, "\x00", "<script>", "🙂"),
)


@cache
def _fields() -> tuple[tuple[str, str], ...]:
    """(field, value) pairs of the valid scenarios, as in a query string."""
    fields = {}
    for data in SCENARIOS:
        for place in places_of(data):
            value: Any = data
            for key in place:
                value = value[key]
            fields[".".join(map(str, place))] = value if isinstance(value, str) else json.dumps(value)
    return tuple(sorted(fields.items()))


@st.composite
def _query(draw: st.DrawFn, depth: int = 0) -> str:
    pairs = []
    for _ in range(draw(st.integers(0, 5))):
        field, value = draw(st.sampled_from(_fields()))
        key = draw(st.sampled_from([field, field, *_FLAGS, *_VIEW_KEYS]))
        other = st.one_of(st.sampled_from(_VALUES), st.sampled_from(JUNK).map(str), st.text(max_size=8))
        pairs.append((key, value if key == field and draw(st.booleans()) else draw(other)))
    if depth == 0 and draw(st.integers(0, 3)) == 0:
        pairs.append(("with", draw(_query(1))))
    if depth == 0 and draw(st.integers(0, 3)):
        few = (
            ("traffic.num_requests", "10"),
            ("plan.finalists", "1"),
            ("plan.seeds", "1"),
            ("plan.num_requests", "20"),
        )
        given = {key for key, _ in pairs}
        pairs += [(key, value) for key, value in few if key not in given]
    query = urlencode(pairs, errors="replace")
    if draw(st.integers(0, 7)) == 0:
        query = quote(damaged(draw, query.encode()), safe="%&=+;.:/")
    return query


@cache
def _targets() -> tuple[tuple[str, str], ...]:
    """(method, path) of all routes with the page's state in their query."""
    from perfmodel.web.views import VIEWS

    parts = [f"{view.name}/{part.name}" for view in VIEWS for part in view.parts]
    targets = [("GET", f"/{view.name}") for view in VIEWS] + [("GET", "/"), ("GET", "/serve-line")]
    targets += [("GET", f"/{kind}/{part}") for kind in ("part", "rest", "later", "data") for part in parts]
    targets += [("GET", f"/file/{part}/report.html") for part in parts]
    return (*targets, *(("POST", f"/{kind}/{part}") for kind in ("ask", "later", "stop") for part in parts))


@st.composite
def _address(draw: st.DrawFn) -> FuzzCase:
    method, path = draw(st.sampled_from(_targets()))
    headers = draw(st.sampled_from([(), ("accept: text/html",), ("hx-request: true", "hx-target: answers")]))
    return FuzzCase("page, address", ("page", method, f"{path}?{draw(_query())}", *headers), {"body": b""})


@st.composite
def _upload(draw: st.DrawFn) -> FuzzCase:
    """A file from another kind of case, sometimes with a wrong name or size."""
    from fuzz_cases import KINDS

    kind = draw(st.sampled_from(["config.json", "GGUF header", "safetensors header", "hardware file", "model file",
                                 "traffic file", "scenario, extreme"]))  # fmt: skip
    case = draw(KINDS[kind][0]())
    name, raw = draw(st.sampled_from(sorted(case.files.items())))
    if draw(st.integers(0, 5)) == 0:
        name = draw(
            st.sampled_from(["", ".json", "a/b.yaml", "..\\x.gguf", "x.exe", "x" * 300 + ".json", "é.json", "\0"])
        )
    size = draw(st.sampled_from(["", "", str(len(raw)), str(len(raw) + 10**9), "0", "1", *_LONG_NUMBERS]))
    return FuzzCase("page, upload", ("page", "POST", f"/drop?{urlencode({'name': name, 'size': size})}"), {"body": raw})


@st.composite
def _page_line(draw: st.DrawFn) -> FuzzCase:
    """A pasted command line."""
    from fuzz_ways_in import command_lines

    raw = draw(command_lines()).encode("utf-8", "surrogatepass")
    raw = damaged(draw, raw) if draw(st.integers(0, 3)) == 0 else raw
    return FuzzCase("page, command line", ("page", "POST", f"/line?{draw(_query())}"), {"body": raw})


_HEADER_NAMES = ("host", "authorization", "content-type", "content-length", "x-request-id", "x-session-id", "accept",
                 "cookie", "origin", "x-perfmodel-token", "x-perfmodel-page", "if-none-match", "hx-target")  # fmt: skip


@st.composite
def _headers(draw: st.DrawFn) -> tuple[str, ...]:
    texts = st.text(st.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=20)
    value = st.one_of(st.sampled_from(_LONG_NUMBERS), texts)
    given = draw(st.lists(st.tuples(st.sampled_from(_HEADER_NAMES), value), min_size=1, max_size=3))
    return tuple(f"{name}: {text}" for name, text in given)


def _paths() -> st.SearchStrategy[str]:
    return st.text(max_size=20).map(lambda text: "/" + quote(text, errors="replace"))


@st.composite
def _page_request(draw: st.DrawFn) -> FuzzCase:
    method, path = draw(st.sampled_from(_targets()))
    path = draw(
        st.one_of(st.just(path), st.sampled_from(["/static/app.css", "/static/../app.py", "/drop", "/line"]), _paths())
    )
    method = draw(st.sampled_from([method, "GET", "POST", "PUT", "HEAD", "OPTIONS", "X"]))
    return FuzzCase("page, headers", ("page", method, path, *draw(_headers())), {"body": draw(st.binary(max_size=60))})


# ------------------------------------------------------------------------------------------------------- the emulator

_MESSAGES = [{"role": "user", "content": "one"}]
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "one two three", "max_tokens": 4},
    "/v1/chat/completions": {"messages": _MESSAGES, "max_completion_tokens": 4},
    "/v1/chat/completions/batch": {"messages": [_MESSAGES], "max_completion_tokens": 4},
    "/v1/responses": {"input": "one", "max_output_tokens": 4},
    "/v1/messages": {"model": "llama-3.1-8b", "messages": _MESSAGES, "max_tokens": 4},
    "/v1/messages/count_tokens": {"model": "llama-3.1-8b", "messages": _MESSAGES},
    "/generative_scoring": {"query": "one", "items": ["two"], "label_token_ids": [1, 2]},
    "/v1/embeddings": {"input": ["one two", "three"]},
    "/invocations": {"prompt": "one", "max_tokens": 4},
    "/tokenize": {"prompt": "one two three"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
_NUMBERS = st.sampled_from([0, 1, -1, 2, 8, 255, 256, 2**31, 2**62, 2**63, 2**70, 0.5, -0.0, 1e308])
_SCALARS = (
    st.none() | st.booleans() | _NUMBERS | st.text(max_size=12) | st.sampled_from(["text", "assistant", "\ud800"])
)
_SCHEMAS = st.sampled_from([
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "array", "minItems": 10**9},
    {"type": "string", "pattern": "(a+)+$", "minLength": 10**9}, {"$ref": "#"}, {"enum": []}, {"type": "nothing"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, {"anyOf": []},
    {"allOf": [{"$ref": "#"}]},
])  # fmt: skip


@cache
def _names() -> tuple[str, ...]:
    """All fields of the server's OpenAPI schema, and two others."""
    from perfmodel.serve.http.app import PATHS, document

    described = document(PATHS)["components"]["schemas"].values()
    return tuple(sorted({name for schema in described for name in schema["properties"]} | {"logit_bias", ""}))


@cache
def _emulator_paths() -> tuple[str, ...]:
    from perfmodel.serve.http.app import PATHS

    return tuple(sorted(row.path for row in PATHS))


def _json_values() -> st.SearchStrategy[Any]:
    keys = st.sampled_from(_names()) | st.text(max_size=4)
    return st.recursive(
        _SCALARS | _SCHEMAS,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
        max_leaves=8,
    )


@st.composite
def _shaped(draw: st.DrawFn) -> dict[str, Any]:
    """Fields that request structured output, tools or log-probabilities."""
    schema = draw(_SCHEMAS)
    tool = {"type": "function", "function": {"name": draw(st.text(max_size=5)), "parameters": schema}}
    options = (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"response_format": {"type": "json_object"}},
        {"tools": [tool], "tool_choice": draw(st.sampled_from(["auto", "required", "none", "x", 1]))},
        {"logprobs": draw(_SCALARS), "top_logprobs": draw(_SCALARS)},
        {"structured_outputs": {draw(st.sampled_from(["json", "choice", "regex", "x"])): schema}},
        {"stream": True, "stream_options": {"include_usage": draw(_SCALARS)}},
    )
    return draw(st.sampled_from(options))


@st.composite
def _body(draw: st.DrawFn) -> FuzzCase:
    path = draw(st.sampled_from(sorted(_BODIES)))
    body: dict[str, Any] = dict(_BODIES[path])
    if draw(st.booleans()):
        body |= draw(_shaped())
    body |= draw(st.dictionaries(st.sampled_from(_names()), _json_values(), max_size=4))
    raw = json.dumps(body).encode()
    what = draw(st.integers(0, 9))
    if what == 0:
        raw = damaged(draw, raw)
    elif what == 1:
        path = draw(st.sampled_from(_emulator_paths()))
        raw = draw(st.one_of(_json_values().map(lambda value: json.dumps(value).encode()), st.binary(max_size=60)))
    elif what == 2:
        raw = draw(st.sampled_from([b"[" * 5000, b'{"a":' * 5000, b"1" * 5000, b"NaN", b"", b"null"]))
    method = draw(st.sampled_from(["POST"] * 9 + ["PUT", "GET", "HEAD"]))
    return FuzzCase("emulator, body", ("emulator", method, path, _JSON), {"body": raw})


@st.composite
def _emulator_request(draw: st.DrawFn) -> FuzzCase:
    path = draw(st.one_of(st.sampled_from(_emulator_paths()), _paths()))
    raw = json.dumps(_BODIES.get(path, {})).encode()
    method = draw(st.sampled_from(["POST", "POST", "GET"]))
    query = draw(st.sampled_from(["", "", "?" + draw(_query(1))]))
    return FuzzCase("emulator, headers", ("emulator", method, path + query, _JSON, *draw(_headers())), {"body": raw})


REQUESTS: CaseMakers = {
    "page, address": (_address, 6),
    "page, upload": (_upload, 3),
    "page, command line": (_page_line, 2),
    "page, headers": (_page_request, 2),
    "emulator, body": (_body, 6),
    "emulator, headers": (_emulator_request, 2),
}
