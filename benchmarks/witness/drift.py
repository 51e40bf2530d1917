"""Plants drifts at a real vLLM server on this CPU and asks `perfmodel watch` what they are.

    python benchmarks/witness/drift.py REPORT.md [--only NAME]

The machine is calibrated by whole steps of vLLM (`perfmodel calibrate --on`); then a server is started for each drift,
`vllm bench serve` sends it requests, and `watch` reads its counters. The server has the highest priority that it may
have, since the machine's other work would be a drift, too. Half an hour; needs Linux.
"""

__all__ = [
    "BUILD",
    "HERE",
    "calibrated_model",
    "main",
    "perfmodel",
    "priority_prefix",
    "scenario_file",
    "send",
    "serve_command",
]

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from environments import NEWEST
from surface import running, surroundings, vllm_command
from surface_model import write_model

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "witness"
HERE = BUILD / "drift"
_SHAPE = {"hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 4}
_SHAPE |= {"intermediate_size": 2048, "max_position_embeddings": 2048}
_ENGINE: dict[str, Any] = {
    **{"profile": "vllm", "version": NEWEST["vllm"], "dtype": "float32", "enforce_eager": True},
    **{"max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 512, "block_size": 32},
    "num_gpu_blocks_override": 512,
}
_DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
_PREFIX, _INPUT, _OUTPUT, _RATE = 96, 80, 32, 2.0
_READING_S, _READINGS = 40, 3
_DUTY_S = 0.02  # of an engine that is stopped half of the time


class Drift(NamedTuple):
    """What is done to the server, and the words by which it is named; empty: no drift."""

    named: str
    server: tuple[str, ...] = ()
    load: tuple[str, ...] = ()
    drafts: bool = False
    rate: float = _RATE
    slowed: bool = False


_SPECULATIVE = ("--speculative-config", json.dumps(_DRAFTS))
DRIFTS = {
    "none": Drift(""),
    "none, with drafts": Drift("", _SPECULATIVE, drafts=True),
    "slower steps": Drift("steps take", slowed=True, rate=1.0),
    "colder cache": Drift(
        "a prefix cache that has", load=("--random-prefix-len", "0", "--random-input-len", str(_PREFIX + _INPUT))
    ),
    "longer answers": Drift("answers of", load=("--random-output-len", str(3 * _OUTPUT))),
    "fewer accepted drafts": Drift("drafts that bring", _SPECULATIVE, ("--temperature", "1"), drafts=True),
    "smaller batch limit": Drift("requests in a batch while", ("--max-num-seqs", "2"), rate=3.0),
}


def main() -> None:
    """Calibrate, plant, watch, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--only", action="append", choices=list(DRIFTS))
    asked = parser.parse_args()
    model = calibrated_model()
    file = asked.report.with_suffix(".json")
    rows = {row["drift"]: row for row in json.loads(file.read_text(encoding="utf-8"))} if file.exists() else {}
    for name in asked.only or DRIFTS:
        rows[name] = {"drift": name, **_watched(model, DRIFTS[name])}
        print(json.dumps(rows[name], indent=1), flush=True)
        in_order = [rows[name] for name in DRIFTS if name in rows]
        file.write_text(json.dumps(in_order, indent=1) + "\n", encoding="utf-8")
        asked.report.write_text(_text(in_order), encoding="utf-8")


def calibrated_model() -> Path:
    """The model's folder; the machine is calibrated on it."""
    model = write_model(HERE / "model", **_SHAPE)
    if not (HERE / "calibrations" / "engine@here.yaml").exists():
        _calibrate(model)
    return model


def scenario_file(model: Path, name: str, engine: dict[str, Any], **traffic: Any) -> Path:
    lengths = {"input_tokens": (_PREFIX + _INPUT // 2, _PREFIX + _INPUT * 3 // 2)}
    lengths["output_tokens"] = (_OUTPUT // 2, _OUTPUT * 3 // 2)
    drawn = {key: {"distribution": "uniform", "low": low, "high": high} for key, (low, high) in lengths.items()}
    base = {"arrivals": {"process": "poisson", "rate": _RATE}, "num_requests": 100, **drawn}
    data = {"name": name, "model": str(model), "hardware": "cpu", "engine": {**_ENGINE, **engine}}
    file = HERE / f"{name}.yaml"
    file.write_text(json.dumps({**data, "traffic": {**base, **traffic}}), encoding="utf-8")
    return file


def _calibrate(model: Path) -> None:
    def lengths(low: int, high: int) -> dict[str, Any]:
        return {"distribution": "uniform", "low": low, "high": high}

    def closed(concurrency: int, number: int, prompt: tuple[int, int], answer: tuple[int, int]) -> dict[str, Any]:
        arrivals = {"process": "closed_loop", "concurrency": concurrency}
        drawn = {"input_tokens": lengths(*prompt), "output_tokens": lengths(*answer)}
        return {"arrivals": arrivals, "num_requests": number, **drawn}

    loads = {
        "short prompts": closed(8, 24, (8, 24), (24, 56)),
        "mixed": closed(4, 20, (24, 96), (16, 40)),
        "long prompts": closed(2, 8, (256, 640), (8, 24)),
    }
    plain = [scenario_file(model, name, {}, **load) for name, load in loads.items()]
    drafts = scenario_file(model, "drafts", {"speculative_config": _DRAFTS}, **closed(4, 20, (24, 96), (16, 40)))
    engine = f"vllm:{vllm_command(NEWEST['vllm'], BUILD)[0]}"
    words = ["calibrate", *map(str, plain), str(drafts), "--on", engine, "--name", "here", "--to"]
    perfmodel([*words, str(HERE / "calibrations"), "--force"], check=True)


def perfmodel(words: list[str], check: bool = False) -> subprocess.CompletedProcess[str]:
    place = {**surroundings(), "cwd": HERE}
    place["env"]["PYTHONPATH"] = os.pathsep.join([place["env"]["PYTHONPATH"], str(ROOT / "executors")])
    command = [sys.executable, "-m", "perfmodel", *words]
    return subprocess.run(command, check=check, capture_output=True, text=True, **place)


def _watched(model: Path, drift: Drift) -> dict[str, Any]:
    """What `watch` printed of a server with that drift, its status, and whether it is right."""
    engine: dict[str, Any] = {"profile": "here"}
    if drift.drafts:
        engine["speculative_config"] = {**_DRAFTS, "acceptance": {"rate": 0.98}}
    scenario = scenario_file(model, "watched", engine, prefix={"num_groups": 1, "shared_tokens": _PREFIX})
    with running(None, serve_command(model, drift.server)) as url:
        send(url, model, _load_of(drift, 40)).wait()  # the first requests of a server take seconds
        seconds = _READING_S * (_READINGS + 1)
        load = send(url, model, _load_of(drift, int(drift.rate * seconds)))
        slowed: AbstractContextManager[None] = _slowed() if drift.slowed else nullcontext()
        with slowed:
            time.sleep(_READING_S / 2)
            words = ["watch", str(scenario), "--url", f"{url}/metrics", "--fail-on", "drift"]
            words += ["--every", str(_READING_S)]
            end = perfmodel([*words, "--minutes", str(_READING_S * _READINGS / 60), "--longest", str(1.5 * _READING_S)])
        load.terminate()
        load.wait()
    lines = [line for line in end.stderr.splitlines() if "req/s" in line or end.returncode == 2]
    return {"status": end.returncode, "lines": lines, "is_right": _is_right(drift, end.returncode, lines)}


def _is_right(drift: Drift, status: int, lines: list[str]) -> bool:
    """Named in most of its readings and by the status; without a drift, neither."""
    if not drift.named:
        return status == 0
    return status == 1 and sum(drift.named in line for line in lines) > len(lines) / 2


def priority_prefix() -> list[str]:
    """Before other processes, and as a session before other sessions, where that is allowed."""
    if os.geteuid():
        return []
    return ["setsid", "sh", "-c", 'echo -20 > /proc/self/autogroup; exec nice -n -20 "$@"', "sh"]


def serve_command(model: Path, more: Sequence[str] = ()) -> list[str]:
    """The words that start vLLM's server, but for its port."""
    flags = ["--served-model-name", "m", "--load-format", "dummy", "--dtype", "float32", "--enforce-eager"]
    for name in ("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override"):
        flags += [f"--{name.replace('_', '-')}", str(_ENGINE[name])]
    vllm = vllm_command(NEWEST["vllm"], BUILD)
    return [*priority_prefix(), *vllm, "serve", str(model), *flags, *more, "--host", "127.0.0.1"]


def _load_of(drift: Drift, number: int) -> list[str]:
    shared = ["--random-prefix-len", str(_PREFIX), "--random-input-len", str(_INPUT)]
    return [*shared, *drift.load, "--request-rate", str(drift.rate), "--num-prompts", str(number)]


def send(url: str, model: Path, load: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Sends the server random prompts."""
    words = ["bench", "serve", "--backend", "openai", "--base-url", url, "--model", "m", "--tokenizer", str(model)]
    words += ["--dataset-name", "random", "--random-range-ratio", "0.5", "--ignore-eos", "--disable-tqdm"]
    words += ["--random-output-len", str(_OUTPUT), "--temperature", "0", *load]
    command = [*priority_prefix(), *vllm_command(NEWEST["vllm"], BUILD), *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **surroundings())


@contextmanager
def _slowed() -> Iterator[None]:
    """The process that computes is stopped half of the time."""
    engine, is_over = _engine_process(), threading.Event()

    def alternate() -> None:
        while not is_over.is_set():
            os.kill(engine, signal.SIGSTOP)
            time.sleep(_DUTY_S / 2)
            os.kill(engine, signal.SIGCONT)
            time.sleep(_DUTY_S / 2)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _engine_process() -> int:
    names = ((int(file.parent.name), file.read_text(encoding="utf-8")) for file in Path("/proc").glob("[0-9]*/comm"))
    return max(number for number, name in names if name.startswith("VLLM::Worker"))


def _text(rows: list[dict[str, Any]]) -> str:
    num_right = sum(row["is_right"] for row in rows)
    lines = [
        f"# A watched vLLM server: {num_right} of {len(rows)} right",
        "",
        f"`perfmodel watch` beside vLLM {NEWEST['vllm']}'s own server on a CPU, calibrated by whole steps of that vLLM "
        f"(63 million parameters, float32, one thread). Requests come from `vllm bench serve`, {_RATE:g} a second of "
        f"{_PREFIX} shared and {_INPUT} other tokens with {_OUTPUT} of answer in the mean; one thing was made "
        f"different each time. `python benchmarks/witness/drift.py` runs it again.",
    ]
    for row in rows:
        ends = "ends with status 1" if row["status"] else "ends with status 0"
        lines += ["", f"## {row['drift'].capitalize()}: {'right' if row['is_right'] else 'wrong'}, {ends}", "", "```"]
        lines += [*row["lines"], "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
