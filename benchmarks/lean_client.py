"""A client of the emulator that takes little time of its own: plain sockets in one thread, used again, nothing parsed.

It sends each request when it is due and notes when tokens come. Benchmarks run it in a process beside the server's.
"""

__all__ = ["Answer", "answers_of", "served"]

import json
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from perfmodel.engine import Request

_LAST_CHUNK = b"\r\n0\r\n\r\n"
_START_S, _END_S = 60, 90


class Answer:
    """What the client knows of one request, in seconds of its clock.

    leaves_after: tokens after which it goes away; None: it stays
    """

    def __init__(self, request: Request, sent: float, leaves_after: int | None = None) -> None:
        self.request, self.sent, self.leaves_after = request, sent, leaves_after
        self.num_tokens = 0
        self.first = self.last = 0.0
        self.status = b""
        self.is_done = False
        self._rest = b""

    def take(self, data: bytes, now: float) -> bool:
        """Whether the answer is whole with what has come."""
        if not self.status:
            self.status = data[9:12]
        data = self._rest + data
        whole, _, self._rest = data.rpartition(b"\n")
        tokens = whole.count(b"data: {")
        if tokens:
            self.first = self.first or now
            self.num_tokens += tokens
            self.last = now
        self.is_done = self.is_done or b"data: [DONE]" in whole
        return self.is_done and data.endswith(_LAST_CHUNK)

    @property
    def has_left(self) -> bool:
        """Whether the client has seen enough."""
        return self.leaves_after is not None and self.num_tokens >= self.leaves_after


class _Sockets:
    """Connections to one port that are free to be used."""

    def __init__(self, port: int, count: int) -> None:
        self._port = port
        self._free = [self._connected() for _ in range(count)]

    def take(self) -> socket.socket:
        while self._free:
            result = self._free.pop()
            if _is_open(result):
                return result
            result.close()
        return self._connected()

    def give_back(self, sock: socket.socket) -> None:
        self._free.append(sock)

    def _connected(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self._port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock


def _is_open(sock: socket.socket) -> bool:
    """Whether the server has not closed it meanwhile, as it does with what is idle for some seconds."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False  # nothing is read, or that no request came in time


def _http_request(request: Request, rng: np.random.Generator, model: str) -> bytes:
    """A streamed completion of a prompt like no other, in tokens."""
    prompt = rng.integers(0, 1000, request.num_prompt_tokens).tolist()
    body = {"model": model, "prompt": prompt, "max_tokens": request.max_output_tokens, "ignore_eos": True}
    text = json.dumps(body | {"stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(text)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + text


def answers_of(
    port: int,
    requests: Iterator[Request],
    model: str,
    speed: float = 1.0,
    leaves_after: Callable[[Request], int | None] = lambda _: None,
    on_tick: Callable[[float], None] = lambda _: None,
) -> Iterator[Answer]:
    """Send each of `requests`, which are in order, when it arrives; each answer when it is over.

    leaves_after: as of an `Answer`
    on_tick:      called again and again, with the seconds since the beginning
    """
    rng, selector, sockets = np.random.default_rng(0), selectors.DefaultSelector(), _Sockets(port, 16)

    def body_of(request: Request | None) -> bytes:
        return b"" if request is None else _http_request(request, rng, model)

    coming = next(requests, None)
    body = body_of(coming)
    begun, num_open = time.perf_counter() + 0.5, 0
    while coming is not None or num_open:
        now = time.perf_counter() - begun
        on_tick(now)
        while coming is not None and coming.arrival / 1e12 / speed <= now:
            sock = sockets.take()
            answer = Answer(coming, time.perf_counter(), leaves_after(coming))
            sock.sendall(body)
            selector.register(sock, selectors.EVENT_READ, answer)
            num_open += 1
            coming = next(requests, None)
            body = body_of(coming)
            now = time.perf_counter() - begun
        wait = 1.0 if coming is None else coming.arrival / 1e12 / speed - now
        for key, _ in selector.select(min(max(wait, 0), 1.0)):
            sock, answer = key.fileobj, key.data
            data = sock.recv(1 << 20)
            is_whole = answer.take(data, time.perf_counter())
            if data and not is_whole and not answer.has_left:
                continue
            selector.unregister(sock)
            num_open -= 1
            if is_whole:
                sockets.give_back(sock)
            else:
                sock.close()
            yield answer


@contextmanager
def served(*arguments: str) -> Iterator[tuple[subprocess.Popen, int, list[str]]]:
    """`perfmodel serve` in a process of its own: it, its port, and, when it has been ended, what it said."""
    command = [sys.executable, "-m", "perfmodel", "serve", *arguments, "--port", "0"]
    server, result = subprocess.Popen(command, stderr=subprocess.PIPE, text=True), []
    try:
        while " listening on " not in f" {(line := server.stderr.readline())}":
            assert line, "the server has ended"
        yield server, int(line.strip().rsplit(":", 1)[1]), result
        server.send_signal(signal.SIGTERM)
        result += server.communicate(timeout=_END_S)[1].strip().splitlines()
    finally:
        server.kill()
        server.wait(_START_S)
