"""What a transfer of KV moves, counted by hand, and what a disaggregated scenario makes of it."""

from dataclasses import replace

import pytest

from perfmodel.cost import EngineProfile, ServerFit
from perfmodel.sim import RunResult, simulate
from perfmodel.sim.fleet.kv_transfer import TransferCost, transfer_cost
from perfmodel.specs import EngineSpec, Link, Scenario, load_hardware, load_model, load_scenario

LINK = Link(name="wire", bandwidth_bytes_per_s=1e9, latency_s=1e-3)
NAME = "llama-3.1-70b-h100-disaggregated"


def sides(model: str, *shapes: tuple[int, int], **engine: object) -> list[Scenario]:
    """Scenarios of engines with (tensor, pipeline) sizes."""
    scenario, scenarios = load_scenario("llama-3.1-8b-a100"), []
    for tp, pp in shapes:
        spec = EngineSpec.model_validate({"tensor_parallel_size": tp, "pipeline_parallel_size": pp} | engine)
        update = {"model": load_model(model), "hardware": load_hardware("h200"), "engine": spec}
        scenarios.append(scenario.model_copy(update=update))
    return scenarios


def cost(model: str, tp_from: int, tp_to: int, **engine: object) -> TransferCost:
    return transfer_cost(*sides(model, (tp_from, 1), (tp_to, 1), **engine), LINK, LINK)


# Llama-3.1-70B: 80 layers x 8 KV heads x (128 + 128) x 2 bytes = 327,680 bytes per token.
@pytest.mark.parametrize(("tp_from", "tp_to", "share"), [(4, 4, 1 / 4), (4, 8, 1 / 4), (8, 4, 1 / 4), (1, 8, 1.0)])
def test_the_busiest_link_carries_its_share(tp_from: int, tp_to: int, share: float) -> None:
    found = cost("llama-3.1-70b", tp_from, tp_to)
    assert found.bytes_per_token == pytest.approx(327_680 * share)
    assert found.bytes_per_token * found.bytes_factor == pytest.approx(327_680)


def test_latents_are_sent_to_every_device_of_the_group() -> None:
    """DeepSeek-V3: 61 layers x (512 + 64) bytes in FP8 = 35,136 bytes per token, on each of eight devices."""
    found = cost("deepseek-v3", 8, 8, kv_cache_dtype="fp8")
    assert found.bytes_per_token == pytest.approx(35_136)
    assert found.bytes_per_token * found.bytes_factor == pytest.approx(8 * 35_136)


def test_all_ranks_that_share_out_prompts_send() -> None:
    """Eight devices send to eight, as 8 x 1 or as 4 x 2: each link carries what one device receives."""
    source, target = sides("deepseek-v3", (4, 1), (8, 1))
    halves = source.model_copy(update={"engine": source.engine.model_copy(update={"prefill_context_parallel_size": 2})})
    assert transfer_cost(halves, target, LINK, LINK) == cost("deepseek-v3", 8, 8)


def test_whole_blocks_and_the_latency() -> None:
    found = cost("llama-3.1-70b", 1, 1)
    assert found.duration_s(17) == pytest.approx(1e-3 + 32 * 327_680 / 1e9)


@pytest.mark.parametrize("shape_from", [(1, 1), (2, 1), (4, 2), (1, 4)])
@pytest.mark.parametrize("shape_to", [(1, 1), (8, 1), (2, 2), (1, 4)])
def test_links_share_a_transfer_evenly_and_carry_each_token_once(shape_from, shape_to) -> None:
    """(tensor, pipeline) sizes of both sides. As many links work as the smaller side has devices."""
    (tp_from, pp_from), (tp_to, pp_to) = shape_from, shape_to
    transfer = transfer_cost(*sides("llama-3.1-70b", shape_from, shape_to), LINK, LINK)
    num_links = min(tp_from * pp_from, tp_to * pp_to)
    assert transfer.bytes_per_token * transfer.bytes_factor == pytest.approx(327_680)
    assert transfer.bytes_per_token == pytest.approx(327_680 / num_links)


def test_the_slower_link_sets_bandwidth_and_latency() -> None:
    fast, slow = Link(name="a", bandwidth_bytes_per_s=4e9, latency_s=3e-3), LINK
    for links in ((fast, slow), (slow, fast)):
        transfer = transfer_cost(*sides("llama-3.1-70b", (1, 1), (1, 1)), *links)
        assert (transfer.bandwidth_bytes_per_s, transfer.latency_s) == (1e9, 3e-3)


def test_a_recurrent_state_is_sent_once_a_sequence_and_tokens_in_blocks_of_the_source() -> None:
    """A transfer grows by whole blocks of the source, from the states of a sequence of no tokens. Qwen3-Next: 36 layers
    of 32 x 128 x 128 values and 3 rows of 16 x 128 x 2 + 32 x 128 channels, 2 bytes each, half on each of 2 devices.
    """
    source, target = sides("qwen3-next-80b-a3b", (2, 1), (2, 1))
    source = source.model_copy(update={"engine": source.engine.model_copy(update={"block_size": 32})})
    transfer = transfer_cost(source, target, LINK, LINK)
    assert transfer.link_bytes(0) == 36 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128)) * 2 / 2
    for tokens, rows in ((1, 32), (32, 32), (33, 64)):
        assert transfer.link_bytes(tokens) - transfer.link_bytes(0) == pytest.approx(rows * transfer.bytes_per_token)


def test_a_rolling_cache_sends_no_more_than_its_window() -> None:
    transfer = replace(cost("llama-3.1-70b", 1, 1), rolling_span=64)
    assert [transfer.link_bytes(tokens) / transfer.bytes_per_token for tokens in (10, 64, 65, 9999)] == [16, 64, 64, 64]


def run(*changes: str, **options: object) -> RunResult:
    return simulate(load_scenario(NAME, ["traffic.num_requests=150", *changes]), **options)  # type: ignore[arg-type]


def test_a_scenario_conserves_requests_and_kv() -> None:
    result = run()
    summary, requests = result.summary, result.requests
    assert requests is not None
    assert summary["completed"] == 150
    assert summary["preemptions"] == 0
    moved = requests.num_prompt_tokens[requests.num_output_tokens > 1]
    assert summary["kv_transfer"]["transfers"] == len(moved)
    # 80 layers x 8 heads x 256 x 2 bytes, in blocks of 16 tokens
    assert summary["kv_transfer"]["bytes"] == pytest.approx((-(-moved // 16) * 16).sum() * 327_680)
    prefill, decode = summary["pools"]
    assert (prefill["role"], prefill["num_devices"], decode["role"], decode["num_devices"]) == (
        "prefill",
        8,
        "decode",
        8,
    )
    assert summary["gpu_hours"] == pytest.approx(16 * summary["duration"] / 3600)


def test_leaps_change_nothing() -> None:
    one, other = run("traffic.num_requests=40"), run("traffic.num_requests=40", can_leap=False)
    for name in ("mean_ttft_ms", "mean_tpot_ms", "p99_e2el_ms", "duration"):
        assert one.summary[name] == other.summary[name]


def test_the_front_end_shows_once_in_the_time_to_first_token() -> None:
    lone = ("traffic.num_requests=1",)
    plain = run(*lone, profile=EngineProfile(engine="x")).summary["mean_ttft_ms"]
    served = EngineProfile(engine="x", server=ServerFit(in_s=0.005, out_s=0.002))
    assert run(*lone, profile=served).summary["mean_ttft_ms"] == pytest.approx(plain + 7.0)


def test_a_slower_link_delays_first_tokens_only_by_the_transfer() -> None:
    lone = ("traffic.num_requests=1", "traffic.input_tokens={distribution: fixed, value: 1600}")
    fast = run(*lone).summary
    slow = run(*lone, "cluster.kv_transfer.bandwidth_bytes_per_s=5 GB/s").summary
    # four prefill links, eight decode devices: a quarter of 1,600 x 327,680 bytes over each
    added = 1600 * 327_680 / 4 * (1 / 5e9 - 1 / 50e9) * 1e3
    assert slow["mean_ttft_ms"] - fast["mean_ttft_ms"] == pytest.approx(added)
    assert slow["mean_tpot_ms"] == pytest.approx(fast["mean_tpot_ms"])


def test_a_shared_fabric_limits_the_sum_of_all_links_of_a_transfer() -> None:
    """Four links of 50 GB/s carry 1,600 x 327,680 bytes at 200 GB/s, or at the 10 GB/s of the shared fabric."""
    single_request = ("traffic.num_requests=1", "traffic.input_tokens={distribution: fixed, value: 1600}")
    shared = "cluster.kv_transfer.shared=true"
    narrow = run(*single_request, shared, "cluster.kv_transfer.fabric_bandwidth_bytes_per_s=10 GB/s").summary
    added = 1600 * 327_680 * (1 / 10e9 - 1 / 200e9) * 1e3
    assert narrow["mean_ttft_ms"] - run(*single_request).summary["mean_ttft_ms"] == pytest.approx(added)


def test_decoding_alone_is_steadier_than_beside_prompts() -> None:
    """The point of it: with prompts elsewhere the slowest gap between tokens is a decode step, not a prompt's."""
    unified = ["cluster={replicas: 2}", "engine.tensor_parallel_size=8"]
    assert run().summary["p99_itl_ms"] < run(*unified).summary["p99_itl_ms"]
