"""Sends the emulator and the real `vllm serve` the same requests, and compares what they answer.

    python benchmarks/witness/surface.py --record measurements/surface/vllm_0.30.0.json.gz   starts both servers
    python benchmarks/witness/surface.py --against measurements/surface/vllm_0.30.0.json.gz  starts ours alone

Compared are status, headers that clients read, names and types of fields, the order of a stream's events, error bodies;
the families of /metrics with types, labels and buckets; and whether counters agree with what was sent. The recording
has the shapes of the real server's answers, which `make test` compares with the emulator's without any engine.
"""

__all__ = ["main", "running", "surroundings", "vllm_command"]

import argparse
import gzip
import http.client
import json
import os
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from environments import python_of
from surface_laws import laws
from surface_model import MAX_MODEL_LEN, write_model
from surface_requests import MODEL, Ask, requests
from surface_shapes import Answer, differences, metric_families, paths_of, shape_of_answer

ROOT = Path(__file__).resolve().parents[2]
_BUILD = ROOT / "build" / "witness"
_START_S = 600.0
_FLAGS = (
    *("--served-model-name", MODEL, "--load-format", "dummy", "--dtype", "float32", "--block-size", "32"),
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "16", "--enable-prompt-tokens-details"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    # Else a model of random weights writes white space in place of JSON until its tokens are used up.
    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
)
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> int:
    """Ask, compare, record; 1 where an answer differs."""
    parser = argparse.ArgumentParser(prog="surface", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--version", default="0.30.0", help="of vLLM")
    parser.add_argument("--build", type=Path, default=_BUILD, help="where environments are")
    parser.add_argument("--real", help="URL of a real server of this model that runs already")
    parser.add_argument("--ours", help="URL of an emulator that runs already")
    parser.add_argument("--record", type=Path, help="keep the shapes of the real server's answers in this file")
    parser.add_argument("--against", type=Path, help="a recording to compare with, in place of a real server")
    parser.add_argument("--only", default="", help="requests that have this in their names")
    parser.add_argument("--answers", type=Path, help="a .json that what was equal and what differed is written to")
    parser.add_argument("--verbose", action="store_true", help="print each difference")
    asked = parser.parse_args()
    model = write_model(asked.build / "surface")
    if asked.against is not None:
        expected = json.loads(gzip.decompress(asked.against.read_bytes()))
    else:
        with running(asked.real, real_command(asked.version, asked.build, model)) as url:
            expected = _document(url, asked)
        if asked.record is not None:
            asked.record.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(expected, separators=(",", ":"))
            asked.record.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    with running(asked.ours, our_command(model)) as url:
        actual = _document(url, asked)
    summary = _compared(expected, actual, asked.verbose)
    if asked.answers is not None:
        kept = json.loads(asked.answers.read_text(encoding="utf-8")) if asked.answers.exists() else {}
        asked.answers.write_text(json.dumps({**kept, "surface": summary}, indent=1) + "\n", encoding="utf-8")
    return int(bool(summary["unexplained"]))


def real_command(version: str, build: Path, model: Path) -> list[str]:
    """The words that start the real server, but for its port."""
    return [*vllm_command(version, build), "serve", str(model), *_FLAGS, "--host", "127.0.0.1"]


def vllm_command(version: str, build: Path) -> list[str]:
    """`vllm`, as words."""
    start = "import sys; from vllm.entrypoints.cli.main import main; sys.argv[0] = 'vllm'; main()"
    return [str(python_of("vllm", version, build)), "-P", "-c", start]


def our_command(model: Path) -> list[str]:
    """The words that start the emulator, but for its port."""
    return [
        *(sys.executable, "-m", "perfmodel", "serve", "--model", str(model / "config.json"), "--hardware", "h100-sxm"),
        *(
            "--served-model-name",
            MODEL,
            "--tokenizer",
            str(model / "tokenizer.json"),
            "--set",
            "engine.max_num_seqs=16",
        ),
        *("--set", f"engine.max_model_len={MAX_MODEL_LEN}", "--set", "traffic.input_tokens.mean=20"),
        *("--set", "traffic.input_tokens.p99=50", "--set", "traffic.output_tokens.mean=20"),
        *("--set", "traffic.output_tokens.p99=50"),
    ]


@contextmanager
def running(url: str | None, command: list[str]) -> Iterator[str]:
    """`url`, or that of the server that `command` starts, until the block ends."""
    if url is not None:
        yield url
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*command, "--port", str(port)], **surroundings())
    try:
        end = time.monotonic() + _START_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{' '.join(command)} does not listen")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(120)


def surroundings() -> dict[str, Any]:
    """Environment and folder of a process of vLLM. It asks for a distribution of this name, whose version tells it that
    it runs on a CPU, and whose plug-in makes drafts possible there."""
    folder = ROOT / "build" / "metadata"
    place = folder / "vllm-0.30.0+cpu.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.30.0+cpu\n", encoding="utf-8")
    plugin = "[vllm.general_plugins]\nrejection = benchmarks.witness.vllm_rejection:register\n"
    (place / "entry_points.txt").write_text(plugin, encoding="utf-8")
    path = os.pathsep.join([str(folder), str(ROOT)])
    return {"env": {**os.environ, **_ENVIRONMENT, "PYTHONPATH": path}, "cwd": folder}


def _answers(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


def _document(url: str, asked: argparse.Namespace) -> dict[str, Any]:
    """All that is compared of the server at `url`."""
    cases = []
    for ask in requests():
        if asked.only not in ask.name:
            continue
        try:
            answer = send(url, ask)
        except (OSError, http.client.HTTPException) as error:
            print(f"{ask.name}: {error!r}", file=sys.stderr)
            answer = Answer(0, {}, b"")
        shape = shape_of_answer(answer, ask.leaves_after is not None)
        if ask.path == "/openapi.json" and answer.status == 200:
            shape["body"] = paths_of(json.loads(answer.body))
        cases.append({**ask._asdict(), "answer": shape})
    page = send(url, Ask("", "GET", "/metrics")).body.decode()
    return {
        "engine": "vllm",
        "version": asked.version,
        "command": "python benchmarks/witness/surface.py --record FILE",
        "server": "vllm serve MODEL " + " ".join(_FLAGS),
        "cases": cases,
        "metrics": metric_families(page),
        "laws": laws(lambda ask: send(url, ask)),
    }


def send(url: str, ask: Ask) -> Answer:
    """What the server at `url` answers; of a client that leaves, what it has had until then."""
    place = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=120)
    body = ask.body if isinstance(ask.body, str) or ask.body is None else json.dumps(ask.body)
    headers = dict(ask.headers)
    if body is not None:
        headers.setdefault("content-type", "application/json")
    connection.request(ask.method, ask.path, body, headers)
    response = connection.getresponse()
    if ask.leaves_after is None:
        data = response.read()
    else:
        data = b""
        while data.count(b"\n\n") < ask.leaves_after and (line := response.readline()):
            data += line
    connection.close()
    return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, data)


def _compared(expected: dict[str, Any], actual: dict[str, Any], is_verbose: bool) -> dict[str, Any]:
    """Print what differs, and why as far as that is known; the same as a summary."""
    known = yaml.safe_load((ROOT / "measurements" / "surface" / "known_differences.yaml").read_text(encoding="utf-8"))
    answers = {case["name"]: case["answer"] for case in actual["cases"]}
    cases = [case for case in expected["cases"] if case["name"] in answers]
    differing: dict[str, str] = {}
    for case in cases:
        pairs = list(differences(case["answer"], answers[case["name"]]))
        for place, text in pairs[: None if is_verbose else 1]:
            why = _reason(known["answers"], "requests", case["name"])
            differing[case["name"]] = why
            print(f"{case['name']}: {place}: {text} ({why or 'NOT KNOWN'})")
    for place, text in differences(expected["metrics"], actual["metrics"]):
        family = place[1:].partition(".")[0]
        differing[family] = why = _reason(known["metrics"], "families", family)
        print(f"metrics{place}: {text} ({why or 'NOT KNOWN'})")
    num_equal = sum(case["name"] not in differing for case in cases)
    print(f"{num_equal} of {len(cases)} answers are equal; laws: {expected['laws']}, {actual['laws']}")
    unexplained = sorted(name for name, why in differing.items() if not why)
    laws_of = {"real": expected["laws"], "emulator": actual["laws"]}
    counts = {"requests": len(cases), "equal": num_equal, "families": len(expected["metrics"])}
    return {**counts, "differing": differing, "unexplained": unexplained, "laws": laws_of}


def _reason(rows: list[dict[str, Any]], field: str, name: str) -> str:
    """Why `name` is known to differ; empty: it is not."""
    return next((row["why"] for row in rows if any(fnmatchcase(name, pattern) for pattern in row[field])), "")


if __name__ == "__main__":
    sys.exit(main())
