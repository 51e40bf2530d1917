"""Times llama-server: a server of one GGUF type after another, in random order, and on each all that it is asked."""

__all__ = ["measure"]

import http.client
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llama_server import Server
from settings import CLIENTS, PROMPTS, REPEATS, SERVED_TYPES, SLOT_TOKENS, SLOTS, TYPES, Served

_WORDS = range(1000, 40_000)  # tokens of random prompts
_PARAMETERS = {
    "n_parallel": SLOTS,
    "n_ctx": SLOTS * SLOT_TOKENS,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_threads_http": 32,
    "cache_ram_mib": 0,
    "kv_unified": False,
    "verbosity": 1,
    "warmup": True,
}


def measure(models: Path, samples: Path, minutes: float) -> None:
    """Add to `samples`, a JSON object a line, the servers that there is time for."""
    done = Counter(sample["type"] for sample in _read(samples))
    left = [name for name in TYPES for _ in range(REPEATS - done[name])]
    random.shuffle(left)
    end = time.monotonic() + 60 * minutes
    with samples.open("a", encoding="utf-8") as out:
        for number, name in enumerate(left):
            if time.monotonic() > end:
                print(f"{len(left) - number} servers are left", file=sys.stderr)
                return
            out.write(json.dumps({"type": name, "at": round(time.time()), **_served(name, models)}) + "\n")
            out.flush()


def _read(samples: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()] if samples.exists() else []


def _served(name: str, models: Path) -> dict[str, Any]:
    """What one server takes for prompts of each length, and for each number of clients."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(models / f"{name}.gguf", Path(folder, "log"), _PARAMETERS) as server,
    ):
        cores = os.sched_getaffinity(0)
        if (os.cpu_count() or 1) > 1:  # the clients leave the server its core
            os.sched_setaffinity(0, {0} if cores != {0} else {1})
        _ask(server.address, 64, 4)  # the first request touches the file's pages
        asked: list[Any] = [*PROMPTS, *(CLIENTS if name in SERVED_TYPES else ())]
        random.shuffle(asked)
        lone, clients = [], []
        for what in asked:
            if isinstance(what, tuple):
                lone.append({"prompt": what[0], "output": what[1], **_timings(server, *what)})
            else:
                clients.append({"clients": what, **_clients(server.address, what)})
        os.sched_setaffinity(0, cores)
    return {"lone": lone, "served": clients}


def _timings(server: Server, prompt: int, output: int) -> dict[str, Any]:
    """The server's own times of one request."""
    timings = server.post("/completion", _body(prompt, output))["timings"]
    return {name: timings[name] for name in ("prompt_n", "prompt_ms", "predicted_n", "predicted_ms")}


def _body(prompt: int, output: int) -> dict[str, Any]:
    tokens = random.choices(_WORDS, k=prompt)
    fixed = {"ignore_eos": True, "temperature": 0, "cache_prompt": False, "return_tokens": True}
    return {"prompt": tokens, "n_predict": output, **fixed}


def _clients(address: str, count: int) -> dict[str, Any]:
    """Means over the requests of `count` clients, as these see them."""
    requests: list[tuple[float, float, int]] = []  # s to the first token, s to the last, tokens
    served = Served()

    def client() -> None:
        for _ in range(served.rounds):
            requests.append(_ask(address, served.prompt, served.output))

    began, threads = time.monotonic(), [threading.Thread(target=client) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - began
    return {
        "ttft_s": statistics.mean(first for first, _, _ in requests),
        "tpot_s": statistics.mean((last - first) / (tokens - 1) for first, last, tokens in requests),
        "e2e_s": statistics.mean(last for _, last, _ in requests),
        "output_tokens_per_s": sum(tokens for _, _, tokens in requests) / took,
    }


def _ask(address: str, prompt: int, output: int) -> tuple[float, float, int]:
    began = time.monotonic()
    times = list(_token_times(address, {**_body(prompt, output), "stream": True}))
    return times[0] - began, times[-1] - began, len(times)


def _token_times(address: str, body: dict[str, Any]) -> Iterator[float]:
    """When each token came."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=300)
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    for line in connection.getresponse():
        if line.startswith(b"data: {") and json.loads(line[6:]).get("tokens"):
            yield time.monotonic()
    connection.close()
