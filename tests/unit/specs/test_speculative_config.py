"""What a scenario may say of speculation, and what it means."""

import json
import random
from math import isclose
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from perfmodel.errors import SpecError
from perfmodel.specs import EngineSpec, load_model, load_scenario
from perfmodel.specs.engine.speculation import Acceptance, Lookahead, MeasuredAcceptance, SpeculativeConfig

SMALL = load_model("qwen3-0.6b")


def chain(**fields: Any) -> SpeculativeConfig:
    return SpeculativeConfig.model_validate({"method": "eagle", "num_speculative_tokens": 4} | fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"method": "draft_model"}, "method=draft_model needs model"),
        ({"draft_layers": 4}, "got draft_layers with method=eagle.*use self_skip"),
        ({"method": "self_skip"}, "method=self_skip needs draft_layers"),
        ({"method": "self_quantized"}, "method=self_quantized needs quantization"),
        ({"method": "lookahead"}, "method=lookahead needs lookahead"),
        ({"method": "ngram", "tree": [2, 2]}, "tree with method=ngram"),
        ({"method": "ngram", "prompt_lookup_min": 7}, "lower the first"),
        ({"tree": [4, 2, 1]}, "beside a tree of 3 levels"),
        ({"num_speculative_tokens": None}, "num_speculative_tokens is missing; give the number"),
        ({"num_speculative_tokens": None, "tree": [64, 64, 2]}, "narrow the tree"),
        ({"pipelined": True}, "got pipelined .*use draft_model"),
        ({"method": "draft_model", "model": SMALL, "has_own_device": True}, "has_own_device without pipelined"),
        ({"acceptance": {}}, "got nothing; give one of rate"),
        ({"acceptance": {"rate": 0.7, "per_position": [0.7]}}, "rate and per_position"),
        ({"acceptance": {"per_rank": [[0.6]]}}, "per_rank without a tree"),
        ({"num_speculative_tokens": None, "tree": [2], "acceptance": {"per_rank": [[0.6]]}}, "where the tree has 2"),
        ({"num_speculative_tokens": None, "tree": [2], "acceptance": {"per_rank": [[0.6, 0.5]]}}, "sum to 1.1"),
    ],
)
def test_what_does_not_fit_together_is_said_in_a_sentence(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        chain(**fields)


def test_stages_of_a_pipeline_do_not_speculate() -> None:
    with pytest.raises(ValidationError, match="pipeline_parallel_size=2"):
        EngineSpec(speculative_config=chain(), pipeline_parallel_size=2)


@pytest.mark.parametrize(
    ("profile", "version", "method", "is_ahead"),
    [
        ("vllm", "0.30.0", "eagle", True),
        ("vllm", "0.30.0", "ngram", False),  # drafted by the host
        ("vllm", "0.30.0", "medusa", False),
        ("vllm", "0.30.0", "draft_model", True),
        ("vllm", "0.27.1", "draft_model", False),
        ("vllm", "0.14.1", "eagle", True),
        ("sglang", None, "eagle", False),
    ],
)
def test_drafts_of_some_methods_are_planned_ahead(
    profile: str, version: str | None, method: str, is_ahead: bool
) -> None:
    """vllm/config/vllm.py of these versions, `async_scheduling`: EAGLE's and MTP's, from 0.28 on draft models."""
    drafts = chain().model_copy(update={"method": method})
    engine = EngineSpec(profile=profile, version=version).model_copy(update={"speculative_config": drafts})
    assert EngineSpec().plans_ahead
    assert engine.plans_ahead == is_ahead
    assert not engine.model_copy(update={"async_scheduling": False}).plans_ahead


def test_a_tree_has_all_its_nodes_verified() -> None:
    tree = chain(num_speculative_tokens=None, tree=[4, 2, 1])
    assert tree.depth == 3
    assert tree.nodes_by_depth == (0, 4, 12, 20)
    assert chain().nodes_by_depth == (0, 1, 2, 3, 4)


def test_lookahead_runs_its_windows_and_guesses_whatever_it_gets() -> None:
    """(W + G) (N - 1) tokens a step, the newest one among them (Fu et al. 2024, section 3)."""
    config = SpeculativeConfig(method="lookahead", lookahead=Lookahead(window=15, ngram=5, guesses=15))
    assert config.depth == 4
    assert config.nodes_by_depth == (0, 119, 119, 119, 119)


@given(st.floats(0, 0.99), st.integers(1, 12))
def test_expected_tokens_are_those_of_the_papers(rate: float, depth: int) -> None:
    config = chain(num_speculative_tokens=depth, acceptance={"rate": rate})
    assert isclose(config.expected_tokens(), (1 - rate ** (depth + 1)) / (1 - rate), rel_tol=1e-9)


def test_expected_tokens_of_a_tree_sum_over_its_paths() -> None:
    ranks = [[0.6, 0.2], [0.5, 0.1]]
    config = chain(num_speculative_tokens=None, tree=[2, 2], acceptance={"per_rank": ranks})
    paths = sum(first for first in ranks[0]) + sum(a * b for a in ranks[0] for b in ranks[1])
    assert isclose(config.expected_tokens(), 1 + paths)


def test_the_last_position_repeats() -> None:
    assert Acceptance(per_position=(0.8, 0.7)).rates(4) == (0.8, 0.7, 0.7, 0.7)


def test_a_measured_file_is_read_beside_its_scenario_and_gives_conditional_rates(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"examined": [100, 80, 0], "accepted": [80, 40, 0]}))
    (tmp_path / "s.yaml").write_text(
        "model: llama-3.1-8b\nhardware: a100-sxm-80gb\n"
        "engine: {speculative_config: {method: draft_model, model: llama-3-8b, num_speculative_tokens: 3,"
        " acceptance: {measured: a.json}}}\n"
        "traffic: {arrivals: {process: burst}, num_requests: 1,"
        " input_tokens: {distribution: fixed, value: 8}, output_tokens: {distribution: fixed, value: 8}}\n"
    )
    config = load_scenario(tmp_path / "s.yaml").engine.speculative_config
    assert config is not None
    assert config.model == load_model("llama-3-8b")
    assert config.acceptance is not None
    assert config.acceptance.rates(3) == (0.8, 0.5, 0.5)
    with pytest.raises(SpecError, match="no such file"):
        load_scenario(tmp_path / "s.yaml", ["engine.speculative_config.acceptance.measured=b.json"])
    with pytest.raises(SpecError, match=r"engine\.speculative_config\.model"):
        load_scenario(tmp_path / "s.yaml", ["engine.speculative_config.model=llama-9"])


@pytest.mark.parametrize("text", ["{", '{"examined": [3], "accepted": [4]}', '{"examined": [0], "accepted": [0]}'])
def test_a_measured_file_with_a_mistake_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(SpecError, match=r"a\.json"):
        MeasuredAcceptance.read(tmp_path / "a.json")


@pytest.mark.parametrize("method", ["eagle3", "mtp", "deepseek_mtp", "qwen3_next_mtp"])
def test_names_of_drafters_over_hidden_states(method: str) -> None:
    """vLLM's names of 2026; an MTP layer is priced as EAGLE's network."""
    assert SpeculativeConfig.model_validate({"method": method, "num_speculative_tokens": 2}).method == "eagle"


def test_a_method_that_is_missing_is_asked_for_by_its_names() -> None:
    with pytest.raises(SpecError, match=r"speculative_config\.method: is missing.*expected one of draft_model, ngram"):
        load_scenario("llama-3.1-8b-a100", ["engine.speculative_config.num_speculative_tokens=4"])


def test_a_draft_model_has_the_vocabulary_of_the_model() -> None:
    """vLLM refuses others, and so does the executor: what is drafted are the model's tokens."""
    drafts = "method: draft_model, num_speculative_tokens: 3, acceptance: {rate: 0.7}"
    with pytest.raises(SpecError, match=r"qwen3-0\.6b with a vocabulary of 151,936 for llama-3\.1-8b with 128,256"):
        load_scenario("llama-3.1-8b-a100", [f"engine.speculative_config={{{drafts}, model: qwen3-0.6b}}"])
    own = load_scenario("llama-3.1-8b-a100", [f"engine.speculative_config={{{drafts}, model: llama-3.2-1b}}"])
    assert own.engine.speculative_config is not None


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_a_pipelined_step_has_a_draft_if_everything_before_was_accepted(rate: float) -> None:
    """Counted in a chain of steps. A step with a draft of 3 produces one token and the accepted prefix; the next step
    has a draft if all three and the guess of the bonus token are right. A step without a draft produces one token, and
    the next has a draft if the guess is right."""
    fields = {"method": "draft_model", "model": SMALL, "num_speculative_tokens": 3, "pipelined": True}
    config = SpeculativeConfig.model_validate(fields | {"acceptance": {"rate": rate}})
    rng, has_draft, tokens, steps = random.Random(5), False, 0, 40_000
    for _ in range(steps):
        right = [rng.random() < rate for _ in range(4)]
        tokens += 1
        if has_draft:
            tokens += next((depth for depth in range(3) if not right[depth]), 3)
        has_draft = all(right) if has_draft else right[0]
    assert config.expected_tokens() == pytest.approx(tokens / steps, rel=0.02)


@pytest.mark.parametrize(
    ("offered", "is_possible"), [(None, True), (60, True), (80, True), (100, True), (59, False), (101, False)]
)
def test_offered_drafts_lie_between_accepted_and_examined(offered: int | None, is_possible: bool) -> None:
    given = {"examined": (100, 60), "accepted": (60, 30), "offered": offered}
    if is_possible:
        assert MeasuredAcceptance.model_validate(given).offered == offered
    else:
        with pytest.raises(ValidationError, match=f"got {offered} offered"):
            MeasuredAcceptance.model_validate(given)
