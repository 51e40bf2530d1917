"""Plans with encode pools: ratios of encode replicas to others, what they cost and hold up, in closed form."""

import json
from pathlib import Path
from typing import Any

import pytest

from perfmodel.cost import step_costs
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.models.vision import ImageGrid
from perfmodel.ops.work import BatchShape
from perfmodel.planning.encoders import processing_s
from perfmodel.planning.result import PlanResult
from perfmodel.planning.screen import Screen
from perfmodel.planning.search import make_plan
from perfmodel.planning.space import Base, Candidate, enumerate_space
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.surfaces import step_surface
from perfmodel.report.terminal import as_text
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario

NAME = "qwen3-vl-4b-a100-encode-pool"
SMALL = {"tensor_parallel_size": [1], "max_num_seqs": [128], "max_num_batched_tokens": [8192]}


def candidates(*changes: str, **space: Any) -> tuple[Candidate, ...]:
    spec = PlanSpec.model_validate({"space": {**SMALL, **space}})
    return enumerate_space(Base(NAME, changes), spec).candidates


def test_groups_have_encode_replicas_in_proportion_and_devices_of_both() -> None:
    (one,) = candidates(encoders=["2:3"])
    assert one.num_devices == 2 + 3
    assert one.usd_per_hour == pytest.approx(5 * 2.45)
    assert one.label.startswith("a100-sxm-80gb TP1, 2 encode to 3,")
    planned = load_scenario(NAME, one.overrides(2))
    assert [(pool.role, pool.replicas) for pool in planned.pools] == [("encode", 4), ("unified", 6)]
    assert planned.cluster.ec_transfer.bandwidth_bytes_per_s == 5e9


def test_encoders_come_before_prefill_and_decode_replicas() -> None:
    (one,) = candidates(encoders=["1:2"], disaggregation=["1:3"])
    assert one.num_devices == 1 + 2 * (1 + 3)
    pools = [(pool.role, pool.replicas) for pool in load_scenario(NAME, one.overrides(1)).pools]
    assert pools == [("encode", 1), ("prefill", 2), ("decode", 6)]
    assert one.num_engines == 6


def test_the_encode_pool_keeps_its_engine_and_devices_whatever_the_plan_tries() -> None:
    pools = "cluster.pools=[{role: encode, hardware: l40s, engine: {max_num_batched_tokens: 4096}}, {}]"
    (one,) = candidates(pools, encoders=["1:1"], tensor_parallel_size=[4], max_num_batched_tokens=[2048])
    assert one.num_devices == 1 + 4
    encode, unified = load_scenario(NAME, (pools, *one.overrides(1))).pools
    assert (encode.engine.tensor_parallel_size, encode.engine.max_num_batched_tokens) == (1, 4096)
    assert (unified.engine.tensor_parallel_size, unified.engine.max_num_batched_tokens) == (4, 2048)
    assert one.devices == "l40s and a100-sxm-80gb"


def test_several_ratios_are_tried_where_the_scenario_has_encoders_and_none_elsewhere() -> None:
    splits = [one.split for one in candidates()]
    assert splits[:3] == ["", "1 encode to 1", "1 encode to 2"]
    assert [one.split for one in candidates("cluster={replicas: 3}")] == [""]


@pytest.mark.parametrize("count", [1, 2])
def test_the_closed_form_saturates_encoders_where_the_simulator_does(count: int) -> None:
    """All images at once before many replicas: encode engines alone set the pace, the closed form's highest rate."""
    (one,) = candidates(encoders=[f"{count}:12"])
    burst = ("traffic.arrivals={process: burst}", "traffic.output_tokens.value=1", "traffic.num_requests=300")
    summary = simulate(load_scenario(NAME, (*one.overrides(1), *burst)), intervals=False).summary
    assert summary["pools"][0]["busy_share"] > 0.97
    (row,) = Screen([one], load_scenario(NAME), 0.9).all()
    assert row.rate == pytest.approx(summary["request_throughput"], rel=0.05)


def test_steps_of_engines_without_encoders_before_them_have_the_encoder() -> None:
    """A prompt of 2,008 tokens with four images of 640 x 640: its step is longer by the encoder's operators."""
    scenario = load_scenario(NAME, ["cluster={replicas: 1}"])
    prompt = 400 + 4 * 402
    with_them, without = (step_surface(scenario, 2000, prompt, 1, 4096, 0, encodes) for encodes in (True, False))
    seconds = float(with_them.mixed_step_time[0, 9] - without.mixed_step_time[0, 9]) * prompt / 4096
    shape = BatchShape(prompt, 1, ((prompt, 0),), images=(ImageGrid(1, 40, 40),) * 4)
    rows = step_costs(scenario).estimate(shape).rows
    encoder_s = sum(row.duration_s for row in rows if row.name.startswith("encoder_"))
    assert 0.8 * encoder_s < seconds < 1.2 * encoder_s
    assert with_them.decode.tolist() == without.decode.tolist()


@pytest.mark.parametrize(("images", "threads"), [(1, 8), (4, 8), (4, 1), (12, 5)])
def test_the_closed_form_of_image_processing_is_that_of_an_idle_server(images: int, threads: int) -> None:
    """Files are decoded by several threads at once, and processed by one."""
    changes = (
        "cluster={replicas: 1}",
        f"traffic.images.per_request={images}",
        f"engine.media_loading_threads={threads}",
    )
    alone = (
        "traffic.arrivals={process: constant, rate: 0.01}",
        "traffic.output_tokens.value=1",
        "traffic.num_requests=3",
    )
    scenario = load_scenario(NAME, [*changes, *alone, "engine.max_model_len=32768"])
    processed = simulate(scenario, intervals=False).summary["image_processing"]
    assert processing_s(scenario, 1)[1] * 1e3 == pytest.approx(processed["mean_ms"], rel=0.02)


def test_a_plan_chooses_encoders_by_what_is_simulated(tmp_path: Path) -> None:
    """Where only ratios with encoders are allowed, the choice has them, in its scenario, its prices and its words."""
    spec = {"finalists": 1, "seeds": 1, "num_requests": 120, "max_gpus": 8, "confidence": 0}
    plan = f"plan={json.dumps({**spec, 'space': {**SMALL, 'encoders': ['1:2']}})}"
    result = make_plan(NAME, [plan, "slo={ttft_ms: 600, tpot_ms: 60}"], tmp_path / "points.sqlite")
    assert isinstance(result, PlanResult)
    assert result.winner is not None
    cluster = result.to_json()["winner"]["choices"]["cluster"]
    assert [pool["replicas"] for pool in cluster["pools"]] == [result.winner.replicas, 2 * result.winner.replicas]
    assert result.winner.num_devices == 3 * result.winner.replicas
    assert 0.5 < result.winner.rate / result.winner.capacity < 2
    assert "1 encode to 2" in as_text(result)


def test_what_plans_with_encoders_do_not_have_is_refused() -> None:
    with pytest.raises(SpecError, match="plans of jobs size no encode pools"):
        make_plan(NAME, ["plan={objective: cheapest_job}", "traffic.arrivals={process: burst}"])
    with pytest.raises(PerfmodelError, match="a plan sizes one"):
        make_plan(NAME, ["cluster.pools=[{role: encode}, {role: encode}, {}]"])
    assert not candidates("cluster={replicas: 1}", "traffic.images=null", encoders=["1:1"])


def test_a_plan_says_which_station_of_its_images_binds() -> None:
    """With limits that the devices hold with ease: encoders saturate before twelve readers; on a host ten times as slow
    the API servers do, those of the encode replica first; text is read as fast as before."""
    (one,) = candidates(encoders=["1:12"])
    (row,) = Screen([one], load_scenario(NAME), 0.9).all()
    assert row.binds == "encoders"
    slow = ("overheads.host=10",)
    (one,) = candidates(*slow, encoders=["1:12"])
    (row,) = Screen([one], load_scenario(NAME, slow), 0.9).all()
    assert row.binds == "image processing"
    assert row.rate == pytest.approx(1 / processing_s(one.encoders.layout.scenario, 1, is_apart=True)[0], rel=0.05)
