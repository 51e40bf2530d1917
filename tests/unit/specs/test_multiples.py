"""`Nx` multiplies what is there, or what is there by default; hardware of pools and overheads can be changed, too."""

import pytest

from perfmodel.errors import SpecError
from perfmodel.specs import load_scenario

DISAGGREGATED = "llama-3.1-70b-h100-disaggregated"


def test_a_default_is_multiplied_where_the_file_gives_no_value():
    default = load_scenario("llama-3.1-8b-a100").engine.gpu_memory_utilization
    scenario = load_scenario("llama-3.1-8b-a100", ["engine.gpu_memory_utilization=0.5x", "overheads.host=3x"])
    assert scenario.engine.gpu_memory_utilization == pytest.approx(default / 2)
    assert (scenario.overheads.host, scenario.overheads.kernels) == (3.0, 1.0)


def test_traffic_and_engine_numbers_are_multiplied():
    base = load_scenario("llama-3.1-8b-a100")
    twice = load_scenario("llama-3.1-8b-a100", ["traffic.arrivals.rate=2x", "engine.max_num_seqs=0.5x"])
    assert twice.traffic.arrivals.rate == 2 * base.traffic.arrivals.rate
    assert twice.engine.max_num_seqs == base.engine.max_num_seqs // 2


def test_what_has_no_number_cannot_be_multiplied():
    with pytest.raises(SpecError, match="to multiply; expected a number"):
        load_scenario("llama-3.1-8b-a100", ["engine.quantization=2x"])


def test_a_pools_own_engine_has_nothing_to_multiply_where_the_file_has_none():
    """What it has comes from the scenario's engine, its version and the device: a multiple of which is not guessed."""
    with pytest.raises(SpecError, match="got nothing to multiply"):
        load_scenario("llama-3.1-70b-h100-disaggregated", ["cluster.pools.0.engine.block_size=2x"])


@pytest.mark.parametrize(
    ("change", "near"),
    [
        ("hardware.hbm.bandwith=0.5x", "hardware.hbm.bandwith: unknown field. Did you mean 'bandwidth'"),
        ("hardware.nvlink.latncy=2x", "hardware.nvlink.latncy: unknown field. Did you mean 'latency'"),
        ("traffic.arrivals.rat=2x", "Did you mean 'rate'"),
    ],
)
def test_a_misspelt_multiple_is_told_what_is_near(change, near):
    with pytest.raises(SpecError) as caught:
        load_scenario("llama-3.1-8b-a100", [change])
    assert near in str(caught.value)


@pytest.mark.parametrize("pool", ["decode", "1"])
def test_one_pool_gets_other_hardware_than_the_rest(pool):
    base = load_scenario(DISAGGREGATED)
    changed = load_scenario(DISAGGREGATED, [f"cluster.pools.{pool}.hardware.hbm.bandwidth=2x"])
    roles = [spec.role for spec in base.pools]
    for role, before, after in zip(roles, base.pools, changed.pools, strict=True):
        old, new = before.hardware or base.hardware, after.hardware or changed.hardware
        assert new.memory_bandwidth == old.memory_bandwidth * (2 if role == "decode" else 1)
    assert changed.hardware == base.hardware


def test_a_pool_that_is_not_there_is_a_mistake():
    with pytest.raises(SpecError, match="no pool 'decoding'"):
        load_scenario(DISAGGREGATED, ["cluster.pools.decoding.hardware.hbm.bandwidth=2x"])
