"""`Server`: an emulator in a process of its own, on free ports of loopback, and what its metrics say of a while."""

__all__ = ["Server", "Span", "cpu_s", "ended", "free_port", "started"]

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]
_START_S, _END_S = 60.0, 90.0
_LISTENS = re.compile(r"listening on (http://\S+)")
# vLLM's histograms, in seconds, by the names that load tools give what they measure.
HISTOGRAMS = {
    "ttft": "vllm:time_to_first_token_seconds",
    "tpot": "vllm:request_time_per_output_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "e2el": "vllm:e2e_request_latency_seconds",
}


class Span(NamedTuple):
    """What servers have counted in a span of time: requests, means in ms, how late and slow their clock was.

    late_ms: the mean lateness of the clock's events; cpu: CPU seconds of the servers per second
    """

    num_requests: int
    num_tokens: int
    mean_ms: Mapping[str, float]
    late_ms: float
    slowed_s: float
    cpu: float
    seconds: float


@dataclass
class Server:
    """A process of `perfmodel serve` that listens on `urls`."""

    process: subprocess.Popen[str]
    urls: list[str]
    lines: list[str]

    def sums(self) -> dict[str, float]:
        """All samples of /metrics, those of one name added up, over all ports; when, and the CPU time until then."""
        result: dict[str, float] = {"time": time.monotonic(), "cpu": cpu_s(self.process.pid)}
        for url in self.urls:
            with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
                text = page.read().decode()
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if not sample.name.endswith("_bucket"):
                        result[sample.name] = result.get(sample.name, 0.0) + sample.value
        return result

    def since(self, before: Mapping[str, float]) -> Span:
        """What has been counted since `before`, which `sums` gave."""
        now = self.sums()
        more = {name: value - before.get(name, 0.0) for name, value in now.items()}
        means = {key: 1e3 * more[f"{name}_sum"] / max(more[f"{name}_count"], 1.0) for key, name in HISTOGRAMS.items()}
        late = "perfmodel_step_lateness_seconds"
        return Span(
            num_requests=int(more[f"{HISTOGRAMS['e2el']}_count"]),
            num_tokens=int(more["vllm:generation_tokens_total"]),
            mean_ms=means,
            late_ms=1e3 * more[f"{late}_sum"] / max(more[f"{late}_count"], 1.0),
            slowed_s=more["perfmodel_clock_slowed_seconds_total"],
            cpu=more["cpu"] / more["time"],
            seconds=more["time"],
        )


def cpu_s(pid: int) -> float:
    """CPU seconds that process `pid` has used, its threads' among them."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as result:
        result.bind(("127.0.0.1", 0))
        return int(result.getsockname()[1])


@contextmanager
def started(scenario: str, *flags: str, num_ports: int = 1) -> Iterator[Server]:
    """`perfmodel serve SCENARIO FLAGS`, until the block ends; then SIGTERM, upon which it has to end with status 0.

    num_ports: on how many it says that it listens
    """
    words = [sys.executable, "-m", "perfmodel", "serve", scenario, *flags]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    server = Server(process, [], [])
    reader = threading.Thread(target=_read, args=(server,), daemon=True)
    reader.start()
    try:
        end = time.monotonic() + _START_S
        while len(server.urls) < num_ports:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{' '.join(words)} does not listen:\n" + "".join(server.lines))
            time.sleep(0.02)
        yield server
    finally:
        status = ended(process)
        reader.join(5)
    if status != 0:
        raise RuntimeError(f"the server ended with status {status}:\n" + "".join(server.lines[-20:]))


def _read(server: Server) -> None:
    assert server.process.stderr is not None
    for line in server.process.stderr:
        server.lines.append(line)
        if match := _LISTENS.search(line):
            server.urls.append(match[1])


def ended(process: subprocess.Popen[str]) -> int:
    """The status of `process`, which is told to end, and made to if it does not."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
