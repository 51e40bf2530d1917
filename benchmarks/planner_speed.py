"""How many configurations the planner's screen looks at, and in what CPU time.

    python benchmarks/planner_speed.py

Llama-3.1-70B on up to 16 devices of three kinds, tensor- and pipeline-parallel, two formats of weights and of the KV
cache, six batch sizes and five step sizes. CPU seconds are the operating system's count for this process, start-up
(imports and the tables of step times) apart from what each configuration takes after it.
"""

import time

SPACE = {
    "hardware": ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm"),
    "tensor_parallel_size": (1, 2, 4, 8),
    "pipeline_parallel_size": (1, 2),
    "quantization": (None, "fp8"),
    "kv_cache_dtype": ("auto", "fp8"),
}


def main() -> None:
    from perfmodel.plan.candidates import Base
    from perfmodel.plan.screen import Screen
    from perfmodel.plan.space import enumerate_space
    from perfmodel.specs.plan import PlanSpec

    imported = time.process_time()
    base, spec = Base("llama-3.1-70b-h100-tp4"), PlanSpec.model_validate({"space": SPACE})
    space = enumerate_space(base, spec)
    enumerated = time.process_time()
    screen = Screen(space.candidates, base.load(), spec.attainment)
    prepared = time.process_time()
    found = screen.all()
    done = time.process_time()
    print(f"{space.num_all:,} configurations, {len(space.candidates):,} of them fit")
    print(f"{'imports':<34} {imported:>6.2f} CPU s")
    print(f"{'enumerated, memory planned':<34} {enumerated - imported:>6.2f}")
    print(f"{'tables of step times':<34} {prepared - enumerated:>6.2f}")
    print(f"{'screened':<34} {done - prepared:>6.2f}   {len(found) / (done - prepared):,.0f} configurations/s")
    after = done - prepared + enumerated - imported
    print(f"{'in all':<34} {done:>6.2f}   {space.num_all / after:,.0f} configurations/s after start-up")


if __name__ == "__main__":
    main()
