"""How much CPU time and memory the simulator takes: to start, for a run, for each further request, streamed.

    python benchmarks/simulator_speed.py [--requests 10000 20000] [--stream 1000000] [--beside TREE] [--repeat 3]
        [--scenario llama-3.1-8b-a100]

Each run is a process of its own: `perfmodel simulate` of Llama-3.1-8B on one H100 under 2,048-in 256-out Poisson
traffic at 4 requests/s, or of another scenario, prediction intervals included. Lengths that differ, as in chat traffic
(llama-3.1-8b-a100), ask for the costs of thousands of steps before they come again: compare 20,000 requests with more.

CPU seconds are the operating system's count for the whole process, so they do not depend on what else the machine does,
except that busy neighbours slow a shared core down by a third and more. So --beside takes another checkout, or a
compiled copy (`make compiled`: build/compiled): the two take turns, and the medians of --repeat turns are compared, as
are their answers, bit by bit. Where Python may not write bytecode (PYTHONDONTWRITEBYTECODE), a tenth of a second goes
into compiling the sources. The peak is the largest resident set. With --stream the records go to disk as they come.

Targets on an idle core: 0.45 s to start; 1.5 s for 10,000 requests, 1 s compiled; 85 us for each further one, 40
compiled; 85 s and 0.3 GB for 1,000,000 streamed, 45 s compiled.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

SCENARIO = "llama-3.1-8b-h100-2048-256"
HERE = Path(__file__).resolve().parent.parent
_FEWEST = 10  # requests of a run that is little but start-up


def run(
    num_requests: int, streams: bool, settings: Sequence[str] = (), tree: Path = HERE, scenario: str = SCENARIO
) -> tuple[dict[str, Any], Any]:
    """One run of the command of `tree` in a fresh process, with further `--set` overrides: its cost, its answer."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "perfmodel", "simulate", scenario, "--json"]
        for setting in (f"traffic.num_requests={num_requests}", *settings):
            command += ["--set", setting]
        if streams:
            command += ["--out", folder]
        paths = os.pathsep.join(map(str, (tree, tree / "executors")))
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": paths},
        )
        assert process.stdout is not None
        answer = json.loads(process.stdout.read())
        _, _, used = os.wait4(process.pid, 0)
    cpu_s = used.ru_utime + used.ru_stime
    cost = {
        "num_requests": num_requests,
        "num_steps": answer["num_steps"],
        "cpu_s": cpu_s,
        "us_per_request": cpu_s / num_requests * 1e6,
        "peak_gb": used.ru_maxrss * 1024 / 1e9,
    }
    return cost, answer


def measure(num_requests: int, streams: bool, settings: Sequence[str] = ()) -> dict[str, float]:
    """What one run costs here."""
    return run(num_requests, streams, settings)[0]


def compare(
    num_requests: int, streams: bool, trees: Sequence[Path], repeat: int, scenario: str = SCENARIO
) -> list[dict[str, float]]:
    """Median costs of runs in each of `trees`, which take turns. Exits if their answers differ."""
    turns: list[list[dict[str, float]]] = [[] for _ in trees]
    for _ in range(repeat):
        answers = []
        for tree, costs in zip(trees, turns, strict=True):
            cost, answer = run(num_requests, streams, tree=tree, scenario=scenario)
            costs.append(cost)
            answers.append(answer)
        if any(answer != answers[0] for answer in answers):
            sys.exit(f"{num_requests:,} requests: the answers of {trees[0]} and {trees[-1]} differ.")
    return [{key: median(cost[key] for cost in costs) for key in costs[0]} for costs in turns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[10_000, 20_000])
    parser.add_argument("--stream", type=int, nargs="*", default=[], help="sizes whose records are streamed to disk")
    parser.add_argument("--beside", type=Path, help="another tree to take turns with")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--scenario", default=SCENARIO)
    arguments = parser.parse_args()
    trees = [HERE] if arguments.beside is None else [HERE, arguments.beside.resolve()]
    print(f"{'':<28}" + "".join(f"{name:>16}" for name in ("here", "beside", "ratio")[: 2 * len(trees) - 1]))

    def show(what: str, values: Sequence[float], digits: int = 2) -> None:
        ratio = [values[1] / values[0]] if len(values) == 2 and values[0] else []
        print(f"{what:<28}" + "".join(f"{value:>16,.{digits}f}" for value in [*values, *ratio]), flush=True)

    scenario, repeat = arguments.scenario, arguments.repeat
    compare(_FEWEST, False, trees, 1, scenario)  # writes the bytecode
    show("start-up, CPU s", [cost["cpu_s"] for cost in compare(_FEWEST, False, trees, repeat, scenario)])
    before: list[dict[str, float]] = []
    for count in sorted(arguments.requests):
        costs = compare(count, False, trees, repeat, scenario)
        show(f"{count:,} requests, CPU s", [cost["cpu_s"] for cost in costs])
        if before:
            further = [
                (b["cpu_s"] - a["cpu_s"]) / (count - a["num_requests"]) for a, b in zip(before, costs, strict=True)
            ]
            show("each further request, us", [item * 1e6 for item in further], 1)
        before = costs
    for count in arguments.stream:
        costs = compare(count, True, trees, 1, scenario)
        show(f"{count:,} streamed, CPU s", [cost["cpu_s"] for cost in costs])
        show("    largest, GB", [cost["peak_gb"] for cost in costs], 3)


if __name__ == "__main__":
    main()
