"""Every gauge and histogram says what the engines' step records, the finished requests and the clients say."""

import asyncio
import shutil
import subprocess

import pytest
from metrics_ledger import Client, Page, served
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from virtual_time import run

from perfmodel.serve import Emulator, Order
from perfmodel.serve.emulator import RequestParams
from perfmodel.serve.metrics import Metrics, MetricsPage, content_type, wants_openmetrics
from perfmodel.serve.metrics.counts import LabelSet, family
from perfmodel.specs import load_scenario

SMALL = ("traffic.num_requests=12", "traffic.arrivals.rate=20")
DRAFTS = "engine.speculative_config={method: ngram, num_speculative_tokens: 3, acceptance: {rate: 0.6}}"
POOLS = "cluster.pools=[{name: prefill, role: prefill, replicas: 1}, {name: decode, role: decode, replicas: 2}]"
FLEETS = {
    "one replica": (),
    "two replicas": ("cluster.replicas=2",),
    "data-parallel ranks": ("engine.data_parallel_size=2",),
    "pipeline stages": ("engine.pipeline_parallel_size=2",),
    "few blocks": ("engine.num_gpu_blocks_override=250", "traffic.num_requests=24"),
    "a full gateway": ("cluster.gateway={max_outstanding: 3, max_queue: 2}",),
    "drafts": (DRAFTS,),
    "prefill and decode pools": (POOLS,),
}


def judged(values, page, name, **labels):
    """The histogram `name` of `page` has these values."""
    number, total, buckets = page.histogram(name, **labels)
    assert number == len(values)
    assert total == pytest.approx(sum(values), rel=1e-9, abs=2e-6 * max(len(values), 1))
    for bound, up_to in buckets.items():
        below, at_most = (sum(value <= bound + way for value in values) for way in (-2e-6, 2e-6))
        assert below <= up_to <= at_most, f"{name}: {up_to} values up to {bound}"


@pytest.mark.parametrize("name", FLEETS)
def test_vllm_s_metrics_equal_the_records(name):
    scenario = load_scenario("llama-3.1-8b-a100", [*SMALL, *FLEETS[name]])
    emulator, metrics, ledger, clients = run(served(scenario, leaves=(3, 9)))
    page = Page(metrics.render())
    requests = [request for _, request in ledger.finished]
    began = [client for client in clients if client.tokens]
    judged([client.tokens[0] - client.arrived for client in began], page, "vllm:time_to_first_token_seconds")
    done = [client for client in clients if client.fate == "finished"]
    judged([client.tokens[-1] - client.arrived for client in done], page, "vllm:e2e_request_latency_seconds")
    spans = {
        "queue": [r.first_scheduled_at - r.arrival for r in requests],
        "prefill": [r.first_token_at - r.first_scheduled_at for r in requests],
        "decode": [r.finished_at - r.first_token_at for r in requests],
        "inference": [r.finished_at - r.first_scheduled_at for r in requests],
    }
    for phase, ticks in spans.items():
        judged([tick / 1e12 for tick in ticks], page, f"vllm:request_{phase}_time_seconds")
    judged([r.num_prompt_tokens for r in requests], page, "vllm:request_prompt_tokens")
    judged([r.max_output_tokens for r in requests], page, "vllm:request_generation_tokens")
    for index, gaps in ledger.gaps.items():
        judged(gaps, page, "vllm:inter_token_latency_seconds", engine=str(index))
    assert page("vllm:request_success_total", finished_reason="length") == len(requests) == emulator.num_finished
    assert page("vllm:request_success_total", finished_reason="abort") == len(ledger.aborted) == emulator.num_aborted
    assert page("vllm:request_success_total", finished_reason="error") == len(ledger.lost) == emulator.num_failed
    assert ledger.aborted
    assert ledger.lost or name != "a full gateway"
    assert page("perfmodel_requests_sent_total") == page("perfmodel_requests_ended_total") == len(clients)


@pytest.mark.parametrize("name", FLEETS)
def test_tokens_are_those_that_clients_got(name):
    """With nobody gone, every token that was generated was delivered, and every prompt was computed once (twice where
    its KV went from one engine to another, as vLLM's two servers count it, and its first token was sampled twice)."""
    scenario = load_scenario("llama-3.1-8b-a100", [*SMALL, *FLEETS[name]])
    _, metrics, ledger, clients = run(served(scenario))
    page = Page(metrics.render())
    requests = [request for _, request in ledger.finished]
    num_moved = sum(request.num_transferred_tokens > 0 for request in requests)
    assert page("vllm:generation_tokens_total") == sum(len(client.tokens) for client in clients) + num_moved
    prompts = sum(request.num_prompt_tokens for request in requests)
    moved = sum(request.num_transferred_tokens for request in requests)
    assert page("vllm:prompt_tokens_total") == prompts + moved
    assert page("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == moved
    number, total, _ = page.histogram("vllm:iteration_tokens_total")
    assert total == page("vllm:prompt_tokens_total") + page("vllm:generation_tokens_total")
    assert number <= sum(map(len, ledger.steps.values()))
    assert page("vllm:num_preemptions_total") == sum(request.num_preemptions for request in requests)
    assert page("vllm:num_preemptions_total") > 0 or name != "few blocks"
    assert (
        page("vllm:num_requests_running") == page("vllm:num_requests_waiting") == page("vllm:kv_cache_usage_perc") == 0
    )


@pytest.mark.parametrize("name", ["one replica", "two replicas", "few blocks", "drafts"])
def test_gauges_are_those_of_the_step_that_has_just_ended(name):
    scenario = load_scenario("llama-3.1-8b-a100", [*SMALL, *FLEETS[name]])
    emulator, _, ledger, _ = run(served(scenario, page_every=30))
    seen = [each for each in ledger.seen if each is not None]
    assert len(seen) > 5
    num_blocks = emulator.cluster.engines[0].loop.scheduler.blocks.num_blocks
    for index, record, page, num_finished in seen:
        engine = str(index)
        assert page("vllm:num_requests_running", engine=engine) == record.num_running - num_finished
        assert page("vllm:num_requests_waiting", engine=engine) == record.num_waiting
        assert page("vllm:num_requests_waiting_by_reason", engine=engine) == record.num_waiting
        used = page("vllm:kv_cache_usage_perc", engine=engine) * num_blocks
        if num_finished:
            assert used < record.used_blocks
        else:
            assert used == pytest.approx(record.used_blocks)


def test_what_comes_back_from_a_second_tier_is_an_external_hit():
    """14 blocks: a prompt of 8 blocks, another that takes its place, and the first again, of which the tier has all."""
    tier = "engine.kv_offload={capacity_bytes: 1.6e10, bandwidth_bytes_per_s: 2.0e10}"
    scenario = load_scenario("llama-3.1-8b-a100", [tier, "engine.num_gpu_blocks_override=14"])

    async def main():
        emulator = Emulator(scenario)
        metrics, size = Metrics(emulator, "a/model"), emulator.block_size
        emulator.start()
        for first in (0, 100, 0):
            emulator.submit(Order(8 * size, 5, tuple(range(first, first + 8))), Client(0))
            await asyncio.sleep(10)
        return Page(metrics.render()), size

    page, size = run(main())
    hits, restored = page("vllm:prefix_cache_hits_total"), page("vllm:external_prefix_cache_hits_total")
    assert hits + restored == 7 * size
    assert restored > 0
    assert page("vllm:prefix_cache_queries_total") == 24 * size
    assert page("vllm:external_prefix_cache_queries_total") == 24 * size - hits


def test_drafts_are_those_of_the_records():
    scenario = load_scenario("llama-3.1-8b-a100", [*SMALL, DRAFTS])
    _, metrics, ledger, _ = run(served(scenario))
    page, records = Page(metrics.render()), ledger.steps[0]
    accepted = sum(record.num_accepted_tokens for record in records)
    assert page("vllm:spec_decode_num_drafts_total") == sum(record.num_drafts for record in records) > 0
    assert page("vllm:spec_decode_num_draft_tokens_total") == sum(record.num_draft_tokens for record in records)
    assert page("vllm:spec_decode_num_accepted_tokens_total") == accepted
    by_position = [page("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(3)]
    assert sum(by_position) == accepted
    assert by_position == sorted(by_position, reverse=True)  # none is right behind a wrong one


def test_hits_are_the_blocks_that_two_prompts_share():
    """The second of two equal prompts finds all full blocks but the one with its last token."""
    scenario = load_scenario("llama-3.1-8b-a100", ["traffic.num_requests=2", "traffic.arrivals.rate=0.01"])

    async def main():
        emulator = Emulator(scenario)
        metrics, size = Metrics(emulator, "a/model"), emulator.block_size
        emulator.start()
        for _ in range(2):
            params = RequestParams("stop", max_tokens=50, n=2)
            emulator.submit(Order(8 * size, 5, tuple(range(8)), params=params), Client(0))
            await asyncio.sleep(10)
        return Page(metrics.render()), size

    page, size = run(main())
    assert page("vllm:prefix_cache_queries_total") == page("vllm:prompt_tokens_total") == 16 * size
    assert page("vllm:prefix_cache_hits_total") == page("vllm:prompt_tokens_cached_total") == 7 * size
    assert page.histogram("vllm:request_prefill_kv_computed_tokens")[1] == 9 * size
    assert page("vllm:request_success_total", finished_reason="stop") == 2
    assert page.histogram("vllm:request_params_max_tokens")[:2] == (2, 100)
    assert page.histogram("vllm:request_params_n")[:2] == (2, 4)


@pytest.mark.parametrize("name", ["one replica", "data-parallel ranks", "drafts"])
def test_sglang_s_metrics_equal_the_records(name):
    scenario = load_scenario("llama-3.1-8b-a100", [*SMALL, *FLEETS[name], "engine.profile=sglang"])
    emulator, metrics, ledger, clients = run(served(scenario, "sglang"))
    page = Page(metrics.render())
    requests = [request for _, request in ledger.finished]
    judged([client.tokens[0] - client.arrived for client in clients], page, "sglang:time_to_first_token_seconds")
    judged([client.tokens[-1] - client.arrived for client in clients], page, "sglang:e2e_request_latency_seconds")
    judged([r.num_prompt_tokens for r in requests], page, "sglang:prompt_tokens_histogram")
    number, total, _ = page.histogram("sglang:inter_token_latency_seconds")
    assert total == pytest.approx(sum(sum(gaps) for gaps in ledger.gaps.values()))
    tokens = sum(len(client.tokens) for client in clients)
    if name == "drafts":  # each token has a share of the gap before it, but for what came with the first
        assert sum(map(len, ledger.gaps.values())) < number <= tokens - len(clients)
    else:
        judged([gap for gaps in ledger.gaps.values() for gap in gaps], page, "sglang:inter_token_latency_seconds")
    assert page("sglang:generation_tokens_total") == tokens
    assert page("sglang:num_requests_total") == emulator.num_finished
    assert page("sglang:max_total_num_tokens") == sum(
        engine.loop.scheduler.blocks.num_blocks * emulator.block_size for engine in emulator.cluster.engines
    )


def test_a_replica_s_page_has_its_own_engines():
    scenario = load_scenario("llama-3.1-8b-a100", [*SMALL, "cluster.replicas=2"])
    _, metrics, _, _ = run(served(scenario))
    whole, parts = Page(metrics.render()), [Page(metrics.of_replica(number).render()) for number in range(2)]
    for number, part in enumerate(parts):
        tokens = part("vllm:generation_tokens_total", engine="0")
        assert (
            tokens == part("vllm:generation_tokens_total") == whole("vllm:generation_tokens_total", engine=str(number))
        )
        assert tokens > 0


def test_lateness_and_a_slowed_clock_are_told():
    emulator, metrics, _, _ = run(served(load_scenario("llama-3.1-8b-a100", SMALL)))
    for seconds in (0.0, 0.002, 0.3):
        metrics.add_late(seconds)
    emulator.clock.slowed_s = 0.3
    page = Page(metrics.render())
    assert page.histogram("perfmodel_step_lateness_seconds")[:2] == (3, pytest.approx(0.302))
    assert page("perfmodel_step_lateness_seconds_bucket", le="0.003") == 2
    assert page("perfmodel_clock_slowed_seconds_total") == 0.3


# What promtool finds in the servers' own names, which are theirs to change.
INHERITED = {
    "metric names should not contain ':'",
    'non-counter metrics should not have "_total" suffix',
    "metric name should not include type 'histogram'",
}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian's package prometheus) is not installed")
@pytest.mark.parametrize(("names", "legacy"), [("vllm", False), ("vllm", True), ("sglang", False)])
def test_promtool_finds_nothing_but_the_servers_own_names(names, legacy):
    scenario = load_scenario("llama-3.1-8b-a100", [*SMALL, DRAFTS, "cluster.replicas=2"])
    _, metrics, _, _ = run(served(scenario, names, legacy))
    found = subprocess.run(["promtool", "check", "metrics"], input=metrics.render(), capture_output=True, check=False)
    lines = found.stderr.decode().splitlines()
    assert not found.stdout
    for line in lines:
        name, what = line.split(" ", 1)
        assert name.startswith((f"{names}:",)), line
        assert what in INHERITED, line


def lasting(page):
    """A page without the figures of the process, which change while it is written."""
    return [line for line in page.splitlines() if not line.startswith((b"process_", b"python_gc"))]


@pytest.mark.parametrize(("names", "legacy"), [("vllm", False), ("vllm", True), ("sglang", False)])
def test_pages_are_what_prometheus_client_writes(names, legacy):
    """Byte for byte, in both formats, whose samples have the same names: told to escape what is no name,
    prometheus_client 0.23 to 0.26 takes the colons out of OpenMetrics' samples, so it is told to leave them."""
    scenario = load_scenario("llama-3.1-8b-a100", [*SMALL, DRAFTS, "cluster.replicas=2"])
    metrics = run(served(scenario, names, legacy, model='a "quoted" \\ model'))[1]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    assert lasting(metrics.render()) == lasting(generate_latest(registry))
    again = exposition.generate_latest(registry, escaping=exposition.ALLOWUTF8)
    assert lasting(metrics.render(openmetrics=True)) == lasting(again)


def test_figures_are_written_as_prometheus_client_writes_them():
    registry, values = CollectorRegistry(auto_describe=False), (0, 0.25, 999_999, 1e6, 123_456_789, 1e-7, -1.5)
    page = MetricsPage(lambda: iter([family("gauge", "a", "b", [(LabelSet(), v) for v in values])]))
    registry.register(page)
    assert page.render() == generate_latest(registry)


def test_simulated_time_passes_while_nothing_happens():
    """Five seconds of the wall at twice its speed, without a request."""

    async def idle():
        emulator = Emulator(load_scenario("llama-3.1-8b-a100"), speed=2.0)
        metrics = Metrics(emulator, "m")
        emulator.start()
        await asyncio.sleep(5)
        return metrics.render().decode()

    assert "perfmodel_simulated_seconds_total 10.0" in run(idle())


def test_both_formats_have_the_same_samples():
    """A Prometheus that asks for OpenMetrics stores the names that one which does not stores."""
    _, metrics, _, _ = run(served(load_scenario("llama-3.1-8b-a100", SMALL)))
    plain, openmetrics = (
        {line.rpartition(" ")[0] for line in metrics.render(each).decode().splitlines() if line and line[0] != "#"}
        for each in (False, True)
    )
    assert plain == openmetrics


def test_openmetrics_is_what_its_own_parser_reads():
    _, metrics, _, _ = run(served(load_scenario("llama-3.1-8b-a100", SMALL)))
    names = {family.name for family in text_string_to_metric_families(metrics.render(openmetrics=True).decode())}
    assert {"vllm:generation_tokens", "vllm:iteration_tokens_total", "perfmodel_requests_sent"} <= names
    assert content_type(True).startswith("application/openmetrics-text; version=1.0.0")
    assert content_type(False).startswith("text/plain; version=")
    prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
    assert wants_openmetrics(prometheus)
    assert not wants_openmetrics("text/plain")
    assert not wants_openmetrics("")
    assert not wants_openmetrics("application/openmetrics-textual")
    assert not wants_openmetrics("text/plain, application/openmetrics-text; q=0.0")


def test_adapters_that_run_and_wait_are_named():
    """One slot: the first request runs, the other waits."""

    async def main():
        emulator = Emulator(load_scenario("llama-3.1-8b-a100", ["engine.max_num_seqs=1"]))
        metrics = Metrics(emulator, "a/model", loras=("sql", "law"))
        emulator.start()
        for name in ("sql", "law"):
            emulator.submit(Order(100, 100, params=RequestParams(adapter=name)), Client(0))
        await asyncio.sleep(0.3)
        busy = Page(metrics.render())
        await asyncio.sleep(60)
        return busy, Page(metrics.render())

    busy, idle = run(main())
    seconds = busy("vllm:lora_requests_info", running_lora_adapters="sql", waiting_lora_adapters="law", max_lora="2")
    assert seconds > 1e9
    assert idle("vllm:lora_requests_info", running_lora_adapters="", waiting_lora_adapters="") >= seconds
