"""An engine's own scheduler with our step times, and `perfmodel simulate`: the same random workloads, both in virtual
time, request by request.

    python benchmarks/witness/timed.py vllm
    python benchmarks/witness/timed.py sglang

Engines run in environments of their own under build/witness, made on first use (3 GB each). HTTP servers are left out
on both sides: times are the engine's.
"""

__all__ = ["draw_case", "main"]

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from environments import NEWEST, python_of

from perfmodel.cost import scenario_fits
from perfmodel.cost.calibrations.engine_profile import ServerFit
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_BUILD = _ROOT / "build" / "witness"
_DEPLOYMENTS = (
    ("llama-3.1-8b", "a100-sxm-80gb", 1),
    ("llama-3.1-8b", "l40s", 1),
    ("llama-3.1-70b", "h100-sxm-80gb", 4),
    ("mixtral-8x7b", "h100-sxm-80gb", 2),
    ("qwen3-30b-a3b", "h200-sxm", 1),
)
_METRICS = ("TTFT", "TPOT", "E2E", "makespan")
_EQUAL, _MAX_MEAN = 1e-6, 0.01


class Difference(NamedTuple):
    """engine, ours: means in seconds; worst: the largest relative difference of one request"""

    engine: float
    ours: float
    worst: float

    @property
    def relative(self) -> float:
        """Of the means."""
        return self.ours / self.engine - 1 if self.engine else 0.0


def draw_case(engine: str, seed: int) -> dict[str, Any]:
    """A deployment, an engine that is often short of blocks or budget, and its requests."""
    rng = random.Random(f"timed {engine} {seed}")
    model, hardware, degree = rng.choice(_DEPLOYMENTS)
    block_size, longest = rng.choice([16, 32]), rng.choice([1024, 4096])
    num_seqs, budget = rng.choice([4, 16, 64, 256]), rng.choice([256, 512, 2048, 8192])
    is_whole = engine == "vllm" and rng.random() < 0.15  # prompts are not cut
    fitting = -(-longest // block_size) + 4
    config = {
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": max(num_seqs, longest if is_whole else budget),
        "block_size": block_size,
        "max_model_len": longest,
        "enable_prefix_caching": rng.random() < 0.7,
        "enable_chunked_prefill": not is_whole,
        "async_scheduling": rng.random() < 0.6,
        "num_blocks": fitting + rng.choice([0, rng.randrange(fitting), 20_000]),
    }
    requests = _requests(rng, longest, has_shared=config["enable_prefix_caching"] and rng.random() < 0.7)
    trace = _BUILD / "traces" / f"{engine}-{seed}.jsonl"
    trace.parent.mkdir(parents=True, exist_ok=True)
    rows = [_trace_row(number, request, block_size) for number, request in enumerate(requests)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    named = {"profile": engine, "tensor_parallel_size": degree, **config}
    named["num_gpu_blocks_override"] = named.pop("num_blocks")
    changes = [f"model={model}", f"hardware={hardware}", *(f"engine.{k}={json.dumps(v)}" for k, v in named.items())]
    changes.append(f"traffic={json.dumps({'trace': {'path': str(trace), 'format': 'jsonl'}})}")
    return {"scenario": "llama-3.1-8b-a100", "set": changes, "engine": config, "requests": requests}


def _requests(rng: random.Random, longest: int, has_shared: bool) -> list[dict[str, Any]]:
    rate, time_s = rng.choice([0.5, 2.0, 8.0, 30.0]), 0.0
    most_input, most_output = rng.choice([100, 500, longest // 2, longest - 200]), rng.choice([1, 30, 190])
    groups = [(group, rng.randrange(8, most_input)) for group in range(rng.choice([1, 2, 5]))]
    requests = []
    for _ in range(rng.randrange(20, 80)):
        group, shared = rng.choice(groups) if has_shared and rng.random() < 0.8 else (0, 0)
        prompt = rng.randrange(1, most_input)
        if shared and rng.random() < 0.2:  # the same prompt as others have
            prompt = shared
        request = {"prompt": prompt, "output": rng.randint(1, most_output), "group": group}
        requests.append({**request, "shared": min(shared, prompt), "arrival_s": time_s})
        if rng.random() < 0.8:  # others come together
            time_s = round(time_s + rng.expovariate(rate), 6)
    return requests


def simulated(case: dict[str, Any]) -> tuple[list[list[float]], int]:
    """[first token, last token] in seconds of each request by `simulate`, and how often one was preempted."""
    scenario = load_scenario(case["scenario"], case["set"])
    profile = scenario_fits(scenario)[1].model_copy(update={"server": ServerFit()})
    requests = simulate(scenario, profile=profile).requests
    times: list[list[float]] = [[] for _ in case["requests"]]
    columns = (requests.request_id, requests.first_token_s, requests.finished_s)
    for number, first, last in zip(*(column.tolist() for column in columns), strict=True):
        times[number] = [first, last]
    return times, int(requests.num_preemptions.sum())


def _trace_row(number: int, request: dict[str, Any], size: int) -> dict[str, Any]:
    """A trace's line: blocks within the shared tokens have hashes of the group."""
    prompt, shared = request["prompt"], request["shared"]
    hashes = [
        (1 + request["group"]) * 10**6 + block if (block + 1) * size <= shared else (1000 + number) * 10**6 + block
        for block in range(prompt // size)
    ]
    lengths = {"input_tokens": prompt, "output_tokens": request["output"]}
    return {"arrival_s": request["arrival_s"], **lengths, "block_hashes": hashes, "hash_block_size": size}


def compare(case: dict[str, Any], engine: list[list[float]], ours: list[list[float]]) -> dict[str, Difference]:
    """Differences of the metrics of one workload."""
    columns: dict[str, list[tuple[float, float]]] = {name: [] for name in _METRICS}
    for request, *pair in zip(case["requests"], engine, ours, strict=True):
        came, gaps = request["arrival_s"], request["output"] - 1
        columns["TTFT"].append((pair[0][0] - came, pair[1][0] - came))
        columns["E2E"].append((pair[0][1] - came, pair[1][1] - came))
        if gaps:
            columns["TPOT"].append(((pair[0][1] - pair[0][0]) / gaps, (pair[1][1] - pair[1][0]) / gaps))
    columns["makespan"].append((max(last for _, last in engine), max(last for _, last in ours)))
    result = {}
    for name, pairs in columns.items():
        if pairs:
            worst = max(abs(own / theirs - 1) for theirs, own in pairs)
            result[name] = Difference(fmean(theirs for theirs, _ in pairs), fmean(own for _, own in pairs), worst)
    return result


def _packages() -> Path:
    """What engines' environments have not and perfmodel needs there."""
    folder = _BUILD / "simpy"
    if not folder.exists():
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", folder, "simpy"], check=True)
    return folder


def engine_times(engine: str, version: str, cases: list[dict[str, Any]]) -> list[list[list[float]]]:
    """[first token, last token] of each request of each workload, by the engine's own scheduler."""
    python = python_of(engine, version, _BUILD)
    asked, result = _BUILD / f"timed-{engine}.json", _BUILD / f"times-{engine}.json"
    asked.write_text(json.dumps(cases), encoding="utf-8")
    packages = os.pathsep.join(map(str, [_ROOT, _ROOT / "executors", _packages()]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": packages}
    subprocess.run([python, _HERE / f"timed_{engine}.py", asked, result], check=True, env=environment)
    times: list[list[list[float]]] = json.loads(result.read_text(encoding="utf-8"))["times"]
    return times


def report(engine: str, version: str, rows: list[tuple[int, dict[str, Any], int, dict[str, Difference]]]) -> str:
    """A Markdown table of `rows`: seed, workload, preemptions, differences. Equal workloads are counted."""
    equal = [row for row in rows if max(value.worst for value in row[3].values()) < _EQUAL]
    preempted = sum(count > 0 for _, _, count, _ in rows)
    lines = [
        f"**{engine} {version}**: {len(rows)} workloads ({preempted} of them with preemptions), {len(equal)} equal in "
        f"every time of every request within a millionth.",
        "",
    ]
    if len(equal) < len(rows):
        lines += [
            "| seed | model | device | " + " | ".join(_METRICS) + " | worst request |",
            "|---:|---|---|" + "---:|" * (len(_METRICS) + 1),
        ]
    for seed, case, _, differences in rows:
        worst = max(value.worst for value in differences.values())
        if worst >= _EQUAL:
            cells = [f"{differences[name].relative:+.3%}" if name in differences else "" for name in _METRICS]
            named = [change.partition("=")[2] for change in case["set"][:2]]
            lines.append(f"| {seed} | {' | '.join([*named, *cells])} | {worst:.3%} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Draw, run, compare; 1 where a mean differs by more than 1 %."""
    parser = argparse.ArgumentParser(prog="timed", description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("engine", choices=["sglang", "vllm"])
    parser.add_argument("--version", help="of the engine; the newest described unless given")
    parser.add_argument("--cases", type=int, default=50, help="workloads")
    parser.add_argument("--seed", type=int, default=0, help="of the first workload")
    asked = parser.parse_args()
    version = asked.version or NEWEST[asked.engine]
    seeds = range(asked.seed, asked.seed + asked.cases)
    cases = [draw_case(asked.engine, seed) for seed in seeds]
    times = engine_times(asked.engine, version, cases)
    rows = []
    for seed, case, theirs in zip(seeds, cases, times, strict=True):
        ours, num_preemptions = simulated(case)
        rows.append((seed, case, num_preemptions, compare(case, theirs, ours)))
    print(report(asked.engine, version, rows))
    return int(any(abs(value.relative) > _MAX_MEAN for *_, differences in rows for value in differences.values()))


if __name__ == "__main__":
    sys.exit(main())
