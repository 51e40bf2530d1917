"""Shortened prompts: fewer tokens to compute and to keep, and the time of the model that shortens them."""

import pytest

from perfmodel.cost import step_costs
from perfmodel.errors import SpecError
from perfmodel.ops.work import BatchShape
from perfmodel.sim import RunResult, simulate
from perfmodel.sim.traffic.workload import RequestDraft
from perfmodel.specs import EngineSpec, load_model, load_scenario

_COMPRESSOR = "opt-13b"


def run(*overrides: str) -> RunResult:
    fixed = [
        "traffic.num_requests=60",
        "traffic.input_tokens={distribution: fixed, value: 1001}",
        "traffic.output_tokens={distribution: fixed, value: 16}",
        "traffic.arrivals={process: constant, rate: 1}",
    ]
    return simulate(load_scenario("llama-3.1-8b-a100", [*fixed, *overrides]))


def test_prompts_of_conversations_are_not_compressed_in_silence():
    """Their tokens stayed as they were, without a word."""
    with pytest.raises(SpecError, match="got prompt_compression beside conversations, whose prompts repeat"):
        run("prompt_compression={ratio: 0.5}", "traffic.conversations={turns: {distribution: fixed, value: 3}}")


def test_tokens_and_times_are_those_of_shorter_prompts():
    short = run("prompt_compression={ratio: 0.25}")
    same = run("traffic.input_tokens={distribution: fixed, value: 251}")
    assert short.summary["total_input_tokens"] == 60 * 251
    for name in ("mean_ttft_ms", "mean_tpot_ms", "duration", "kv_cache_usage_peak"):
        assert short.summary[name] == same.summary[name], name
    assert run("prompt_compression={ratio: 1}").summary["mean_ttft_ms"] == run().summary["mean_ttft_ms"]


def test_an_idle_compressor_adds_its_prefill_of_the_whole_prompt_to_ttft():
    free, paid = (run(f"prompt_compression={{ratio: 0.25{more}}}") for more in ("", f", model: {_COMPRESSOR}"))
    scenario = load_scenario("llama-3.1-8b-a100")
    alone = scenario.model_copy(update={"model": load_model(_COMPRESSOR), "engine": EngineSpec()})
    added = step_costs(alone).estimate(BatchShape(1001, 1, ((1001, 0),))).duration_s
    assert paid.summary["mean_ttft_ms"] - free.summary["mean_ttft_ms"] == pytest.approx(added * 1e3, rel=1e-6)
    assert paid.summary["mean_tpot_ms"] == pytest.approx(free.summary["mean_tpot_ms"], rel=1e-6)


def test_prompts_wait_for_each_other_at_the_compressor():
    crowd = "traffic.arrivals={process: constant, rate: 1e6}"
    free, paid = (run(crowd, f"prompt_compression={{ratio: 0.1{more}}}") for more in ("", ", model: llama-3.1-8b"))
    alone = run("prompt_compression={ratio: 0.1, model: llama-3.1-8b}")
    assert paid.summary["mean_ttft_ms"] > 10 * alone.summary["mean_ttft_ms"]
    assert paid.summary["mean_ttft_ms"] > free.summary["mean_ttft_ms"]


def test_prompts_beyond_the_context_fit_when_they_are_short():
    lengths = "traffic.input_tokens={distribution: fixed, value: 20000}"
    found = run("engine.max_model_len=8192", lengths, "prompt_compression={ratio: 0.3}")
    assert found.summary["total_input_tokens"] == 60 * 6000


def test_a_shortened_prompt_keeps_its_share_of_tokens_and_of_full_blocks():
    """A quarter of 161 tokens in blocks of 16 is 41 tokens (rounded up) and 2 full blocks (rounded down)."""
    short = RequestDraft(0.0, 161, 5, tuple(range(10))).compressed(0.25)
    assert (short.num_prompt_tokens, short.block_hashes, short.num_source_tokens) == (41, (0, 1), 161)
