"""The step estimate: sums, host time, and what it prints."""

import pytest

from perfmodel.cost import Calibration, FamilyFit, HostFit, OperatorTimer, estimate_step, host_fit
from perfmodel.cost.kernel_models.overheads import load_overheads
from perfmodel.models.cards import load_model
from perfmodel.ops import BatchShape, build_graph, decode_shape
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.scenario_file import load_hardware

A100 = load_hardware("a100-sxm-80gb")
GRAPH = build_graph(load_model("llama-3.1-8b"), sampling="greedy")


def timer(**host):
    fit = FamilyFit(overhead_s=5e-6)
    return OperatorTimer(A100, Calibration(device="x", engine="test", default=fit, host=HostFit(**host)))


def test_a_step_is_the_sum_of_its_operators():
    found = estimate_step(GRAPH, timer(), decode_shape(8, 1000))
    assert found.duration_s == found.device_s == pytest.approx(sum(row.duration_s for row in found.rows))
    assert found.flops == sum(node.count * node.work(decode_shape(8, 1000)).flops for node in GRAPH.nodes)
    assert found.origin == "calibrated"
    assert found.bound == "memory"


def test_serial_host_time_always_shows():
    base = estimate_step(GRAPH, timer(), decode_shape(8, 1000)).duration_s
    host = {"serial_step_s": 1e-3, "serial_per_sequence_s": 1e-5}
    assert estimate_step(GRAPH, timer(**host), decode_shape(8, 1000)).duration_s == pytest.approx(base + 1.08e-3)


def test_hidden_host_time_shows_only_where_it_is_longer():
    base = estimate_step(GRAPH, timer(), decode_shape(8, 1000))
    assert estimate_step(GRAPH, timer(hidden_step_s=1e-3), decode_shape(8, 1000)).duration_s == base.duration_s
    slow = estimate_step(GRAPH, timer(hidden_step_s=0.1), decode_shape(8, 1000))
    assert slow.duration_s == 0.1
    assert slow.bound == "overhead"
    assert sum(slow.bound_share.values()) == pytest.approx(1)


def test_eager_mode_launches_from_the_host():
    eager = build_graph(load_model("llama-3.1-8b"), EngineSpec(enforce_eager=True), sampling="greedy")
    datasheet = OperatorTimer(A100)
    operators = sum(row.count for row in estimate_step(GRAPH, datasheet, decode_shape(1, 1)).rows)
    assert host_fit(eager, datasheet).hidden_step_s == pytest.approx(load_overheads().engine_launch_s * operators)
    assert host_fit(GRAPH, datasheet) == HostFit()
    assert host_fit(eager, timer()) == HostFit()  # a fit knows its own host


def test_operators_without_work_are_left_out():
    names = {row.name for row in estimate_step(GRAPH, timer(), decode_shape(1, 1)).rows}
    assert "attention_decode" in names
    assert "attention_prefill" not in names
    chunk = BatchShape(512, 0, ((512, 0),))  # a chunk that is not the prompt's last
    names = {row.name for row in estimate_step(GRAPH, timer(), chunk).rows}
    assert not names & {"attention_decode", "lm_head", "sample"}


def test_utilization_by_hand():
    """MFU and MBU are FLOPs and bytes over the step at the declared peaks."""
    found = estimate_step(GRAPH, timer(), decode_shape(64, 500))
    assert found.mbu == pytest.approx(found.hbm_bytes / 2039e9 / found.duration_s)
    matrix = sum(row.flops for row in found.rows if row.work.rate == "bf16")
    vector = sum(row.flops for row in found.rows if row.work.rate == "vector")
    assert found.mfu == pytest.approx((matrix / 312e12 + vector / 19.5e12) / found.duration_s)


def test_an_estimate_prints_its_operators_and_what_they_add_up_to():
    found = estimate_step(GRAPH, timer(serial_step_s=1e-4), decode_shape(8, 1000))
    text = str(found)
    assert all(row.name in text for row in found.rows)
    assert "exposed host time" in text
    assert f"{found.duration_s * 1e3:.3f} ms a step" in text
