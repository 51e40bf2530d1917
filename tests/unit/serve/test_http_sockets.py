"""The server on a real socket: what only HTTP itself can do wrong, and what the openai client makes of it."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import openai
import pytest

from perfmodel.listening import Listening
from perfmodel.serve import Emulator
from perfmodel.serve.http import build_app, serve
from perfmodel.serve.metrics import Metrics
from perfmodel.serve.settings import InjectedFaults, ServerSettings
from perfmodel.specs import load_scenario

CHAT = "/v1/chat/completions"


@contextmanager
def listening(speed=20.0, **settings):
    """(port, emulator) of a server in a thread of this process."""
    found, ready = {}, threading.Event()

    async def main():
        emulator = found["emulator"] = Emulator(load_scenario("llama-3.1-8b-a100"), speed=speed)
        emulator.start()
        own = ServerSettings(port=0, drain_s=1, **settings)
        found["loop"], found["task"] = asyncio.get_running_loop(), asyncio.current_task()

        def on_ready(ports):
            found["port"] = ports[0]
            ready.set()

        metrics = Metrics(emulator, "a")
        await serve([Listening(build_app(emulator, own, metrics), 0)], own, on_ready, metrics.add_stalled)

    def run():
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(20)
    try:
        yield found["port"], found["emulator"]
    finally:
        found["loop"].call_soon_threadsafe(found["task"].cancel)
        thread.join(20)


def post(path, body, **headers):
    """The bytes of a request."""
    data = json.dumps(body).encode()
    given = {"host": "localhost", "content-type": "application/json", "content-length": len(data), **headers}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def exchange(port, data, until=b"\r\n\r\n"):
    """What the server says until it has said `until`, or closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.sendall(data)
        return heard(sock, until)


def heard(sock, until):
    found = bytearray()
    while found.find(until, max(len(found) - (1 << 17), 0)) < 0 and (more := sock.recv(1 << 16)):
        found += more
    return bytes(found)


def test_two_hundred_openai_clients_at_once_each_have_their_answer():
    async def ask(client, number):
        wanted = {"model": "llama-3.1-8b", "messages": [{"role": "user", "content": f"say {number}"}]}
        wanted["max_tokens"] = 3 + number % 7
        if number % 2:
            answer = await client.chat.completions.create(**wanted)
            return number, len(answer.choices[0].message.content.split()), answer.usage.completion_tokens
        stream = await client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **wanted)
        texts, usage = [], None
        async for chunk in stream:
            usage = chunk.usage or usage
            texts += [each.delta.content for each in chunk.choices if each.delta.content]
        return number, len(texts), usage.completion_tokens

    async def all_at_once(port):
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(200)))

    with listening() as (port, emulator):
        answers = asyncio.run(all_at_once(port))
        assert answers == [(number, 3 + number % 7, 3 + number % 7) for number in range(200)]
        assert emulator.num_finished == 200


def test_a_connection_that_breaks_aborts_its_request():
    with listening(speed=1.0) as (port, emulator):
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5000, "stream": True}
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
            sock.sendall(post(CHAT, body))
            assert b'"content":' in heard(sock, b'"content":')
        for _ in range(200):
            if emulator.num_aborted:
                break
            time.sleep(0.02)
        assert (emulator.num_aborted, emulator.num_under_way) == (1, 0)


def test_a_client_that_reads_late_misses_nothing():
    """The answer is larger than all buffers between: what does not fit waits behind what does not."""
    name = "long" * 1000  # is in each chunk
    with listening(speed=2000.0, served_names=(name,)) as (port, emulator), socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(20)
        sock.connect(("127.0.0.1", port))
        sock.sendall(post("/v1/completions", {"prompt": "a", "max_tokens": 1500, "stream": True}))
        for _ in range(200):
            if emulator.num_finished:
                break
            time.sleep(0.02)
        found = heard(sock, b"[DONE]")
        assert found.count(b'"text"') == 1500
        assert found.index(b'"finish_reason":"length"') > found.rindex(b'"finish_reason":null')
        assert len(found) > 6_000_000


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_reads_nothing_is_cut_off(is_stream):
    """Its connection takes a place, and a stream a slot of the engine, until somebody gives up. The answer is larger
    than what the kernel keeps of it: by each chunk's name of the model, or by that of a whole answer."""
    name = "long" * (10_000 if is_stream else 4_000_000)
    with listening(speed=20.0, served_names=(name,), stalled_s=0.3) as (port, emulator), socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(20)
        sock.connect(("127.0.0.1", port))
        sock.sendall(
            post("/v1/completions", {"prompt": "a", "max_tokens": 7000 if is_stream else 9, "stream": is_stream})
        )
        ended = "num_aborted" if is_stream else "num_finished"
        for _ in range(500):
            if getattr(emulator, ended):
                break
            time.sleep(0.02)
        assert (getattr(emulator, ended), emulator.num_under_way) == (1, 0)
        time.sleep(1)
        with pytest.raises(ConnectionResetError):
            heard(sock, b"[DONE]")
        scrape = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"
        assert b"\nperfmodel_connections_stalled_total 1.0\n" in exchange(port, scrape, b"stalled_total 1.0\n")


def test_a_client_that_reads_slowly_is_not_cut_off():
    """It takes longer for the whole than a client may be silent, and something of it all the time."""
    name = "long" * 2_000_000
    with listening(speed=20.0, served_names=(name,), stalled_s=0.4) as (port, _), socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(20)
        sock.connect(("127.0.0.1", port))
        sock.sendall(post("/v1/completions", {"prompt": "a", "max_tokens": 1}))
        found = 0
        for _ in range(20):
            time.sleep(0.1)
            left = 400_000
            while left > 0 and (more := sock.recv(left)):
                left, found = left - len(more), found + len(more)
        assert found == 8_000_000
        assert b"completion_tokens" in heard(sock, b'"metrics":null}')


def test_a_broken_answer_ends_without_its_last_chunk():
    faults = InjectedFaults(1.0, ("broken",))
    body = {"prompt": "a", "max_tokens": 20}
    with listening(faults=faults) as (port, emulator):
        found = exchange(port, post("/v1/completions", {**body, "stream": True}), until=b"\r\n0\r\n\r\n")
        assert b'"text"' in found
        assert not found.endswith(b"0\r\n\r\n")
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIConnectionError):
            client.completions.create(model="llama-3.1-8b", **body)
        assert emulator.num_under_way == 0


def test_one_connection_serves_request_after_request():
    with listening() as (port, _), socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        for number in range(3):
            sock.sendall(post(CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "seed": number}))
            assert b"completion_tokens" in heard(sock, b'"metrics":null}')


@pytest.mark.parametrize(
    ("settings", "data", "status"),
    [
        ({"max_header_bytes": 2000}, b"GET /health HTTP/1.1\r\nx: " + b"a" * 3000, 431),
        ({"max_header_bytes": 2000}, b"GET /health HTTP/1.1\r\nx: " + b"a" * 3000 + b"\r\n\r\n", 431),
        ({"max_header_bytes": 2000}, b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\n\r\n", 431),
        ({"max_body_bytes": 100}, post(CHAT, {"messages": "a" * 200}), 413),
        ({"max_body_bytes": 100}, post(CHAT, {}, **{"transfer-encoding": "chunked"}).replace(b"{}", b"c8\r\n"), 400),
        ({"arrival_s": 0.2}, b"GET /health HTTP/1.1\r\n", 408),
        ({"arrival_s": 0.2}, b"", 408),
        ({"arrival_s": 0.2}, post(CHAT, {}).replace(b"length: 2", b"length: 9"), 408),
        ({}, b"\x00\x01\x02\r\n\r\n", 400),
    ],
)
def test_what_is_too_much_or_too_slow_is_refused(settings, data, status):
    with listening(**settings) as (port, _):
        assert exchange(port, data).startswith(f"HTTP/1.1 {status} ".encode())
        assert b" 200 OK" in exchange(port, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")


def test_more_connections_than_allowed_are_refused():
    with listening(max_connections=3) as (port, _):
        held = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(3)]
        for sock in held:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b" 200 OK" in heard(sock, b"\r\n\r\n")
        assert b" 503 " in exchange(port, b"")
        held.pop().close()
        time.sleep(0.1)
        assert b" 200 OK" in exchange(port, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        for sock in held:
            sock.close()


@pytest.mark.release
@pytest.mark.parametrize("num_signals", [1, 2])
@pytest.mark.parametrize("flags", [(), ("--ports", "--set", "cluster.replicas=2")])
def test_sigterm_lets_answers_end_and_a_second_one_does_not(num_signals, flags):
    command = [sys.executable, "-m", "perfmodel", "serve", "llama-3.1-8b-a100", "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        port = int(process.stderr.readline().split()[2].rpartition(":")[2])
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 100, "stream": True}
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
            sock.sendall(post(CHAT, body))
            found = heard(sock, b'"content":')
            for _ in range(num_signals):
                process.send_signal(signal.SIGTERM)
                time.sleep(0.4)  # a port without requests has ended by then
            with pytest.raises(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1)
            found += heard(sock, b"[DONE]")
        said = process.communicate(timeout=20)[1]
    assert (b"[DONE]" in found) == (num_signals == 1)
    assert process.returncode == 0
    assert "Traceback" not in said
    assert f"{num_signals - 1} aborted" in said
