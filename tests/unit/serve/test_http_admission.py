"""Whom the server answers: by name, by key, from which pages, once weights are loaded; and the faults that are asked
for."""

import asyncio
import re

import pytest
from http_conversation import CHAT, COMPLETIONS, HELLO, served

from perfmodel.errors import SpecError
from perfmodel.serve.http.app import PATHS
from perfmodel.serve.settings import InjectedFaults, ServerSettings


def test_a_host_of_another_name_is_refused():
    async def hosts(client, _):
        names = ("localhost:8000", "127.0.0.1", "[::1]:8000", "evil.example", "localhost.evil.example:8000", "10.0.0.1")
        return [(await client.get("/health", headers=[("host", name)])).status for name in names]

    assert served(hosts) == [200, 200, 200, 400, 400, 400]
    assert served(hosts, ServerSettings(host="0.0.0.0")) == [200, 200, 200, 400, 400, 200]
    assert served(hosts, ServerSettings(allowed_hosts=("evil.example",)))[3] == 200


def test_a_key_is_asked_for_below_v1():
    async def keys(client, _):
        given = ([], [("authorization", "Bearer wrong")], [("authorization", "Bearer right")])
        models = [(await client.get("/v1/models", headers=headers)).status for headers in given]
        return models, (await client.get("/health")).status

    assert served(keys, ServerSettings(api_key="right")) == ([401, 401, 200], 200)


def test_nothing_generates_without_the_key():
    """Every path that takes a body, but for those that only count."""
    free = {"/ping", "/tokenize", "/detokenize", "/is_scaling_elastic_ep", "/scale_elastic_ep"}
    asking = [row.path for row in PATHS if "POST" in row.methods and row.path not in free]

    async def statuses(client, _):
        return {path: (await client.post(path, HELLO)).status for path in asking}

    assert set(served(statuses, ServerSettings(api_key="right")).values()) == {401}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 200),
        ([("host", "localhost:8000"), ("origin", "http://localhost:8000"), ("sec-fetch-site", "same-origin")], 200),
        ([("host", "localhost:8000"), ("origin", "https://evil.example")], 403),
        ([("host", "localhost:8000"), ("origin", "null")], 403),
        ([("host", "localhost:8000"), ("origin", "http://localhost:3000")], 403),
        ([("sec-fetch-site", "cross-site")], 403),
        ([("content-type", "application/x-www-form-urlencoded")], 403),
        ([("content-type", "Multipart/form-data; boundary=x")], 403),
        ([("content-type", "text/plain")], 403),
    ],
)
def test_no_page_of_another_site_empties_a_cache(headers, status):
    """A form of any page can be posted to this machine, under a name of its own, without being asked."""

    async def reset(client, _):
        body = {"prompt": "word " * 300, "max_tokens": 1}
        await client.post(COMPLETIONS, body)
        answer = await client.post("/reset_prefix_cache", b"", headers=headers)
        again = (await client.post(COMPLETIONS, body)).json()
        return answer.status, again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    assert served(reset) == (status, status == 200)


def test_a_key_is_asked_for_before_a_cache_is_emptied():
    async def reset(client, _):
        given = ([], [("authorization", "Bearer wrong")], [("authorization", "Bearer right")])
        return [(await client.post("/reset_prefix_cache", b"", headers=headers)).status for headers in given]

    assert served(reset, ServerSettings(api_key="right")) == [401, 401, 200]


def test_it_answers_once_weights_are_loaded():
    async def cold(client, _):
        early = await client.post(CHAT, HELLO)
        await asyncio.sleep(30)
        return early, await client.post(CHAT, {**HELLO, "max_tokens": 1})

    early, late = served(cold, ServerSettings(cold_start_s=30.0))
    assert (early.status, late.status) == (503, 200)
    assert re.search(r"loading for 30.0 s", early.json()["error"]["message"])


def test_faults_are_injected_at_the_rate_and_alike_for_a_seed():
    async def many(client, _):
        body = {**HELLO, "max_tokens": 4, "stream": True}
        return [await client.post(CHAT, body) for _ in range(200)]

    faults = ServerSettings(faults=InjectedFaults.parsed("rate=0.3"), seed=3)
    first, again = served(many, faults), served(many, faults)
    fates = [response.status if response.status != 200 or response.is_complete else "broken" for response in first]
    assert [each.status for each in first] == [each.status for each in again]
    assert 30 < 200 - fates.count(200) < 90  # 60, give or take 4.6 standard deviations
    assert set(fates) == {200, 429, 500, "broken"}
    broken = next(response for response, fate in zip(first, fates, strict=True) if fate == "broken")
    assert broken.events
    assert b"[DONE]" not in broken.body
    assert not any(response.is_complete for response, fate in zip(first, fates, strict=True) if fate == "broken")


def test_each_port_has_draws_of_its_own_and_the_same_ones_again():
    """Requests without a seed are told apart by their number, which each port counts by itself: what falls to them, be
    it an id, a text or a fault, must not be the same on all ports. With a seed they are answered alike on each."""
    two = ["cluster.replicas=2"]
    faults = ServerSettings(faults=InjectedFaults.parsed("rate=0.3,kinds=429+500"), seed=3)

    async def many(client, _):
        return [(await client.post(CHAT, {**HELLO, "max_tokens": 4})).status for _ in range(100)]

    fates = [served(many, faults, two, replica=replica) for replica in (0, 1, 0)]
    assert fates[0] == fates[2] != fates[1]
    assert all(15 < 100 - each.count(200) < 50 for each in fates)  # 30, give or take 4.4 standard deviations

    async def one(client, _):
        body = {**HELLO, "max_tokens": 9}
        answers = [(await client.post(CHAT, {**body, "seed": seed})).json() for seed in (None, 5)]
        return [(each["id"], each["choices"][0]["message"]["content"]) for each in answers]

    (drawn, seeded), (other, same), again = (served(one, None, two, replica=replica) for replica in (0, 1, 0))
    assert again == [drawn, seeded]
    assert (drawn[0] != other[0], drawn[1] != other[1]) == (True, True)
    assert (seeded[0] != same[0], seeded[1] == same[1]) == (True, True)


def test_a_broken_whole_answer_has_less_than_it_announces():
    settings = ServerSettings(faults=InjectedFaults(1.0, ("broken",)))
    response = served(lambda client, _: client.post(CHAT, {**HELLO, "max_tokens": 4}), settings)
    assert 0 < len(response.body) < int(response.headers["content-length"])


@pytest.mark.parametrize("text", ["rate=2", "rate=x", "often", "rate=0.1,kinds=404", "rate=0.1,kinds=", ""])
def test_faults_that_there_are_not_are_refused(text):
    with pytest.raises(SpecError, match="fail: got"):
        InjectedFaults.parsed(text)
