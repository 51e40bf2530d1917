"""Served with speculation: what runs gain follows from acceptance and the time of a round, with other switches too."""

from itertools import pairwise
from typing import Any

import pytest

from perfmodel import sim
from perfmodel.cost import step_costs
from perfmodel.errors import SpecError
from perfmodel.ops import decode_shape
from perfmodel.specs import load_scenario

TRAFFIC = (
    "traffic={{arrivals: {{process: closed_loop, concurrency: {n}}}, num_requests: {count}, "
    "input_tokens: {{distribution: fixed, value: 300}}, output_tokens: {{distribution: fixed, value: 200}}}}"
)
DRAFT = "method: draft_model, model: llama-3.2-1b, num_speculative_tokens: 4"


def run(config: str | None, *changes: str, at_once: int = 1, count: int = 4) -> dict[str, Any]:
    speculation = [f"engine.speculative_config={{{config}}}"] if config else []
    traffic = TRAFFIC.format(n=at_once, count=count)
    return sim.simulate(load_scenario("llama-3.1-8b-a100", [traffic, *speculation, *changes])).summary


def test_alone_a_request_gains_what_the_closed_form_says() -> None:
    """E t(1) / round, Leviathan et al. 2023, theorem 3.8, over 12,000 tokens."""
    accepted = f"{DRAFT}, acceptance: {{rate: 0.7}}"
    plain, drafted = run(None, count=60), run(accepted, count=60)
    costs = step_costs(load_scenario("llama-3.1-8b-a100", [f"engine.speculative_config={{{accepted}}}"]))
    shape = decode_shape(1, 400)
    one = step_costs(load_scenario("llama-3.1-8b-a100")).estimate(shape).duration_s
    expected = costs.tokens_per_decode(shape) * one / costs.estimate(shape).duration_s
    assert plain["mean_tpot_ms"] / drafted["mean_tpot_ms"] == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize("pipelined", ["", ", pipelined: true"])
def test_more_accurate_drafts_never_hurt(pipelined: str) -> None:
    times = [
        run(f"{DRAFT}{pipelined}, acceptance: {{rate: {rate}}}", at_once=6, count=18)["duration"]
        for rate in (0, 0.3, 0.6, 0.9, 1)
    ]
    assert all(better < worse for worse, better in pairwise(times))


@pytest.mark.parametrize(
    "changes",
    [
        ("engine.kv_cache_dtype=fp8",),
        ("engine.max_num_batched_tokens=128", "engine.max_num_seqs=32"),
        ("engine.tensor_parallel_size=2",),
        ("model=mixtral-8x7b", "engine.tensor_parallel_size=4"),
        ("model=mixtral-8x7b", "engine.tensor_parallel_size=2", "engine.data_parallel_size=2"),
        ("engine.quantization=w4a16",),
    ],
    ids=["kv-fp8", "chunks", "tensor", "experts", "lockstep", "weights-int4"],
)
@pytest.mark.parametrize("config", ["method: eagle, num_speculative_tokens: 3", "method: medusa, tree: [3, 2]"])
def test_it_composes(config: str, changes: tuple[str, ...]) -> None:
    """With few requests, and drafts that are mostly right, a run is shorter under every other switch."""
    plain, drafted = run(None, *changes, at_once=4), run(f"{config}, acceptance: {{rate: 0.9}}", *changes, at_once=4)
    assert drafted["duration"] < 0.8 * plain["duration"]
    assert drafted["completed"] == plain["completed"] == 4


def test_pipeline_stages_are_refused_with_a_reason() -> None:
    with pytest.raises(SpecError, match="one stage at a time"):
        load_scenario(
            "llama-3.1-8b-a100",
            ["engine.pipeline_parallel_size=2", f"engine.speculative_config={{{DRAFT}, acceptance: {{rate: 0.5}}}}"],
        )
