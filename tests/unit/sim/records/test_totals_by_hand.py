"""Energy, utilization, blocks and cost of two pools with given device usage, per pool and in total."""

from types import SimpleNamespace

import pytest

from perfmodel.cost import Usage
from perfmodel.engine import HostBlocks, Request, StepRecord
from perfmodel.sim.clock import TICKS_PER_S
from perfmodel.sim.fleet.pool import Pool
from perfmodel.sim.records.collector import Collector
from perfmodel.sim.records.totals import device_totals
from perfmodel.specs import load_hardware
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.scenario import PriceOverride

DURATION_S = 20
FAST, SLOW = load_hardware("h100-sxm-80gb"), load_hardware("a100-sxm-80gb")
# Two engines of 2 x 2 devices, and one of 1; usage of one device of each engine, summed
USAGES = (
    Usage(peak_compute_s=8.0, hbm_bytes=5 * FAST.memory_bandwidth, bound_s={"compute": 10.0, "memory": 6.0}),
    Usage(peak_compute_s=1.0, hbm_bytes=9 * SLOW.memory_bandwidth, bound_s={"compute": 2.0, "memory": 12.0}),
)


def engine(index: int, preemptions: int, asked: int, hit: int, host: HostBlocks | None = None) -> SimpleNamespace:
    scheduler = SimpleNamespace(
        num_preemptions=preemptions,
        num_prefix_tokens_asked=asked,
        num_prefix_tokens_hit=hit,
        blocks=SimpleNamespace(host=host),
    )
    return SimpleNamespace(index=index, loop=SimpleNamespace(scheduler=scheduler))


def pool(number: int, hardware, tp: int, pp: int, num_blocks: int, prompt_share: float, *engines) -> Pool:
    sizes = EngineSpec(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    spec = SimpleNamespace(role="unified", replicas=len(engines), engine=sizes, shadow=False)
    spec.name = spec.deployment = spec.model = None
    clocks = (SimpleNamespace(ticks_under_way=12 * TICKS_PER_S, num_ranks=2),) if pp > 1 else ()
    backend = SimpleNamespace(
        prompt_time=SimpleNamespace(share=prompt_share, cached_share=0.0),
        restore=SimpleNamespace(block_bytes=100.0 * (number + 1)),
    )
    parts = SimpleNamespace(hardware=hardware), SimpleNamespace(num_kv_blocks=num_blocks)
    replicas = tuple(SimpleNamespace(ranks=[rank]) for rank in engines)
    timer = SimpleNamespace(usage=lambda: USAGES[number])
    return Pool(spec, *parts, timer, replicas, None, backend, clocks)  # type: ignore[arg-type]


def finished(number: int, rank: int, ttft: float) -> tuple[Request, int]:
    """A request of the engine `rank` with its only token after `ttft` seconds."""
    request = Request(number, 0, 10, 1)
    request.first_scheduled_at, request.num_output_tokens = 0, 1
    request.first_token_at = request.finished_at = round(ttft * TICKS_PER_S)
    return request, rank


def totals(price: float | None = None, dynamic: SimpleNamespace | None = None, requests=()):
    host = HostBlocks(10)
    host.num_stored, host.num_restored, host.num_restored_tokens = 7, 3, 40
    pools = (
        pool(0, FAST, 2, 2, 100, 0.25, engine(0, 1, 500, 100), engine(1, 2, 300, 50, host)),
        pool(1, SLOW, 1, 1, 1000, 0.75, engine(2, 4, 200, 150)),
    )
    engines = [rank for members in pools for rank in members.engines]
    override = None if price is None else PriceOverride(usd_per_gpu_hour=price)
    transfers = SimpleNamespace(num_transfers=4, num_abandoned=0, num_bytes=600.0, ticks=10 * TICKS_PER_S)
    cluster = SimpleNamespace(
        pools=pools,
        engines=engines,
        dynamic=dynamic,
        transfers=transfers,
        encoding=None,
        fronts=[],
        tiers=None,
        scenario=SimpleNamespace(price=override),
    )
    collector, row = Collector(), dict.fromkeys(StepRecord._fields, 0) | {"num_steps": 1}
    for number, used in ((0, 20), (1, 60), (2, 300), (1, 10)):
        times = {"start": 0, "end": DURATION_S * TICKS_PER_S}
        collector.add_step(StepRecord(**(row | times | {"used_blocks": used})), number)
    for request, rank in requests:
        collector.add_request(request, rank)
    return pools, device_totals(cluster, collector)  # type: ignore[arg-type]


def test_utilization_is_over_the_time_of_all_devices() -> None:
    """8 devices of the first pool and 1 of the second, for 20 s each."""
    _, result = totals()
    assert (result.num_devices, result.device_s) == (9, 9 * DURATION_S)
    assert result.mfu == pytest.approx((8.0 * 4 + 1.0) / (9 * DURATION_S))
    assert result.mbu == pytest.approx((5 * 4 + 9) / (9 * DURATION_S))
    assert result.bound_share["compute"] == pytest.approx((10 * 4 + 2) / (16 * 4 + 14))
    assert sum(result.bound_share.values()) == pytest.approx(1)
    assert result.pipeline_bubble_share == pytest.approx(1 - 16 * 4 / (12 * 2 * 4))


def test_counts_add_up_and_the_kv_peak_is_the_fullest_engines() -> None:
    _, result = totals()
    assert (result.num_preemptions, result.prefix_tokens_asked, result.prefix_tokens_hit) == (7, 1000, 300)
    assert result.kv_cache_usage_peak == pytest.approx(0.6)
    assert [row["kv_cache_usage_peak"] for row in result.pools] == pytest.approx([0.6, 0.3])
    assert [row["preemptions"] for row in result.pools] == [3, 4]
    assert [row["engines"] for row in result.pools] == [[0, 2], [2, 1]]


def test_energy_adds_up_over_pools_and_their_devices() -> None:
    pools, result = totals()
    assert result.energy_j == pytest.approx(sum(row["energy_j"] for row in result.pools))
    assert sum(result.energy_split_j.values()) == pytest.approx(result.energy_j)
    for row, devices, num_devices in zip(result.pools, pools, (8, 1), strict=True):
        declared = devices.scenario.hardware.declared
        assert row["mean_power_w"] * num_devices * DURATION_S == pytest.approx(row["energy_j"])
        assert declared.idle_w < row["mean_power_w"] < declared.tdp_w
        split = devices.energy_split_j(DURATION_S * len(devices.engines))
        assert sum(split.values()) == pytest.approx(row["energy_j"])
        assert split["idle"] >= declared.idle_w * num_devices * DURATION_S


def test_shares_and_bill_per_pool() -> None:
    _, result = totals(3.0)
    first, second = result.pools
    assert (first["busy_share"], second["busy_share"]) == pytest.approx((16 / 40, 14 / 20))
    assert (first["mfu"], second["mfu"]) == pytest.approx((8 / 40, 1 / 20))
    assert (first["mbu"], second["mbu"]) == pytest.approx((5 / 40, 9 / 20))
    assert (first["num_devices"], second["num_devices"]) == (8, 1)
    bills = [3.0 * count * DURATION_S / 3600 for count in (8, 1)]
    assert [row["usd_total"] for row in result.pools] == pytest.approx(bills)
    assert result.usd_per_hour == pytest.approx(3.0 * 9)
    assert result.prompt_cost_share == pytest.approx((8 * 0.25 + 1 * 0.75) / 9)


def test_units_of_kv_transfers_and_kv_offload() -> None:
    """10 s for four transfers of 600 bytes, in a run of 20 s. A block has 100 bytes on each of 4 links."""
    _, result = totals()
    assert result.kv_transfer == {"transfers": 4, "bytes": 600.0, "mean_ms": 2500.0, "bytes_per_s": 30.0}
    assert result.kv_offload == {
        "stored_blocks": 7,
        "restored_blocks": 3,
        "restored_tokens": 40,
        "stored_bytes": 7 * 400.0,
        "restored_bytes": 3 * 400.0,
    }


def test_a_fleet_is_billed_while_up_and_counts_the_requests_of_its_engines() -> None:
    """Two replicas of 4 devices of the first pool were up for 15 s in all; the second pool does not change."""
    counts = [(0, 1, 1), (5 * TICKS_PER_S, 1, 2)]
    fleet = SimpleNamespace(used_s=lambda end: 15.0, most_in_use=2, num_started=1, num_failed=3, counts=counts)
    fleet.failed_at = [7 * TICKS_PER_S]
    gateway = SimpleNamespace(num_rejected=11, num_retries=12)
    fleets = {0: fleet}
    dynamic = SimpleNamespace(
        fleet_of=lambda group: fleets.get(group.engines[0].index), fleets=fleets, gateway=gateway, shadowed={}
    )
    requests = [finished(0, 0, ttft=1.0), finished(1, 1, ttft=3.0), finished(2, 2, ttft=8.0), finished(3, 0, ttft=2.0)]
    _, result = totals(3.0, dynamic, requests)
    first, second = result.pools
    assert first["gpu_hours"] == pytest.approx(15 * 4 / 3600)
    assert second["gpu_hours"] == pytest.approx(20 / 3600)
    assert result.device_s == pytest.approx(15 * 4 + 20)
    assert result.usd_per_hour == pytest.approx(3.0 * (15 * 4 + 20) / 20)
    assert (first["replicas_peak"], first["starts"], first["failures"]) == (2, 1, 3)
    assert first["replicas_over_time"] == [[0.0, 1, 1], [5.0, 1, 2]]
    assert first["failed_at_s"] == [7.0]
    assert "starts" not in second
    assert (first["completed"], second["completed"]) == (3, 1)
    assert (first["mean_ttft_ms"], second["mean_ttft_ms"]) == pytest.approx((2000.0, 8000.0))
    assert (result.num_rejected, result.num_retries) == (11, 12)
    assert result.kv_transfer is not None
    assert result.kv_transfer["abandoned"] == 0
