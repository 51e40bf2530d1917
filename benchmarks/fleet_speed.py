"""How much CPU time and memory a large cluster takes to simulate, and whether it grows linearly with the requests.

    python benchmarks/fleet_speed.py [--replicas 1000] [--router least_outstanding] [--requests 100000 ...]

Each size runs in a process of its own: `perfmodel simulate` of so many replicas of Llama-3.1-8B, each on one H100,
under 2,048-in 256-out Poisson traffic at 4 requests/s per replica, the cluster's one stream shared out by the router.
CPU seconds are the operating system's count for the whole process (see simulator_speed.py).
"""

import argparse

from simulator_speed import measure

RATE = 4.0  # requests per second and replica


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--router", default="least_outstanding")
    parser.add_argument("--requests", type=int, nargs="+", default=[100_000, 200_000, 400_000, 1_000_000])
    parser.add_argument("--set", action="append", default=[], help="a further override, as in `simulate --set`")
    arguments = parser.parse_args()
    settings = [
        f"cluster.replicas={arguments.replicas}",
        f"cluster.router={arguments.router}",
        f"traffic.arrivals.rate={RATE * arguments.replicas}",
        *arguments.set,
    ]
    print(f"{arguments.replicas} replicas, {arguments.router}")
    print(f"{'requests':>10} {'steps':>12} {'CPU s':>8} {'us/request':>11} {'peak GB':>8}")
    for count in arguments.requests:
        row = measure(count, False, settings)
        cells = f"{row['num_requests']:>10} {row['num_steps']:>12} {row['cpu_s']:>8.1f} {row['us_per_request']:>11.1f}"
        print(f"{cells} {row['peak_gb']:>8.3f}", flush=True)


if __name__ == "__main__":
    main()
