"""Simulations share step tables exactly when their steps are the same."""

import re
from pathlib import Path

import pytest

import perfmodel.ops
from perfmodel.cost import EngineProfile, StepTables, load_calibration
from perfmodel.ops.work import Depends
from perfmodel.sim.replica.step_costs import _SCHEDULING, shared_step_costs
from perfmodel.specs import EngineSpec, Lengths, Scenario, load_scenario


def tables_of(scenario: Scenario) -> StepTables:
    profile = EngineProfile(engine="vllm")
    return shared_step_costs(scenario, load_calibration(scenario.hardware, "vllm"), profile).tables


def with_engine(scenario: Scenario, **changes: object) -> Scenario:
    return scenario.model_copy(update={"engine": scenario.engine.model_copy(update=changes)})


BASE = load_scenario("llama-3.1-8b-h100-2048-256")


def test_what_only_the_scheduler_reads_leaves_the_tables_as_they_are() -> None:
    again = with_engine(BASE, max_num_seqs=7, max_num_batched_tokens=333, max_model_len=4096)
    assert tables_of(again) is tables_of(BASE)


@pytest.mark.parametrize(
    "change",
    [
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2},
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8"},
        {"enforce_eager": True},
        {"fused_kernels": False},
    ],
)
def test_what_an_operator_reads_makes_tables_of_its_own(change: dict[str, object]) -> None:
    assert tables_of(with_engine(BASE, **change)) is not tables_of(BASE)


def test_other_lengths_of_answers_make_decodes_cost_otherwise_and_nothing_else_anew() -> None:
    """The spread of contexts is the decodes' alone: what tokens and prompts cost is worked out once for both."""
    longer = BASE.traffic.model_copy(update={"output_tokens": Lengths(distribution="uniform", low=10, high=4000)})
    one, other = tables_of(BASE), tables_of(BASE.model_copy(update={"traffic": longer}))
    assert one.timer.calibration.has_ragged_cost
    alone = StepTables(other.graph, other.timer)
    for group in one.groups:
        key = ((300, 100),) if group.depends is Depends.PREFILL else 300
        if group.depends is not Depends.ROWS:
            assert other.cost(group, key) is one.cost(group, key)
            assert other.cost(group, key).duration == alone.cost(group, key).duration
    assert other.decodes(0, 64, 64_000).duration > one.decodes(0, 64, 64_000).duration
    assert other.decodes(0, 64, 64_000) == alone.decodes(0, 64, 64_000)


def test_no_operator_reads_what_only_the_scheduler_is_said_to_read() -> None:
    sources = [path.read_text(encoding="utf-8") for path in Path(perfmodel.ops.__file__).parent.glob("*.py")]
    read = {name for source in sources for name in re.findall(r"engine\.(\w+)", source)}
    assert read.isdisjoint(_SCHEDULING)
    assert EngineSpec.model_fields.keys() >= _SCHEDULING
