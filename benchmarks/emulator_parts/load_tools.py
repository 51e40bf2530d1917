"""GuideLLM and AIPerf as clients of a server, each in an environment of its own, and what `validate bench` reads there.

Both want the tokenizer of the model, to make prompts of a length and to count. No hub is asked: `write_tokenizer`
trains a byte-level BPE of 4,096 tokens on README.md and docs/ of this checkout, and the server counts by the same file.
"""

__all__ = ["Tool", "aiperf", "guidellm", "read_back", "scraped", "write_tokenizer"]

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from server import ROOT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_NUM_TOKENS = 4096
_LIMIT_S = 420
# A hub that nobody answers for: told to stay offline, AIPerf 0.13 takes a folder's path for the name of a repository.
_ENVIRONMENT = {"HF_ENDPOINT": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
FIGURES = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "mean_e2el_ms", "p99_e2el_ms")


class Tool(NamedTuple):
    """A load tool's run: its name and version, the words of its command, its result file and the CPU it took.

    cpu: CPU seconds of all its processes per second
    """

    version: str
    words: Sequence[str]
    result: Path
    cpu: float


def write_tokenizer(folder: Path) -> Path:
    """The folder, with a tokenizer.json in it that transformers loads, too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_NUM_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    texts = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    tokenizer.train([str(text) for text in texts], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "model_max_length": 131072}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def guidellm(
    programs: Path, url: str, tokenizer: Path, out: Path, concurrency: int, num_requests: int, lengths: tuple[int, int]
) -> Tool:
    """So many requests of GuideLLM in `programs`, `concurrency` at a time; lengths: tokens of prompts and of answers"""
    result = out / "guidellm.json"
    words = [
        *(str(programs / "guidellm"), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={url},http2=false"),
        *("--profile", "kind=concurrent", "--override", "profile.streams", str(concurrency)),
        *("--constraint", f"kind=max_requests,count={num_requests}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={lengths[0]},output_tokens={lengths[1]}"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}", "--output", f"kind=json,path={result}"),
    ]
    return _run("GuideLLM", programs / "guidellm", words, result, out)


def aiperf(
    programs: Path,
    url: str,
    tokenizer: Path,
    out: Path,
    concurrency: int,
    num_requests: int,
    lengths: tuple[int, int],
    model: str = "llama-3.1-8b",
    endpoint: str = "chat",
) -> Tool:
    """So many requests of AIPerf in `programs`, `concurrency` at a time; lengths: tokens of prompts and of answers;
    model, endpoint: which it asks for, and how"""
    folder = out / "aiperf"
    words = [
        *(str(programs / "aiperf"), "profile", "--url", url, "--endpoint-type", endpoint, "--streaming"),
        *("--model", model, "--tokenizer", str(tokenizer), "--use-server-token-count"),
        *("--concurrency", str(concurrency), "--request-count", str(num_requests), "--random-seed", "0"),
        *("--synthetic-input-tokens-mean", str(lengths[0]), "--output-tokens-mean", str(lengths[1])),
        *("--extra-inputs", "ignore_eos:true", "--artifact-dir", str(folder), "--ui", "none"),
    ]
    return _run("AIPerf", programs / "aiperf", words, folder, out)


def _run(name: str, program: Path, words: Sequence[str], result: Path, out: Path) -> Tool:
    environment = {**os.environ, **_ENVIRONMENT, "HOME": str(out)}
    environment.pop("PYTHONPATH", None)
    version = subprocess.run([program, "--version"], env=environment, capture_output=True, text=True, check=True)
    before = os.times()
    with (out / f"{name.lower()}.log").open("w") as log:
        done = subprocess.run(words, cwd=out, env=environment, stdout=log, stderr=log, timeout=_LIMIT_S, check=False)
    after = os.times()
    if done.returncode != 0 or not result.exists():
        raise RuntimeError(
            f"{name} ended with {done.returncode}:\n" + (out / f"{name.lower()}.log").read_text()[-3000:]
        )
    used = after.children_user - before.children_user + after.children_system - before.children_system
    return Tool(f"{name} {version.stdout.split()[-1]}", words, result, used / (after.elapsed - before.elapsed))


def scraped(result: Path) -> int:
    """How many metrics of the server the tool has found by itself, at /metrics, and written down."""
    file = result / "server_metrics_export.json"
    return len(json.loads(file.read_text(encoding="utf-8"))["metrics"]) if file.exists() else 0


def read_back(result: Path, scenario: str) -> dict[str, Any]:
    """The run in `result` as `perfmodel validate bench` compares it with `scenario`: predicted and measured figures."""
    files = sorted(result.glob("profile_export*.json*")) if result.is_dir() else [result]
    names = [
        str(file) for file in files if file.name in ("profile_export.jsonl", "profile_export_aiperf.json", result.name)
    ]
    words = [sys.executable, "-m", "perfmodel", "validate", "bench", *names, "--scenario", scenario, "--json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    (run,) = json.loads(done.stdout)["runs"]
    figures = {item["metric"]: item for item in run["figures"]}
    return {
        "completed": run["completed"],
        "failed": run["failed"],
        "figures": {name: (figures[name]["predicted"], figures[name]["measured"]) for name in FIGURES},
    }
