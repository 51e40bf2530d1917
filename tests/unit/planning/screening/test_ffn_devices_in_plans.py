"""Plans whose decode engines have feed-forward devices of their own (AFD): their number as a choice."""

import json

import pytest

from perfmodel.cost import step_costs
from perfmodel.ops.work import decode_shape
from perfmodel.planning.screen import Screen
from perfmodel.planning.space import Base, Candidate, enumerate_space
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.surfaces import BATCHES, step_surface
from perfmodel.specs import load_scenario

NAME = "step3-h800-afd"
SPACE = {
    "tensor_parallel_size": [8],
    "enable_expert_parallel": [True],
    "max_num_seqs": [384],
    "max_num_batched_tokens": [8192],
    "disaggregation": ["3:1"],
    "prefill": {"tensor_parallel_size": [8], "data_parallel_size": [1], "max_num_seqs": [64]},
    "decode": {"tensor_parallel_size": [1], "data_parallel_size": [16]},
}
PLAN = {"objective": "fewest_gpus", "max_gpus": 128, "rate": 10}


def candidates(*servers: int) -> tuple[Candidate, ...]:
    sizes = [{"num_ffn_servers": count} for count in servers]
    space = {**SPACE, "decode": {**SPACE["decode"], "afd_config": [*sizes, None]}}  # type: ignore[dict-item]
    plan = {**PLAN, "space": space}
    base = Base(NAME, (f"plan={json.dumps(plan)}",))
    return enumerate_space(base, PlanSpec.model_validate(plan)).candidates


def test_decode_engines_alone_have_them_and_their_devices_count() -> None:
    """Three prefill engines of 8 devices, 16 attention ranks, servers of 8."""
    chosen = candidates(1, 4)
    assert [one.num_devices for one in chosen] == [24 + 16 + 8, 24 + 16 + 32, 24 + 16]
    assert [part for part in chosen[1].layout.traits if "FFN" in part] == ["32 FFN devices"]
    prefill, decode = load_scenario(NAME, chosen[1].overrides(2)).pools
    assert prefill.engine.afd_config is None
    assert decode.engine.afd_config is not None
    assert decode.engine.afd_config.num_ffn_devices == 32
    assert (prefill.replicas, decode.replicas) == (6, 2)
    assert load_scenario(NAME, chosen[2].overrides(1)).pools[1].engine.afd_config is None


def test_the_screen_has_their_steps_and_more_of_them_serve_more() -> None:
    """One server holds up three prefill engines, two do not: these serve what they would without, at least nearly."""
    one, two, none = candidates(1, 2)
    scenario = one.layout.scenario
    surface = step_surface(scenario, 4100, 4000, 64, 8192)
    step_s = step_costs(scenario).estimate(decode_shape(64, 4100)).duration_s
    assert surface.decode[BATCHES == 64][0] == pytest.approx(step_s, rel=1e-4)
    rates = [row.rate for row in Screen([one, two, none], load_scenario(NAME), 0.9).all()]
    assert rates[0] < 0.7 * rates[1]
    assert rates[1] == pytest.approx(rates[2], rel=0.05)
