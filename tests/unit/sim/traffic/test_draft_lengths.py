"""The table of draft lengths against its definition: the depth that brings most tokens per second."""

import pytest

from perfmodel.sim.traffic.draft_lengths import draft_lengths, mean_context, speculation_of
from perfmodel.specs import load_scenario
from perfmodel.specs.engine.speculation import SpeculativeConfig

DEPTH = 4


class Pricer:
    """A step of B sequences that draft k deep takes 1 + B (k + 1) / 50."""

    def expected_time(self, batch: int, depth: int, context: int) -> float:
        return 1 + batch * (depth + 1) / 50


def table(rate: float) -> tuple[tuple[int, ...], ...]:
    scenario = load_scenario("llama-3.1-8b-a100", ("traffic.num_requests=20", "engine.max_num_seqs=200"))
    fields = {"method": "ngram", "num_speculative_tokens": DEPTH, "acceptance": {"rate": rate}}
    return draft_lengths(scenario, SpeculativeConfig.model_validate(fields), Pricer())  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [0.5, 0.8])
def test_a_row_drafts_as_deep_as_pays_at_the_acceptance_in_the_middle_of_its_part(rate: float) -> None:
    """With the acceptance a a draft of k brings 1 + a + ... + a^k tokens, whatever was expected when the run began."""
    rows = table(rate)
    for number, row in enumerate(rows):
        acceptance = (number + 0.5) / len(rows)
        for batch in (1, 2, 7, 16):
            rates = [
                sum(acceptance**i for i in range(k + 1)) / Pricer().expected_time(batch, k, 0) for k in range(DEPTH + 1)
            ]
            assert rates[row[batch - 1]] == pytest.approx(max(rates))


def test_more_acceptance_never_drafts_less_and_more_sequences_never_more() -> None:
    rows = table(0.6)
    assert all(len(row) == 200 for row in rows)
    assert all(list(column) == sorted(column) for column in zip(*rows, strict=True))
    assert all(list(row) == sorted(row, reverse=True) for row in rows)
    assert (rows[0][-1], rows[-1][0]) == (0, DEPTH)


def test_a_sequence_that_decodes_has_its_prompt_and_half_its_answer() -> None:
    """Weighted by how long it decodes: of (100, 300) and (500, 100) by 300 and 100 tokens, 250 and 550."""
    fixed = "traffic.{}_tokens={{distribution: fixed, value: {}}}"
    scenario = load_scenario(
        "llama-3.1-8b-a100", ("traffic.num_requests=9", fixed.format("input", 100), fixed.format("output", 300))
    )
    assert mean_context(scenario) == 250


@pytest.mark.parametrize(
    ("method", "lookahead", "inputs", "rereads"),
    [("ngram", 0, 0, False), ("eagle", 3, 0, True), ("draft_model", 3, 1, False)],
)
def test_a_drafter_with_kv_writes_ahead_and_one_that_reads_the_model_needs_no_input_token(
    method: str, lookahead: int, inputs: int, rereads: bool
) -> None:
    """vLLM: EAGLE reads the model's last hidden states, so a cached prefix lacks its last block; a model of its own
    reads the token instead."""
    model = ", model: llama-3.2-1b" if method == "draft_model" else ""
    config = f"{{method: {method}, num_speculative_tokens: 3, acceptance: {{rate: 0.6}}{model}}}"
    found = speculation_of(
        load_scenario("llama-3.1-8b-a100", (f"engine.speculative_config={config}", "engine.version=0.30"))
    )
    assert found is not None
    assert (found.num_lookahead, found.num_input_tokens, found.rereads_last_block) == (lookahead, inputs, rereads)
    assert found.estimate == pytest.approx(0.6)
    assert found.nodes == (0, 1, 2, 3)


def test_the_estimate_begins_at_the_share_of_judged_tokens_that_are_right() -> None:
    """A first token is always judged, a second where the first was right: of 1 + 0.8 judged, 0.8 + 0.8 x 0.5 right."""
    config = "{method: ngram, num_speculative_tokens: 2, acceptance: {per_position: [0.8, 0.5]}}"
    speculation = speculation_of(load_scenario("llama-3.1-8b-a100", (f"engine.speculative_config={config}",)))
    assert speculation is not None
    assert speculation.estimate == pytest.approx((0.8 + 0.8 * 0.5) / (1 + 0.8))
