"""How much CPU time and memory the simulator takes, start-up included, and whether it grows linearly.

    python benchmarks/simulator_speed.py [--requests 10000 ...] [--out DIR]

Each size runs in a process of its own: `perfmodel simulate` of Llama-3.1-8B on one H100 under 2,048-in 256-out Poisson
traffic at 4 requests/s. CPU seconds are the operating system's count for the whole process, so they do not depend on
what else the machine does; the peak is its largest resident set. With --out the records are streamed to disk.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

SCENARIO = "llama-3.1-8b-h100-2048-256"


def measure(num_requests: int, streams: bool) -> dict[str, float]:
    """One run in a fresh process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__)), "--child", str(num_requests)]
        if streams:
            command += ["--out", folder]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    inside = json.loads(done.stdout)
    return {"num_requests": num_requests, "streams": streams, "cpu_s": round(cpu, 3), **inside}


def child(num_requests: int, out: Path | None) -> None:
    """What a measured process does: the work of the command line, without its tables."""
    from perfmodel.sim import simulate
    from perfmodel.specs import load_scenario

    scenario = load_scenario(SCENARIO, [f"traffic.num_requests={num_requests}"])
    result = simulate(scenario, out=out)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"num_steps": result.summary["num_steps"], "peak_gb": round(peak / 1e9, 3)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[2_500, 5_000, 10_000, 20_000, 40_000])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--stream", action="store_true", help="stream the records to disk")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments.child, arguments.out)
        return
    rows = [measure(count, arguments.stream) for count in arguments.requests]
    print(f"{'requests':>10} {'steps':>10} {'CPU s':>8} {'us/request':>11} {'peak GB':>8}")
    for row in rows:
        per_request = row["cpu_s"] / row["num_requests"] * 1e6
        print(f"{row['num_requests']:>10} {row['num_steps']:>10} {row['cpu_s']:>8.2f} {per_request:>11.1f} {row['peak_gb']:>8.3f}")


if __name__ == "__main__":
    main()
