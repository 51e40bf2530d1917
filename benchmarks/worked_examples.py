"""Figures of examples in docs/ that no command prints as they stand there: as JSON, for the marks in the pages.

python benchmarks/worked_examples.py request | eager | power_cap | chunks
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from perfmodel.cost import plan_memory, step_costs
from perfmodel.ops import BatchShape
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario

_BASE = "llama-3.1-8b-a100"
_PROMPT = BatchShape(num_tokens=1024, num_samples=1, prefills=((1024, 0),))


def request() -> dict[str, Any]:
    """docs/architecture.md: request 6 of a run, and the steps that it was in."""
    scenario = load_scenario(_BASE)
    result = simulate(scenario, keep_steps=True)
    rows, steps = result.requests, result.steps
    assert rows is not None
    assert steps is not None
    at = list(rows.request_id).index(6)
    prefill = int(np.flatnonzero(steps.end_s <= rows.first_token_s[at])[-1])  # streamed, it comes after its step
    waited = int(np.flatnonzero(steps.start_s <= rows.arrival_s[at])[-1])
    memory = plan_memory(scenario.model, scenario.hardware, scenario.engine)
    blocks = -(-int(rows.num_prompt_tokens[at]) // memory.block_size)
    return {
        "arrival_s": rows.arrival_s[at],
        "prompt": rows.num_prompt_tokens[at],
        "answer": rows.num_output_tokens[at],
        "running": steps.index[waited],
        "step": steps.index[prefill],
        "decodes": steps.num_decodes[prefill],
        "tokens": steps.num_tokens[prefill],
        "step_ms": 1e3 * steps.first_duration_s[prefill],
        "step_end_s": steps.end_s[prefill],
        "leapt": steps.num_steps[prefill + 1],
        "first_token_s": rows.first_token_s[at],
        "ttft_ms": 1e3 * rows.ttft_s[at],
        "finished_s": rows.finished_s[at],
        "blocks": blocks,
        "kv_blocks": memory.num_kv_blocks,
        "weights_gb": memory.weight_bytes / 1e9,
        "visible_gb": memory.visible_bytes / 1e9,
    }


def _decode(batch: int, context: int) -> BatchShape:
    return BatchShape(num_tokens=batch, num_samples=batch, num_decodes=batch, decode_context=batch * context)


def _step_s(shape: BatchShape, name: str, *overrides: str) -> float:
    return step_costs(load_scenario(name, overrides)).estimate(shape).duration_s


def eager() -> dict[str, float]:
    """docs/techniques/cuda-graphs.md: steps without graphs over steps with them, for one sequence and for 64."""
    without = "engine.enforce_eager=true"
    return {
        str(batch): _step_s(_decode(batch, 1000), _BASE, without) / _step_s(_decode(batch, 1000), _BASE)
        for batch in (1, 64)
    }


def power_cap() -> dict[str, float]:
    """docs/costs.md: times under a cap over times without, of the published setups."""
    big = ("llama-3.1-70b-h100-tp4", "engine.tensor_parallel_size=8")
    pcie = ("llama-3.1-70b-h100-tp4", "model=llama-2-70b", "hardware=a100-pcie-80gb", "engine.max_model_len=4096")
    many = _decode(64, 512)

    def ratio(shape: BatchShape, like: tuple[str, ...], low: int, high: int) -> float:
        one, other = (_step_s(shape, *like, f"hardware.power_cap_w={watts}") for watts in (low, high))
        return one / other

    return {
        "prompt": ratio(_PROMPT, big, 350, 700),
        "token": ratio(_decode(1, 1024), big, 350, 700),
        "batch": ratio(many, pcie, 175, 250),
    }


def chunks() -> dict[str, float]:
    """docs/techniques/pipeline-parallel.md: prompts in chunks over whole ones, GPT-3 on 8 x 8 A100s."""
    setup = (
        *("model=opt-175b", "hardware=a100-sxm-80gb", "engine.tensor_parallel_size=8"),
        *("engine.pipeline_parallel_size=8", "engine.max_model_len=2048", "engine.max_num_seqs=216"),
        *("engine.enable_prefix_caching=false", "traffic.arrivals={process: burst}", "traffic.num_requests=400"),
        "traffic.input_tokens={distribution: uniform, low: 930, high: 1850}",
        "traffic.output_tokens={distribution: uniform, low: 93, high: 185}",
    )
    sizes = (
        ("engine.enable_chunked_prefill=false", "engine.max_num_batched_tokens=4096"),
        ("engine.max_num_batched_tokens=256",),
    )
    whole, parts = (
        simulate(load_scenario("llama-3.1-8b-h100-2048-256", (*setup, *size)), keep_steps=False).summary
        for size in sizes
    )
    idle = [item["pipeline_bubble_share"] * item["duration"] for item in (whole, parts)]
    return {"gain": parts["output_throughput"] / whole["output_throughput"], "bubbles": idle[0] / idle[1]}


if __name__ == "__main__":
    asked = {item.__name__: item for item in (request, eager, power_cap, chunks)}[sys.argv[1]]()
    print(json.dumps(asked, default=float))
