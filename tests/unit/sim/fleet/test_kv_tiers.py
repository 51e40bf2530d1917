"""Tiers of KV on the calendar: transfer times by hand, blocks that are conserved, limits in which a tier is none."""

from collections.abc import Hashable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.errors import SpecError
from perfmodel.sim import RunResult, simulate
from perfmodel.sim.clock import TICKS_PER_S, Alarm, TickEnvironment
from perfmodel.sim.fleet.kv_tiers import KvStore
from perfmodel.specs import load_scenario
from perfmodel.specs.engine.offload import SecondaryTier

MEGABYTE = 1e6
_PREFIXES = [
    "traffic.num_requests=120",
    "traffic.arrivals={process: closed_loop, concurrency: 1}",
    "engine.num_gpu_blocks_override=300",
    "traffic.input_tokens={distribution: fixed, value: 1600}",
    "traffic.output_tokens={distribution: fixed, value: 8}",
    "traffic.prefix={num_groups: 12, shared_tokens: 1536}",
]
_PREFIX_BYTES = 1536 * 2 * 8 * 128 * 32 * 2  # K and V of 8 heads of 128 elements in 32 layers, two bytes each


def run(*overrides: str) -> RunResult:
    return simulate(load_scenario("llama-3.1-8b-a100", [*_PREFIXES, *overrides]))


def tier(more: str = "", store: str | None = None, capacity: str = "64 GB") -> str:
    stores = "" if store is None else f", secondary_tiers: [{{name: store, shared: true, {store}}}]"
    return f"engine.kv_offload={{capacity_bytes: {capacity}, write_policy: write_through{more}{stores}}}"


def new_store(env: TickEnvironment, **fields: float) -> KvStore:
    return KvStore(env, SecondaryTier(read_bandwidth_bytes_per_s=1e9, latency_s=0.01, **fields), MEGABYTE)


def read_at(env: TickEnvironment, store: KvStore, starts_s: Sequence[float], num_blocks: int) -> list[float]:
    """When reads of `num_blocks` that begin at `starts_s` end, in seconds."""
    ends = dict[int, float]()

    def reading(number: int):
        yield from store.read([(number, i) for i in range(num_blocks)], lambda _: None)
        ends[number] = env.ticks / TICKS_PER_S

    for number, start in enumerate(starts_s):
        Alarm(env, round(start * TICKS_PER_S), lambda _, number=number: env.process(reading(number)))
    env.run_until_idle()
    return [ends[number] for number in range(len(starts_s))]


@pytest.mark.parametrize(
    ("starts", "ends"),
    [
        ([0.0], [0.11]),  # 10 ms, then 100 MB at 1 GB/s
        ([0.0, 0.0], [0.21, 0.21]),  # each at half of it
        ([0.0, 0.05], [0.16, 0.21]),  # half of the first is left when the second comes, at 0.06 s: 50 MB at half speed
    ],
)
def test_two_readers_at_once_share_the_bandwidth(starts: list[float], ends: list[float]) -> None:
    env = TickEnvironment()
    assert read_at(env, new_store(env), starts, 100) == pytest.approx(ends, rel=1e-9)


def test_a_long_read_pays_the_latency_of_each_batch_and_a_writer_waits_for_the_one_before() -> None:
    env = TickEnvironment()
    assert read_at(env, new_store(env), [0.0], 300) == pytest.approx([0.33])  # three batches of up to 128 blocks
    env = TickEnvironment()
    store, seen = new_store(env, write_bandwidth_bytes_per_s=2e9), list[tuple[float, int]]()
    store.put([("first", i) for i in range(100)])
    store.put([("second", i) for i in range(100)])
    for milliseconds in (59, 61, 119, 121):  # 10 ms and 100 MB at 2 GB/s each
        Alarm(env, milliseconds * 10**9, lambda _: seen.append(len(store.contents)))
    env.run_until_idle()
    assert seen == [0, 100, 100, 200]


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 30), max_size=12), max_size=12), st.integers(1, 20))
def test_blocks_written_are_there_or_evicted_and_nothing_is_there_twice(
    puts: list[list[Hashable]], capacity: int
) -> None:
    env = TickEnvironment()
    store = new_store(env, capacity_bytes=capacity * MEGABYTE)
    for contents in puts:
        store.put(list(dict.fromkeys(contents)))
        env.run_until_idle()
        assert store.num_written == len(store.contents) + store.num_evicted
        assert len(store.contents) <= capacity


def test_the_least_recently_used_block_makes_room() -> None:
    env = TickEnvironment()
    store = new_store(env, capacity_bytes=3 * MEGABYTE)
    for contents in ("abc", "a", "d"):
        store.put(list(contents))
        env.run_until_idle()
    assert set(store.contents) == set("acd")


def test_a_load_takes_what_its_bytes_take_on_the_link() -> None:
    result = run(tier(", load: async, rule: restore, bandwidth_bytes_per_s: 1e9, latency_s: 0"))
    counts = result.summary["kv_offload"]
    assert counts["loads"] * 1536 == pytest.approx(counts["restored_tokens"], rel=0.1)
    per_load = counts["restored_bytes"] / counts["loads"] / 1e9
    assert counts["mean_load_ms"] == pytest.approx(per_load * 1e3, rel=1e-6)
    assert counts["restored_bytes"] == pytest.approx(counts["restored_tokens"] / 1536 * _PREFIX_BYTES)


def test_an_unlimited_store_has_the_hit_rate_of_one_unlimited_cache() -> None:
    """Four replicas at random with 300 blocks each and host memory for two prompts, against one with blocks for all."""
    slow = ", rule: restore, latency_s: 0"
    endless = "read_bandwidth_bytes_per_s: 1e15"
    four = run(tier(slow, endless, "450 MB"), "cluster={replicas: 4, router: random}")
    one = run("engine.num_gpu_blocks_override=20000")
    alone = run(tier(slow, None, "450 MB"), "cluster={replicas: 4, router: random}")
    assert four.summary["prefix_cache_hit_rate"] == pytest.approx(one.summary["prefix_cache_hit_rate"], abs=1e-12)
    assert alone.summary["prefix_cache_hit_rate"] < 0.5 * one.summary["prefix_cache_hit_rate"]
    counts = four.summary["kv_offload"]["stores"]["store"]
    assert counts["written_blocks"] == counts["blocks"] + counts["evicted_blocks"]
    assert counts["written_blocks"] == 12 * 96 + 120 * 4  # every prefix once, and each prompt's own 64 tokens


def test_a_smaller_store_finds_less_and_evicts_what_it_cannot_hold() -> None:
    rates = []
    for blocks in (100, 500, 1000, 5000):
        size = f"capacity_bytes: {blocks * _PREFIX_BYTES // 96}, read_bandwidth_bytes_per_s: 1e15"
        result = run(tier(", rule: restore", size, "450 MB"), "cluster={replicas: 4, router: random}")
        counts = result.summary["kv_offload"]["stores"]["store"]
        assert counts["blocks"] <= blocks
        assert counts["written_blocks"] == counts["blocks"] + counts["evicted_blocks"]
        rates.append(result.summary["prefix_cache_hit_rate"])
    assert rates == sorted(rates)
    assert rates[-1] > 2 * rates[0]


@pytest.mark.parametrize("load", ["step", "async"])
def test_a_store_without_bandwidth_is_none(load: str) -> None:
    without, empty = (
        run(tier(f", load: {load}", store, "450 MB"), "cluster.replicas=2")
        for store in (None, "read_bandwidth_bytes_per_s: 1e-3, write_bandwidth_bytes_per_s: 1e12")
    )
    assert without.requests is not None
    assert empty.requests is not None
    assert np.array_equal(without.requests.finished_s, empty.requests.finished_s)
    assert empty.summary["kv_offload"]["stores"]["store"]["read_blocks"] == 0


@pytest.mark.parametrize("load", ["step", "async"])
@pytest.mark.parametrize("bandwidth", ["1e8", "1e9", "3e9", "1e10", "1e12"])
def test_what_is_read_only_when_faster_delays_no_first_token(load: str, bandwidth: str) -> None:
    """One request at a time, so that nothing else decides; prompts alternate between two replicas."""
    two = "cluster={replicas: 2, router: round_robin}"
    without, behind = (
        run(tier(f", load: {load}", store, "450 MB"), two)
        for store in (None, f"latency_s: 1 ms, read_bandwidth_bytes_per_s: {bandwidth}")
    )
    assert without.requests is not None
    assert behind.requests is not None
    ttft = [result.requests.first_token_s - result.requests.arrival_s for result in (without, behind)]
    assert np.all(ttft[1] <= ttft[0] * (1 + 1e-9))
    assert bool(ttft[1].mean() < 0.7 * ttft[0].mean()) is (float(bandwidth) > 5e9)


_CHATS = ("traffic.conversations={turns: {distribution: fixed, value: 4}}", "traffic.prefix=null")


@pytest.mark.parametrize(
    ("policy", "overrides"),
    [
        ("", (*_CHATS, "engine.num_gpu_blocks_override=800", "cluster.replicas=2")),  # a leap may evict blocks
        (", storage_prefetch_policy: best_effort", ("engine.num_gpu_blocks_override=200",)),  # read within a leap
    ],
)
def test_leaps_and_single_steps_read_and_write_stores_at_the_same_times(
    policy: str, overrides: tuple[str, ...]
) -> None:
    stores = "[{name: store, shared: true, read_bandwidth_bytes_per_s: 2e10}]"
    offload = f"engine.kv_offload={{capacity_bytes: 100 MB, secondary_tiers: {stores}{policy}}}"
    traffic = (
        "traffic={num_requests: 100, arrivals: {process: poisson, rate: 10}, prefix: {shared_tokens: 400, "
        "num_groups: 10}, input_tokens: {distribution: fixed, value: 500}, output_tokens: {distribution: fixed, "
        "value: 100}}"
    )
    scenario = load_scenario("llama-3.1-8b-a100", [traffic, offload, *overrides])
    leaping, single = (simulate(scenario, can_leap=can_leap) for can_leap in (True, False))
    assert leaping.requests is not None
    assert single.requests is not None
    assert np.array_equal(leaping.requests.finished_s, single.requests.finished_s)
    assert leaping.summary["kv_offload"] == single.summary["kv_offload"]


def test_prefill_replicas_find_what_others_have_computed() -> None:
    """Without the store each of two prefill replicas computes every prefix itself."""
    rates = []
    for store in (None, "read_bandwidth_bytes_per_s: 1e12"):
        own = tier("", store).removeprefix("engine.")
        pools = f"{{role: prefill, replicas: 2, engine: {{{own.replace('=', ': ', 1)}}}}}, {{role: decode}}"
        result = run(
            f"cluster={{router: round_robin, pools: [{pools}], kv_transfer: {{bandwidth_bytes_per_s: 1e11}}}}",
            "traffic.num_requests=36",
        )
        assert result.summary["completed"] == 36
        rates.append(result.summary["kv_offload"]["restored_tokens"])
    assert rates[1] > rates[0] + 5 * 1536


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["cluster.pools=[{role: prefill}, {role: decode}]", tier()], "the prefill pool alone"),
        (["engine.kv_offload={capacity_bytes: 1e9, load: async, overlap: false}"], "leave overlap out"),
        (["engine.kv_offload={capacity_bytes: 1e9, store_threshold: 3}"], "only write_through_selective counts"),
        (["engine.kv_offload={capacity_bytes: 1e9, storage_prefetch_policy: best_effort}"], "without secondary_tiers"),
        (["engine.kv_offload={capacity_bytes: 1e9, load: async}", "engine.batching=static"], "not modelled together"),
        (
            [
                tier("", "read_bandwidth_bytes_per_s: 1e9"),
                "cluster.pools=[{share: 0.5}, {share: 0.5, engine: {block_size: 32}}]",
            ],
            "share the store store and differ",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        load_scenario("llama-3.1-8b-a100", overrides)
