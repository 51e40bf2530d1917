"""Whatever is sent to the server, it answers in words: no 500, no traceback, no answer that is not complete."""

import asyncio
import json

import pytest
from asgi_client import Client
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import VirtualLoop

from perfmodel.serve import Emulator
from perfmodel.serve.http import build_app
from perfmodel.serve.http.openapi import document
from perfmodel.serve.http.routes import PATHS as ROWS
from perfmodel.serve.settings import ServerSettings
from perfmodel.specs import load_scenario

BASES = {
    "/v1/completions": {"prompt": "one two three", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "one"}], "max_completion_tokens": 4},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "one"}]], "max_completion_tokens": 4},
    "/v1/responses": {"input": "one", "max_output_tokens": 4},
    "/v1/messages": {"model": "llama-3.1-8b", "messages": [{"role": "user", "content": "one"}], "max_tokens": 4},
    "/v1/messages/count_tokens": {"model": "llama-3.1-8b", "messages": [{"role": "user", "content": "one"}]},
    "/generative_scoring": {"query": "one", "items": ["two"], "label_token_ids": [1, 2]},
    "/invocations": {"prompt": "one", "max_tokens": 4},
    "/tokenize": {"prompt": "one two three"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
PATHS = sorted(row.path for row in ROWS)
SMALL = (
    "engine.max_model_len=256",
    "traffic.input_tokens={distribution: fixed, value: 100}",
    "traffic.output_tokens={distribution: fixed, value: 20}",
)
NAMES = sorted(
    {name for schema in document(ROWS)["components"]["schemas"].values() for name in schema["properties"]}
    | {"tool_calls", "echo", "logit_bias", "guided_json", ""}
)

numbers = st.sampled_from([0, 1, -1, 2, 8, 255, 256, 2**31, 2**62, 2**63, 2**70, 0.5, -0.0, 1e308])
scalars = st.none() | st.booleans() | numbers | st.text(max_size=12) | st.sampled_from(["text", "assistant", "\ud800"])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), inner),
    max_leaves=8,
)
bodies = st.one_of(
    st.tuples(st.sampled_from(sorted(BASES)), st.dictionaries(st.sampled_from(NAMES), values, max_size=4)).map(
        lambda drawn: (drawn[0], json.dumps({**BASES[drawn[0]], **drawn[1]}).encode())
    ),
    st.tuples(st.sampled_from(PATHS), values.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=60)),
    st.tuples(st.sampled_from(sorted(BASES)), st.sampled_from([b"[" * 5000, b'{"a":' * 5000, b"1" * 5000, b"NaN"])),
)
header_names = st.sampled_from(
    ["host", "authorization", "content-type", "content-length", "x-request-id", "x-session-id", "accept", "cookie"]
)
odd = st.sampled_from(["9" * 5000, "\xb2", "-1", "1e9"])
headers = st.lists(st.tuples(header_names, odd | st.text(st.characters(max_codepoint=255), max_size=20)), max_size=3)


@pytest.fixture(scope="module")
def fuzzed():
    """Sends requests to one server, in virtual time: a small context keeps answers short."""
    scenario = load_scenario("llama-3.1-8b-a100", SMALL)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:

        async def started():
            emulator = Emulator(scenario)
            emulator.start()
            return emulator, Client(build_app(emulator, ServerSettings(max_answers=8)))

        emulator, client = runner.run(started())
        yield lambda *request, **options: runner.run(client.call(*request, **options))
        assert emulator.num_under_way == 0


def check(response):
    assert response.status is not None
    assert response.status != 500
    assert response.is_complete
    assert b"Traceback" not in response.body
    if response.status >= 400:
        body = response.json()
        error = body.get("error", {})
        assert error.get("code", response.status) == response.status
        assert (body.get("detail") or error["message"]).strip()


@settings(max_examples=300, deadline=None)
@given(drawn=bodies, method=st.sampled_from(["POST"] * 9 + ["PUT", "GET", "HEAD"]))
def test_any_body_is_answered(fuzzed, drawn, method):
    path, body = drawn
    check(fuzzed(method, path, body, headers=[("content-type", "application/json")]))


@settings(max_examples=150, deadline=None)
@given(path=st.sampled_from(PATHS) | st.text(max_size=20).map(lambda text: f"/{text}"), given=headers)
def test_any_path_and_header_is_answered(fuzzed, path, given):
    sent = [("content-type", "application/json"), *given]
    check(fuzzed("POST", path, json.dumps(BASES.get(path, {})).encode(), headers=sent))
