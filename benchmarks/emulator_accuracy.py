"""What clients measure against `perfmodel serve`, beside what `perfmodel simulate` says of the same arrivals.

    python benchmarks/emulator_accuracy.py [--rates 2,8,20] [--seconds 60] [--scenario NAME] [--set KEY=VALUE]

The server is a process of its own; this one is a lean client on plain sockets, which it uses again, that sends each
request of the scenario's traffic when it arrives and notes when tokens come. Speed is 1. What is printed is
measured, and depends on the machine and on what else it does.
"""

import argparse
import heapq
import json
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perfmodel.engine import Request
from perfmodel.sim import Workload, simulate
from perfmodel.specs import load_scenario

LATENCIES = ("ttft", "tpot", "e2e")
MEAN_LIMITS = 0.03, 2.0  # a share, or milliseconds: whichever is more
P99_LIMITS = 0.06, 5.0
_LAST_CHUNK = b"\r\n0\r\n\r\n"


class Answer:
    """What the client knows of one request, in seconds of its clock."""

    def __init__(self, request: Request, sent: float) -> None:
        self.request, self.sent = request, sent
        self.num_tokens = 0
        self.first = self.last = 0.0
        self.rest = b""
        self.is_done = False

    def take(self, data: bytes, now: float) -> bool:
        """Whether the answer is whole with what has come."""
        data = self.rest + data
        whole, _, self.rest = data.rpartition(b"\n")
        tokens = whole.count(b"data: {")
        if tokens:
            self.first = self.first or now
            self.num_tokens += tokens
            self.last = now
        self.is_done = self.is_done or b"data: [DONE]" in whole
        return self.is_done and data.endswith(_LAST_CHUNK)


class Latencies(NamedTuple):
    """Of all requests, in seconds."""

    ttft: Any
    tpot: Any
    e2e: Any


def http_request(request: Request, rng: np.random.Generator, model: str) -> bytes:
    """A streamed completion of a prompt like no other, in tokens."""
    prompt = rng.integers(0, 1000, request.num_prompt_tokens).tolist()
    body = {"model": model, "prompt": prompt, "max_tokens": request.max_output_tokens, "ignore_eos": True}
    text = json.dumps(body | {"stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(text)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + text


def connected(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def drained(free: list[socket.socket]) -> Iterator[socket.socket]:
    while free:
        yield free.pop()


def is_open(sock: socket.socket) -> bool:
    """Whether the server has not closed it meanwhile, as it does with what is idle for some seconds."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False  # nothing is read, or that no request came in time


def measured(port: int, requests: list[Request], model: str) -> list[Answer]:
    """Send each when it arrives, and wait for all answers."""
    rng, selector, answers = np.random.default_rng(0), selectors.DefaultSelector(), []
    bodies = [http_request(request, rng, model) for request in requests]
    due = [(request.arrival / 1e12, number) for number, request in enumerate(requests)]
    heapq.heapify(due)
    free = [connected(port) for _ in range(64)]
    begun, num_open = time.perf_counter() + 0.5, 0
    while due or num_open:
        now = time.perf_counter() - begun
        while due and due[0][0] <= now:
            number = heapq.heappop(due)[1]
            sock = next((each for each in drained(free) if is_open(each)), None) or connected(port)
            answer = Answer(requests[number], time.perf_counter())
            sock.sendall(bodies[number])
            selector.register(sock, selectors.EVENT_READ, answer)
            answers.append(answer)
            num_open += 1
        wait = 1.0 if not due else max(due[0][0] + begun - time.perf_counter(), 0)
        for key, _ in selector.select(wait):
            data = key.fileobj.recv(1 << 20)
            assert data, "the server has closed a connection"
            if key.data.take(data, time.perf_counter()):
                selector.unregister(key.fileobj)
                free.append(key.fileobj)
                num_open -= 1
    return answers


def latencies_of(answers: list[Answer]) -> Latencies:
    first = np.array([each.first - each.sent for each in answers])
    whole = np.array([each.last - each.sent for each in answers])
    count = np.array([each.num_tokens for each in answers])
    longer = count > 1
    return Latencies(first, ((whole - first)[longer] / (count[longer] - 1)), whole)


def simulated(scenario: Any) -> Latencies:
    found = simulate(scenario).requests
    first, whole = found.first_token_s - found.arrival_s, found.finished_s - found.arrival_s
    longer = found.num_output_tokens > 1
    return Latencies(first, (whole - first)[longer] / (found.num_output_tokens[longer] - 1), whole)


def row(name: str, statistic: str, measured_s: float, simulated_s: float) -> dict[str, Any]:
    """One line: both in milliseconds, and whether the difference is within the limits."""
    share, milliseconds = MEAN_LIMITS if statistic == "mean" else P99_LIMITS
    apart_ms = (measured_s - simulated_s) * 1e3
    return {
        "latency": f"{statistic} {name}",
        "measured_ms": measured_s * 1e3,
        "simulated_ms": simulated_s * 1e3,
        "apart_ms": apart_ms,
        "apart": measured_s / simulated_s - 1,
        "is_within": abs(apart_ms) <= max(share * simulated_s * 1e3, milliseconds),
    }


def one_rate(name: str, sets: list[str], rate: float, seconds: float) -> dict[str, Any]:
    """Serve and simulate the traffic at one rate."""
    changes = [*sets, f"traffic.arrivals.rate={rate}", f"traffic.num_requests={max(int(rate * seconds), 1)}"]
    scenario = load_scenario(name, changes)
    requests = list(Workload(scenario).requests())
    command = [sys.executable, "-m", "perfmodel", "serve", name, "--port", "0"]
    command += [word for each in sets for word in ("--set", each)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        port = int(server.stderr.readline().split()[2].rsplit(":", 1)[1])
        answers = measured(port, requests, scenario.model.name)
        server.send_signal(signal.SIGTERM)
        said = server.communicate(timeout=60)[1].strip()
    finally:
        server.kill()
    for each in answers:
        assert each.num_tokens == each.request.max_output_tokens, (each.num_tokens, each.request)
    seen, expected = latencies_of(answers), simulated(scenario)
    rows = []
    for latency in LATENCIES:
        ours, theirs = getattr(seen, latency), getattr(expected, latency)
        rows.append(row(latency, "mean", float(ours.mean()), float(theirs.mean())))
        rows.append(row(latency, "p99", float(np.percentile(ours, 99)), float(np.percentile(theirs, 99))))
    tokens = sum(each.num_tokens for each in answers)
    span = max(each.last for each in answers) - min(each.sent for each in answers)
    return {"rate": rate, "requests": len(answers), "tokens_per_s": tokens / span, "rows": rows, "said": said}


def text_of(what: str, found: list[dict[str, Any]]) -> str:
    """The report as Markdown."""
    lines = [
        "# What clients of the emulator measure, beside the simulation of the same arrivals",
        "",
        f"`python benchmarks/emulator_accuracy.py`: {what} at speed 1, a lean client in another process. A difference "
        "is within its limits where a mean is off by 3 % or 2 ms, whichever is more, a p99 by 6 % or 5 ms.",
    ]
    for each in found:
        lines += [
            "",
            f"## {each['rate']:g} requests/s, {each['tokens_per_s']:,.0f} output tokens/s, {each['requests']} requests",
            "",
            "| latency | measured | simulated | apart | | within |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {r['latency']} | {r['measured_ms']:.2f} ms | {r['simulated_ms']:.2f} ms | {r['apart_ms']:+.2f} ms | "
            f"{r['apart']:+.2%} | {'yes' if r['is_within'] else '**no**'} |"
            for r in each["rows"]
        ]
        lines += ["", each["said"]]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenario", default="llama-3.1-8b-h100-2048-256")
    parser.add_argument("--rates", default="2,10,20")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--report", type=Path)
    asked = parser.parse_args()
    found, what = [], " ".join([asked.scenario, *asked.sets])
    for rate in asked.rates.split(","):
        found.append(one_rate(asked.scenario, asked.sets, float(rate), asked.seconds))
        print(text_of(what, found[-1:]), flush=True)
    if asked.report:
        asked.report.write_text(text_of(what, found), encoding="utf-8")
        asked.report.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
