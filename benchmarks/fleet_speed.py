"""How much CPU time and memory a large cluster takes to simulate, and whether it grows linearly with the requests.

    python benchmarks/fleet_speed.py [--replicas 1000] [--router least_outstanding] [--requests 100000 ...] [--living]

Each size runs in a process of its own: `perfmodel simulate` of so many replicas of Llama-3.1-8B, each on one H100,
under 2,048-in 256-out Poisson traffic at 4 requests/s per replica, the cluster's one stream shared out by the router.
With --living a gateway with deadlines and retries watches over every request, and replicas fail.
CPU seconds are the operating system's count for the whole process (see simulator_speed.py).
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from simulator_speed import measure

RATE = 4.0  # requests per second and replica
LIVING = (
    "cluster.gateway={timeout_s: 60, max_outstanding: 100000, max_queue: 100000, retries: {max: 3}}",
    "cluster.failures={mtbf_s: 3600, repair_s: 60}",
)
_HEAD = ("requests", "steps", "CPU s", "us/request", "peak GB")


def cells(row: dict[str, float]) -> list[str]:
    """A size as text."""
    counts = [f"{row[name]:,.0f}" for name in ("num_requests", "num_steps")]
    return [*counts, f"{row['cpu_s']:.1f}", f"{row['us_per_request']:.0f}", f"{row['peak_gb']:.3f}"]


def growth(rows: Sequence[dict[str, float]]) -> str:
    """What each further request cost, from size to size: the same if cost grows linearly."""
    further = [
        (after["cpu_s"] - before["cpu_s"]) / (after["num_requests"] - before["num_requests"]) * 1e6
        for before, after in pairwise(rows)
    ]
    return "Each further request, from size to size: " + ", ".join(f"{cost:.0f}" for cost in further) + " us."


def report(title: str, rows: Sequence[dict[str, float]]) -> str:
    """The page of `--report`."""
    command = shlex.join(["python", "benchmarks/fleet_speed.py", *_without_report(sys.argv[1:])])
    table = [_HEAD, ["---:"] * len(_HEAD), *map(cells, rows)]
    lines = [f"| {' | '.join(line)} |" for line in table]
    page = ["# A large fleet, simulated", "", f"```\n{command}\n```", "", f"{title}; one core.", "", *lines, ""]
    return "\n".join([*page, growth(rows), ""])


def _without_report(words: Sequence[str]) -> list[str]:
    at = words.index("--report") if "--report" in words else len(words)
    return [*words[:at], *words[at + 2 :]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--router", default="least_outstanding")
    parser.add_argument("--requests", type=int, nargs="+", default=[100_000, 200_000, 400_000, 1_000_000])
    parser.add_argument("--living", action="store_true", help="a gateway with deadlines and retries, and failures")
    parser.add_argument("--set", action="append", default=[], help="a further override, as in `simulate --set`")
    parser.add_argument("--report", type=Path, help="write the table to this file as well")
    arguments = parser.parse_args()
    settings = [
        f"cluster.replicas={arguments.replicas}",
        f"cluster.router={arguments.router}",
        f"traffic.arrivals.rate={RATE * arguments.replicas}",
        *(LIVING if arguments.living else ()),
        *arguments.set,
    ]
    life = ", a gateway, failures" if arguments.living else ""
    title = f"{arguments.replicas:,} replicas of Llama-3.1-8B on an H100 each, {arguments.router}{life}"
    print(title)
    print(" ".join(head.rjust(12) for head in _HEAD))
    rows = []
    for count in arguments.requests:
        rows.append(measure(count, False, settings))
        print(" ".join(cell.rjust(12) for cell in cells(rows[-1])), flush=True)
    if len(rows) > 1:
        print(growth(rows))
    if arguments.report is not None:
        arguments.report.write_text(report(title, rows), encoding="utf-8")


if __name__ == "__main__":
    main()
