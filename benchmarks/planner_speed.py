"""How many configurations the planner's screen looks at, and in what CPU time.

    python benchmarks/planner_speed.py [--whole]

Llama-3.1-70B on up to 16 devices of three kinds, tensor- and pipeline-parallel, two formats of weights and of the KV
cache, six batch sizes and five step sizes. CPU seconds are the operating system's count for this process, start-up
(imports and the tables of step times) apart from what each configuration takes after it. With `--whole` then the whole
plan for 10 requests/s, finalists simulated, nothing known before, on as many cores as this process may use.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

SPACE = {
    "hardware": ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm"),
    "tensor_parallel_size": (1, 2, 4, 8),
    "pipeline_parallel_size": (1, 2),
    "quantization": (None, "fp8"),
    "kv_cache_dtype": ("auto", "fp8"),
}


def whole() -> None:
    """The plan that the screen is for."""
    from perfmodel.planning.search import make_plan

    began, spent = time.perf_counter(), os.times()
    with tempfile.TemporaryDirectory() as folder:
        overrides = ("traffic.arrivals.rate=10", f"plan={json.dumps({'space': SPACE})}")
        plan = make_plan("llama-3.1-70b-h100-tp4", overrides, Path(folder) / "points.sqlite")
    now = os.times()
    cpu_s = sum(now[:4]) - sum(spent[:4])
    cores = len(os.sched_getaffinity(0))
    print(f"whole plan: {time.perf_counter() - began:.0f} s on {cores} cores, {cpu_s:.0f} CPU s")
    print(str(plan).split("\n", 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--whole", action="store_true", help="simulate the finalists, too")
    is_whole = parser.parse_args().whole
    screen()
    if is_whole:
        whole()


def screen() -> None:
    from perfmodel.planning.screen import Screen
    from perfmodel.planning.space import Base, enumerate_space
    from perfmodel.planning.spec import PlanSpec

    imported = time.process_time()
    base, spec = Base("llama-3.1-70b-h100-tp4"), PlanSpec.model_validate({"space": SPACE})
    space = enumerate_space(base, spec)
    enumerated = time.process_time()
    screened = Screen(space.candidates, base.load(), spec.attainment)
    prepared = time.process_time()
    result = screened.all()
    done = time.process_time()
    print(f"{space.num_all:,} configurations, {len(space.candidates):,} of them fit")
    print(f"{'imports':<34} {imported:>6.2f} CPU s")
    print(f"{'enumerated, memory planned':<34} {enumerated - imported:>6.2f}")
    print(f"{'tables of step times':<34} {prepared - enumerated:>6.2f}")
    print(f"{'screened':<34} {done - prepared:>6.2f}   {len(result) / (done - prepared):,.0f} configurations/s")
    after = done - prepared + enumerated - imported
    print(f"{'in all':<34} {done:>6.2f}   {space.num_all / after:,.0f} configurations/s after start-up")


if __name__ == "__main__":
    main()
