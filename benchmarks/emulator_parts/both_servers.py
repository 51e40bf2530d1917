"""Four clients against a real server and against the emulator of the same model: the counts of both.

    python benchmarks/emulator_parts/both_servers.py REAL_URL OUR_URL --model FOLDER --guidellm FOLDER \\
        --aiperf FOLDER --vllm PYTHON [--answers reports/surface_202611.json]

Both servers stand already, as `benchmarks/witness/surface.py` starts them; FOLDER of the model has its tokenizer,
PYTHON is that of an environment with vLLM, the other folders are as of `__main__` here. Each client sends 24 requests,
4 at a time, for 32 tokens each. The server's own /metrics stand next to what a client counts.
"""

__all__ = ["main"]

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import load_tools
from openai import __version__ as openai_version
from prometheus_client.parser import text_string_to_metric_families

_REQUESTS, _CONCURRENCY, _PROMPT, _ANSWER = 24, 4, 100, 32
_COUNTED = {
    "requests": "vllm:request_success_total",
    "prompt tokens": "vllm:prompt_tokens_total",
    "generated tokens": "vllm:generation_tokens_total",
}
_START = "import sys; from vllm.entrypoints.cli.main import main; sys.argv[0] = 'vllm'; main()"


class Counts(NamedTuple):
    """What a client says: requests that were answered, and that failed, tokens of all prompts and of all answers."""

    client: str
    api: str
    completed: int
    failed: int
    prompt_tokens: int | None
    output_tokens: int


def main() -> int:
    """Run each client against both; 1 where what they count differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("urls", nargs=2, metavar="URL")
    for name in ("model", "guidellm", "aiperf", "vllm"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--answers", type=Path, help="a .json that what is counted is added to")
    parser.add_argument(
        "--only", action="append", choices=sorted(_CLIENTS), help="a client; may be given several times"
    )
    asked = parser.parse_args()
    kept = json.loads(asked.answers.read_text(encoding="utf-8")) if asked.answers and asked.answers.exists() else {}
    rows = kept.setdefault("clients", {})
    for name in asked.only or _CLIENTS:
        client = _CLIENTS[name]
        sides = [_counted(client, asked, url) for url in asked.urls]
        is_equal = sides[0]["client"][2:4] == sides[1]["client"][2:4] and sides[0]["client"][5] == sides[1]["client"][5]
        rows[name] = {"real": sides[0], "emulator": sides[1], "equal": is_equal}
        print(json.dumps(rows[name]), flush=True)
        if asked.answers is not None:
            asked.answers.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return int(not all(row["equal"] for row in rows.values()))


def _counted(
    client: Callable[[argparse.Namespace, str, Path], Counts], asked: argparse.Namespace, url: str
) -> dict[str, Any]:
    before = _sums(url)
    with tempfile.TemporaryDirectory() as folder:
        counts = client(asked, url, Path(folder))
    after = _sums(url)
    return {"client": counts, "server": {name: after[name] - before[name] for name in _COUNTED}}


def _sums(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    return {name: int(sum(one.value for one in samples if one.name == its)) for name, its in _COUNTED.items()}


def _openai(asked: argparse.Namespace, url: str, out: Path) -> Counts:
    script = Path(__file__).with_name("clients.py")
    sizes = ("--requests", _REQUESTS, "--concurrency", _CONCURRENCY, "--prompt-tokens", 20, "--output-tokens", _ANSWER)
    words = [sys.executable, str(script), url, *map(str, sizes)]
    result = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    failed = sum(result["failed"].values())
    return Counts(f"openai {openai_version}", "chat", result["requests"], failed, None, result["tokens"])


def _vllm_bench(asked: argparse.Namespace, url: str, out: Path) -> Counts:
    words = [
        *(str(asked.vllm), "-P", "-c", _START, "bench", "serve", "--backend", "openai", "--base-url", url),
        *("--endpoint", "/v1/completions", "--model", "surface", "--tokenizer", str(asked.model)),
        *("--dataset-name", "random", "--random-input-len", str(_PROMPT), "--random-output-len", str(_ANSWER)),
        *("--num-prompts", str(_REQUESTS), "--max-concurrency", str(_CONCURRENCY), "--ignore-eos", "--seed", "0"),
        *("--save-result", "--result-dir", str(out), "--result-filename", "bench.json"),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(load_tools.ROOT / "build" / "metadata")  # see witness/surface.py
    subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    result = json.loads((out / "bench.json").read_text(encoding="utf-8"))
    tokens = result["total_input_tokens"], result["total_output_tokens"]
    return Counts("vllm bench serve 0.30.0", "completions", result["completed"], result["failed"], *tokens)


def _guidellm(asked: argparse.Namespace, url: str, out: Path) -> Counts:
    lengths = (_PROMPT, _ANSWER)
    programs = asked.guidellm.absolute() / "bin"
    tool = load_tools.guidellm(programs, url, asked.model, out, _CONCURRENCY, _REQUESTS, lengths)
    (result,) = json.loads(tool.result.read_text(encoding="utf-8"))["benchmarks"]
    totals, metrics = result["metrics"]["request_totals"], result["metrics"]
    tokens = [int(metrics[f"{name}_token_count"]["successful"]["total_sum"]) for name in ("prompt", "output")]
    return Counts(tool.version, "chat", totals["successful"], totals["errored"], tokens[0], tokens[1])


def _aiperf(asked: argparse.Namespace, url: str, out: Path) -> Counts:
    lengths = (_PROMPT, _ANSWER)
    programs = asked.aiperf.absolute() / "bin"
    tool = load_tools.aiperf(
        programs, url, asked.model, out, _CONCURRENCY, _REQUESTS, lengths, "surface", "completions"
    )
    result = json.loads((tool.result / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    failed = int((result.get("error_request_count") or {"avg": 0})["avg"])
    tokens = [int(result[f"total_usage_{name}_tokens"]["avg"]) for name in ("prompt", "completion")]
    return Counts(tool.version, "completions", int(result["request_count"]["avg"]), failed, tokens[0], tokens[1])


_CLIENTS: dict[str, Callable[[argparse.Namespace, str, Path], Counts]] = {
    "openai": _openai,
    "vllm bench serve": _vllm_bench,
    "guidellm": _guidellm,
    "aiperf": _aiperf,
}

if __name__ == "__main__":
    sys.exit(main())
