"""Suffix decoding: draft depths by hand, the means of the law against runs that are played out, and what is refused."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import PerfmodelError
from perfmodel.sim import simulate
from perfmodel.sim.traffic.distributions import uniform_draws
from perfmodel.specs import load_scenario
from perfmodel.specs.engine.speculation import SpeculativeConfig

Rates = tuple[float, ...]


def suffix(rates: Rates = (0.5,), **fields: object) -> SpeculativeConfig:
    block = {"method": "suffix", "acceptance": {"per_position": rates}, **fields}
    return SpeculativeConfig.model_validate(block)


def test_depths_by_hand() -> None:
    """A tree of 6 tokens: a match of 1 drafts 1, of 2 two, of 3 three; of 4 the tree has 2 behind it, so the match of 3
    within it is taken. Twice as many for each: 2, then 4, and no more. At most two in all: 1, 2."""
    tree = {"suffix_decoding_max_tree_depth": 6}
    assert suffix(**tree).depth_by_match == (1, 2, 3, 3, 3)
    assert suffix(**tree, suffix_decoding_max_spec_factor=2.0).depth_by_match == (2, 4, 4, 4, 4)
    assert suffix(**tree, num_speculative_tokens=2).depth_by_match == (1, 2, 2, 2, 2)
    assert max(suffix().depth_by_match) == 12  # of vLLM's 24, half match
    assert suffix().depth == 24


def test_the_first_step_of_a_run_by_hand() -> None:
    """Never right twice: after a wrong token one is drafted and right with 0.4, then the next is wrong. From a run of
    0: 1.4 tokens of 1 drafted, then a run of 0 again."""
    config = suffix((0.4, 0.0))
    assert config.expected_tokens() == pytest.approx(1.4)
    assert config.mean_depth == pytest.approx(1.0)


def test_always_right_drafts_all() -> None:
    assert suffix((1.0,)).expected_tokens() == 13.0
    assert suffix((1.0,), num_speculative_tokens=5).expected_tokens() == 6.0
    assert suffix((0.0,)).expected_tokens() == 1.0


def played_out(config: SpeculativeConfig, rates: Rates, num_steps: int) -> tuple[float, float]:
    """(tokens, drafted tokens) per step, token by token: each is right by how many right ones came before it."""
    rng, run, tokens, drafted = random.Random(7), 0, 0, 0
    depths = config.depth_by_match
    for _ in range(num_steps):
        depth = depths[min(run, len(depths) - 1)]
        drafted += depth
        right = 0
        while right <= depth and rng.random() < rates[min(run + right, len(rates) - 1)]:
            right += 1
        tokens += min(right, depth) + 1
        run = run + right if right > depth else 0
    return tokens / num_steps, drafted / num_steps


@given(
    st.lists(st.floats(0.05, 0.97), min_size=1, max_size=8).map(tuple),
    st.sampled_from([1.0, 2.0, 3.5]),
    st.integers(1, 24),
)
def test_the_means_are_those_of_runs_that_are_played_out(rates: Rates, factor: float, most: int) -> None:
    config = suffix(rates, num_speculative_tokens=most, suffix_decoding_max_spec_factor=factor)
    tokens, drafted = played_out(config, rates, 20_000)
    assert config.expected_tokens() == pytest.approx(tokens, rel=0.08)
    assert config.mean_depth == pytest.approx(drafted, rel=0.08)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6).map(tuple), st.integers(0, 5), st.floats(0.0, 0.5))
def test_more_acceptance_never_gives_fewer_tokens(rates: Rates, place: int, more: float) -> None:
    """Where acceptance grows along a run, as it does in texts; else a long run may be worse than a new one."""
    growing = tuple(sorted(rates))
    higher = tuple(rate if k < place else min(rate + more, 1.0) for k, rate in enumerate(growing))
    assert suffix(higher).expected_tokens() >= suffix(growing).expected_tokens() - 1e-9


@pytest.mark.parametrize("concurrency", [1, 6])
def test_simulated_runs_are_those_of_their_draws(concurrency: int) -> None:
    """Answers played through by hand, each by its own run, whoever is beside it; and the law's tokens, within what 24
    answers of 1,500 tokens may differ."""
    rates = (0.44, 0.85, 0.91, 0.95)
    scenario = load_scenario(
        "llama-3.1-8b-a100",
        [
            f"traffic.arrivals={{process: closed_loop, concurrency: {concurrency}}}",
            "traffic.num_requests=24",
            "traffic.output_tokens={distribution: fixed, value: 1500}",
            f"engine.speculative_config={{method: suffix, acceptance: {{per_position: {list(rates)}}}}}",
        ],
    )
    summary, config, num_steps = simulate(scenario).summary, suffix(rates), 0
    for number in range(24):
        draws, place, run = uniform_draws(0, number, 1500), 1, 0  # the first token comes with the prompt
        while place < 1500:
            depth, right = config.depth_by_match[min(run, 22)], 0
            while right <= depth and place + right < 1500 and draws[place + right] < rates[min(run + right, 3)]:
                right += 1
            run = run + right if right > depth else 0
            place, num_steps = place + min(right, depth) + 1, num_steps + 1
    assert summary["mean_acceptance_length"] == pytest.approx(24 * 1499 / num_steps, rel=2e-3)
    assert summary["mean_acceptance_length"] == pytest.approx(config.expected_tokens(), rel=0.05)


def test_steps_wait_for_the_host_s_trees() -> None:
    """Never right: each step waits 12.9 us for its sequence's draft, and the first one 0.6 us for each of 1,000 tokens
    of the prompt; of the rest of a step, n-grams at the same depth have the same."""
    lengths = [
        f"traffic.{name}={{distribution: fixed, value: {n}}}"
        for name, n in (("input_tokens", 1000), ("output_tokens", 101))
    ]
    one = ["traffic.arrivals={process: closed_loop, concurrency: 1}", "traffic.num_requests=1", *lengths]
    e2e = {}
    for method in ("suffix", "ngram"):
        block = f"{{method: {method}, num_speculative_tokens: 1, acceptance: {{rate: 0.0}}}}"
        summary = simulate(load_scenario("llama-3.1-8b-a100", [*one, f"engine.speculative_config={block}"])).summary
        e2e[method] = summary["mean_e2el_ms"]
    lookups = sum(2e-3 + 1e-6 * context for context in range(1001, 1101))  # ms, of n-grams
    assert e2e["suffix"] - e2e["ngram"] == pytest.approx(1000 * 0.6e-3 + 100 * 12.9e-3 - lookups, abs=0.02)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ("adaptive: true, acceptance: {rate: 0.5}", "got adaptive with method=suffix"),
        ("acceptance: {rate: 0.5, offered: 0.5}", "acceptance.measured or offered"),
        ("acceptance: {catalog: {}}", "its drafts are chains by EAGLE"),
        ("acceptance: {per_rank: [[0.5, 0.2]]}", "per_rank without a tree"),
        ("suffix_decoding_max_spec_factor: 0.5", "suffix_decoding_max_spec_factor"),
        ("suffix_decoding_max_tree_depth: 1", "suffix_decoding_max_tree_depth"),
    ],
)
def test_what_suffix_decoding_does_not_take_is_refused(fields: str, words: str) -> None:
    with pytest.raises(PerfmodelError, match=words):
        load_scenario("llama-3.1-8b-a100", [f"engine.speculative_config={{method: suffix, {fields}}}"])


def test_its_fields_belong_to_it_alone() -> None:
    with pytest.raises(PerfmodelError, match="suffix_decoding_max_tree_depth"):
        load_scenario(
            "llama-3.1-8b-a100",
            ["engine.speculative_config={method: ngram, num_speculative_tokens: 2, suffix_decoding_max_tree_depth: 9}"],
        )
