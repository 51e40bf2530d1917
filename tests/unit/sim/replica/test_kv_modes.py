"""Without a cache, with reservations, with paged blocks: who runs, what it costs, what is empty."""

import numpy as np
import pytest
from engine_integrity import check_integrity

from perfmodel.cost import plan_memory, step_costs
from perfmodel.engine import KVBlockManager, Request, Scheduler, SchedulerConfig
from perfmodel.errors import SpecError, WorkloadError
from perfmodel.ops.work import BatchShape
from perfmodel.sim import RunResult, simulate
from perfmodel.specs import load_scenario

_FIXED = [
    "traffic.num_requests=40",
    "traffic.input_tokens={distribution: fixed, value: 100}",
    "traffic.output_tokens={distribution: fixed, value: 41}",
    "engine.max_model_len=512",
]


def scenario(*overrides: str):
    return load_scenario("llama-3.1-8b-a100", [*_FIXED, *overrides])


def run(*overrides: str) -> RunResult:
    return simulate(scenario(*overrides))


def off(**config: object) -> Scheduler:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "block_size": 4} | config
    return Scheduler(SchedulerConfig(**settings, keeps_kv=False), KVBlockManager(8, 4, span=0))  # type: ignore[arg-type]


def turn(engine: Scheduler, now: int) -> dict[int, int]:
    plan = engine.plan(now)
    engine.apply(plan, now + 1)
    check_integrity(engine)
    assert all(grant.num_computed_tokens == 0 for grant in plan.chunks)
    assert not plan.decodes
    return {grant.request.request_id: grant.num_new_tokens for grant in plan.chunks}


def test_without_a_cache_each_step_computes_all_tokens_and_holds_no_block():
    engine = off()
    engine.add(Request(0, 0, 10, 3))
    engine.add(Request(1, 0, 20, 2))
    assert turn(engine, 0) == {0: 10, 1: 20}
    assert turn(engine, 1) == {0: 11, 1: 21}
    assert engine.blocks.num_used == 0
    assert turn(engine, 2) == {0: 12}
    assert not engine.has_requests


def test_without_a_cache_who_does_not_fit_the_budget_waits_whole():
    engine = off()
    engine.add(Request(0, 0, 40, 3))
    engine.add(Request(1, 0, 30, 2))
    assert turn(engine, 0) == {0: 40}
    assert turn(engine, 1) == {0: 41}
    assert turn(engine, 2) == {0: 42}
    assert turn(engine, 3) == {1: 30}
    with pytest.raises(WorkloadError, match="keep the KV cache"):
        engine.add(Request(2, 0, 60, 30))


@pytest.mark.parametrize("batching", ["continuous", "iteration", "dynamic", "static", "none"])
@pytest.mark.parametrize("plans_ahead", ["true", "false"])
def test_with_and_without_a_cache_the_same_tokens_come(batching, plans_ahead):
    modes = [f"engine.batching={batching}", f"engine.async_scheduling={plans_ahead}"]
    on, without = run(*modes), run(*modes, "engine.kv_cache=off")
    assert without.summary["total_output_tokens"] == on.summary["total_output_tokens"] == 40 * 41
    assert without.summary["kv_cache_usage_peak"] == 0
    assert without.summary["kv_cache_waste"] is None
    assert without.summary["preemptions"] == 0
    steps = without.steps
    assert steps is not None
    # Each request's tokens are computed anew for each of its 41 tokens: 100 + 101 + ... + 140.
    assert steps.num_tokens.sum() == 40 * sum(range(100, 141))


def test_without_a_cache_the_flops_are_the_sum_of_whole_prompts():
    """One request: its steps are prompts of 100, 101, ... tokens; with a cache, one prompt and then single tokens."""
    alone = ["traffic.num_requests=1", "engine.async_scheduling=false"]
    result, costs = run(*alone, "engine.kv_cache=off"), step_costs(scenario(*alone, "engine.kv_cache=off"))
    steps = [costs.estimate(BatchShape(n, 1, ((n, 0),))) for n in range(100, 141)]
    assert result.steps is not None
    durations = result.steps.end_s - result.steps.start_s
    assert durations == pytest.approx([step.duration_s for step in steps], rel=1e-9)
    in_layers = 8.03e9 - 2 * 128_256 * 4096  # the embedding multiplies nothing, the LM head one token a step
    assert sum(step.flops for step in steps) == pytest.approx(2 * in_layers * sum(range(100, 141)), rel=0.02)


def test_recomputing_is_nearly_free_while_weights_bind_and_linear_in_tokens_beyond():
    costs = step_costs(scenario("engine.kv_cache=off"))
    few, some, many, more = (costs.estimate(BatchShape(n, 1, ((n, 0),))).device_s for n in (8, 32, 8192, 16384))
    assert some < 1.1 * few
    assert 1.8 * many < more


@pytest.mark.parametrize("reserved", [512, 1024, 2048])
def test_contiguous_reservations_limit_the_batch_to_whole_ones(reserved):
    mine = scenario(
        "engine.kv_cache=contiguous", f"engine.max_model_len={reserved}", "engine.num_gpu_blocks_override=1000"
    )
    plan = plan_memory(mine.model, mine.hardware, mine.engine)
    assert plan.max_batch(141) == 1000 * 16 // reserved
    burst = ["traffic.arrivals={process: constant, rate: 1e6}", "traffic.num_requests=120"]
    result = run(
        "engine.kv_cache=contiguous",
        f"engine.max_model_len={reserved}",
        "engine.num_gpu_blocks_override=1000",
        *burst,
    )
    assert result.steps is not None
    assert result.steps.num_running.max() == 1000 * 16 // reserved
    assert result.summary["preemptions"] == 0
    # 100 to 140 tokens of each reservation are filled: 120 on average.
    assert result.summary["kv_cache_waste"] == pytest.approx(1 - 120 / reserved, rel=1e-12)


def test_reservations_of_the_known_answer_and_of_its_power_of_two():
    known = run("engine.kv_cache=contiguous", "engine.reserve_output=true")
    rounded = run("engine.kv_cache=contiguous", "engine.reserve_output=pow2")
    assert known.summary["kv_cache_waste"] == pytest.approx(1 - 120 / 144)  # 140 tokens in 9 blocks
    assert rounded.summary["kv_cache_waste"] == pytest.approx(1 - 120 / 176)  # 100 + 64 - 1 in 11
    assert run("engine.reserve_output=true").summary["kv_cache_waste"] == known.summary["kv_cache_waste"]


@pytest.mark.parametrize("block", [8, 16, 32])
def test_paged_sequences_waste_half_a_block_on_average(block):
    """(block - 1) / 2 slots of the last block, lengths being whole numbers."""
    result = run(
        f"engine.block_size={block}",
        "traffic.num_requests=400",
        "traffic.input_tokens={distribution: uniform, low: 50, high: 400}",
    )
    requests = result.requests
    assert requests is not None
    mean = np.average(
        requests.num_prompt_tokens + (requests.num_output_tokens - 1) / 2, weights=requests.num_output_tokens
    )
    assert result.summary["kv_cache_waste"] == pytest.approx((block - 1) / 2 / (mean + block / 2), rel=0.05)


def test_what_makes_no_sense_together_is_refused():
    for overrides, words in (
        (["engine.kv_cache=off", "engine.kv_eviction={heavy_tokens: 8, recent_tokens: 8}"], "keeps no keys"),
        (["engine.kv_cache=contiguous", "engine.kv_offload={capacity_bytes: 1e9}"], "nothing would ever be moved"),
        (["engine.kv_tiers=[{tokens: 8}, {dtype: int4}]", "engine.kv_cache_dtype=fp8"], "the same thing"),
        (["engine.kv_tiers=[{tokens: 8}, {tokens: 9, dtype: int4}]"], "all older tokens"),
        (["engine.kv_cache_residual_tokens=8"], "name the format"),
        (["engine.kv_cache_group_size=8"], "no scales in groups"),
        (["engine.kv_offload={capacity_bytes: 1e9, link: warp}"], "no link warp"),
    ):
        with pytest.raises(SpecError, match=words):
            scenario(*overrides)


def test_buffers_of_newer_tokens_are_held_and_given_back():
    blocks = KVBlockManager(20, 4, num_buffers=3)
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, block_size=4)
    engine = Scheduler(config, blocks)
    for number in range(4):
        engine.add(Request(number, number, 9, 20))
    now = most = 0
    while engine.has_requests:
        turn_paged(engine, now)
        running = 20 - blocks.num_free
        most, now = max(most, running), now + 1
    assert engine.num_preemptions > 0
    assert blocks.num_free == 20
    assert most > 15


def turn_paged(engine: Scheduler, now: int) -> None:
    plan = engine.plan(now)
    engine.apply(plan, now + 1)
    check_integrity(engine)


def test_leaps_change_nothing_with_buffers_and_eviction():
    prefixes = ["traffic.prefix={num_groups: 12, shared_tokens: 64}"]
    for overrides in (
        ["engine.kv_cache_dtype=int4", "engine.kv_cache_residual_tokens=64"],
        ["engine.kv_eviction={heavy_tokens: 60, recent_tokens: 60}"],
        ["engine.kv_cache=contiguous"],
        ["engine.kv_offload={capacity_bytes: 8 GB, rule: restore}"],
        ["engine.kv_offload={capacity_bytes: 8 GB, rule: restore, overlap: false}"],
        ["engine.kv_offload={capacity_bytes: 1 GB, rule: restore, overlap: false}", *prefixes],
    ):
        mine = scenario(*overrides, "engine.num_gpu_blocks_override=400", "traffic.arrivals.rate=100")
        leapt, stepped = simulate(mine), simulate(mine, can_leap=False)
        assert leapt.requests is not None
        assert stepped.requests is not None
        assert np.array_equal(leapt.requests.finished_s, stepped.requests.finished_s)
