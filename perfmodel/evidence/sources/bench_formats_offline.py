"""Result files of tools without clients, or with whole-run figures only.

llama-bench    `-o json|jsonl|csv`: a row per test, prompts of n_prompt tokens or n_gen generated ones. `avg_ts` is
               tokens/s. The device is `gpu_info` (`cpu_info` if layers run on the processor), GGUF type and model in
               `model_type`; file names in the usual form are more precise (tools/llama-bench/llama-bench.cpp)
MLPerf         `mlperf_log_summary.txt`: `name : value` lines in sections, without model, data set, machine, or lengths
               but the total tokens of answers. Times in ns. Server: Poisson arrivals at `target_qps`; Offline: all
               samples at once (loadgen/results.cc 6.0.17)
trtllm-bench   `throughput|latency --report_json`: `performance` in ms and tokens/s; `streaming_metrics` only with
               --streaming: TPOT without the first token. Requests are sent at once unless limited by --concurrency,
               which shows only as the mean in flight (bench/dataclasses/reporting.py)"""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from perfmodel.errors import SpecError
from perfmodel.evidence.sources.bench_run import MAX_TOKENS, Figure, Place, ResultFields, known_figures, known_format
from perfmodel.evidence.sources.local import METRICS, LocalSetup
from perfmodel.evidence.sources.setups import quantization_of
from perfmodel.files.tables import load_table

_FILE_TYPE = re.compile(r"[-._](i?q\d\w*|bf16|f16|f32|mxfp4)(?=\.gguf$|-\d{5}-of-\d{5}\.gguf$)", re.IGNORECASE)
_TYPE = re.compile(r"\b(I?Q\d_\w+|Q\d_K(?: - (?:Small|Medium|Large))?|BF16|F16|F32|MXFP4)", re.IGNORECASE)
_SIZES = {" - small": "_s", " - medium": "_m", " - large": "_l"}
_PARTS = re.compile(r"-\d{5}-of-\d{5}$")
_AUTO = "-1"  # of flash_attn: as the backend has it
_MAX_PARAMETERS = 1e14


def _llama_test(fields: ResultFields) -> str:
    return "pp" if fields.count("n_prompt") else "tg"


def _llama_refusal(fields: ResultFields) -> str:
    prompt, generated, data = fields.count("n_prompt"), fields.count("n_gen"), fields.data
    if bool(prompt) == bool(generated):
        return f"got n_prompt {prompt} and n_gen {generated}, compared are tests of one of the two."
    for key in ("n_prompt", "n_gen", "n_depth", "n_ubatch"):
        if (fields.number(key) or 0) > MAX_TOKENS:
            return f"{key}: got {str(data[key])[:40]!r}; expected up to {MAX_TOKENS:g} tokens."
    if (fields.number("model_n_params") or 0) > _MAX_PARAMETERS:
        shown = str(data["model_n_params"])[:40]
        return f"model_n_params: got {shown!r}; expected up to {_MAX_PARAMETERS:g}."
    return "" if fields.number("avg_ts") else "has no tokens per second (avg_ts); there is nothing to compare."


def _llama_backend(fields: ResultFields) -> str:
    if str(fields.data.get("n_gpu_layers")) == "0":  # -1 for all that fit
        return "cpu"
    backends = fields.text("backends").lower()
    known = load_table("published_words")["llama_backends"]
    return str(next((ours for theirs, ours in known if theirs in backends), "cpu"))


def _llama_setup(fields: ResultFields) -> LocalSetup:
    """The timed setup; values may be text, as in a CSV."""
    data, backend = fields.data, _llama_backend(fields)
    is_cpu = backend == "cpu"
    stated = fields.text("cpu_info" if is_cpu else "gpu_info")
    devices = [item.strip() for item in stated.split(",") if item.strip()]
    if not devices:
        raise SpecError(f"{fields.name}: names no device in gpu_info or cpu_info; give --hardware.")
    flash = None if str(data.get("flash_attn")) in ("None", _AUTO) else data.get("flash_attn")
    model, gguf_type = _llama_model(fields)
    return LocalSetup(
        device=devices[0],
        device_class="cpu" if is_cpu else "gpu",
        num_devices=len(devices),
        tool="llama-bench",
        backend=backend,
        build=_llama_build(fields),
        model=model,
        params=fields.number("model_n_params") or 0.0,
        gguf_type=gguf_type,
        file_size_bytes=fields.number("model_size") or 0.0,
        flash=None if flash is None else str(flash).lower() in ("1", "true"),
        kv_type=fields.text("type_k"),
        test=_llama_test(fields),
        num_prompt=fields.count("n_prompt"),
        num_generated=fields.count("n_gen"),
        depth=fields.count("n_depth"),
        ubatch=fields.count("n_ubatch"),
    )


def _llama_build(fields: ResultFields) -> str:
    build = fields.number("build_number")
    return f"b{build:.0f}" if build else ""


def _llama_notes(fields: ResultFields) -> Iterator[str]:
    threads = fields.number("n_threads")
    if threads and _llama_backend(fields) == "cpu":
        yield f"ran with {threads:.0f} threads; predicted is the processor with all of its cores"


def _llama_model(fields: ResultFields) -> tuple[str, str]:
    """(model name, weight format)"""
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


LLAMA_BENCH = known_format(
    "llama_bench",
    refusal=_llama_refusal,
    figures=lambda fields: ((METRICS[_llama_test(fields)], ("avg_ts",), 1.0),),
    completed=lambda fields: 1,
    version=_llama_build,
    notes=_llama_notes,
    local=_llama_setup,
)


_LINE = re.compile(r"^\s*(.+?)\s*:\s*(\S.*?)\s*$", re.MULTILINE)
_MAX_SERVED = 4000  # requests of a Server run that is simulated: its means have long settled
_MLPERF_HEAD = "MLPerf Results Summary"


def mlperf_log(text: str) -> dict[str, str] | None:
    """Summary lines by name; None for other text."""
    return {_MLPERF_HEAD: "", **dict(_LINE.findall(text))} if _MLPERF_HEAD in text[:2000] else None


def _is_offline(fields: ResultFields) -> bool:
    return fields.text("Scenario") == "Offline"


def _samples(fields: ResultFields) -> tuple[str, float]:
    """(path of the samples per second, their number)"""
    places = (f"{'S' if _is_offline(fields) else 'Completed s'}amples per second", "Scheduled samples per second")
    return next(((place, rate) for place in places if (rate := fields.number(place))), (places[0], 0.0))


def _tokens(fields: ResultFields) -> str:
    return "Tokens per second" if _is_offline(fields) else "Completed tokens per second"


def _mlperf_refusal(fields: ResultFields) -> str:
    kind, mode = fields.text("Scenario"), fields.text("Mode") or "PerformanceOnly"
    if mode != "PerformanceOnly":
        return f"is of mode {mode[:30]}, compared are runs of mode PerformanceOnly."
    if kind not in ("Server", "Interactive", "Offline"):
        return (
            f"got scenario {kind[:30]!r}, compared are Server, Interactive and Offline; the file may have been cut off."
        )
    if not _samples(fields)[1]:
        return "states no samples per second: the file was cut off, or nothing was answered."
    if kind != "Offline" and fields.number("target_qps") is None:
        return "states no target_qps: the file was cut off."
    return ""


def _mlperf_figures(fields: ResultFields) -> tuple[Figure, ...]:
    """Offline, all samples wait for all others: latencies repeat what the rate says."""
    rates = (("request_throughput", (_samples(fields)[0],), 1.0), ("output_throughput", (_tokens(fields),), 1.0))
    return (*(() if _is_offline(fields) else known_figures("mlperf")), *rates)


def _mlperf_count(fields: ResultFields) -> int:
    """As long as its longest latency (Offline), or its requested minimum duration."""
    samples = _samples(fields)[1]
    if _is_offline(fields):
        return max(round(samples * (fields.number("Max latency (ns)", scale=1e-9) or 0.0)), 1)
    duration_s = fields.number("min_duration (ms)", scale=1e-3) or 0.0
    return min(max(round(samples * duration_s), fields.count("min_query_count"), 1), _MAX_SERVED)


def _mlperf_notes(fields: ResultFields) -> Iterator[str]:
    result = fields.text("Result is")
    if result and result != "VALID":
        yield f"the generator calls the result {result}"
    yield "the file has no lengths of prompts, no model and no machine: those are the scenario's"


MLPERF = known_format(
    "mlperf",
    refusal=_mlperf_refusal,
    figures=_mlperf_figures,
    completed=_mlperf_count,
    load={
        "rate": lambda fields: None if _is_offline(fields) else fields.number("target_qps"),
        "answer": lambda fields: (fields.number(_tokens(fields)) or 0.0) / _samples(fields)[1],
    },
    notes=_mlperf_notes,
)


_ALL_IN_FLIGHT = 0.9  # of the requests or of the batch on average: nothing held them back


def _trtllm_slots(fields: ResultFields) -> int | None:
    """Mean in flight if requests were held back: a draining burst averages half of its own."""
    count = fields.count("request_info", "num_requests")
    places = fields.number("world_info", "max_batch_size") or count
    in_flight = fields.number("request_info", "avg_num_concurrent_requests") or 0.0
    return max(1, round(in_flight)) if in_flight < _ALL_IN_FLIGHT * min(count, places) / 2 else None


def _trtllm_notes(fields: ResultFields) -> Iterator[str]:
    in_flight = fields.number("request_info", "avg_num_concurrent_requests") or 0.0
    taken = "sent at once" if _trtllm_slots(fields) is None else "its concurrency"
    yield f"the report states no concurrency: {in_flight:.1f} requests in flight on average, taken as {taken}"


def _world(key: str) -> Place:
    return lambda fields: fields.count("world_info", key)


# Its share of memory for KV is of what the weights leave free, another number than vLLM's: left to the default.
TRTLLM = known_format(
    "trtllm",
    load={"concurrency": _trtllm_slots},
    says={
        "engine.profile": lambda fields: "trtllm",
        "engine.quantization": lambda fields: quantization_of(fields.text("engine", "quantization")),
        "engine.kv_cache_dtype": lambda fields: (
            "fp8" if "FP8" in str(fields.at("engine", "kv_cache_dtype")).upper() else None
        ),
        "engine.tensor_parallel_size": _world("tp_size"),
        "engine.pipeline_parallel_size": _world("pp_size"),
        "engine.max_num_seqs": _world("max_batch_size"),
        "engine.max_num_batched_tokens": _world("max_num_tokens"),
        "engine.enable_expert_parallel": lambda fields: (fields.number("world_info", "ep_size") or 1) > 1,
    },
    notes=_trtllm_notes,
)
