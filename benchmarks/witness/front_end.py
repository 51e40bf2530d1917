"""CPU seconds that vLLM's processes take for a short request for a vector, at the real server on this CPU.

    python benchmarks/witness/front_end.py OUT.json [--build FOLDER] [--requests 1500]

The model has one small layer and vectors of 1,024 numbers, so that what is left is the server: HTTP, tokenisation and
JSON in the API server, plans and messages in the engine's core. CPU time is read of each process before and after,
which other work on the machine disturbs little; a line through prompts of several lengths has the part of a request
and that of a token. With --cores, a server of a still smaller model and its clients share so many cores, and short
prompts are sent, three times. Ten minutes; needs Linux.
"""

__all__ = ["cpu_seconds", "main"]

import argparse
import http.client
import json
import os
import statistics
import threading
import time
import urllib.parse
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from environments import NEWEST
from surface import running, vllm_command
from surface_model import write_model

_ROOT = Path(__file__).resolve().parents[2]
_SHAPE = {"hidden_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 16, "num_key_value_heads": 16}
_SHAPE |= {"intermediate_size": 64, "max_position_embeddings": 1024}
_FLAGS = ("--served-model-name", "m", "--load-format", "dummy", "--dtype", "float32", "--enforce-eager")
_POOLING = ("--runner", "pooling", "--convert", "embed", "--no-enable-prefix-caching", "--max-model-len", "1024")
_SMALL = _SHAPE | {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
_WORDS = (4, 16, 64, 160)  # of a prompt
_CLIENTS = 16
_NUM_WARM = 200


def main() -> None:
    """Start, ask, read, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--build", type=Path, default=_ROOT / "build" / "witness", help="where environments are")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--api-server-count", type=int, action="append", help="1 and 2 unless given")
    parser.add_argument("--cores", type=int, action="append", help="all unless given")
    asked = parser.parse_args()
    model = write_model(_ROOT / "build" / "front_end", **(_SMALL if asked.cores else _SHAPE))
    lengths = _WORDS[:1] * 3 if asked.cores else _WORDS
    rows = []
    every = sorted(os.sched_getaffinity(0))
    for cores, count in product(asked.cores or (len(every),), asked.api_server_count or (1, 2)):
        os.sched_setaffinity(0, every[:cores])
        words = [*vllm_command(NEWEST["vllm"], asked.build), "serve", str(model), *_FLAGS, *_POOLING]
        words += ["--host", "127.0.0.1", "--api-server-count", str(count)]
        with running(None, ["nice", "-n", "19", *words]) as url:
            for length in (lengths[0], *lengths):
                row = {"cores": cores, "api_server_count": count, **_measured(url, length, asked.requests)}
                print(json.dumps(row), flush=True)
                rows.append(row)
            rows.remove(next(row for row in rows if _setup(row) == (cores, count)))  # the first warms up
    fits = (
        {}
        if asked.cores
        else {
            f"api_server_count {count}": _lines(rows, *_setup(rows[0])[:1], count)
            for count in {row["api_server_count"] for row in rows}
        }
    )
    document = {"engine": "vllm", "version": NEWEST["vllm"], "rows": rows, "fits": fits}
    asked.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _measured(url: str, num_words: int, num_requests: int) -> dict[str, Any]:
    """Throughput and CPU seconds per request of each kind of process, with prompts of so many words."""
    _ask(url, num_words, _NUM_WARM)
    before, begun, own = cpu_seconds(), time.perf_counter(), time.process_time()
    tokens, latencies = _ask(url, num_words, num_requests)
    took, after = time.perf_counter() - begun, {**cpu_seconds(), "clients": time.process_time() - own}
    spent = {name: (after[name] - before.get(name, 0.0)) / num_requests for name in after}
    return {
        "prompt_tokens": tokens,
        "requests_per_s": num_requests / took,
        "mean_latency_ms": 1e3 * statistics.mean(latencies),
        "cpu_ms_per_request": {name: round(1e3 * value, 4) for name, value in sorted(spent.items())},
    }


def _ask(url: str, num_words: int, num_requests: int) -> tuple[int, list[float]]:
    """(tokens of a prompt, seconds of each request) of `num_requests` sent by several clients, one after another."""
    place = urllib.parse.urlparse(url)
    body = json.dumps({"model": "m", "input": " ".join(["balasen"] * num_words)}).encode()
    tokens, latencies, left = [0], list[float](), [num_requests]
    lock = threading.Lock()

    def client() -> None:
        connection = http.client.HTTPConnection(place.hostname or "", place.port)
        while True:
            with lock:
                if not left[0]:
                    return
                left[0] -= 1
            begun = time.perf_counter()
            connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            latencies.append(time.perf_counter() - begun)
            assert answer.status == 200, text[:300]
            if not tokens[0]:
                tokens[0] = json.loads(text)["usage"]["prompt_tokens"]

    threads = [threading.Thread(target=client) for _ in range(_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tokens[0], latencies


def cpu_seconds() -> dict[str, float]:
    """Of this process's children and theirs, by kind, all of a kind together."""
    parents, totals, kinds = dict[int, int](), dict[int, float](), dict[int, str]()
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = file.read_text(encoding="utf-8")
        except OSError:
            continue
        number, name = int(file.parent.name), text[text.index("(") + 1 : text.rindex(")")]
        fields = text[text.rindex(")") + 2 :].split()
        parents[number], kinds[number] = int(fields[1]), name
        totals[number] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    spent: dict[str, float] = {}
    for number in parents:
        if os.getpid() in _ancestors(number, parents):
            kind = next((kind for kind in ("EngineCor", "APIServer", "Worker") if kind in kinds[number]), "main")
            spent[kind] = spent.get(kind, 0.0) + totals[number]
    return spent


def _ancestors(number: int, parents: dict[int, int]) -> Iterator[int]:
    while (number := parents.get(number, 0)) > 0:
        yield number


def _setup(row: dict[str, Any]) -> tuple[int, int]:
    return row["cores"], row["api_server_count"]


def _lines(rows: list[dict[str, Any]], *setup: int) -> dict[str, dict[str, float]]:
    """CPU milliseconds of a request and of a token in each kind of process, by least squares over lengths."""
    own = [row for row in rows if _setup(row) == setup]
    lengths, lines = [row["prompt_tokens"] for row in own], {}
    for name in own[0]["cpu_ms_per_request"]:
        slope, intercept = statistics.linear_regression(lengths, [row["cpu_ms_per_request"][name] for row in own])
        lines[name] = {"ms_per_request": round(intercept, 4), "ms_per_token": round(slope, 6)}
    return lines


if __name__ == "__main__":
    main()
