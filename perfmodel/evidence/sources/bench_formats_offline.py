"""Files of tools that time an engine without clients, or have figures of whole runs alone.

llama-bench    `-o json|jsonl|csv`: a row for each test, prompts of n_prompt tokens or n_gen generated ones. `avg_ts` is
               tokens per second. The device is `gpu_info` (`cpu_info` where layers run on the processor), the GGUF type
               and the model's name are in `model_type`; a file's name says them better where it follows the usual form
               (tools/llama-bench/llama-bench.cpp)
MLPerf         `mlperf_log_summary.txt`: `name : value` lines in sections. It knows neither the model nor its data set
               nor the machine, and no lengths but the tokens of answers in all. Times are in ns. Server: Poisson
               arrivals at `target_qps`; Offline: all samples at once (loadgen/results.cc 6.0.17)
trtllm-bench   `throughput|latency --report_json`: `performance` is in ms and tokens/s; `streaming_metrics` only with
               --streaming: their TPOT leaves the first token out. Requests are all sent at once unless --concurrency
               held them back, which a report shows only as the average in flight (bench/dataclasses/reporting.py)
"""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.evidence.observation import Observation
from perfmodel.evidence.sources.bench_run import MOST_TOKENS, BenchLoad, BenchRun, Figure, ResultFields, Said, stated
from perfmodel.evidence.sources.local import LocalSetup, local_observation
from perfmodel.evidence.sources.setups import quantization_of

Object = Mapping[str, Any]

# ---------------------------------------------------------------- llama-bench

_FILE_TYPE = re.compile(r"[-._](i?q\d\w*|bf16|f16|f32|mxfp4)(?=\.gguf$|-\d{5}-of-\d{5}\.gguf$)", re.IGNORECASE)
_TYPE = re.compile(r"\b(I?Q\d_\w+|Q\d_K(?: - (?:Small|Medium|Large))?|BF16|F16|F32|MXFP4)", re.IGNORECASE)
_SIZES = {" - small": "_s", " - medium": "_m", " - large": "_l"}
_PARTS = re.compile(r"-\d{5}-of-\d{5}$")
_BACKENDS = {
    **{name: name for name in ("cuda", "rocm", "vulkan", "metal", "opencl", "sycl", "cpu")},
    **{"hip": "rocm", "mtl": "metal", "blas": "cpu"},
}
_BACKEND_ORDER = ("cuda", "rocm", "hip", "vulkan", "metal", "mtl", "opencl", "sycl", "blas", "cpu")
_TOOL = "llama-bench"
_AUTO = "-1"  # of flash_attn: as the backend has it
_MOST_PARAMETERS = 1e14


def read_llama_bench_row(name: str, data: Object) -> BenchRun:
    """The test that `data` is of, called `name`; values may be text, as CSV has them."""
    fields = ResultFields(name, data)
    prompt, generated, rate = fields.count("n_prompt"), fields.count("n_gen"), fields.number("avg_ts")
    if bool(prompt) == bool(generated):
        raise SpecError(f"{name}: found n_prompt {prompt} and n_gen {generated}, compared are tests of one of the two.")
    for key in ("n_prompt", "n_gen", "n_depth", "n_ubatch"):
        if (fields.number(key) or 0) > MOST_TOKENS:
            raise SpecError(f"{name}: {key}: found {str(data[key])[:40]!r}, allowed up to {MOST_TOKENS:g} tokens.")
    if (fields.number("model_n_params") or 0) > _MOST_PARAMETERS:
        shown = str(data["model_n_params"])[:40]
        raise SpecError(f"{name}: model_n_params: found {shown!r}, allowed up to {_MOST_PARAMETERS:g}.")
    if not rate:
        raise SpecError(f"{name}: has no tokens per second (avg_ts); there is nothing to compare.")
    row = _llama_row(fields, prompt, generated, rate)
    setup: LocalSetup = row.setup
    threads = fields.number("n_threads")
    note = f"ran with {threads or 0:.0f} threads; predicted is the processor with all of its cores"
    return BenchRun(
        name=name,
        tool=_TOOL,
        version=setup.build,
        says={"model": setup.model, "hardware": setup.device, "engine.profile": "llamacpp"},
        load=BenchLoad("closed", 1, 1, prompt=prompt or None, answer=generated or None),
        measured=row.metrics,
        completed=1,
        notes=(note,) if setup.backend == "cpu" and threads else (),
        row=row,
    )


def _llama_row(fields: ResultFields, prompt: int, generated: int, rate: float) -> Observation:
    data, backends = fields.data, fields.text("backends").lower()
    backend = next((_BACKENDS[theirs] for theirs in _BACKEND_ORDER if theirs in backends), "cpu")
    if str(data.get("n_gpu_layers")) == "0":  # -1 for all that fit
        backend = "cpu"
    is_cpu = backend == "cpu"
    stated = fields.text("cpu_info" if is_cpu else "gpu_info")
    devices = [item.strip() for item in stated.split(",") if item.strip()]
    if not devices:
        raise SpecError(f"{fields.name}: names no device in gpu_info or cpu_info; give --hardware.")
    flash = None if str(data.get("flash_attn")) in ("None", _AUTO) else data.get("flash_attn")
    build = fields.number("build_number")
    model, gguf_type = _llama_model(fields)
    setup = LocalSetup(
        device=devices[0],
        device_class="cpu" if is_cpu else "gpu",
        num_devices=len(devices),
        tool=_TOOL,
        backend=backend,
        backend_detail="",
        build=f"b{build:.0f}" if build else "",
        date=None,
        model=model,
        params=fields.number("model_n_params") or 0.0,
        active_params=0.0,
        gguf_type=gguf_type,
        file_size_bytes=fields.number("model_size") or 0.0,
        flash=None if flash is None else str(flash).lower() in ("1", "true"),
        kv_type=fields.text("type_k"),
        test="pp" if prompt else "tg",
        num_prompt=prompt,
        num_generated=generated,
        depth=fields.count("n_depth"),
        batch=1,
        ubatch=fields.count("n_ubatch"),
    )
    return local_observation(fields.name, setup, rate, fields.name, _TOOL)


def _llama_model(fields: ResultFields) -> tuple[str, str]:
    """(the model's name, the type of its weights)"""
    stem = PurePosixPath(fields.text("model_filename").replace("\\", "/")).name
    kind = fields.text("model_type")
    plain = _PARTS.sub("", _FILE_TYPE.sub("", stem).removesuffix(".gguf"))
    model = plain or _TYPE.sub("", kind).strip()
    result = _FILE_TYPE.search(stem)
    if result is not None:
        return model, result[1].lower()
    stated = _TYPE.search(kind)
    if stated is None:
        raise SpecError(
            f"{fields.name}: neither model_filename nor model_type names the type of the weights (Q4_K_M, F16)."
        )
    lower = stated[1].lower()
    for words, short in _SIZES.items():
        lower = lower.replace(words, short)
    return model, lower


# ---------------------------------------------------------------- MLPerf

_LINE = re.compile(r"^\s*(.+?)\s*:\s*(\S.*?)\s*$", re.MULTILINE)
_MLPERF_QUANTILES = {"50.00": "median", "90.00": "p90", "95.00": "p95", "99.00": "p99"}
# The generator's words for a latency, as a mean and at a percentile; newer ones last.
_MLPERF_LATENCIES = (
    ("ttft", "Mean First Token latency (ns)", "{} percentile first token latency (ns)"),
    ("tpot", "Mean Time per Output Token (ns)", "{} percentile time to output token (ns)"),
    ("tpot", "Mean Time to Output Token (ns)", "{} percentile time to output token (ns)"),
    ("e2el", "Mean latency (ns)", "{} percentile latency (ns)"),
)
_MLPERF_FIGURES: tuple[Figure, ...] = tuple(
    figure
    for metric, mean, percentile in _MLPERF_LATENCIES
    for figure in (
        (f"mean_{metric}_ms", (mean,), 1e-6),
        *((f"{ours}_{metric}_ms", (percentile.format(theirs),), 1e-6) for theirs, ours in _MLPERF_QUANTILES.items()),
    )
)
_MOST_SERVED = 4000  # requests of a Server run that is simulated: its means have long settled


def is_mlperf_log(text: str) -> bool:
    """Whether it is such a summary."""
    return "MLPerf Results Summary" in text[:2000]


def read_mlperf_log(name: str, text: str) -> BenchRun:
    """The run of the summary `text`, called `name`."""
    lines = dict(_LINE.findall(text))
    fields, kind = ResultFields(name, lines), lines.get("Scenario", "")
    if lines.get("Mode", "PerformanceOnly") != "PerformanceOnly":
        raise SpecError(f"{name}: is of mode {lines['Mode'][:30]}, compared are runs of mode PerformanceOnly.")
    if kind not in ("Server", "Interactive", "Offline"):
        raise SpecError(
            f"{name}: found scenario {kind[:30]!r}, compared are Server, Interactive and Offline; the file may have "
            f"been cut off."
        )
    is_offline = kind == "Offline"
    # Offline all wait for all others: how long each took says what the rate does.
    measured = {} if is_offline else fields.figures(_MLPERF_FIGURES)
    words = ("Tokens", "Samples") if is_offline else ("Completed tokens", "Completed samples")
    tokens, samples = (fields.number(f"{word} per second") for word in words)
    samples = samples or fields.number("Scheduled samples per second")
    if not samples:
        raise SpecError(f"{name}: states no samples per second: the file was cut off, or nothing was answered.")
    measured["request_throughput"] = samples
    if tokens:
        measured["output_throughput"] = tokens
    # It is as long as its longest latency (Offline) or as it was asked to be at least.
    key, scale = ("Max latency (ns)", 1e-9) if is_offline else ("min_duration (ms)", 1e-3)
    stated = 0 if is_offline else fields.count("min_query_count")
    count = max(round(samples * (fields.number(key, scale=scale) or 0.0)), stated, 1)
    count = count if is_offline else min(count, _MOST_SERVED)
    result = lines.get("Result is", "")
    invalid = (f"the generator calls the result {result}",) if result and result != "VALID" else ()
    rate = None if is_offline else fields.number("target_qps")
    answer = tokens / samples if tokens else None
    return BenchRun(
        name=name,
        tool="MLPerf LoadGen",
        says={},
        load=BenchLoad("burst" if is_offline else "open", count, rate=rate, answer=answer),
        measured=measured,
        completed=count,
        notes=(*invalid, "the file has no lengths of prompts, no model and no machine: those are the scenario's"),
    )


# ---------------------------------------------------------------- trtllm-bench

_TRTLLM_FIGURES: tuple[Figure, ...] = (
    ("request_throughput", ("performance", "request_throughput_req_s"), 1.0),
    ("output_throughput", ("performance", "system_output_throughput_tok_s"), 1.0),
    ("total_token_throughput", ("performance", "system_total_throughput_tok_s"), 1.0),
    ("mean_e2el_ms", ("performance", "avg_request_latency_ms"), 1.0),
    ("mean_ttft_ms", ("streaming_metrics", "avg_ttft_ms"), 1.0),
    ("mean_tpot_ms", ("streaming_metrics", "avg_tpot_ms"), 1.0),
    *(
        (f"{ours}_{metric}_ms", (*place, theirs), 1.0)
        for metric, place in (
            ("e2el", ("performance", "request_latency_percentiles_ms")),
            ("ttft", ("streaming_metrics", "ttft_percentiles")),
            ("tpot", ("streaming_metrics", "tpot_percentiles")),
        )
        for theirs, ours in {"p50": "median", "p90": "p90", "p95": "p95", "p99": "p99"}.items()
    ),
)
_ALL_IN_FLIGHT = 0.9  # of the requests or of the batch on average: nothing held them back


def read_trtllm_report(name: str, data: Object) -> BenchRun:
    """The run of a report, called `name`."""
    fields = ResultFields(name, data)
    count = fields.count("request_info", "num_requests")
    if not count:
        raise fields.unanswered()
    in_flight = fields.number("request_info", "avg_num_concurrent_requests") or 0.0
    places = fields.number("world_info", "max_batch_size") or count
    is_held_back = in_flight < _ALL_IN_FLIGHT * min(count, places) / 2  # a drained burst has half of it on average
    note = f"the report states no concurrency: {in_flight:.1f} requests in flight on average"
    return BenchRun(
        name=name,
        tool="trtllm-bench",
        version=fields.text("engine", "version"),
        says=_trtllm_says(fields),
        load=BenchLoad(
            "closed" if is_held_back else "burst",
            count,
            max(1, round(in_flight)) if is_held_back else None,
            prompt=fields.number("request_info", "avg_input_length"),
            answer=fields.number("request_info", "avg_output_length"),
        ),
        measured=fields.figures(_TRTLLM_FIGURES),
        completed=count,
        notes=(f"{note}, {'taken as its concurrency' if is_held_back else 'taken as sent at once'}",),
    )


def _trtllm_says(fields: ResultFields) -> dict[str, Said]:
    """The devices by their driver's name, the layout, the limits of a step.

    Its share of memory for KV is of what the weights leave free, another number than vLLM's: left to the default.
    """
    world = fields.within("world_info")
    is_fp8 = "FP8" in str(fields.at("engine", "kv_cache_dtype")).upper()
    return stated(
        {
            "model": fields.text("engine", "model"),
            "hardware": fields.text("machine", "name"),
            "engine.profile": "trtllm",
            "engine.version": fields.text("engine", "version"),
            "engine.quantization": quantization_of(fields.text("engine", "quantization")),
            "engine.kv_cache_dtype": "fp8" if is_fp8 else None,
            "engine.tensor_parallel_size": world.count("tp_size"),
            "engine.pipeline_parallel_size": world.count("pp_size"),
            "engine.max_num_seqs": world.count("max_batch_size"),
            "engine.max_num_batched_tokens": world.count("max_num_tokens"),
            "engine.enable_expert_parallel": (world.number("ep_size") or 1) > 1,
        }
    )
