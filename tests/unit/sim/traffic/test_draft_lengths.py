"""The table of draft lengths against its definition: the depth with the most tokens per second."""

import pytest

from perfmodel.sim.traffic.draft_lengths import draft_lengths, mean_context, speculation_of
from perfmodel.specs import load_scenario
from perfmodel.specs.engine.speculation import SpeculativeConfig

DEPTH = 4


class CostModel:
    """A step of B sequences with k draft tokens each takes 1 + B (k + 1) / 50."""

    def expected_time(self, batch: int, depth: int, context: int) -> float:
        return 1 + batch * (depth + 1) / 50


def table(rate: float) -> tuple[tuple[int, ...], ...]:
    scenario = load_scenario("llama-3.1-8b-a100", ("traffic.num_requests=20", "engine.max_num_seqs=200"))
    fields = {"method": "ngram", "num_speculative_tokens": DEPTH, "acceptance": {"rate": rate}}
    return draft_lengths(scenario, SpeculativeConfig.model_validate(fields), CostModel())  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [0.5, 0.8])
def test_a_row_has_the_best_depth_for_the_middle_of_its_acceptance_bin(rate: float) -> None:
    """At acceptance a, k draft tokens yield 1 + a + ... + a^k tokens, whatever rate the scenario expects."""
    rows = table(rate)
    for number, row in enumerate(rows):
        acceptance = (number + 0.5) / len(rows)
        for batch in (1, 2, 7, 16):
            rates = [
                sum(acceptance**i for i in range(k + 1)) / CostModel().expected_time(batch, k, 0)
                for k in range(DEPTH + 1)
            ]
            assert rates[row[batch - 1]] == pytest.approx(max(rates))


def test_depth_rises_with_acceptance_and_falls_with_batch_size() -> None:
    rows = table(0.6)
    assert all(len(row) == 200 for row in rows)
    assert all(list(column) == sorted(column) for column in zip(*rows, strict=True))
    assert all(list(row) == sorted(row, reverse=True) for row in rows)
    assert (rows[0][-1], rows[-1][0]) == (0, DEPTH)


def test_mean_context_is_the_prompt_and_half_the_answer() -> None:
    """A prompt of 100 tokens and an answer of 300: 100 + 300 / 2."""
    fixed = "traffic.{}_tokens={{distribution: fixed, value: {}}}"
    scenario = load_scenario(
        "llama-3.1-8b-a100", ("traffic.num_requests=9", fixed.format("input", 100), fixed.format("output", 300))
    )
    assert mean_context(scenario) == 250


@pytest.mark.parametrize(
    ("method", "lookahead", "inputs", "rereads"),
    [("ngram", 0, 0, False), ("eagle", 3, 0, True), ("draft_model", 3, 1, False)],
)
def test_lookahead_and_input_tokens_by_drafting_method(method: str, lookahead: int, inputs: int, rereads: bool) -> None:
    """vLLM: EAGLE reads the model's last hidden states, so a cached prefix lacks its last block; a separate draft
    model reads the token instead."""
    model = ", model: llama-3.2-1b" if method == "draft_model" else ""
    config = f"{{method: {method}, num_speculative_tokens: 3, acceptance: {{rate: 0.6}}{model}}}"
    speculation = speculation_of(
        load_scenario("llama-3.1-8b-a100", (f"engine.speculative_config={config}", "engine.version=0.30"))
    )
    assert speculation is not None
    assert (speculation.num_lookahead, speculation.num_input_tokens, speculation.rereads_last_block) == (
        lookahead,
        inputs,
        rereads,
    )
    assert speculation.estimate == pytest.approx(0.6)
    assert speculation.nodes == (0, 1, 2, 3)


def test_the_estimate_begins_at_the_share_of_judged_tokens_that_are_right() -> None:
    """A first token is always judged, a second where the first was right: of 1 + 0.8 judged, 0.8 + 0.8 x 0.5 right."""
    config = "{method: ngram, num_speculative_tokens: 2, acceptance: {per_position: [0.8, 0.5]}}"
    speculation = speculation_of(load_scenario("llama-3.1-8b-a100", (f"engine.speculative_config={config}",)))
    assert speculation is not None
    assert speculation.estimate == pytest.approx((0.8 + 0.8 * 0.5) / (1 + 0.8))
