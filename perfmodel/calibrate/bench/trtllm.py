"""Reports of `trtllm-bench throughput|latency --report_json`: what ran, and averages and percentiles of its requests.

`performance` is in ms and tokens/s; `streaming_metrics` only with --streaming: their TPOT leaves the first token out.
Requests are all sent at once unless --concurrency held them back, which a report shows only as the average number in
flight. The requests themselves are in another file (--request_json), with times of the same clock in ns.

Fields: NVIDIA/TensorRT-LLM, tensorrt_llm/bench/dataclasses/reporting.py.
"""

__all__ = ["is_trtllm_report", "read_trtllm_report"]

from collections.abc import Mapping
from typing import Any

from perfmodel.calibrate.bench.runs import BenchLoad, BenchRun, Said, figure, member, text_of
from perfmodel.calibrate.served.setups import quantization_of
from perfmodel.errors import SpecError

_PERCENTILES = {"p50": "median", "p90": "p90", "p95": "p95", "p99": "p99"}
_ALL_IN_FLIGHT = 0.9  # of the requests or of the batch on average: nothing held them back


def is_trtllm_report(data: Mapping[str, Any]) -> bool:
    """Whether it is such a report."""
    return {"engine", "world_info", "request_info", "performance"} <= set(data)


def read_trtllm_report(name: str, data: Mapping[str, Any]) -> BenchRun:
    """The run of a report, called `name`. Raises SpecError for what cannot be compared."""
    count = int(figure(name, data, "request_info", "num_requests") or 0)
    if not count:
        raise SpecError(f"{name}: none of its requests was answered; there is nothing to compare.")
    in_flight = figure(name, data, "request_info", "avg_num_concurrent_requests") or 0.0
    places = figure(name, data, "world_info", "max_batch_size") or count
    is_held_back = in_flight < _ALL_IN_FLIGHT * min(count, places) / 2  # a drained burst has half of it on average
    slots = max(1, round(in_flight))
    note = f"the report states no concurrency: {in_flight:.1f} requests in flight on average"
    return BenchRun(
        name=name,
        tool="trtllm-bench",
        version=text_of(name, data, "engine", "version"),
        says=_says(name, data),
        load=BenchLoad(
            "closed" if is_held_back else "burst",
            count,
            slots if is_held_back else None,
            prompt=figure(name, data, "request_info", "avg_input_length"),
            answer=figure(name, data, "request_info", "avg_output_length"),
        ),
        measured=_figures(name, data),
        completed=count,
        failed=0,
        notes=(f"{note}, {'taken as its concurrency' if is_held_back else 'taken as sent at once'}",),
    )


def _figures(name: str, data: Mapping[str, Any]) -> dict[str, float]:
    found = {
        "request_throughput": figure(name, data, "performance", "request_throughput_req_s"),
        "output_throughput": figure(name, data, "performance", "system_output_throughput_tok_s"),
        "total_token_throughput": figure(name, data, "performance", "system_total_throughput_tok_s"),
        "mean_e2el_ms": figure(name, data, "performance", "avg_request_latency_ms"),
        "mean_ttft_ms": figure(name, data, "streaming_metrics", "avg_ttft_ms"),
        "mean_tpot_ms": figure(name, data, "streaming_metrics", "avg_tpot_ms"),
    }
    places = {
        "e2el": ("performance", "request_latency_percentiles_ms"),
        "ttft": ("streaming_metrics", "ttft_percentiles"),
        "tpot": ("streaming_metrics", "tpot_percentiles"),
    }
    for metric, place in places.items():
        for theirs, ours in _PERCENTILES.items():
            found[f"{ours}_{metric}_ms"] = figure(name, data, *place, theirs)
    return {key: value for key, value in found.items() if value}


def _says(name: str, data: Mapping[str, Any]) -> dict[str, Said]:
    """The devices by their driver's name, the layout, the limits of a step."""
    found: dict[str, Said] = {
        "model": text_of(name, data, "engine", "model"),
        "hardware": text_of(name, data, "machine", "name"),
        "engine.profile": "trtllm",
        "engine.version": text_of(name, data, "engine", "version"),
        "engine.quantization": quantization_of(text_of(name, data, "engine", "quantization")) or "",
    }
    if "FP8" in str(member(name, data, "engine", "kv_cache_dtype")).upper():
        found["engine.kv_cache_dtype"] = "fp8"
    counts = {
        "tp_size": "engine.tensor_parallel_size",
        "pp_size": "engine.pipeline_parallel_size",
        "max_batch_size": "engine.max_num_seqs",
        "max_num_tokens": "engine.max_num_batched_tokens",
    }
    for theirs, ours in counts.items():
        value = figure(name, data, "world_info", theirs)
        if value:
            found[ours] = int(value)
    if (figure(name, data, "world_info", "ep_size") or 1) > 1:
        found["engine.enable_expert_parallel"] = True
    # Its share of memory for KV is of what the weights leave free, another number than vLLM's: left to the default.
    return {key: value for key, value in found.items() if value}
