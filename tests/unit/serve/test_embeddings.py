"""/v1/embeddings of an emulated deployment that returns vectors."""

import asyncio
from base64 import b64decode

import numpy as np
import pytest
from http_conversation import CHAT, COMPLETIONS, HELLO, served

PATH, POOLING = "/v1/embeddings", ["engine.runner=pooling"]


def test_each_prompt_has_a_vector_of_its_own_at_the_end_of_its_step():
    """A unit vector of the model's width, the same for the same prompt, and as 32-bit floats in base64; the tokens
    counted are those of the prompts."""

    async def ask(client, _):
        began = asyncio.get_running_loop().time()
        plain = await client.post(PATH, {"model": "llama-3.1-8b", "input": ["one", "two two", "one"]})
        took = asyncio.get_running_loop().time() - began
        return plain, took, await client.post(PATH, {"input": "two two", "encoding_format": "base64"})

    plain, took, packed = served(ask, changes=POOLING)
    assert (plain.status, packed.status) == (200, 200)
    answer = plain.json()
    vectors = [np.array(row["embedding"]) for row in answer["data"]]
    assert [row["index"] for row in answer["data"]] == [0, 1, 2]
    assert {len(vector) for vector in vectors} == {4096}
    assert all(np.linalg.norm(vector) == pytest.approx(1) for vector in vectors)
    assert np.array_equal(vectors[0], vectors[2])
    assert not np.allclose(vectors[0], vectors[1])
    unpacked = np.frombuffer(b64decode(packed.json()["data"][0]["embedding"]), "<f4")
    assert np.allclose(unpacked, vectors[1])
    usage = answer["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] == 1 + 2 + 1  # words are tokens without a tokenizer
    assert usage["completion_tokens"] == 0
    assert took > 0.005  # a step of an 8B model


@pytest.mark.parametrize(
    ("changes", "path", "body"),
    [
        ([], PATH, {"input": "one"}),
        (POOLING, CHAT, HELLO),
        (POOLING, COMPLETIONS, {"prompt": "one"}),
        ([*POOLING, "engine.convert=classify"], PATH, {"input": "one"}),
    ],
)
def test_deployments_have_the_paths_of_what_they_return(changes, path, body):
    assert served(lambda client, _: client.post(path, body), changes=changes).status == 404


@pytest.mark.parametrize(
    "body", [{}, {"input": ""}, {"input": []}, {"input": ["one", ""]}, {"input": "x", "dimensions": 8}]
)
def test_what_cannot_be_answered_is_refused_in_words(body):
    response = served(lambda client, _: client.post(PATH, body), changes=POOLING)
    assert response.status == 400
    assert response.json()["error"]["message"]


def test_a_prompt_may_fill_the_context():
    """vLLM's bound for what generates nothing is the context itself: 64 of 64 tokens are taken, 65 are not."""

    async def ask(client, _):
        sizes = ({"input": [7] * n} for n in (64, 65))
        cut = {"input": [7] * 100, "truncate_prompt_tokens": -1}
        return [await client.post(PATH, body) for body in (*sizes, cut)]

    lengths = "traffic.input_tokens={distribution: fixed, value: 8}"
    whole, beyond, cut = served(ask, changes=[*POOLING, "engine.max_model_len=64", lengths])
    assert [reply.status for reply in (whole, beyond, cut)] == [200, 400, 200]
    assert whole.json()["usage"]["prompt_tokens"] == cut.json()["usage"]["prompt_tokens"] == 64
    assert "maximum context length is 64 tokens" in beyond.json()["error"]["message"]
