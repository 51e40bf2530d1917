"""What other hardware does to predictions under a fitted calibration, from what hardware can do.

Twice the bandwidth of a memory takes at most half of the time off what moves through it, and adds none. Devices without
their fabric still have PCIe: more than one of them get slower, one alone does not notice.
"""

import pytest

from perfmodel.cost import step_costs
from perfmodel.ops.work import BatchShape, decode_shape
from perfmodel.sim import simulate
from perfmodel.specs import Scenario, load_scenario

FEW = "traffic.num_requests=30"
SCENARIOS = ("llama-3.1-8b-a100", "llama-3.1-70b-h100-tp4", "mixtral-8x7b-a100-tp2", "qwen3-30b-a3b-h100")


def scenario(name: str, *changes: str) -> Scenario:
    return load_scenario(name, [FEW, *changes])


def shapes(of: Scenario) -> list[BatchShape]:
    spans = of.model.attention_spans
    decodes = [decode_shape(batch, context, spans) for batch in (1, 16, 200) for context in (128, 8192)]
    return [*decodes, BatchShape(512, 1, ((512, 0),)), BatchShape(2048, 1, ((2048, 4096),))]


@pytest.mark.parametrize("name", SCENARIOS)
def test_twice_the_memory_bandwidth_slows_nothing_and_gains_at_most_twofold(name: str) -> None:
    base, fast = scenario(name), scenario(name, "hardware.hbm.bandwidth=2x")
    before, after = step_costs(base), step_costs(fast)
    for shape in shapes(base):
        for slow, quick in zip(before.estimate(shape).rows, after.estimate(shape).rows, strict=True):
            assert slow.duration_s / 2 <= quick.duration_s * (1 + 1e-9), (slow.name, shape)
            assert quick.duration_s <= slow.duration_s * (1 + 1e-9), (slow.name, shape)


@pytest.mark.parametrize("name", SCENARIOS)
def test_twice_the_memory_bandwidth_speeds_up_serving(name: str) -> None:
    base, fast = (
        simulate(scenario(name, *changes)).summary
        for changes in ((), ("hardware.declared.memory.0.bandwidth_bytes_per_s=2x",))
    )
    for metric in ("mean_tpot_ms", "mean_e2el_ms"):
        assert 1.05 < base[metric] / fast[metric] < 2


@pytest.mark.parametrize("name", SCENARIOS)
def test_devices_without_their_fabric_talk_over_pcie(name: str) -> None:
    """NVLink is 9 (A100) and 7 (H100) times PCIe one way; only messages may change, and only between devices."""
    base, apart = scenario(name), scenario(name, "hardware.nvlink=null")
    assert [link.name for link in apart.hardware.declared.links] == ["pcie"]
    before, after = step_costs(base), step_costs(apart)
    for shape in shapes(base):
        for fabric, bus in zip(before.estimate(shape).rows, after.estimate(shape).rows, strict=True):
            if fabric.work.message is None:
                assert bus.duration_s == fabric.duration_s
            else:
                assert bus.duration_s >= fabric.duration_s, (fabric.name, shape)
    slower = simulate(apart).summary["mean_tpot_ms"] / simulate(base).summary["mean_tpot_ms"]
    assert slower > 1.02 if base.engine.tensor_parallel_size > 1 else slower == 1


def test_a_link_is_taken_out_by_its_name_or_its_place() -> None:
    for change in ("hardware.nvlink=null", "hardware.declared.links.nvlink=null", "hardware.declared.links.0=~"):
        links = scenario("llama-3.1-8b-a100", change).hardware.declared.links
        assert [link.name for link in links] == ["pcie"]
