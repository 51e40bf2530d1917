"""Our step times under other engines' schedulers: an executor for vLLM, a time predictor for SGLang's simulator.

    vllm serve MODEL --distributed-executor-backend perfmodel_executors.engines.plugins.VllmExecutor \\
        --additional-config '{"perfmodel": {"scenario": "llama-3.1-8b-a100"}}'

The scenario has the model, its formats, devices and degrees of parallelism; the engine's flags rule its scheduler.
Interfaces: `Executor` of vLLM 0.30 (vllm/v1/executor/abstract.py), hooks of SGLang 0.5.23 (sglang/srt/plugins), and
`InferTimePredictor` of its simulator (tools/sglang-simulator). No engine is imported with this module."""

__all__ = ["SglangTimePredictor", "TimedExecutor", "register_in_sglang"]

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from typing import Any

from perfmodel.cost.memory.plan import plan_memory
from perfmodel.cost.steps.step_time import StepTimer
from perfmodel.errors import SpecError, UnsupportedError
from perfmodel.sim.replica.step_costs import shared_step_costs
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.scenario_file import load_scenario

_NAME = "perfmodel"
# vLLM's flags that count for steps and memory, by its configurations.
_FLAGS = {
    "scheduler_config": ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill"),
    "cache_config": ("block_size", "enable_prefix_caching"),
    "model_config": ("max_model_len",),
}
_NO_ANSWER = ("set_kv_cache_layout", "initialize_from_config", "reset_mm_cache", "reset_encoder_cache", "shutdown")
_ANSWERS: dict[str, list[Any]] = {  # of the only worker, which is not there
    "get_supported_kv_cache_layouts": [["LBNHC"]],
    "get_supported_tasks": [("generate",)],
    "compile_or_warm_up_model": [],
    "supports_draft_weight_updates": [False],
    **{method: [None] for method in _NO_ANSWER},
}


class _StepFuture(Future[Any]):
    """The outcome of a step, once it is `end_s` by `clock`."""

    def __init__(self, clock: Any, end_s: float, outcome: Any) -> None:
        super().__init__()
        self._clock, self._end_s = clock, end_s
        self.set_result(outcome)

    def done(self) -> bool:
        return bool(self._clock.monotonic() >= self._end_s)

    def result(self, timeout: float | None = None) -> Any:
        self._clock.sleep(max(0.0, self._end_s - self._clock.monotonic()))
        return super().result(timeout)


class TimedExecutor:
    """What `VllmExecutor` adds to vLLM's `Executor`: no worker, no model. A step ends when its predicted time is over
    and samples a token that ends no answer. clock: has `monotonic` and `sleep`, as `time`; set before the first step"""

    vllm_config: Any
    clock: Any = time

    def _init_executor(self) -> None:
        config = self.vllm_config
        values = {name: getattr(getattr(config, part), name) for part, names in _FLAGS.items() for name in names}
        flags = [f"engine.{name}={json.dumps(value)}" for name, value in values.items()]
        scenario = _scenario(config.additional_config.get(_NAME), "--additional-config", flags)
        engine, memory = scenario.engine, plan_memory(scenario.model, scenario.hardware, scenario.engine)
        has_groups = memory.kv_groups or memory.num_buffers or memory.rolling_span is not None
        refused = {
            "model": has_groups and "layers that keep another part of a sequence than all its tokens",
            "cluster": scenario.num_devices > engine.tensor_parallel_size and f"{scenario.num_devices} devices",
            "engine.speculative_config": (engine.speculative_config or config.speculative_config) and "drafts",
        }
        for field, what in refused.items():
            if what:
                sentence = f"got {what}; VllmExecutor times one tensor-parallel engine that drafts nothing."
                raise UnsupportedError(sentence, "not timed", field, f"{field}: ")
        config.scheduler_config.async_scheduling = engine.plans_ahead  # CPU builds take it back
        self._timer, self._num_blocks = StepTimer(scenario, shared_step_costs(scenario)), memory.num_kv_blocks
        self._free_at_s = 0.0  # when the devices have done all steps that they were given
        self._requests: dict[str, tuple[int, int]] = {}  # prompt tokens, and the token that is sampled
        self._numbers: Iterator[int] = count(1)
        self._step: _StepFuture | None = None

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        """One layer in place of all."""
        spec, config = import_module("vllm.v1.kv_cache_interface").FullAttentionSpec, self.vllm_config
        size, dtype = config.cache_config.block_size, config.model_config.dtype
        self._layer = spec(block_size=size, num_kv_heads=1, head_size=1, dtype=dtype)
        return [{"layer": self._layer}]

    def determine_available_memory(self) -> list[int]:
        """Bytes of as many blocks as the scenario's devices have, and of vLLM's null block."""
        return [(self._num_blocks + 1) * self._layer.page_size_bytes]

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Begin a step, once those before it are done; `sample_tokens` has its outcome."""
        outputs, outcome = import_module("vllm.v1.outputs"), None
        if not scheduler_output.total_num_scheduled_tokens:
            outcome = outputs.EMPTY_MODEL_RUNNER_OUTPUT
        else:
            sequences, sampled = self._read(scheduler_output)
            self._free_at_s = max(self._free_at_s, self.clock.monotonic()) + self._timer(sequences).seconds
            names = list(scheduler_output.num_scheduled_tokens)
            places = {name: place for place, name in enumerate(names)}
            ended = outputs.ModelRunnerOutput(names, places, sampled)
            self._step = _StepFuture(self.clock, self._free_at_s, ended)
        return _StepFuture(self.clock, 0.0, outcome) if non_block else outcome

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """The outcome of the step begun last."""
        assert self._step is not None
        return self._step if non_block else self._step.result()

    def _read(self, plan: Any) -> tuple[list[tuple[int, int]], list[list[int]]]:
        """(new tokens, tokens computed before) of each request of vLLM's plan, and what it samples."""
        for name in plan.finished_req_ids:
            self._requests.pop(name, None)
        progress: dict[str, tuple[int, int]] = {}  # tokens computed before, tokens known
        for new in plan.scheduled_new_reqs:
            self._requests[new.req_id] = new.prompt_len, self._token_of(new.sampling_params)
            progress[new.req_id] = new.num_computed_tokens, len(new.prefill_token_ids or ()) or new.prompt_len
        old = plan.scheduled_cached_reqs
        for name, computed, answered in zip(old.req_ids, old.num_computed_tokens, old.num_output_tokens, strict=True):
            progress[name] = computed, self._requests[name][0] + answered
        sequences, sampled = [], []
        for name, num_new in plan.num_scheduled_tokens.items():
            computed, num_known = progress[name]
            sequences.append((num_new, computed))
            sampled.append([self._requests[name][1]] if computed + num_new >= num_known else [])
        return sequences, sampled

    def _token_of(self, sampling: Any) -> int:
        """Requests have different ones: none finds an answer of another in the prefix cache."""
        ends, size = (
            {sampling.eos_token_id, *sampling.all_stop_token_ids},
            self.vllm_config.model_config.get_vocab_size(),
        )
        return int(next(token for number in self._numbers if (token := number % size) not in ends))

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Raises UnsupportedError for what only a worker could do."""
        if method not in _ANSWERS:
            raise UnsupportedError(f"got {method}, and VllmExecutor has no worker for it.", "no worker", f"{method}")
        return _ANSWERS[method]

    def check_health(self) -> None:
        """Nothing can fail."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True


@lru_cache
def _vllm_executor() -> type:
    base = import_module("vllm.v1.executor.abstract").Executor
    return type("VllmExecutor", (TimedExecutor, base), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    if name != "VllmExecutor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _vllm_executor()


class SglangTimePredictor:
    """An `InferTimePredictor`. model, hw, config: the simulator's own, which do not count; asked: `predictor` of its
    configuration file."""

    def __init__(self, model: Any, hw: Any, config: Any, asked: Any) -> None:
        scenario = _scenario(asked, "predictor")
        self._timer = StepTimer(scenario, shared_step_costs(scenario))

    def predict_infer_time(self, batch: Any) -> float:
        """Seconds of a `ScheduleBatch`."""
        sequences = [(request.extend_length, request.past_kv_length) for request in batch.reqs]
        return self._timer(sequences).seconds if sequences else 0.0

    def get_metrics(self) -> dict[str, Any]:
        return {}

    def reset_metrics(self) -> None:
        """There are none."""


def register_in_sglang() -> None:
    """SGLang's entry point: its simulator, where it is installed, gets a predictor named perfmodel."""
    if find_spec("sglang_simulator") is not None:
        hooks = import_module("sglang.srt.plugins.hook_registry")
        target = "sglang_simulator.simulation.manager.config.ConfigManager.get_inference_time_predictor"
        hooks.HookRegistry.register(target, _predictor, hooks.HookType.AROUND)


def _predictor(original: Callable[..., Any], manager: Any, model: Any, hw: Any, sched_config: Any) -> Any:
    asked = manager._get_raw_config().get("predictor", {})
    if asked.get("name") != _NAME:
        return original(manager, model, hw, sched_config)
    return SglangTimePredictor(model, hw, sched_config, asked)


def _scenario(asked: Any, where: str, flags: Sequence[str] = ()) -> Scenario:
    if not isinstance(asked, dict) or not isinstance(asked.get("scenario"), str):
        raise SpecError(f'{where}: got {asked!r} for {_NAME}; expected {{"scenario": NAME or path, "set": [...]}}.')
    return load_scenario(asked["scenario"], [*asked.get("set", ()), *flags])
