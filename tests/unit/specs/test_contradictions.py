"""Scenarios that say nothing, or two things at once, are refused with the sentence that names it."""

import pytest

from perfmodel.errors import DoesNotFitError, SpecError
from perfmodel.planning.typical_step import estimate_choice
from perfmodel.specs import load_scenario

SCENARIO = "llama-3.1-8b-a100"
_FAR = "{name: far, shared: true, read_bandwidth_bytes_per_s: 1e9}"
HALF = f"share: 0.5, engine: {{kv_offload: {{capacity_bytes: 1e10, secondary_tiers: [{_FAR}]}}"
THREE = "{distribution: fixed, value: 3}"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("cluster.pools=[]", r"cluster\.pools: got an empty list; expected at least one pool"),
        ("plan={space: {hardware: []}}", r"plan\.space\.hardware: got an empty list; expected names of devices"),
        ("slo={tpot_ms: 50, min_tokens_per_s: 100}", "tpot_ms 50, which is 20 tokens/s"),
        (
            "traffic.classes=[{name: chat, share: 0.5}, {name: chat, share: 0.5}]",
            "got 'chat' as the name of more than one class",
        ),
        (
            f"traffic.conversations={{turns: {THREE}, tool_tokens: {THREE}}}",
            "got tool_tokens without tool_share, the share of the turns that it is for",
        ),
        (
            "traffic={trace: {path: TRACE, format: csv, speedup: 2}, arrivals: {process: burst}}",
            r"got trace\.speedup with arrivals of process burst, which do not have the trace's gaps",
        ),
        (
            f"cluster.pools=[{{{HALF}, kv_cache_dtype: fp8}}}}, {{{HALF}}}}}]",
            "got pools that share the store far and differ in it, in their model, its formats",
        ),
        (
            "cluster.pools=[{share: 0.5}, {share: 0.5, model: bge-m3}]",
            "got llama-3.1-8b and bge-m3 with different kinds of answers, and a server gives one kind: simulate text",
        ),
        (
            "cluster.pools=[{share: 0.5}, {share: 0.5, engine: {runner: pooling, convert: embed}}]",
            "and the same model with different kinds of answers",
        ),
    ],
)
def test_it_is_refused(tmp_path, change, sentence):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,8,8\n")
    with pytest.raises(SpecError, match=sentence):
        load_scenario(SCENARIO, [change.replace("TRACE", str(trace))])


def test_tools_that_no_turn_takes_may_stay_where_the_share_is_said():
    tools = "turns: {distribution: fixed, value: 3}, tool_share: 0, tool_time: {mean_s: 2}"
    assert load_scenario(SCENARIO, [f"traffic.conversations={{{tools}}}"]).traffic.conversations.tool_share == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [("traffic.samples_per_prompt=4", "samples_per_prompt"), ("traffic.rollouts={iterations: 2}", "rollouts")],
)
def test_a_model_without_text_has_no_answers_to_take_several_of(change, field):
    burst = ["model=qwen3-embedding-0.6b", "traffic.arrivals={process: burst}"]
    with pytest.raises(SpecError, match=f"got {field} with qwen3-embedding-0.6b, which returns no text"):
        load_scenario(SCENARIO, [*burst, change])


@pytest.mark.parametrize(
    "step", [{"batch": 1_000_000_000}, {"batch": 4, "context": 10_000_000}, {"prefill": 10_000_000}]
)
def test_a_step_that_no_run_has_is_refused_with_the_largest_that_fits(step):
    with pytest.raises(DoesNotFitError, match=r"holds [\d,]+ tokens, at most [\d,]+"):
        estimate_choice(load_scenario(SCENARIO), **step)
    assert estimate_choice(load_scenario(SCENARIO), batch=64, context=1024).estimate.duration_s > 0
