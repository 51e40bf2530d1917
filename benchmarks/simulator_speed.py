"""How much CPU time and memory the simulator takes, start-up included, and whether it grows linearly.

    python benchmarks/simulator_speed.py [--requests 10000 ...] [--stream]

Each size runs in a process of its own: `perfmodel simulate` of Llama-3.1-8B on one H100 under 2,048-in 256-out Poisson
traffic at 4 requests/s. CPU seconds are the operating system's count for the whole process, so they do not depend on
what else the machine does, except that busy neighbours slow a shared core down by a third: compare runs side by
side. Where Python may not write bytecode (PYTHONDONTWRITEBYTECODE), a tenth of a second goes into compiling the
sources. The peak is the largest resident set. With --stream the records go to disk as they come.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

SCENARIO = "llama-3.1-8b-h100-2048-256"


def measure(num_requests: int, streams: bool, settings: Sequence[str] = ()) -> dict[str, float]:
    """One run of the command in a fresh process, with further `--set` overrides."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "perfmodel", "simulate", SCENARIO, "--json"]
        command += ["--set", f"traffic.num_requests={num_requests}"]
        for setting in settings:
            command += ["--set", setting]
        if streams:
            command += ["--out", folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        answer = json.loads(process.stdout.read())
        _, _, used = os.wait4(process.pid, 0)
    cpu_s = used.ru_utime + used.ru_stime
    return {
        "num_requests": num_requests,
        "num_steps": answer["num_steps"],
        "cpu_s": cpu_s,
        "us_per_request": cpu_s / num_requests * 1e6,
        "peak_gb": used.ru_maxrss * 1024 / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[2_500, 5_000, 10_000, 20_000, 40_000])
    parser.add_argument("--stream", action="store_true", help="stream the records to disk")
    arguments = parser.parse_args()
    print(f"{'requests':>10} {'steps':>10} {'CPU s':>8} {'us/request':>11} {'peak GB':>8}")
    for count in arguments.requests:
        row = measure(count, arguments.stream)
        cells = f"{row['num_requests']:>10} {row['num_steps']:>10} {row['cpu_s']:>8.2f} {row['us_per_request']:>11.1f}"
        print(f"{cells} {row['peak_gb']:>8.3f}", flush=True)


if __name__ == "__main__":
    main()
