"""Our step times under vLLM's and SGLang's schedulers: what the plug-ins make of what these tell them. No engine."""

import abc
import gzip
import importlib
import json
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from perfmodel.cost.memory.plan import plan_memory
from perfmodel.cost.steps.step_time import StepTimer
from perfmodel.errors import PerfmodelError, UnsupportedError
from perfmodel.ops.work import BatchShape
from perfmodel.sim.replica.step_costs import shared_step_costs
from perfmodel.specs import load_scenario
from perfmodel_executors.engines import plugins

ROOT = Path(__file__).parents[2]
# Written by benchmarks/witness/timed_vllm.py: the first plans of its workloads 45 and 19 (asynchronous).
RECORDED = json.loads(gzip.decompress((ROOT / "tests/data/vllm_plans.json.gz").read_bytes()))
EMPTY = SimpleNamespace(req_ids=[])
END = 3


class VirtualTime:
    now_s = 0.0

    def monotonic(self):
        return self.now_s

    def sleep(self, duration_s):
        self.now_s += duration_s


def started(asked={"scenario": "llama-3.1-8b-a100"}, block_size=16, speculation=None, **limits):  # noqa: B006
    """A `TimedExecutor` under vLLM's configurations, in virtual time."""
    executor = plugins.TimedExecutor()
    scheduling = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "enable_chunked_prefill": True, **limits}
    executor.vllm_config = SimpleNamespace(
        additional_config={} if asked is None else {"perfmodel": asked},
        scheduler_config=SimpleNamespace(async_scheduling=False, **scheduling),
        cache_config=SimpleNamespace(block_size=block_size, enable_prefix_caching=True),
        model_config=SimpleNamespace(max_model_len=8192, dtype="bfloat16", get_vocab_size=lambda: 5),
        speculative_config=speculation,
    )
    executor.clock = VirtualTime()
    executor._init_executor()
    return executor


@pytest.fixture
def engine(monkeypatch):
    """The modules of vLLM that the executor asks."""
    outputs = SimpleNamespace(
        EMPTY_MODEL_RUNNER_OUTPUT=EMPTY,
        ModelRunnerOutput=lambda ids, places, sampled: SimpleNamespace(ids=ids, places=places, sampled=sampled),
    )
    spec = SimpleNamespace(FullAttentionSpec=lambda **given: SimpleNamespace(page_size_bytes=given["block_size"] * 4))
    monkeypatch.setitem(importlib.sys.modules, "vllm.v1.outputs", outputs)
    monkeypatch.setitem(importlib.sys.modules, "vllm.v1.kv_cache_interface", spec)


def sampling():
    return SimpleNamespace(eos_token_id=END, all_stop_token_ids={0})


def plan_of(scheduled, new=(), cached=(), finished=()):
    """A `SchedulerOutput`: new: (request, prompt tokens, tokens computed, tokens to prefill or None); cached: (request,
    tokens computed, tokens answered)."""
    requests = [
        SimpleNamespace(
            req_id=name,
            prompt_len=prompt,
            num_computed_tokens=computed,
            prefill_token_ids=prefill and [1] * prefill,
            sampling_params=sampling(),
        )
        for name, prompt, computed, prefill in new
    ]
    names, computed, answered = (list(column) for column in zip(*cached, strict=True)) if cached else ([], [], [])
    old = SimpleNamespace(req_ids=names, num_computed_tokens=computed, num_output_tokens=answered)
    return SimpleNamespace(
        scheduled_new_reqs=requests,
        scheduled_cached_reqs=old,
        finished_req_ids=set(finished),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
    )


@pytest.mark.parametrize("recording", RECORDED["recordings"], ids=lambda recording: f"workload {recording['seed']}")
def test_plans_are_read_as_vllm_counts_them(recording):
    """New tokens, tokens computed before and who samples, of vLLM 0.30.0's own requests: chunks of prompts, sequences
    that are recomputed after a preemption, and answers whose last token is still under way."""
    executor, num_part, num_recomputed = started(), 0, 0
    for plan in recording["plans"]:
        sequences, sampled = executor._read(plan_of(plan["scheduled"], plan["new"], plan["cached"], plan["finished"]))
        expected = plan["counted"]
        assert [[*pair, bool(tokens)] for pair, tokens in zip(sequences, sampled, strict=True)] == expected
        num_part += sum(not samples for _, _, samples in expected)
        num_recomputed += sum(answered > 0 and computed == 0 for _, computed, answered in plan["cached"])
    assert num_recomputed
    assert num_part or recording["seed"] == 19


def test_a_step_begins_when_the_one_before_has_ended_and_idle_time_passes(engine):
    """Two steps under way, then a pause of 5 s. In the first a prompt's part samples nothing, and a decode does."""
    executor = started()
    timer = executor._timer
    executor._read(plan_of({"b": 700}, new=[("b", 700, 0, None)]))
    first = plan_of({"a": 512, "b": 1}, new=[("a", 600, 0, None)], cached=[("b", 700, 1)])
    assert executor.execute_model(first, non_block=True).result() is None
    one = executor.sample_tokens(None, non_block=True)
    executor.execute_model(plan_of({"a": 88}, cached=[("a", 512, 0)]), non_block=True)
    two = executor.sample_tokens(None, non_block=True)
    durations = [timer(BatchShape(513, 2, ((512, 0),), 1, 701)).seconds, timer([(88, 512)]).seconds]
    assert executor.clock.now_s == 0
    assert not one.done()
    tokens = one.result().sampled
    assert [len(sampled) for sampled in tokens] == [0, 1]
    assert executor.clock.now_s == pytest.approx(durations[0], rel=1e-12)
    assert one.done()
    assert [len(sampled) for sampled in two.result().sampled] == [1]
    assert executor.clock.now_s == pytest.approx(sum(durations), rel=1e-12)
    executor.clock.sleep(5)
    assert executor.execute_model(plan_of({"a": 1}, cached=[("a", 600, 1)])) is None
    assert executor.sample_tokens(None).places == {"a": 0}
    assert executor.clock.now_s == pytest.approx(sum(durations) + 5 + timer([(1, 600)]).seconds, rel=1e-12)


def test_a_plan_without_tokens_takes_no_time(engine):
    executor = started()
    assert executor.execute_model(plan_of({})) is EMPTY
    assert executor.execute_model(plan_of({}), non_block=True).result() is EMPTY
    assert executor.clock.now_s == 0


def test_no_request_ends_by_its_token_and_neighbours_have_others(engine):
    """Of a vocabulary of five, two end an answer."""
    executor = started()
    _, sampled = executor._read(plan_of(dict.fromkeys("abcd", 9), new=[(name, 9, 0, None) for name in "abcd"]))
    assert sampled == [[1], [2], [4], [1]]


@pytest.mark.parametrize("block_size", [16, 32])
def test_the_devices_of_the_scenario_hold_as_many_blocks_under_vllms_flags(engine, block_size):
    """Flags of vLLM count, whatever the scenario has; one block more is vLLM's null block."""
    asked = {"scenario": "llama-3.1-8b-a100", "set": ["engine.block_size=8", "engine.max_num_batched_tokens=256"]}
    executor = started(asked, block_size, max_num_batched_tokens=4096)
    executor.get_kv_cache_specs()
    changes = [f"engine.block_size={block_size}", "engine.max_num_batched_tokens=4096", "engine.max_num_seqs=64"]
    own = load_scenario("llama-3.1-8b-a100", [*changes, "engine.max_model_len=8192"])
    expected = plan_memory(own.model, own.hardware, own.engine).num_kv_blocks
    assert executor.determine_available_memory() == [(expected + 1) * block_size * 4]
    assert executor.vllm_config.scheduler_config.async_scheduling is own.engine.plans_ahead


@pytest.mark.parametrize(
    ("asked", "speculation", "sentence"),
    [
        (None, None, "--additional-config: got None"),
        ({"set": []}, None, 'expected {"scenario": NAME'),
        ({"scenario": "llama-3.1-8b-a101"}, None, "llama-3.1-8b-a101"),
        ({"scenario": "llama-3.1-8b-a100", "set": ["model=gemma-3-4b"]}, None, "^model: got layers"),
        (
            {"scenario": "llama-3.1-8b-a100", "set": ["engine.pipeline_parallel_size=2"]},
            None,
            "^cluster: got 2 devices",
        ),
        ({"scenario": "llama-3.1-8b-a100", "set": ["cluster.replicas=2"]}, None, "^cluster: got 2 devices"),
        ({"scenario": "llama-3.1-8b-a100"}, "ngram", "^engine.speculative_config: got drafts"),
    ],
    ids=str,
)
def test_what_is_not_timed_is_refused_with_a_sentence(asked, speculation, sentence):
    with pytest.raises(PerfmodelError, match=sentence):
        started(asked, speculation=speculation)


def test_what_only_a_worker_could_do_is_refused(engine):
    executor = started()
    assert executor.collective_rpc("get_supported_tasks") == [("generate",)]
    with pytest.raises(UnsupportedError, match="got add_lora"):
        executor.collective_rpc("add_lora", args=(1,))


def test_vllms_class_is_an_executor_with_nothing_left_abstract(monkeypatch):
    """vLLM looks it up by its path, and hands it to another process by its name."""

    def init(self, vllm_config):
        self.vllm_config = vllm_config

    names = ("_init_executor", "collective_rpc", "check_health")  # of vLLM 0.30.0
    methods = {name: abc.abstractmethod(lambda self: None) for name in names}
    base = abc.ABCMeta("Base", (), {"__init__": init, **methods})
    monkeypatch.setitem(importlib.sys.modules, "vllm.v1.executor.abstract", SimpleNamespace(Executor=base))
    plugins._vllm_executor.cache_clear()
    kind = plugins.VllmExecutor
    plugins._vllm_executor.cache_clear()
    assert issubclass(kind, base)
    assert (kind.__module__, kind.__qualname__) == (plugins.__name__, "VllmExecutor")
    assert kind({}).supports_async_scheduling()
    with pytest.raises(AttributeError, match="TrtllmExecutor"):
        plugins.TrtllmExecutor  # noqa: B018


class ConfigManager:
    """Of SGLang's simulator: what it hands out by the name in its configuration file."""

    def __init__(self, predictor):
        self.predictor = predictor

    def _get_raw_config(self):
        return {"predictor": self.predictor}

    def get_inference_time_predictor(self, model, hw, config):
        return f"SGLang's own {self.predictor.get('name')}"


def predictor_of(**asked):
    return plugins._predictor(ConfigManager.get_inference_time_predictor, ConfigManager(asked), "model", "hw", "config")


def test_the_simulators_predictor_has_the_time_of_the_batch():
    """A prompt of 300 tokens of which 200 are cached, and a decode behind 700; no request takes no time."""
    predictor = predictor_of(name="perfmodel", scenario="llama-3.1-8b-a100", set=["engine.profile=sglang"])
    scenario = load_scenario("llama-3.1-8b-a100", ["engine.profile=sglang"])
    seconds = StepTimer(scenario, shared_step_costs(scenario))([(100, 200), (1, 700)]).seconds
    pairs = [
        SimpleNamespace(extend_length=100, past_kv_length=200),
        SimpleNamespace(extend_length=1, past_kv_length=700),
    ]
    assert predictor.predict_infer_time(SimpleNamespace(reqs=pairs)) == seconds > 0
    assert predictor.predict_infer_time(SimpleNamespace(reqs=[])) == 0
    assert predictor.get_metrics() == {}
    assert predictor.reset_metrics() is None


def test_other_predictors_of_the_simulator_stay():
    assert predictor_of(name="replay") == "SGLang's own replay"
    assert predictor_of() == "SGLang's own None"
    with pytest.raises(PerfmodelError, match="predictor: got"):
        predictor_of(name="perfmodel")


@pytest.mark.parametrize("has_simulator", [False, True])
def test_sglang_finds_the_entry_point_and_only_its_simulator_is_hooked(monkeypatch, has_simulator):
    with (ROOT / "pyproject.toml").open("rb") as file:
        place = tomllib.load(file)["project"]["entry-points"]["sglang.srt.plugins"]["perfmodel"]
    module, _, name = place.partition(":")
    registered = []
    registry = SimpleNamespace(register=lambda *arguments: registered.append(arguments))
    hooks = SimpleNamespace(HookRegistry=registry, HookType=SimpleNamespace(AROUND="around"))
    monkeypatch.setitem(importlib.sys.modules, "sglang.srt.plugins.hook_registry", hooks)
    monkeypatch.setattr(plugins, "find_spec", lambda package: object() if has_simulator else None)
    getattr(importlib.import_module(module), name)()
    assert [(hook, kind) for _, hook, kind in registered] == [(plugins._predictor, "around")] * has_simulator
