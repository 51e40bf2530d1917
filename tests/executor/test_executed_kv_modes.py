"""How keys and values are kept changes which steps there are, not one token: paged, contiguous, not at all, in fp32."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import MODELS  # noqa: E402
from test_backend import alone  # noqa: E402

from perfmodel.engine import KVBlockManager, Scheduler, ServeLoop  # noqa: E402
from perfmodel.models.changes import with_sparse_attention, with_window  # noqa: E402
from perfmodel.models.model_changes import ModelChanges  # noqa: E402
from perfmodel.specs import load_scenario  # noqa: E402
from perfmodel_executors.backend import ExecutedBackend  # noqa: E402
from perfmodel_executors.clocks import serve  # noqa: E402
from perfmodel_executors.measure.cpu_steps import calibration_grid, scenario_range  # noqa: E402
from perfmodel_executors.models.decoder import Decoder  # noqa: E402
from perfmodel_executors.run import execute_scenario  # noqa: E402
from perfmodel_executors.runner import StepRunner  # noqa: E402
from workloads import BLOCK_SIZE, MAX_MODEL_LEN, Case, cases  # noqa: E402

PLAIN = ("gqa", "window", "moe", "chunks", "qk-norm-bias-gate")
DECODERS = {name: Decoder(MODELS[name], torch.float32, seed=1) for name in PLAIN}
DECODERS["rolling"] = Decoder(with_window(MODELS["gqa"], ModelChanges(window=17, sinks=3)), torch.float32, seed=1)
_SPARSE = ModelChanges(sparse={"block": 8, "windows": 1, "globals": 1, "random": 1})
DECODERS["sparse"] = Decoder(with_sparse_attention(MODELS["gqa"], _SPARSE), torch.float32, seed=1)
DECODERS["standard"] = Decoder(MODELS["gqa"], torch.float32, seed=1, attention="standard")


def served(decoder, case, keeps_kv=True):
    """Outputs by request, and how many tokens each step computed."""
    runner = StepRunner(decoder, decoder.new_cache(BLOCK_SIZE), keeps_kv=keeps_kv)
    backend = ExecutedBackend(runner, warms_up=False)
    blocks = KVBlockManager(case.num_blocks, BLOCK_SIZE, False, None if keeps_kv else 0)
    loop = ServeLoop(Scheduler(case.config, blocks), case.is_async)
    finished, sizes = [], []
    requests = case.requests()
    serve(
        loop,
        backend,
        requests,
        finished.append,
        lambda record: sizes.append(record.num_tokens),
    )
    assert len(finished) == len(requests)
    return {request.request_id: backend.tokens.outputs(request) for request in finished}, sizes, runner


@st.composite
def small_cases(draw, **config):
    case = draw(cases(max_requests=6))
    rows = tuple((arrival, prompt, min(output, 12), *rest) for arrival, prompt, output, *rest in case.rows)
    return replace(
        case, config=replace(case.config, record_positions=True, spans=(), **config), rows=rows, rolling_span=None
    )


@given(small_cases(keeps_kv=False, max_num_batched_tokens=96), st.sampled_from(sorted(DECODERS)))
@settings(max_examples=30, deadline=None)
def test_without_a_cache_the_tokens_are_those_with_one(case: Case, name: str) -> None:
    """Every batching discipline; and all tokens of a sequence are computed for each of its answer's."""
    decoder = DECODERS[name]
    outputs, sizes, runner = served(decoder, case, keeps_kv=False)
    expected = 0
    for request in case.requests():
        assert outputs[request.request_id] == alone(decoder, request)
        expected += sum(request.num_prompt_tokens + i for i in range(request.max_output_tokens))
    assert sum(sizes) == expected
    assert runner.cache.num_blocks == 0


@given(small_cases(is_contiguous=True), st.sampled_from(["gqa", "rolling"]))
@settings(max_examples=15, deadline=None)
def test_contiguous_reservations_give_the_same_tokens(case: Case, name: str) -> None:
    """Room for the longest sequence allowed, or for the request's own with `reserves_output`."""
    decoder = DECODERS[name]
    case = replace(case, num_blocks=max(case.num_blocks, MAX_MODEL_LEN // BLOCK_SIZE))
    outputs, _, _ = served(decoder, case)
    for request in case.requests():
        assert outputs[request.request_id] == alone(decoder, request)


SCENARIO = [
    "traffic.num_requests=3",
    "traffic.arrivals={process: closed_loop, concurrency: 3}",
    "traffic.input_tokens={distribution: fixed, value: 20}",
    "traffic.output_tokens={distribution: fixed, value: 5}",
    "engine.num_gpu_blocks_override=100",
    "engine.max_model_len=64",
]


@pytest.mark.parametrize("mode", ["paged", "contiguous", "off"])
def test_a_scenario_is_executed_in_every_mode(mode):
    scenario = load_scenario("tiny-llama-cpu", [*SCENARIO, f"engine.kv_cache={mode}"])
    result = execute_scenario(scenario.model_copy(update={"model": MODELS["gqa"]}))
    assert result.summary["total_output_tokens"] == 15
    assert (result.summary["kv_cache_usage_peak"] == 0) == (mode == "off")


def test_steps_to_time_without_a_cache_are_of_whole_sequences_within_the_budget():
    scenario = load_scenario("tiny-llama-cpu", [*SCENARIO, "engine.kv_cache=off", "engine.max_num_batched_tokens=60"])
    grid = calibration_grid(scenario_range(scenario))
    assert grid
    for shape in grid:
        assert not shape.contexts
        assert all(computed == 0 and is_sampled for _, computed, is_sampled in shape.chunks)
        assert shape.num_tokens <= 60
