"""KV blocks copied to a second tier and back: the text is what it is without one, and the copies are those planned."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import MODELS  # noqa: E402
from test_backend import alone, executed_cases  # noqa: E402

from perfmodel.engine import (  # noqa: E402
    HostBlocks,
    HostCopies,
    KVBlockManager,
    Request,
    Scheduler,
    SchedulerConfig,
    ServeLoop,
)
from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.files.catalog import data_dir  # noqa: E402
from perfmodel.models.changes import with_window  # noqa: E402
from perfmodel.models.model_changes import ModelChanges  # noqa: E402
from perfmodel.sim import simulate  # noqa: E402
from perfmodel.specs import load_scenario  # noqa: E402
from perfmodel_executors.backend import ExecutedBackend  # noqa: E402
from perfmodel_executors.clocks import serve  # noqa: E402
from perfmodel_executors.measure.calibrate import calibrate_machine  # noqa: E402
from perfmodel_executors.models.decoder import Decoder  # noqa: E402
from perfmodel_executors.run import execute_scenario  # noqa: E402
from perfmodel_executors.runner import StepRunner  # noqa: E402
from workloads import BLOCK_SIZE, Case  # noqa: E402

DECODER = Decoder(MODELS["gqa"], torch.float32, seed=1)
ROLLING = Decoder(with_window(MODELS["gqa"], ModelChanges(window=17, sinks=3)), torch.float32, seed=1)
PAIR = data_dir("scenarios") / "techniques" / "kv-offload.yaml"


def checked(decoder, blocks, config, requests, is_async=True, warms_up=False):
    """Serves `requests`, whose text must be that of each alone; bytes copied must be those of the blocks planned."""
    loop = ServeLoop(Scheduler(config, blocks), is_async)
    backend = ExecutedBackend(StepRunner(decoder, decoder.new_cache(BLOCK_SIZE)), warms_up=warms_up)
    finished = []
    serve(loop, backend, requests, finished.append)
    assert len(finished) == len(requests)
    for request in finished:
        assert backend.tokens.outputs(request) == alone(decoder, request)
    host, runner = blocks.host, backend.runner
    block_bytes = sum(pages.block_bytes for pages in runner.cache.pages)
    assert runner.host_pages.num_bytes == (host.num_stored + host.num_restored) * block_bytes


@given(executed_cases(), st.integers(1, 40), st.sampled_from([1, 9]), st.booleans(), st.booleans())
@settings(max_examples=12, deadline=None)
def test_any_engine_with_a_second_tier_gives_the_tokens_of_a_request_alone(
    case: Case, capacity: int, least: int, is_awaited: bool, is_rolling: bool
) -> None:
    decoder = ROLLING if is_rolling else DECODER
    host, span = HostBlocks(capacity, least, is_awaited, HostCopies()), decoder.model.rolling_span
    blocks = KVBlockManager(case.num_blocks, BLOCK_SIZE, case.has_prefix_cache, span, host=host)
    checked(decoder, blocks, case.config, case.requests(), case.is_async)


@pytest.mark.parametrize("is_async", [True, False])
def test_what_was_preempted_and_what_was_reused_comes_back(is_async):
    """Three sequences grow beyond 14 blocks; then two prefixes of 6 blocks each take turns in them, five times."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, block_size=BLOCK_SIZE, record_positions=True)
    shared = [tuple((number, i) for i in range(6)) for number in range(2)]
    restored = []
    for num_turns in (0, 10):
        growing = [Request(i, 0, 9, 20) for i in range(3)]
        turns = [Request(3 + i, 10**15 + i, 26, 12, shared[i % 2]) for i in range(num_turns)]
        host = HostBlocks(12, is_awaited=True, copies=HostCopies())
        blocks = KVBlockManager(14, BLOCK_SIZE, host=host)
        checked(DECODER, blocks, config, [*growing, *turns], is_async, warms_up=num_turns > 0)
        restored.append(host.num_restored)
    assert restored[1] > restored[0] > 0


def test_a_scenario_is_executed_as_it_is_simulated_and_waits_for_copies():
    """Equal counts on both clocks (one request after another); without the tier, less is found in the cache."""
    lengths = ["traffic.input_tokens={distribution: fixed, value: 112}", "traffic.prefix.shared_tokens=96"]
    scenario = load_scenario(PAIR, [*lengths, "engine.num_gpu_blocks_override=16"])
    scenario = scenario.model_copy(update={"model": MODELS["gqa"]})
    executed, simulated = execute_scenario(scenario), simulate(scenario)
    counts = executed.summary["kv_offload"]
    assert counts == simulated.summary["kv_offload"]
    assert counts["restored_blocks"] > 32
    assert executed.summary["prefix_cache_hit_rate"] == simulated.summary["prefix_cache_hit_rate"]


def test_the_link_is_what_copies_of_this_machine_take():
    """A block takes as long as it was measured to, and its bytes no longer than the scenario says."""
    scenario = load_scenario(PAIR).model_copy(update={"model": MODELS["gqa"]})
    times = calibrate_machine(scenario, budget_s=0, min_rounds=2).times
    offload = times.with_link(scenario).engine.kv_offload
    taken = [seconds / case.num_blocks for case, seconds in times.copies.seconds.items()]
    block = offload.latency_s + 16 * 2 * 2 * 8 * 2 * 2 / offload.bandwidth_bytes_per_s
    assert min(taken) <= block <= max(taken)


@pytest.mark.parametrize(
    ("more", "found"),
    [
        (["engine.kv_offload.overlap=true"], "overlap to false"),
        (["engine.speculative_config={method: ngram, num_speculative_tokens: 2}"], "beside drafts"),
        (["engine.kv_eviction={heavy_tokens: 16, recent_tokens: 16}"], "a second tier holds KV blocks"),
    ],
)
def test_what_is_not_executed_with_a_second_tier_is_refused(more, found):
    with pytest.raises(PerfmodelError, match=found):
        execute_scenario(load_scenario(PAIR, more))
