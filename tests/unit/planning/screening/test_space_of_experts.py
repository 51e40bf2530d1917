"""The default search space for a mixture of experts, and the notes about it in the result."""

from types import SimpleNamespace
from typing import Any

import pytest

from perfmodel.planning.export import server_arguments
from perfmodel.planning.finalist import Finalist, Screened
from perfmodel.planning.space import Base, Space, enumerate_space
from perfmodel.planning.spec import MAX_CANDIDATES, PlanSpec
from perfmodel.report.document import Paragraph
from perfmodel.report.views.plan import _assumed
from perfmodel.specs import load_scenario
from perfmodel.specs.overrides import as_overrides

QWEN = ("model=qwen3-235b-a22b", "engine.speculative_config=null")


def space_of(scenario: str, overrides: tuple[str, ...] = (), **space: Any) -> Space:
    """The candidates with a single schedule, on at most 16 GPUs."""
    schedule = {"max_num_seqs": (64,), "max_num_batched_tokens": (8192,)}
    spec = PlanSpec.model_validate({"max_gpus": 16, "space": {**schedule, **space}})
    return enumerate_space(Base(scenario, overrides), spec)


@pytest.mark.parametrize(
    ("scenario", "overrides", "drafts"),
    [
        ("deepseek-v3-h200", (), "mtp"),
        ("deepseek-v3-h200", QWEN, "ngram"),
        ("gpt-oss-120b-h100", (), "ngram"),
    ],
    ids=["deepseek", "qwen3-235b", "gpt-oss"],
)
def test_common_parallelisms_and_drafts_are_searched_by_default(
    scenario: str, overrides: tuple[str, ...], drafts: str
) -> None:
    """Expert parallelism, data-parallel attention, disaggregation and speculative decoding."""
    space = space_of(scenario, overrides)
    engines = [candidate.layout.scenario.engine for candidate in space.candidates]
    assert any(engine.enable_expert_parallel for engine in engines)
    assert any(engine.data_parallel_size > 1 for engine in engines)
    assert any(candidate.ratio is not None for candidate in space.candidates)
    assert {engine.speculative_config is None for engine in engines} == {True, False}
    assert {"TP", "attention DP", "EP", "prefill:decode", "speculation"} <= set(space.searched)
    assert drafts in space.searched["speculation"]
    assert "of drafted tokens right" in space.searched["speculation"]


def test_data_parallel_attention_comes_with_expert_parallelism() -> None:
    """Unless requested: replicated experts on every rank are rare in practice."""
    for candidate in space_of("deepseek-v3-h200").candidates:
        engine = candidate.layout.scenario.engine
        assert engine.data_parallel_size == 1 or engine.enable_expert_parallel
    asked = space_of("gpt-oss-120b-h100", data_parallel_size=(2,), enable_expert_parallel=(False,))
    assert {candidate.layout.scenario.engine.data_parallel_size for candidate in asked.candidates} == {2}


def test_a_given_space_is_not_widened() -> None:
    space = space_of("deepseek-v3-h200", enable_expert_parallel=(True,), disaggregation=("none",), speculation=(None,))
    assert all(candidate.layout.scenario.engine.enable_expert_parallel for candidate in space.candidates)
    assert all(candidate.ratio is None for candidate in space.candidates)
    assert not {"EP", "prefill:decode", "speculation"} & set(space.searched)


def test_a_dense_model_searches_tensor_parallelism_only() -> None:
    space = space_of("llama-3.1-70b-h100-tp4", ("engine.quantization=fp8",))
    assert set(space.searched) == {"TP"}
    assert space.searched["TP"] == "1, 2, 4, 8"


def test_the_scenarios_own_drafter_is_tried_with_and_without() -> None:
    own = "engine.speculative_config={method: ngram, num_speculative_tokens: 5, acceptance: {rate: 0.6}}"
    space = space_of("deepseek-v3-h200", (own,), tensor_parallel_size=(8,), disaggregation=("none",))
    depths = set()
    for candidate in space.candidates:
        drafts = candidate.layout.scenario.engine.speculative_config
        depths.add(None if drafts is None else drafts.depth)
    assert depths == {None, 5}


def test_the_space_stays_within_the_maximum_of_candidates() -> None:
    """20,000 candidates with both kinds of experts are 40,000; five sizes of attention ranks would make 200,000."""
    spec = PlanSpec.model_validate(
        {
            "space": {
                "tensor_parallel_size": (3,),  # does not divide the heads: no candidate is built
                "max_num_seqs": tuple(range(1, 101)),
                "max_num_batched_tokens": tuple(range(2048, 2248)),
            }
        }
    )
    space = enumerate_space(Base("deepseek-v3-h200", ("engine.tensor_parallel_size=8",)), spec)
    assert space.num_all <= MAX_CANDIDATES
    assert "EP" in space.searched
    assert "attention DP" not in space.searched


def test_the_command_names_the_models_own_prediction_head() -> None:
    """vLLM's method `mtp`, with the tokens that each step drafts."""
    space = space_of("deepseek-v3-h200", tensor_parallel_size=(8,), disaggregation=("none",))
    drafting = [
        candidate for candidate in space.candidates if candidate.layout.scenario.engine.speculative_config is not None
    ]
    scenario = load_scenario("deepseek-v3-h200", as_overrides(drafting[0].choices(1)))
    arguments = server_arguments(scenario, scenario.pools[0])
    config = arguments[arguments.index("--speculative-config") + 1]
    assert '"method": "mtp"' in config
    assert "MTP drafts" in drafting[0].label
    assert '"num_speculative_tokens": 1' in config


@pytest.mark.parametrize("given", [False, True])
def test_the_result_names_the_assumed_acceptance(given: bool) -> None:
    """In the brief result, where the choice uses speculation and no acceptance was given."""
    drafts = {"method": "mtp", "num_speculative_tokens": 1, "acceptance": {"rate": 0.8}}
    asked = {"speculation": (drafts,)} if given else {}
    space = space_of("deepseek-v3-h200", tensor_parallel_size=(8,), disaggregation=("none",), **asked)
    candidate = next(c for c in space.candidates if c.layout.scenario.engine.speculative_config is not None)
    winner = Finalist(Screened(candidate, 1.0, "ttft", 1.0, ""), 1)
    spec = PlanSpec.model_validate({"space": asked})
    result: Any = SimpleNamespace(scenario=load_scenario("deepseek-v3-h200"), spec=spec, searched=space.searched)
    blocks = _assumed(result, winner)
    if given:
        assert blocks == []
    else:
        (block,) = blocks
        assert isinstance(block, Paragraph)
        assert "mtp with 85% of drafted tokens right" in str(block)


def test_what_pools_refuse_is_ruled_out_there_and_served_by_unified_replicas() -> None:
    """A mixture of experts is tried in both ways by default; a tier for KV is not modelled in decode pools."""
    space = space_of("qwen3-30b-a3b-h100", ("engine.kv_offload={capacity_bytes: 1e10}",), tensor_parallel_size=(2,))
    assert space.candidates
    assert all(candidate.ratio is None for candidate in space.candidates)
    assert any(reason.startswith("prefill and decode pools: got kv_offload in a decode") for reason in space.ruled_out)


def test_candidates_that_differ_in_the_exchange_are_called_so() -> None:
    """Fronts and tables know candidates by their labels: no two may share one."""
    backends = ("deepep_low_latency", "deepep_high_throughput")
    sizes = {"tensor_parallel_size": (1,), "data_parallel_size": (8,), "enable_expert_parallel": (True,)}
    space = space_of("deepseek-v3-h200", **sizes, all2all_backend=backends, speculation=(None,))
    labels = [candidate.label for candidate in space.candidates]
    assert len(labels) == len(set(labels)) > 1
    assert {label.split(" exchange")[0].split(", ")[-1] for label in labels} == set(backends)
