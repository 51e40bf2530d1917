"""Which steps of data-parallel ranks are cut in two, and where: against what vLLM's own functions say."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perfmodel.cost.steps.overlap import OverlapCostModel, halves
from perfmodel.cost.steps.step_costs import step_costs
from perfmodel.engine.plan import Grant, StepPlan
from perfmodel.ops.work import decode_shape
from perfmodel.sim import simulate
from perfmodel.sim.replica.backend import shape_of
from perfmodel.sim.replica.lockstep import RankPadding
from perfmodel.specs import Scenario, load_scenario
from perfmodel.specs.engine.spec import EngineSpec

FILE = Path(__file__).parents[4] / "measurements" / "engine-counts" / "vllm_0.30.0_halves.json.gz"
ROWS: list[dict[str, Any]] = json.loads(gzip.decompress(FILE.read_bytes()))["rows"]
OWN_HALVES = RankPadding(64, 0, (), (2, 2))  # SGLang's


def plan_of(decodes: int, prompts: list[int]) -> StepPlan:
    plan: Any = StepPlan(0)
    plan.decodes = [SimpleNamespace(request_id=number) for number in range(decodes)]
    plan.chunks = [Grant(SimpleNamespace(request_id=-1), 0, tokens) for tokens in prompts]  # type: ignore[arg-type]
    plan.num_chunk_tokens = sum(prompts)
    return plan  # type: ignore[no-any-return]


def padding_of(row: dict[str, Any]) -> RankPadding:
    captured, rules = row["captured"], EngineSpec(profile="vllm").described.facts
    sizes = rules.graphs.sizes_up_to(captured)
    return RankPadding(captured, captured, sizes, tuple(row["from"]), rules.batching.halves_alike)


def test_ranks_are_cut_where_vllm_cuts_them() -> None:
    """Rows with and without prompts, graphs, ranks that idle and such that differ; a third of them are cut."""
    assert 80 < sum(bool(row["cut"]) for row in ROWS) < len(ROWS) == 300
    for row in ROWS:
        plans = [plan_of(*rank) for rank in row["ranks"] if any(rank)]
        first_half = padding_of(row).first_half(plans, len(row["ranks"]))
        assert first_half == (row["cut"][0] if row["cut"] else -1), row
        for plan, (stop, start) in zip(plans, row["cut"][1] if row["cut"] else [], strict=False):
            plan.first_half = first_half
            first, second = halves(shape_of(plan), len(row["ranks"]))
            num_requests = len(plan.decodes) + len(plan.chunks)
            assert first.num_decodes + len(first.prefills) == stop
            assert num_requests - second.num_decodes - len(second.prefills) == start
            assert first.group_tokens == first_half * len(row["ranks"])


def test_ranks_with_halves_alike_are_padded_to_the_largest() -> None:
    """32 and 40 tokens: halves of 20, 80 tokens in all, also where no graph pads them; else 72."""
    plans = [plan_of(32, []), plan_of(40, [])]
    assert RankPadding(0, 0, (), (32, 32), True).group_tokens(plans, 2, 2) == 80
    assert RankPadding(0, 0, (), (33, 32), True).group_tokens(plans, 2, 2) == 72


@pytest.mark.parametrize(
    ("ranks", "first_half"),
    [
        ([(8, []), (2, [])], 0),
        ([(0, [9]), (4, [50])], 0),
        ([(8, []), (0, [50])], -1),  # forward modes differ
        ([(8, []), (1, [])], -1),
    ],
)
def test_ranks_of_sglang_agree_on_the_kind_of_step_and_have_middles_of_their_own(ranks: Any, first_half: int) -> None:
    assert OWN_HALVES.first_half([plan_of(*rank) for rank in ranks], len(ranks)) == first_half
    assert OWN_HALVES.first_half([plan_of(*ranks[0])], len(ranks)) == 0  # the others idle


def wide(*changes: str) -> Scenario:
    engine = {"data_parallel_size": 32, "enable_expert_parallel": True, "all2all_backend": "deepep_low_latency"}
    base = {"name": "wide", "model": "deepseek-v3", "hardware": "h100-sxm-80gb", "traffic": "chat"}
    return load_scenario(json.dumps({**base, "engine": {**engine, "enable_dbo": True}}), changes)


def test_the_price_follows_the_ranks_agreement() -> None:
    """64 decodes are cut alone, and not where another rank idles; a first half of 60 leaves less to hide behind."""
    model, shape = step_costs(wide()).cost_model(), decode_shape(64, 900)._replace(group_tokens=32 * 64)
    assert isinstance(model, OverlapCostModel)
    assert [model.is_split(shape._replace(first_half=half)) for half in (0, 40, -1)] == [True, True, False]
    even, odd = (model.duration_ps(shape._replace(first_half=half)) for half in (32, 60))
    assert model.duration_ps(shape) == even != odd


def test_a_lone_request_is_never_cut_since_other_ranks_idle() -> None:
    """Its prompt is above the threshold; before ranks agreed it was cut, and took longer or shorter."""
    lone = ("traffic.num_requests=2", "traffic.arrivals={process: closed_loop, concurrency: 1}", "slo={}")
    few = ("engine.dbo_prefill_token_threshold=2", "engine.dbo_decode_token_threshold=2")
    cut, whole = (
        simulate(wide(*lone, *few, f"engine.enable_dbo={is_on}"), intervals=False).summary
        for is_on in ("true", "false")
    )
    assert cut["mean_ttft_ms"] == whole["mean_ttft_ms"]
    assert cut["mean_tpot_ms"] == whole["mean_tpot_ms"]
