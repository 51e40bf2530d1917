"""Command line of the measuring programme; needs nothing but the standard library beside what measures."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from perfmodel.errors import PerfmodelError


def main(arguments: Sequence[str] | None = None) -> None:
    """0; 1 where a check of the smoke failed or found a wrong result; 2 and one sentence for wrong arguments."""
    start = time.monotonic()  # loading torch is part of the budget
    from perfmodel_executors.gpu_suite.session import TASKS, SuiteRequest, measure, summary_of

    parser = argparse.ArgumentParser(
        prog="python -m perfmodel_executors.gpu_suite",
        description="Measure this device: smoke, kernels, steps, served scenarios, pairs of techniques. Ends within "
        "the budget; the same command again measures what is missing.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the results")
    parser.add_argument(
        "--budget-s", type=float, default=480.0, metavar="SECONDS", help="after which nothing new is begun (480)"
    )
    parser.add_argument("--device", default="auto", help="cuda, cpu, or auto: a GPU where there is one")
    parser.add_argument(
        "--part", action="append", choices=list(TASKS), default=[], help="only this; may be given several times"
    )
    parser.add_argument("--kernels", default="auto", help="triton, torch, or auto: triton on a GPU")
    given = parser.parse_args(arguments)
    if not given.budget_s >= 1.0:
        parser.error(f"--budget-s {given.budget_s:g}: at least one second")
    request = SuiteRequest(given.out, given.budget_s, start, given.part, given.device, given.kernels)
    try:
        outcome = measure(request)
    except PerfmodelError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    lines, is_right = summary_of(request, outcome)
    print("\n".join(lines), file=sys.stderr, flush=True)
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
