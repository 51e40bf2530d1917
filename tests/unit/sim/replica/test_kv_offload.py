"""A second tier for KV blocks: what leaves comes back, over the link, where that is quicker than computing it again."""

import numpy as np
import pytest
from engine_integrity import check_integrity

from perfmodel.cost import load_calibration, step_costs
from perfmodel.cost.memory.offload import RestoreCost, least_restored_tokens
from perfmodel.engine import HostBlocks, KVBlockManager, Request, Scheduler, SchedulerConfig
from perfmodel.errors import SpecError
from perfmodel.sim import RunResult, simulate
from perfmodel.specs import load_scenario

_TIGHT = ["traffic.num_requests=150", "engine.num_gpu_blocks_override=500", "traffic.arrivals.rate=40"]
_PREFIXES = [
    "traffic.num_requests=200",
    "engine.num_gpu_blocks_override=700",
    "traffic.input_tokens={distribution: fixed, value: 1600}",
    "traffic.output_tokens={distribution: fixed, value: 8}",
    "traffic.prefix={num_groups: 12, shared_tokens: 1536}",
]


def run(*overrides: str) -> RunResult:
    return simulate(load_scenario("llama-3.1-8b-a100", list(overrides)))


def tier(rule: str, more: str = "", capacity: str = "64 GB") -> str:
    return f"engine.kv_offload={{capacity_bytes: {capacity}, rule: {rule}{more}}}"


def test_a_preempted_request_goes_on_where_it_was():
    host = HostBlocks(100)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, block_size=4)
    engine = Scheduler(config, KVBlockManager(12, 4, host=host))
    for number in range(3):
        engine.add(Request(number, number, 9, 20))
    computed = now = 0
    while engine.has_requests:
        plan = engine.plan(now)
        engine.apply(plan, now + 1)
        check_integrity(engine)
        computed, now = computed + plan.num_tokens, now + 1
    assert engine.num_preemptions > 0
    assert computed == 3 * 28  # nothing is computed twice: 9 + 20 - 1 tokens each
    assert host.num_used == 0
    assert host.num_restored <= host.num_stored


def test_without_room_in_the_tier_all_is_computed_again_as_without_one():
    plain, full = run(*_TIGHT), run(*_TIGHT, tier("restore", capacity="1 B"))
    assert plain.summary["preemptions"] > 0
    assert full.summary["kv_offload"]["restored_tokens"] == 0
    for one in (full, run(*_TIGHT, tier("recompute"))):
        assert one.requests is not None
        assert plain.requests is not None
        assert np.array_equal(one.requests.finished_s, plain.requests.finished_s)


def test_restored_bytes_are_those_of_the_blocks_and_fewer_tokens_are_computed():
    plain, restored = run(*_TIGHT), run(*_TIGHT, tier("restore"))
    counts = restored.summary["kv_offload"]
    assert counts["restored_blocks"] <= counts["stored_blocks"]
    assert counts["restored_bytes"] == counts["restored_blocks"] * 16 * 2 * 8 * 128 * 32 * 2
    assert restored.steps is not None
    assert plain.steps is not None
    requests = restored.requests
    assert requests is not None
    needed = int((requests.num_prompt_tokens + requests.num_output_tokens - 1).sum())
    tokens = restored.steps.num_tokens * restored.steps.num_steps
    assert tokens.sum() == needed
    assert (plain.steps.num_tokens * plain.steps.num_steps).sum() > needed


def test_prefixes_that_left_the_device_come_back():
    without, behind = run(*_PREFIXES), run(*_PREFIXES, tier("restore"))
    assert behind.summary["prefix_cache_hit_rate"] > 1.5 * without.summary["prefix_cache_hit_rate"]
    assert behind.summary["mean_ttft_ms"] < without.summary["mean_ttft_ms"]


def test_a_slow_link_is_slower_and_waiting_for_all_of_it_too():
    fast, slow, waits = (
        run(*_PREFIXES, tier("restore", more))
        for more in ("", ", bandwidth_bytes_per_s: 1e9", ", bandwidth_bytes_per_s: 1e9, overlap: false")
    )
    assert fast.summary["mean_ttft_ms"] < slow.summary["mean_ttft_ms"] < waits.summary["mean_ttft_ms"]


def test_steps_that_wait_for_copies_wait_for_those_to_the_tier_too():
    """All time beyond that of the same steps with free copies is that of the blocks that went out and came in."""
    waits = ", bandwidth_bytes_per_s: {rate}, latency_s: 0, overlap: false"
    alone = [*_PREFIXES, "traffic.arrivals={process: closed_loop, concurrency: 1}"]
    free, slow = (run(*alone, tier("restore", waits.format(rate=rate))) for rate in ("1e18", "1e9"))
    counts = slow.summary["kv_offload"]
    assert counts == free.summary["kv_offload"]
    copying = (counts["restored_bytes"] + counts["stored_bytes"]) / 1e9
    assert slow.summary["duration"] - free.summary["duration"] == pytest.approx(copying, rel=1e-6)


def test_the_faster_way_is_taken():
    """On an A100 some 131 kB a token come at 31 GB/s, far quicker than 16 GFLOP; from a slow disk they do not."""
    for more, restores in (("", True), (", bandwidth_bytes_per_s: 1e6", False)):
        scenario = load_scenario("llama-3.1-8b-a100", [tier("faster", more)])
        costs = step_costs(scenario, load_calibration(scenario.hardware, "vllm"))
        assert scenario.engine.kv_offload is not None
        least = least_restored_tokens(scenario, scenario.engine.kv_offload, costs.graph, costs.timer)
        assert (least <= 1024) is restores


@pytest.mark.parametrize("step", [1e-3, 1e-2, 1e-1])
def test_layer_by_layer_hides_what_the_step_is_longer_than(step):
    cost = RestoreCost(1e-6, 30e9, 131_072, 32, 16)
    alone = cost.alone_s(4096, 256)
    together = step + cost.added_s(step, 4096, 256)
    assert max(step, alone) < together < max(step, alone) * (1 + 1 / 32) + 1e-12
    one_by_one = RestoreCost(1e-6, 30e9, 131_072, 0, 16)
    assert one_by_one.added_s(step, 4096, 256) == alone
    # 64 blocks of 16 tokens go out before: as many bytes as a quarter of those that come.
    assert one_by_one.added_s(step, 4096, 256, 64) == pytest.approx(1.25 * alone)
    assert cost.added_s(step, 4096, 256, 64) == cost.added_s(step, 4096, 256)


def test_stages_compute_a_prompt_in_turn_but_fetch_it_side_by_side():
    """So with a link on which it never pays on one device, it may on four."""
    least = []
    for stages in (1, 4):
        overrides = [tier("faster", ", bandwidth_bytes_per_s: 1e8"), f"engine.pipeline_parallel_size={stages}"]
        scenario = load_scenario("llama-3.1-8b-a100", overrides)
        costs = step_costs(scenario, load_calibration(scenario.hardware, "vllm"))
        assert scenario.engine.kv_offload is not None
        least.append(least_restored_tokens(scenario, scenario.engine.kv_offload, costs.graph, costs.timer))
    assert least[1] < least[0]


def test_slots_that_save_prompts_by_themselves_take_no_second_tier():
    with pytest.raises(SpecError, match=r"got engine\.kv_offload with slots"):
        run(*_TIGHT, "engine={profile: llamacpp}", tier("restore"))
