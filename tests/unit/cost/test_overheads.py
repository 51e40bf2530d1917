"""Overheads of what-ifs: so many times what a calibration says, and nothing else; changed facts are less sure."""

import pytest

from perfmodel.cost import load_calibration, step_costs
from perfmodel.ops.work import decode_shape
from perfmodel.specs import Scenario, load_hardware, load_scenario


def estimate_with(*changes: str):
    scenario: Scenario = load_scenario("llama-3.1-8b-a100", list(changes))
    return step_costs(scenario).estimate(decode_shape(8, 1024, scenario.model.attention_spans))


@pytest.mark.parametrize("profile", ["datasheet", "vllm"])
def test_overheads_of_kernels_scale_and_work_does_not(profile):
    base, none, twice = (
        estimate_with(f"engine.profile={profile}", f"overheads.kernels={factor}") for factor in (1, 0, 2)
    )
    for one, zero, two in zip(base.rows, none.rows, twice.rows, strict=True):
        assert zero.time.overhead_s == 0
        assert zero.time.duration_s == pytest.approx(one.time.duration_s - one.time.overhead_s)
        assert two.time.duration_s - one.time.duration_s == pytest.approx(one.time.overhead_s)


def test_host_time_scales():
    base, twice = estimate_with("engine.profile=vllm"), estimate_with("engine.profile=vllm", "overheads.host=2")
    assert base.serial_host_s + base.hidden_host_s > 0
    assert twice.serial_host_s == pytest.approx(2 * base.serial_host_s)
    assert twice.hidden_host_s == pytest.approx(2 * base.hidden_host_s)
    assert twice.device_s == base.device_s


def test_launches_one_by_one_are_the_hosts():
    eager = ("engine.profile=datasheet", "engine.enforce_eager=true")
    base, half = estimate_with(*eager), estimate_with(*eager, "overheads.host=0.5")
    assert base.hidden_host_s > 0
    assert half.hidden_host_s == pytest.approx(base.hidden_host_s / 2)


def test_a_device_with_changed_facts_keeps_its_fractions_and_its_interval():
    known = load_calibration(load_hardware("a100-sxm-80gb"))
    changed = load_calibration(load_hardware("a100-sxm-80gb", ["hardware.hbm.bandwidth=2x"]))
    assert changed.families == known.families
    assert changed.spread == known.spread
    assert not changed.is_passed_on
    assert "as its file declares it" in changed.source
    assert load_calibration(load_hardware("a100-sxm-80gb", ["hardware.price=1"])) == known
