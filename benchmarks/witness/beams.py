"""CPU seconds that vLLM's processes take for a token of a beam, at the real server on this CPU.

    python benchmarks/witness/beams.py OUT.json [--build FOLDER]

The model is as small as can be, so that what is left is the server: requests for one token each with their logprobs,
made by the API server. Widths and lengths of prompts vary; a line through the lengths has the part of a request and
that of a token of its prompt. Also asked is what the prefix cache says. Five minutes; needs Linux.
"""

__all__ = ["main"]

import argparse
import http.client
import json
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from environments import NEWEST
from front_end import cpu_seconds
from surface import running, vllm_command
from surface_model import write_model

_ROOT = Path(__file__).resolve().parents[2]
_SHAPE = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
_SHAPE |= {"intermediate_size": 64, "max_position_embeddings": 1024}
_FLAGS = ("--served-model-name", "m", "--load-format", "dummy", "--dtype", "float32", "--enforce-eager")
_CACHE = ("--block-size", "32", "--max-model-len", "1024", "--max-num-seqs", "64", "--max-logprobs", "40")
_WIDTHS, _WORDS, _TOKENS, _TIMES = (2, 4, 8, 16), (16, 160), 64, 3


def main() -> None:
    """Start, ask, read, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--build", type=Path, default=_ROOT / "build" / "witness", help="where environments are")
    asked = parser.parse_args()
    words = [*vllm_command(NEWEST["vllm"], asked.build), "serve", str(write_model(_ROOT / "build" / "beams", **_SHAPE))]
    with running(None, ["nice", "-n", "19", *words, *_FLAGS, *_CACHE, "--host", "127.0.0.1"]) as url:
        _searched(url, 3, 16)  # warms up
        rows = [_searched(url, width, length) for length in _WORDS for width in _WIDTHS]
    document = {"engine": "vllm", "version": NEWEST["vllm"], "block_size": 32, "rows": rows}
    asked.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _searched(url: str, width: int, num_words: int) -> dict[str, Any]:
    """CPU milliseconds of each process for a request of a beam, and tokens that the engine computed."""
    before, counts, begun = cpu_seconds(), _counts(url), time.perf_counter()
    usages = [_ask(url, width, f"{number} {width} " + " ".join(["balasen"] * num_words)) for number in range(_TIMES)]
    took, after, done = time.perf_counter() - begun, cpu_seconds(), _counts(url)
    asked = _TIMES * (1 + width * (_TOKENS - 1))
    row = {
        "beam_width": width,
        "prompt_tokens": [usage["prompt_tokens"] for usage in usages],
        "completion_tokens": [usage["completion_tokens"] for usage in usages],
        "requests": done["vllm:request_success_total"] - counts["vllm:request_success_total"],
        "requests_expected": asked,
        "tokens_asked": done["vllm:prefix_cache_queries_total"] - counts["vllm:prefix_cache_queries_total"],
        "tokens_hit": done["vllm:prefix_cache_hits_total"] - counts["vllm:prefix_cache_hits_total"],
        "ms_per_token": 1e3 * took / (_TIMES * _TOKENS),
        "cpu_ms_per_request": {name: round(1e3 * (after[name] - before.get(name, 0.0)) / asked, 4) for name in after},
    }
    print(json.dumps(row), flush=True)
    return row


def _ask(url: str, width: int, prompt: str) -> dict[str, int]:
    place = urllib.parse.urlparse(url)
    body = {"model": "m", "prompt": prompt, "use_beam_search": True, "n": width, "max_tokens": _TOKENS}
    connection = http.client.HTTPConnection(place.hostname or "", place.port)
    text = json.dumps({**body, "ignore_eos": True, "temperature": 0})
    connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    document = json.loads(answer.read())
    assert answer.status == 200, document
    usage: dict[str, int] = document["usage"]
    return usage


def _counts(url: str) -> dict[str, float]:
    """The server's counters, over all labels."""
    counts: dict[str, float] = {}
    with urllib.request.urlopen(f"{url}/metrics") as page:
        for line in page.read().decode().splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                counts[name.partition("{")[0]] = counts.get(name.partition("{")[0], 0.0) + float(value)
    return counts


if __name__ == "__main__":
    main()
