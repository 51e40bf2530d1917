"""SGLang's own scheduler, without a model: reads cases, writes what it decides in each step.

    python sglang_scheduler.py CASES.json OUT.json      in an environment with sglang and a CPU build of torch

SGLang's are: the event loops (`event_loop_normal`, `event_loop_overlap`) and what they call of `Scheduler` to choose a
batch and to process its result, `SchedulePolicy`, `PrefillAdder`, `ScheduleBatch` with its retraction, `Req`, the token
estimate, the radix tree (its Rust core), the allocators and the table of requests, on CPU tensors. Scripted are: which
requests arrive in an iteration, and the forward pass, which "samples" a token of its own for each request. The
`Scheduler` is made without its `__init__`, which would load a model; metrics, output and communication are silent.
One iteration of the loop is one step.
"""

__all__ = ["Case", "published_arguments", "run_case"]

import json
import logging
import os
import sys
import tempfile
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import absent_packages  # noqa: F401  before SGLang
import sglang
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.scheduler_components.logprob_result_processor import SchedulerLogprobResultProcessor
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import SpawnRanks, get_context, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 16384,
    "torch_dtype": "float32",
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
_MAX_STEPS = 20_000

# Attributes of the scheduler that are of other features than those under test: off, none, or silent.
_OFF = (
    *("enable_hierarchical_cache", "enable_lmcache", "enable_hicache_storage", "enable_hisparse", "enable_lora"),
    *("enable_fpm", "is_hybrid_swa", "is_hybrid_ssm", "enable_unified_cache_external_linker", "enable_unified_memory"),
    *("require_mlp_sync", "enable_overlap_mlx", "_war_barrier_enabled", "_engine_paused", "_sched_idled"),
    *("enable_pdmux", "abort_on_priority_when_disabled"),
)
_NONE = (
    *("dllm_config", "hisparse_coordinator", "decode_offload_manager", "draft_worker", "min_free_slots_delayer"),
    *("scripted_scheduler_hook", "dynamic_chunk_sizer", "prefill_delayer", "max_new_tokens_limit", "metrics_collector"),
    *("sliding_window_size", "truncation_align_size", "scheduler_stage_metrics", "max_queued_requests"),
)
_SILENT = (
    *("metrics_reporter", "output_streamer", "tp_worker", "model_worker", "load_inquirer", "load_publisher"),
    *("dllm_manager", "invariant_checker", "kv_events_publisher", "flush_wrapper", "session_controller"),
)


class _Silent:
    """In place of parts that report, send or measure: every attribute and every answer is none."""

    def __getattr__(self, name: str) -> Any:
        return _Silent()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None

    def __bool__(self) -> bool:
        return False


class _Passing(_Silent):
    """Hands its first argument on: adapters for what is not used here."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda batch, *args, **kwargs: batch


def _tokens(number: int, recorded: dict[str, Any]) -> array:
    """Prompts share their first tokens within a group; every other token chain is its own."""
    shared, group = recorded.get("shared", 0), recorded.get("group", 0)
    common = [100 + (group * 7919 + place * 31) % 9000 for place in range(shared)]
    return array("q", common + [10000 + number] * (recorded["prompt"] - shared))


def _publish(config: dict[str, Any]) -> None:
    """SGLang's arguments of a case."""
    policy = config.get("scheduling_policy", "fcfs")
    has_priority = policy == "priority"
    get_context().override(
        "witness",
        page_size=config["block_size"],
        chunked_prefill_size=config["max_num_batched_tokens"] if config.get("enable_chunked_prefill", True) else -1,
        max_prefill_tokens=config.get("max_prefill_tokens", 16384),
        enable_mixed_chunk=not config.get("prefill_exclusive", True),
        disable_overlap_schedule=not config.get("async_scheduling", False),
        schedule_policy="fcfs" if has_priority else policy,
        enable_priority_scheduling=has_priority,
        schedule_low_priority_values_first=True,
        disable_radix_cache=not config["enable_prefix_caching"],
        pp_max_micro_batch_size=config["max_num_seqs"],
    )


class Case:
    """One workload on its way through a scheduler of SGLang's."""

    def __init__(self, case: dict[str, Any], model_config: Any, server_args: Any) -> None:
        self.config, self.recorded = case["config"], case["requests"]
        _publish(self.config)
        recorded = self.recorded
        self.pending = deque(sorted(range(len(recorded)), key=lambda i: (recorded[i]["arrival"], i)))
        self.steps: list[list[Any]] = []
        self.requests: list[Any] = []
        self.scheduler = self._scheduler(model_config, server_args)

    def _scheduler(self, model_config: Any, server_args: Any) -> Any:
        """SGLang's scheduler as its `__init__` would leave it, as far as scheduling is concerned."""
        scheduler: Any = object.__new__(Scheduler)
        table, allocator, tree = self._memory()
        vars(scheduler).update(
            server_args=server_args,
            model_config=model_config,
            req_to_token_pool=table,
            token_to_kv_pool_allocator=allocator,
            tree_cache=tree,
            **self._settings(),
            **dict.fromkeys(_OFF, False),
            **dict.fromkeys(_NONE),
            **{name: _Silent() for name in _SILENT},
        )
        scheduler.metrics_reporter.num_generated_tokens = scheduler.metrics_reporter.forward_ct_decode = 0
        scheduler.ngram_embedding_manager = scheduler.dp_attn_adapter = _Passing()
        scheduler.beam_coordinator = types.SimpleNamespace(
            pending_member_rows=lambda batch: 0, commit_decode=lambda batch: set()
        )
        scheduler.grammar_manager = types.SimpleNamespace(has_waiting_grammars=lambda: False, grammar_queue=())
        self._begin(scheduler)
        return scheduler

    def _memory(self) -> tuple[Any, Any, Any]:
        """SGLang's table of requests, allocator of KV slots and radix tree; no slot holds anything."""
        config, page_size = self.config, self.config["block_size"]
        table = ReqToTokenPool(config["max_num_seqs"], config["max_model_len"] + 8, "cpu", False)
        size = config["num_blocks"] * page_size
        if page_size == 1:
            allocator: Any = TokenToKVPoolAllocator(size, torch.float32, "cpu", None, False)
        else:
            allocator = PagedTokenToKVPoolAllocator(size, page_size, torch.float32, "cpu", None, False)
            allocator.use_triton_kernels = False
        tree = UnifiedRadixCache(
            CacheInitParams(
                disable=not config["enable_prefix_caching"],
                req_to_token_pool=table,
                token_to_kv_pool_allocator=allocator,
                page_size=page_size,
                tree_components=(ComponentType.FULL,),
            )
        )
        return table, allocator, tree

    def _settings(self) -> dict[str, Any]:
        """What the scheduler has of a case's arguments, and of a single device."""
        config = self.config
        policy = config.get("scheduling_policy", "fcfs")
        return {
            "page_size": config["block_size"],
            "schedule_policy": "fcfs" if policy == "priority" else policy,
            "enable_priority_scheduling": policy == "priority",
            "schedule_low_priority_values_first": True,
            "priority_scheduling_preemption_threshold": 10,
            "enable_overlap": config.get("async_scheduling", False),
            "max_prefill_tokens": config.get("max_prefill_tokens", 16384),
            "max_running_requests": config["max_num_seqs"],
            "max_total_num_tokens": config["num_blocks"] * config["block_size"],
            "max_req_len": config["max_model_len"],
            "spec_algorithm": SpeculativeAlgorithm.from_string(None),
            "disaggregation_mode": DisaggregationMode.NULL,
            "device": "cpu",
            "is_generation": True,
            "processed_tokens_counter": 0,
            "kv_shard_widening": 1,
        }

    def _begin(self, scheduler: Any) -> None:
        """The parts of SGLang's `__init__` that concern scheduling, and what is scripted in place of others."""
        scheduler.init_running_status()
        scheduler.init_chunked_prefill()
        scheduler.init_schedule_policy()
        scheduler.batch_result_processor = SchedulerBatchResultProcessor(
            is_generation=True,
            disaggregation_mode=DisaggregationMode.NULL,
            enable_overlap=scheduler.enable_overlap,
            enable_overlap_mlx=False,
            model_config=scheduler.model_config,
            token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
            tree_cache=scheduler.tree_cache,
            hisparse_coordinator=None,
            req_to_token_pool=scheduler.req_to_token_pool,
            decode_offload_manager=None,
            metrics_collector=None,
            metrics_reporter=scheduler.metrics_reporter,
            draft_worker=None,
            model_worker=scheduler.model_worker,
            logprob_result_processor=SchedulerLogprobResultProcessor(model_config=scheduler.model_config),
            output_streamer=scheduler.output_streamer,
            beam_coordinator=scheduler.beam_coordinator,
            abort_request=None,
        )
        enqueue = scheduler._add_request_to_queue

        def queue(request: Any, is_retracted: bool = False) -> None:
            if request.is_retracted:
                self.steps[-1][2].append(int(request.rid))
            enqueue(request, is_retracted)

        scheduler._add_request_to_queue = queue
        scheduler.ingest_requests = self._arrive
        scheduler.run_batch = self.forward
        scheduler.on_idle = self._rest
        scheduler.publish_load_snapshot = scheduler._record_step_counters = lambda *args, **kwargs: None
        scheduler._maybe_clear_mm_inputs = scheduler._process_hicache_events = lambda *args, **kwargs: None
        scheduler.maybe_send_health_check_signal = scheduler._prefetch_kvcache = lambda *args, **kwargs: None
        scheduler.launch_batch_sample_if_needed = lambda *args: None

    # ---------------------------------------------------------------- what is scripted

    def _arrive(self) -> None:
        """The beginning of an iteration: requests of this step, or the end when all are done."""
        scheduler, step = self.scheduler, len(self.steps)
        if not self.pending and all(request.finished() for request in self.requests) and not scheduler.result_queue:
            scheduler.gracefully_exit = True
        if step == _MAX_STEPS:
            raise RuntimeError(f"not done after {step} steps")
        self.steps.append([step, [], []])
        now = self.now()
        while self.pending and self.recorded[self.pending[0]]["arrival"] <= now:
            self._add(self.pending.popleft())

    def now(self) -> float:
        """What arrivals are counted in: steps, here."""
        return self.steps[-1][0]

    def _add(self, number: int) -> None:
        recorded = self.recorded[number]
        sampling = SamplingParams(
            max_new_tokens=recorded["output"], ignore_eos=self.config.get("ignore_eos", True), temperature=0.0
        )
        sampling.normalize(None)
        request = Req(
            str(number),
            "",
            _tokens(number, recorded),
            sampling,
            vocab_size=32000,
            eos_token_ids=set(),
            priority=recorded.get("priority", 0) if self.scheduler.enable_priority_scheduling else None,
        )
        self.scheduler.init_req_max_new_tokens(request)
        if request.sampling_params.max_new_tokens != recorded["output"]:
            raise RuntimeError(f"request {number} is clipped to {request.sampling_params.max_new_tokens} tokens")
        self.requests.append(request)
        self.scheduler._add_request_to_queue(request)

    def forward(self, batch: Any) -> Any:
        """A forward pass: its grants are recorded, each request's token is its own."""
        scheduler = self.scheduler
        scheduler.forward_ct += 1
        batch.forward_iter = scheduler.forward_ct
        scheduler._sched_idled = False
        if batch.extend_num_tokens:
            scheduler.processed_tokens_counter += batch.extend_num_tokens
        if batch.forward_mode.is_decode():
            grants = [
                [int(r.rid), length - 1, 1] for r, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True)
            ]
        else:
            spans = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
            grants = [[int(r.rid), computed, count] for r, computed, count in spans]
        self.steps[-1][1] = sorted(grants)
        batch.input_ids = None
        tokens = [20000 + int(request.rid) for request in batch.reqs]
        return GenerationBatchResult(next_token_ids=torch.tensor(tokens, dtype=torch.int64))

    def _rest(self) -> None:
        """An iteration without a batch: of its housekeeping, only the estimate begins anew."""
        scheduler = self.scheduler
        running, last = scheduler.running_batch, scheduler.last_batch
        is_busy = not running.is_empty() or scheduler.chunked_req is not None or scheduler.waiting_queue
        if not (is_busy or (last is not None and not last.is_empty()) or scheduler.result_queue):
            scheduler.new_token_ratio_tracker.reset()

    def run(self) -> list[list[Any]]:
        """The steps until the last request is done, but for those in which nothing is decided."""
        scheduler = self.scheduler
        (scheduler.event_loop_overlap if scheduler.enable_overlap else scheduler.event_loop_normal)()
        steps = ([step, grants, sorted(set(retracted))] for step, grants, retracted in self.steps)
        return [step for step in steps if step[1] or step[2]]


def run_case(case: dict[str, Any], model_config: Any, server_args: Any) -> list[Any]:
    """The steps of one case; see the module."""
    return Case(case, model_config, server_args).run()


@contextmanager
def published_arguments() -> Iterator[tuple[Any, Any]]:
    """SGLang's configuration of a small model and its arguments, which its parts read from now on."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
        args = ServerArgs(
            model_path=folder,
            device="cpu",
            load_format="dummy",
            skip_tokenizer_init=True,
            attention_backend="torch_native",
            page_size=1,
            mem_fraction_static=0.5,
        )
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0))
        yield ModelConfig.from_server_args(args), args


def main(cases_file: str, out_file: str) -> None:
    """Run all cases of a file."""
    cases = json.loads(Path(cases_file).read_text(encoding="utf-8"))
    logging.disable(logging.CRITICAL)
    recorded = []
    with published_arguments() as arguments:
        for case in cases:
            try:
                recorded.append({**case, "steps": run_case(case, *arguments)})
            except Exception as error:  # a case that SGLang refuses is told, not lost
                if os.environ.get("WITNESS_RAISES"):
                    raise
                recorded.append({**case, "error": f"{type(error).__name__}: {error}"[:300]})
    document = {"engine": "sglang", "version": sglang.__version__, "cases": recorded}
    Path(out_file).write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
