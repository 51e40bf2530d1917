"""Does speculation pay: laws of the closed form, the simulator, and published speedups."""

import json
from functools import cache

import pytest
from typer.testing import CliRunner

from perfmodel import sim
from perfmodel.cli import app
from perfmodel.errors import SpecError
from perfmodel.planning.speculation import SpeculationAdvice, ask_speculation
from perfmodel.specs import Scenario, load_scenario

DRAFTS = "engine.speculative_config"
EAGLE_3 = {"method": "eagle3", "num_speculative_tokens": 3, "acceptance": {"catalog": {}}}


def closed_loop(num_users: int, *more: str) -> Scenario:
    arrivals = f"traffic.arrivals={{process: closed_loop, concurrency: {num_users}}}"
    return load_scenario("llama-3.1-8b-a100", [arrivals, *more])


@cache
def advice() -> SpeculationAdvice:
    return ask_speculation(closed_loop(8))


def test_the_present_load_is_the_closed_loops() -> None:
    assert advice().concurrencies[advice().present] == 8


def test_drafts_that_are_never_right_never_pay() -> None:
    block = "{method: draft_model, model: llama-3.2-1b, num_speculative_tokens: 2, acceptance: {rate: 0.0}}"
    drafts = ask_speculation(closed_loop(8, f"{DRAFTS}={block}")).drafts["draft_model"]
    assert all(draft.tokens_per_step == 1 for draft in drafts)
    assert not any(ask_speculation(closed_loop(8, f"{DRAFTS}={block}")).pays(draft) for draft in drafts)


def test_gains_fall_as_the_step_becomes_compute_bound() -> None:
    three = advice().drafts["EAGLE-3"][2]
    gains = [advice().gain(three, place) for place in range(len(three.tpot_ms))]
    assert gains[0] > gains[-1]
    assert gains[0] < three.tokens_per_step  # a draft is not free


def test_n_grams_stop_paying_where_their_lines_cross() -> None:
    """Between the neighbours of the end of the range the order changes, by the 2 % below which nothing is chosen."""
    four = advice().drafts["n-gram"][3]
    ((low, high),) = advice().pays(four)
    assert low == 1
    for place, size in enumerate(advice().concurrencies):
        assert (advice().gain(four, place) > 1.02) == (size < high)


@pytest.mark.parametrize("num_users", [1, 8, 32])
def test_gains_and_throughput_are_the_simulators(num_users: int) -> None:
    """The simulator answers eight requests of each user; it drains at the end, which takes a tenth off many users'."""
    result = ask_speculation(closed_loop(num_users))
    simulated = []
    for config in (None, EAGLE_3):
        more = {DRAFTS: config, "traffic.num_requests": max(60, 8 * num_users)}
        simulated.append(
            sim.simulate(closed_loop(num_users).with_(more), keep_steps=False).summary["output_throughput"]
        )
    three, place = result.drafts["EAGLE-3"][2], result.present
    rates = result.plain.output_throughput[place], three.output_throughput[place]
    assert rates == pytest.approx(simulated, rel=0.12)
    assert rates[1] / rates[0] == pytest.approx(simulated[1] / simulated[0], rel=0.06)


@pytest.mark.parametrize(("batch", "speedup"), [(1, 373.25 / 158.34), (2, 1.81), (4, 1.82), (8, 1.62)])
def test_speedups_of_eagle_3_in_sglang(batch: int, speedup: float) -> None:
    """Li et al. 2025, EAGLE-3 (arXiv 2503.01840): Llama 3.1 8B on an H100, MT-bench, chains of 3. Its prompts have some
    100 tokens and its answers some 300 [assumed]; its drafter is better than the one that the catalog has for this
    model, of 2.6 tokens a step in chat. Larger batches: docs/whatif.md."""
    lengths = (
        f"traffic.{name}_tokens={{distribution: fixed, value: {n}}}" for name, n in (("input", 100), ("output", 300))
    )
    fields = ("hardware=h100-sxm-80gb", "engine.profile=sglang", "engine.max_model_len=2048")
    result = ask_speculation(closed_loop(batch, *fields, *lengths))
    assert result.gain(result.drafts["EAGLE-3"][2], result.present) == pytest.approx(speedup, rel=0.2)


def test_a_models_prediction_head_drafts() -> None:
    given = load_scenario(
        "{name: v3, model: deepseek-v3, hardware: h200, traffic: chat, engine: {tensor_parallel_size: 8}}"
    )
    assert set(ask_speculation(given).drafts) == {"MTP", "n-gram"}


def test_refusals() -> None:
    with pytest.raises(SpecError, match="no method of speculation is possible"):
        ask_speculation(closed_loop(8, "engine.pipeline_parallel_size=2"))
    with pytest.raises(SpecError, match="has no acceptance"):
        ask_speculation(closed_loop(8, f"{DRAFTS}={{method: ngram, num_speculative_tokens: 2}}"))
    with pytest.raises(SpecError, match="returns no text, of which tokens could be drafted"):
        ask_speculation(load_scenario("arctic-embed-m-h200"))


def test_the_command() -> None:
    command = ["whatif", "llama-3.1-8b-a100", "--speculation"]
    answer = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert answer["concurrency"] in answer["concurrencies"]
    assert "is best" in answer["answer"][0]
    shown = CliRunner().invoke(app, command, env={"COLUMNS": "100"}).stdout
    assert len(shown.splitlines()) <= 40
    refused = CliRunner().invoke(app, [*command, "--grid"])
    assert refused.exit_code == 2
