"""Prompts and answers that `max_model_len` does not hold: counted, refused one by one, or the whole scenario is."""

import json
from itertools import islice, repeat
from math import exp, log

import numpy as np
import pytest

from perfmodel.errors import SpecError, WorkloadError
from perfmodel.sim import Workload, simulate
from perfmodel.sim.traffic.distributions import draw_lengths, lognormal_parameters, prefix_plan, share_above
from perfmodel.specs import load_scenario
from perfmodel.specs.traffic import Lengths

SCENARIO = "llama-3.1-8b-a100"  # prompts lognormal, mean 1155, p99 4142


def run(*overrides, requests=300):
    return simulate(load_scenario(SCENARIO, [f"traffic.num_requests={requests}", *overrides]))


def test_clipped_prompts_are_counted_beside_the_answer():
    result = run("engine.max_model_len=2048")
    at_the_limit = int((result.requests.num_prompt_tokens == 2047).sum())
    assert 0 < at_the_limit < 300
    assert f"{at_the_limit} of 300 requests have prompts that were clipped to max_model_len 2,048." in result.notes
    assert not any("clipped" in note for note in run("engine.max_model_len=131072").notes)


def test_answers_cut_short_are_counted():
    """Prompts of 900 and answers of 200 in 1,000 tokens: each ends after 100."""
    fixed = [
        f"traffic.{name}={{distribution: fixed, value: {n}}}"
        for name, n in (("input_tokens", 900), ("output_tokens", 200))
    ]
    result = run("engine.max_model_len=1000", *fixed, requests=20)
    assert set(result.requests.num_output_tokens.tolist()) == {100}
    assert any(
        note.startswith("20 of 20 requests have answers that end where the context is full") for note in result.notes
    )


def test_a_context_that_clips_most_prompts_is_refused():
    with pytest.raises(WorkloadError, match=r"max_model_len=200 would clip 9\d% of the prompts"):
        run("engine.max_model_len=200")


def test_the_share_above_is_that_of_the_draws():
    """Of a lognormal half lies above exp(mu), the median; of an exponential 1/e above its mean."""
    lognormal = Lengths(distribution="lognormal", mean=1000, p99=4000)
    median = exp(lognormal_parameters(1000, 4000, None)[0])
    assert share_above(lognormal, round(median)) == pytest.approx(0.5, abs=1e-3)
    assert share_above(Lengths(distribution="exponential", mean=500), 500) == pytest.approx(exp(-1))
    assert share_above(Lengths(distribution="fixed", value=500), 100) == 0.0
    draws = draw_lengths(lognormal, np.random.default_rng(0), 2**31)
    drawn = np.array([next(draws) for _ in range(20_000)])
    for limit in (200, 700, 3000):
        share = share_above(lognormal, limit)
        assert np.mean(drawn > limit) == pytest.approx(share, abs=4 * (share * (1 - share) / 20_000) ** 0.5 + 1e-3)
    assert log(median) < log(1000)


@pytest.mark.parametrize(("length", "sentence"), [(1, "at least 2"), (10_000_000, "positions up to 131072")])
def test_impossible_contexts_are_refused(length, sentence):
    with pytest.raises(SpecError, match=rf"engine\.max_model_len: got {length}.*{sentence}"):
        run(f"engine.max_model_len={length}")


@pytest.mark.parametrize("arrivals", ["{process: trace}", "{process: closed_loop, concurrency: 1}"])
def test_an_over_long_prompt_of_a_trace_is_refused_alone(tmp_path, arrivals):
    """Every other request is answered, and a closed loop goes on with the next; as vLLM, which answers it with an
    error."""
    lengths = [5000] * 1500 + [100, 5000, 200, 4095, 4096]
    rows = [{"arrival_s": 0.1 * i, "input_tokens": n, "output_tokens": 8} for i, n in enumerate(lengths)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    traffic = f"traffic={{arrivals: {arrivals}, trace: {{path: {trace}, format: jsonl}}}}"
    result = simulate(load_scenario(SCENARIO, [traffic, "engine.max_model_len=4096"]))
    assert sorted(result.requests.num_prompt_tokens.tolist()) == [100, 200, 4095]
    assert (result.summary["completed"], result.summary["failed"]) == (3, 1502)
    assert any(
        note.startswith("1,502 of 1,505 requests have prompts beyond max_model_len 4,096") for note in result.notes
    )


def test_prompts_far_beyond_the_context_are_refused_before_their_content_is_made_up():
    """A hundred million tokens are six million blocks of content, for each of a hundred prompts."""
    far = "traffic.input_tokens={distribution: fixed, value: 100000000}"
    prefix = "traffic.prefix={num_groups: 10, shared_tokens: 90000000, num_prompts_per_group: 10}"
    lengths = prefix_plan(
        load_scenario(SCENARIO, [far, prefix]).traffic.prefix,
        repeat(100_000_000),
        np.random.default_rng(0),
        16,
        longest=4095,
    )
    assert all(len(content) == 4095 // 16 for _, content in islice(lengths, 200))


@pytest.mark.parametrize(("answer", "num_cut"), [(99, 0), (100, 0), (101, 20)])
def test_an_answer_that_just_fits_the_context_is_not_cut(answer, num_cut):
    """Prompts of 900 tokens in 1,000 leave room for answers of 100."""
    lengths = [("input_tokens", 900), ("output_tokens", answer)]
    fixed = [f"traffic.{name}={{distribution: fixed, value: {value}}}" for name, value in lengths]
    workload = Workload(load_scenario(SCENARIO, ["traffic.num_requests=20", "engine.max_model_len=1000", *fixed]))
    assert len(list(workload.requests())) == 20
    assert workload.num_cut == num_cut
