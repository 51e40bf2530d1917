"""Listening by itself, in front of an application that says yes: files, names, bounds."""

import asyncio
import resource
import socket

import pytest

pytest.importorskip("uvicorn", reason="listening needs uvicorn, of the extra serve")

from perfmodel.errors import SpecError
from perfmodel.listening import Bounds, HostCheck, Listening, is_loopback, serve_apps

DEFAULT = Bounds()


async def yes(scope, receive, send):
    """An application."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
    await send({"type": "http.response.body", "body": b"yes"})


async def exchange(port, data):
    """What the server answers to `data`, until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    found = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return found


def listened(conversation, num_apps=1, bounds=DEFAULT, **options):
    """What `conversation`, called with the ports, returns."""

    async def whole():
        ready = asyncio.get_running_loop().create_future()
        apps = [Listening(yes, 0)] * num_apps
        task = asyncio.ensure_future(serve_apps(apps, "127.0.0.1", bounds, 1.0, on_ready=ready.set_result, **options))
        try:
            return await conversation(await ready)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return asyncio.run(whole())


def test_files_are_allowed_for_the_connections_of_all_applications():
    async def limit(_):
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 3 * 200
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip("this machine allows fewer files")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        assert listened(limit, 3, Bounds(max_connections=200)) >= wanted
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_is_beyond_the_bounds_is_refused_in_plain_words_unless_told_otherwise():
    async def refused(ports):
        return await exchange(ports[0], b"GET / HTTP/1.1\r\nx: " + b"a" * 3000)

    bounds = Bounds(max_header_bytes=2000)
    head, _, body = listened(refused, bounds=bounds).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert (b"content-type: text/plain" in head, b"2000 bytes" in body) == (True, True)
    own = listened(refused, bounds=bounds, refusal=lambda status, why: ("application/json", b"[%d]" % status))
    assert own.endswith(b"content-type: application/json\r\ncontent-length: 5\r\nconnection: close\r\n\r\n[431]")


def test_several_applications_listen_on_ports_of_their_own():
    async def each(ports):
        asked = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        return ports, [await exchange(port, asked) for port in ports]

    ports, found = listened(each, num_apps=3)
    assert len(set(ports)) == 3
    assert all(answer.endswith(b"yes") for answer in found)


def test_an_address_that_is_taken_is_refused_in_words():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SpecError, match=f"127.0.0.1:{port}: nothing can listen there"):
            asyncio.run(serve_apps([Listening(yes, port)], "127.0.0.1", Bounds()))


@pytest.mark.parametrize(
    ("host", "allowed", "header", "is_answered"),
    [
        ("127.0.0.1", (), None, True),
        ("127.0.0.1", (), "LOCALHOST:80", True),
        ("127.0.0.1", (), "[::1]", True),
        ("127.0.0.1", (), "evil.example", False),
        ("127.0.0.1", (), "localhost.evil.example", False),
        ("127.0.0.1", (), "10.0.0.1", False),
        ("0.0.0.0", (), "10.0.0.1:8000", True),
        ("0.0.0.0", (), "evil.example", False),
        ("127.0.0.1", ("Good.Example",), "good.example", True),
        ("127.0.0.1", ("*",), "evil.example", True),
    ],
)
def test_names_of_another_machine_are_no_names_of_this_one(host, allowed, header, is_answered):
    why = HostCheck(host, allowed).refusal(header)
    assert (why is None) == is_answered
    assert is_answered or "--allowed-host" in why


def test_loopback_is_what_only_this_machine_reaches():
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "10.0.0.1")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
