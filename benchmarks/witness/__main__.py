"""Drives an engine's own scheduler and ours over the same random workloads, and compares every plan.

    python benchmarks/witness vllm --version 0.30.0 --cases 200            draws new workloads, prints equal / different
    python benchmarks/witness vllm --version 0.30.0 --seed 0 --record FILE  keeps the decisions for `validate plans`
    python benchmarks/witness llama.cpp --cases 20         the same for llama-server, which is built on first use
    python benchmarks/witness sglang --cases 180           and for SGLang's scheduler

The engine runs in an environment of its own under build/witness, which this makes on first use (2.4 GB); nothing of it
is a dependency of the project.
"""

__all__ = ["main"]

import argparse
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sglang_workloads
from environments import NEWEST, python_of
from slot_workloads import SLOT_FEATURES, draw_slot_case

from perfmodel.evidence.kinds.plans import validate_plans
from perfmodel.report.terminal import as_text
from workloads import FEATURES, draw_case

_HERE = Path(__file__).parent
_BUILD = _HERE.parents[1] / "build" / "witness"
_DRIVERS = {
    "llama.cpp": _HERE / "llama_server.py",
    "sglang": _HERE / "sglang_scheduler.py",
    "vllm": _HERE / "vllm_scheduler.py",
}
_WORKLOADS = {
    "llama.cpp": (SLOT_FEATURES, draw_slot_case),
    "sglang": (sglang_workloads.FEATURES, sglang_workloads.draw_case),
    "vllm": (FEATURES, draw_case),
}


def main() -> int:
    """Draw, drive, compare; 1 where a plan differs."""
    parser = argparse.ArgumentParser(prog="witness", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("engine", choices=sorted(_DRIVERS))
    parser.add_argument("--version", help="of the engine; the newest described unless given")
    parser.add_argument("--features", help="what the workloads exercise, with commas between; all unless given")
    parser.add_argument("--cases", type=int, default=100, help="workloads of each feature")
    parser.add_argument("--seed", type=int, default=None, help="of the first workload; new ones unless given")
    parser.add_argument("--record", type=Path, help="keep the decisions in this file")
    asked = parser.parse_args()
    known, draw = _WORKLOADS[asked.engine]
    asked.version = asked.version or NEWEST[asked.engine]
    asked.features = asked.features or ",".join(known)
    seed = asked.seed if asked.seed is not None else time.time_ns() % 10**9
    features = asked.features.split(",")
    unknown = [feature for feature in features if feature not in known]
    if unknown:
        parser.error(f"got feature {unknown[0]}; expected one of {', '.join(known)}")
    cases = [draw(seed + number, feature) for feature in features for number in range(asked.cases)]
    command = f"python benchmarks/witness {asked.engine} --version {asked.version} --features {asked.features}"
    document = _decisions(asked.engine, asked.version, cases)
    document["command"] = f"{command} --cases {asked.cases} --seed {seed}"
    refused = [case for case in document["cases"] if "error" in case]
    for case in refused[:3]:
        print(f"refused by {asked.engine}: {case['error']}", file=sys.stderr)
    document["cases"] = [
        {**case, "steps": list(_compact(case["steps"]))} for case in document["cases"] if "steps" in case
    ]
    file = asked.record or _BUILD / f"{asked.engine}-{asked.version}-latest.json.gz"
    _write(document, file)
    print(f"{len(cases)} workloads from seed {seed}, {len(refused)} refused; decisions in {file}", file=sys.stderr)
    report = validate_plans(str(file))
    print(as_text(report))
    return int(report.equal < report.rows)


def _decisions(engine: str, version: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """What the engine's own scheduler decides."""
    python = python_of(engine, version, _BUILD)
    asked, result = _BUILD / "cases.json", _BUILD / "decisions.json"
    asked.write_text(json.dumps(cases), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([python, _DRIVERS[engine], asked, result], check=True, env=environment)
    document: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return document


def _compact(steps: list[list[Any]]) -> Iterator[list[Any]]:
    """Runs of steps in which the same requests get as many tokens, as `validate plans` reads them."""
    first: list[Any] | None = None
    times = 0
    for step in steps:
        if first is not None and _continues(first, times + 1, step):
            times += 1
            continue
        if first is not None:
            yield [*first, times] if times else first
        first, times = step, 0
    if first is not None:
        yield [*first, times] if times else first


def _continues(first: list[Any], times: int, step: list[Any]) -> bool:
    expected = [[request, computed + times * count, count] for request, computed, count in first[1]]
    return step[0] == first[0] + times and step[1] == expected and not step[2]


def _write(document: dict[str, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document, separators=(",", ":"))
    file.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    sys.exit(main())
