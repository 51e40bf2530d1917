"""The server over its ASGI interface, in virtual time: what clients are answered, and when."""

import asyncio
import time

import numpy as np
import pytest
from http_conversation import CHAT, COMPLETIONS, HELLO, served
from virtual_time import run

from perfmodel.serve import Order
from perfmodel.serve.http.bodies import ChatBody
from perfmodel.serve.http.reply import CachedCounts, HttpReply, Outlet
from perfmodel.serve.http.shapes import AnswerSet, AskedAnswer, ChatShape
from perfmodel.serve.tokens import ByteTokens, WrittenAnswer


def test_a_streamed_answer_has_a_chunk_for_each_token_at_the_time_of_its_step():
    body = {**HELLO, "max_tokens": 20, "stream": True, "stream_options": {"include_usage": True}}
    response = served(lambda client, _: client.post(CHAT, body))
    opening, *tokens, usage = response.events
    assert opening[1]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["finish_reason"] for _, event in tokens] == [None] * 19 + ["length"]
    assert usage[1]["choices"] == []
    assert usage[1]["usage"]["completion_tokens"] == 20
    times = [at for at, _ in tokens]
    assert times == sorted(set(times))  # steps take time, and each gives one token
    assert response.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("speed", [0.25, 1.0, 4.0])
def test_responses_state_the_speed_and_latencies_scale_by_it(speed):
    """Otherwise latencies measured by a load tool would be read as those of the deployment."""

    async def timed(client, emulator):
        began = asyncio.get_running_loop().time()
        whole = await client.post(CHAT, {**HELLO, "max_tokens": 20, "seed": 3})
        took = asyncio.get_running_loop().time() - began
        emulator.clock.slowed_s = 1.5
        return whole, took, await client.get("/nowhere")

    whole, took, refused = served(timed, speed=speed)
    assert whole.headers["x-perfmodel-speed"] == refused.headers["x-perfmodel-speed"] == f"{speed:g}"
    assert "x-perfmodel-slowed-s" not in whole.headers
    assert (refused.status, refused.headers["x-perfmodel-slowed-s"]) == (404, "1.500")
    _, expected, _ = served(timed)
    assert took * speed == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_whole_and_streamed_answers_say_the_same_at_the_same_time(path):
    body = {"prompt": "hello", **HELLO, "max_tokens": 20, "seed": 5, "n": 2}

    async def both(client, _):
        whole = await client.post(path, body)
        began = asyncio.get_running_loop().time()
        return whole, began, await client.post(path, {**body, "stream": True})

    whole, began, streamed = served(both)
    key = "message" if path == CHAT else "text"
    said = [choice[key]["content"] if path == CHAT else choice[key] for choice in whole.json()["choices"]]
    parts = ["", ""]
    for _, event in streamed.events:
        choice = event["choices"][0]
        parts[choice["index"]] += choice["delta"]["content"] if path == CHAT else choice["text"]
    assert said == parts
    assert said[0] != said[1]
    assert whole.chunks[-1][0] == pytest.approx(streamed.chunks[-1][0] - began, abs=1e-6)


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
def test_prompt_logprobs_bypass_the_prefix_cache(asked):
    """As in vLLM: the prompt is computed in full, so TTFT is that of an uncached prompt."""
    body = {"prompt": "word " * 1000, "max_tokens": 1}

    async def sent(client, _):
        answers = []
        for more in ({}, {}, asked):
            began = asyncio.get_running_loop().time()
            response = await client.post(COMPLETIONS, {**body, **more})
            cached = (response.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            answers.append((cached, response.chunks[-1][0] - began))
        return answers

    (_, first_s), (cached, again_s), (read, with_logprobs_s) = served(sent)
    assert cached > 1000
    assert again_s < first_s / 2
    assert read == 0
    assert with_logprobs_s == pytest.approx(first_s, rel=0.05)


def test_the_next_turn_finds_the_blocks_of_the_answer():
    """All full blocks of the first prompt and its answer are the beginning of the second prompt."""

    async def two_turns(client, emulator):
        said = [{"role": "user", "content": "word " * 300}]
        first = (await client.post(CHAT, {"messages": said, "max_tokens": 100})).json()
        said += [first["choices"][0]["message"], {"role": "user", "content": "go on"}]
        second = (await client.post(CHAT, {"messages": said, "max_tokens": 1})).json()
        return first["usage"], second["usage"], emulator.block_size

    first, second, block_size = served(two_turns)
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    computed = first["total_tokens"] - 1  # the last token was sampled, and its KV never computed
    assert second["prompt_tokens_details"]["cached_tokens"] == computed // block_size * block_size


def test_a_salt_hides_blocks():
    async def twice(client, _):
        body = {"prompt": "word " * 300, "max_tokens": 1}
        await client.post(COMPLETIONS, {**body, "cache_salt": "a"})
        other = await client.post(COMPLETIONS, {**body, "cache_salt": "b"})
        same = await client.post(COMPLETIONS, {**body, "cache_salt": "a"})
        return [each.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (other, same)]

    other, same = served(twice)
    assert other == 0
    assert same > 0


def test_a_client_that_goes_away_aborts_its_request():
    async def left(client, emulator):
        response = await client.post(CHAT, {**HELLO, "max_tokens": 5000, "stream": True}, leaves_at=1.0)
        return response, emulator.num_aborted, emulator.num_finished

    response, num_aborted, num_finished = served(left)
    assert (num_aborted, num_finished) == (1, 0)
    assert not response.is_complete


def test_a_stop_string_ends_the_answer_before_it():
    async def stopped(client, _):
        body = {**HELLO, "max_tokens": 50, "seed": 1}
        whole = (await client.post(CHAT, body)).json()["choices"][0]["message"]["content"]
        words = whole.split()
        cut = (await client.post(CHAT, {**body, "stop": ["nowhere", words[7]]})).json()
        return words, cut

    words, cut = served(stopped)
    first = words.index(words[7])
    choice = cut["choices"][0]
    assert choice["message"]["content"].split() == words[:first]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", words[7])
    assert cut["usage"]["completion_tokens"] == first + 1  # the token that completes it is generated


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("POST", COMPLETIONS, {"prompt": "a", "model": "x"}, 404, "The model `x` does not exist."),
        ("POST", COMPLETIONS, {"prompt": "a " * 20_000}, 400, "maximum context length is 8192 tokens"),
        ("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 8192}, 400, "maximum context length is 8192 tokens"),
        ("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 9000}, 400, "at most 8192"),
        ("POST", COMPLETIONS, {"prompt": "a", "logprobs": 21}, 400, "logprobs"),
        ("POST", COMPLETIONS, {"prompt": "a", "use_beam_search": True}, 400, "beams"),
        ("POST", CHAT, {**HELLO, "structured_outputs": {"grammar": "a+"}}, 400, "grammar"),
        ("POST", CHAT, {**HELLO, "n": 5000}, 400, "expected at most 1024"),
        ("POST", COMPLETIONS, {"prompt": [[1]] * 2000}, 400, "expected at most 1024"),
        ("POST", COMPLETIONS, {"prompt": " " * 2_000_000}, 400, "maximum context length is 8192 tokens"),
        ("POST", CHAT, {"messages": HELLO["messages"] * 9000}, 400, "maximum context length is 8192 tokens"),
        ("POST", "/tokenize", {"prompt": "a" * 400_000, "return_token_strs": True}, 400, "return_token_strs"),
        ("POST", CHAT, {"messages": []}, 400, "messages"),
        ("POST", CHAT, b"{", 400, "content-type"),
    ],
)
def test_errors_are_sentences_in_the_shape_of_the_engines_server(method, path, body, status, said):
    response = served(lambda client, _: client.call(method, path, body))
    error = response.json()["error"]
    assert response.status == error["code"] == status
    assert said in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("path", "status"), [(CHAT, 405), ("/nowhere", 404), ("/metrics", 404)])
def test_what_there_is_not_is_named_as_fastapi_does(path, status):
    response = served(lambda client, _: client.get(path))
    assert response.status == status
    assert response.json() == {"detail": "Method Not Allowed" if status == 405 else "Not Found"}


def test_the_document_describes_every_route():
    document = served(lambda client, _: client.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    for path, methods in document["paths"].items():
        for method in methods:
            response = served(lambda client, _, m=method, p=path: client.call(m.upper(), p, {}))
            assert response.status not in (405, 500)
            assert response.status != 404 or path.startswith(("/metrics", "/v1/responses/", "/v1/embeddings"))


class Formats:
    """A page of metrics that says which format it is in."""

    http = None

    def render(self, openmetrics=False):
        return b"open" if openmetrics else b"plain"


@pytest.mark.parametrize(
    ("accept", "said"),
    [
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", b"open"),
        ("text/plain", b"plain"),
        ("application/openmetrics-text-of-another-kind", b"plain"),
    ],
)
def test_a_scraper_gets_the_format_that_it_asks_for(accept, said):
    def scrape(client, _):
        return client.get("/metrics", headers=[("accept", accept)])

    found = served(scrape, metrics=Formats())
    assert found.body == said
    assert found.headers["content-type"].startswith("application/openmetrics-text" if said == b"open" else "text/plain")


class Hasty:
    """An emulator that has the first token of an answer before the next is submitted; it is its own clock."""

    @property
    def clock(self):
        return self

    def catch_up(self):
        pass

    def submit(self, order, listener, replica, arrived):
        listener.on_tokens(1)
        return 0

    def abort(self, number):
        pass


def test_tokens_that_come_before_all_is_submitted_come_after_the_beginning():
    sent = []

    async def send(message):
        sent.append(message["type"])

    answer = WrittenAnswer(np.arange(3), ["a ", "b ", "c "], "length")
    asked = [AskedAnswer(Order(1, 3), answer, choice) for choice in range(2)]
    body = ChatBody(**HELLO, stream=True)
    shape = ChatShape(body, AnswerSet("x", 0, "m", ByteTokens(), asked))
    reply = HttpReply(Hasty(), CachedCounts(), Outlet(send), shape, body, asked)
    reply.submit(None, None)
    assert sent == ["http.response.start", "http.response.body", "http.response.body"]


def test_a_prefix_cache_is_reset_when_nothing_runs():
    async def reset(client, _):
        body = {"prompt": "word " * 300, "max_tokens": 200}
        running = asyncio.ensure_future(client.post(COMPLETIONS, body))
        await asyncio.sleep(0.5)
        early = await client.post("/reset_prefix_cache", b"")
        await running
        late = await client.post("/reset_prefix_cache", b"")
        again = await client.post(COMPLETIONS, body)
        return early.status, late.status, again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert served(reset) == (409, 200, 0)


def test_what_cannot_be_sent_at_once_is_sent_in_order():
    """A server whose client reads slowly suspends each second message."""

    async def slowly():
        sent = []

        async def send(message):
            if len(sent) % 2:
                await asyncio.sleep(1)
            sent.append(message.get("body"))

        outlet = Outlet(send)
        outlet.start(200, [])
        for number in range(9):
            outlet.body(b"%d" % number, is_last=number == 8)
        await outlet.drained()
        return sent

    assert run(slowly()) == [None, *(b"%d" % number for number in range(9))]


@pytest.mark.parametrize(("length", "status"), [("9" * 5000, 413), ("\xb2", 200), ("9999999999", 413), ("-1", 200)])
def test_a_length_that_is_no_number_is_not_read(length, status):
    response = served(lambda client, _: client.post("/tokenize", {"prompt": "a"}, headers=[("content-length", length)]))
    assert response.status == status


@pytest.mark.parametrize(
    ("is_stream", "retries"),
    [(True, ""), (False, ""), (False, ", retries: {max: 1, backoff_s: 0.5, jitter: 0}")],  # a stream would have begun
)
def test_what_is_beyond_the_gateways_rate_is_told_when_to_try_again(is_stream, retries):
    """One request every ten seconds: the second comes after the first, and is let in when as much is over as it was
    told. The gateway's own retry changes how long there is to wait, which is whole seconds, rounded up."""
    refusing = [f"cluster.gateway={{rate_limit: {{requests_per_s: 0.1, burst: 1}}{retries}}}"]

    async def three(client, emulator):
        body = {**HELLO, "stream": is_stream, "max_tokens": 2}
        first, second = await client.post(CHAT, body), await client.post(CHAT, body)
        now = emulator.clock.elapsed_s
        await asyncio.sleep(int(second.headers["retry-after"]))
        return now, first, second, await client.post(CHAT, body)

    now, first, second, third = served(three, changes=refusing)
    assert [each.status for each in (first, second, third)] == [200, 429, 200]
    assert second.json()["error"]["type"] == "RateLimitError"
    assert 0 <= int(second.headers["retry-after"]) - (10 - now) < 1


def test_what_finds_no_room_in_the_gateway_is_no_matter_of_rate():
    async def two(client, _):
        answers = [asyncio.ensure_future(client.post(CHAT, {**HELLO, "max_tokens": 50})) for _ in range(2)]
        return sorted([(await each).status for each in answers])

    assert served(two, changes=["cluster.gateway={max_outstanding: 1}"]) == [200, 503]


def test_more_tokens_at_least_than_an_answer_may_have_are_refused_in_words():
    async def many(client, _):
        body = {"model": "llama-3.1-8b", "prompt": "hi", "min_tokens": 100, "stop": "x"}
        return await client.post("/v1/completions", body)

    found = served(many)
    assert found.status == 400
    assert "min_tokens: got 100; expected at most 16" in found.json()["error"]["message"]


def test_a_body_of_wrong_items_is_refused_by_the_first_of_them():
    async def wrong(client, _):
        return await client.post("/v1/completions", {"model": "llama-3.1-8b", "prompt": [{}] * 100_000})

    begun = time.process_time()
    found = served(wrong)
    assert found.status == 400
    assert len(found.body) < 2000
    assert time.process_time() - begun < 5  # a second, and a fraction of it in here; a list of all errors took many
