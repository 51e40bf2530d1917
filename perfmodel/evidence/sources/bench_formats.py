"""Result files of load tools: where each format has its figures, and its peculiarities.

vLLM, SGLang   `vllm bench serve --save-result [--save-detailed]` and `bench_serving` share an ancestor: latencies in
               ms under the same keys, arrays in s. SGLang says `e2e_latency` for `e2el`, `total_throughput` for
               `total_token_throughput`, and omits the model; both omit the devices. SGLang's and older vLLM details
               lack start times; SGLang's lists include failed requests, with an error and no tokens
               (vllm/benchmarks/serve.py, sglang/benchmark/serving.py 0.5.23)
AIPerf         `profile_export_aiperf.json` has figures (`{"unit", "avg", "p50", ...}` by metric) and the request,
               `profile_export.jsonl` one line per request; GenAI-Perf has only the former. Inter-token latency is
               (latency - TTFT) / (tokens - 1) of a request. Warm-up requests are dropped (aiperf 0.13.0, schema 1.4;
               genai-perf 0.0.16)
GuideLLM       `benchmarks.json`, versions 1 and 2: a benchmark per rate or concurrency, with all requests. Time per
               output token counts the first token; the figure without it is compared. Request times are clock seconds,
               metrics ms, except `request_latency` in s. `incomplete` requests were cut off by the end of the run
               (guidellm/schemas 0.8.1)
InferenceX     `agg_*.json`: one object per run, or the list of a sweep. Latencies in s, throughput per device;
               parallelism is of the one server. `isl` and `osl` are nominal: lengths are drawn down from there by the
               recipe's range, which the file omits, as it does the number of requests (utils/process_result.py, 2026)
"""

from collections.abc import Iterator
from functools import partial
from math import isinf

from perfmodel.errors import SpecError
from perfmodel.evidence.observation import RequestTimes
from perfmodel.evidence.sources.bench_run import (
    Figure,
    Object,
    ResultFields,
    known_figures,
    known_format,
    refuse_unequal,
    request_times,
)
from perfmodel.evidence.sources.setups import engine_of, quantization_of

_ARRAYS = ("input_lens", "output_lens", "ttfts", "itls")
_OF_ENGINES = ("sglang", "tensorrt-llm", "trt")


def _vllm_requests(fields: ResultFields) -> RequestTimes | None:
    name, data = fields.name, fields.data
    prompts, outputs, ttfts, itls = lists = [data.get(key) for key in _ARRAYS]
    if not all(isinstance(values, list) for values in lists):
        return None
    errors = data.get("errors")
    errors = errors if isinstance(errors, list) else [""] * len(prompts)
    refuse_unequal(name, dict(zip((*_ARRAYS, "errors"), (*lists, errors), strict=True)), len(prompts))
    e2els = []
    for number, (ttft, gaps) in enumerate(zip(ttfts, itls, strict=True)):
        if not isinstance(gaps, list):
            raise SpecError(f"{name}: request {number} has {str(gaps)[:20]!r} as its itls, expected a list of seconds.")
        try:
            e2els.append(ttft + sum(gaps))
        except TypeError:
            raise SpecError(f"{name}: request {number} has an entry in its itls that is no number.") from None
    # The script has 0 tokens of a failed request, and sometimes no error.
    answered = [not error and output != 0 for error, output in zip(errors, outputs, strict=True)]
    starts = data.get("start_times")
    columns = {"prompt": prompts, "output": outputs, "ttft": ttfts, "e2el": e2els}
    return request_times(name, columns, answered, starts if isinstance(starts, list) else None)


def _vllm_failed(fields: ResultFields) -> int:
    completed = fields.count("completed")
    listed = len(fields.data["input_lens"]) if fields.requests is not None else 0
    return max(listed, fields.count("num_prompts"), completed + fields.count("failed")) - completed


def _vllm_rate(fields: ResultFields) -> float | None:
    """An infinite rate sends all at once, or as slots become free."""
    rate = fields.data["request_rate"]
    is_unlimited = rate in ("inf", "trace", None) or (isinstance(rate, float) and isinf(rate))
    return None if is_unlimited else fields.number("request_rate")


def _vllm_engine(fields: ResultFields) -> str | None:
    """Any OpenAI-compatible server may be "vllm"."""
    backend = fields.text("backend") or fields.text("endpoint_type")
    return engine_of(backend)[0] if backend.startswith(_OF_ENGINES) else None


def _vllm_degree(fields: ResultFields) -> int:
    keys = ("tensor_parallel_size", "tp", "tp_size")
    return next((count for key in keys if (count := fields.count(key) or fields.count("server_info", key))), 0)


def _vllm_speed(fields: ResultFields) -> float:
    """Emulator speed, added by `--metadata`."""
    speed = ResultFields(fields.name, {"perfmodel_speed": 1, **fields.data}).number("perfmodel_speed")
    if not speed:
        got = fields.data["perfmodel_speed"]
        raise SpecError(f"{fields.name}: perfmodel_speed: got {got}; expected more than 0.")
    return speed


def _vllm_notes(fields: ResultFields) -> Iterator[str]:
    data, times = fields.data, fields.requests
    asked = [path[0] for _, path, _ in known_figures("vllm") if path[0] != "total_throughput"]
    given = {key: data[key] for key in (*asked, "duration") if data.get(key) is not None}
    wrong = [key for key, value in given.items() if isinstance(value, int | float) and not 0 < value < float("inf")]
    if wrong:
        yield f"left out, since zero or not finite: {', '.join(wrong)}"
    if times is not None and times.start_s is None:
        yield "the file has no starting times: arrivals are drawn at its rate, lengths are its own, in order"
    if data.get("request_rate") == "trace":
        yield "requests were sent by a trace's times, which are not in the file: taken as sent at once"
    if fields.number("spec_decode_acceptance_length") or fields.number("accept_length"):
        yield "the server speculated: without --set engine.speculative_config=... tokens come one by one here"


VLLM = known_format(
    "vllm",
    tool=lambda fields: (
        "SGLang bench_serving"
        if "mean_e2e_latency_ms" in fields.data or "sharegpt_output_len" in fields.data
        else "vllm bench serve"
    ),
    failed=_vllm_failed,
    requests=_vllm_requests,
    load={
        "concurrency": lambda fields: fields.count("max_concurrency") or None,
        "rate": _vllm_rate,
        # Gaps are gamma-distributed; the script calls their shape so.
        "cv": lambda fields: (fields.number("burstiness") or 1.0) ** -0.5,
        "prompt": lambda fields: (fields.number("total_input_tokens") or 0) / fields.count("completed"),
        "answer": lambda fields: (fields.number("total_output_tokens") or 0) / fields.count("completed"),
    },
    says={
        "model": lambda fields: fields.text("model_id") or fields.text("server_info", "model_path"),
        "engine.profile": _vllm_engine,
        "engine.tensor_parallel_size": _vllm_degree,
    },
    notes=_vllm_notes,
    speed=_vllm_speed,
)


_AIPERF_LATENCIES = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "e2el": "request_latency"}
_AIPERF_STATISTICS = {"mean": "avg", "median": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}
_MILLISECONDS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "sec": 1e3, "s": 1e3}
_PROFILING = "profiling"


def is_aiperf_record(data: Object) -> bool:
    """Whether it describes one request."""
    metadata = data.get("metadata")
    return "metrics" in data and isinstance(metadata, dict) and "request_start_ns" in metadata


def _aiperf_figures(fields: ResultFields) -> list[Figure]:
    result: list[Figure] = [
        (f"{ours}_{metric}_ms", (key, theirs), _unit(fields, key))
        for metric, key in _AIPERF_LATENCIES.items()
        if key in fields.data
        for ours, theirs in _AIPERF_STATISTICS.items()
    ]
    rates = {"request_throughput": "request_throughput", "output_throughput": "output_token_throughput"}
    return [*result, *((ours, (theirs, "avg"), 1.0) for ours, theirs in rates.items())]


def _unit(fields: ResultFields, *path: str) -> float:
    """Milliseconds per unit of a figure."""
    unit = fields.text(*path, "unit")
    if unit not in _MILLISECONDS:
        raise SpecError(f"{fields.name}: {path[-1]} is in {unit!r}; expected {', '.join(_MILLISECONDS)}.")
    return _MILLISECONDS[unit]


def _aiperf_records(fields: ResultFields) -> tuple[list[ResultFields], list[bool]]:
    """(requests of the profiling phase, whether each was answered)"""
    records = [ResultFields(fields.name, record) for record in fields.data.get("records", ())]
    members = [item for item in records if (item.text("metadata", "benchmark_phase") or _PROFILING) == _PROFILING]
    return members, [not item.data.get("error") and not item.at("metadata", "was_cancelled") for item in members]


def _aiperf_requests(fields: ResultFields) -> RequestTimes | None:
    if "records" not in fields.data:
        return None

    def seconds(record: ResultFields, key: str) -> float | None:
        scale = _unit(record, "metrics", key) if record.text("metrics", key, "unit") else 1.0
        return record.number("metrics", key, "value", scale=scale / 1e3)

    members, answered = _aiperf_records(fields)
    columns = {
        "prompt": [item.number("metrics", "input_sequence_length", "value") for item in members],
        "output": [item.number("metrics", "output_sequence_length", "value") for item in members],
        "ttft": [seconds(item, "time_to_first_token") for item in members],
        "e2el": [seconds(item, "request_latency") for item in members],
    }
    starts = [item.number("metadata", "request_start_ns", scale=1e-9) for item in members]
    return request_times(fields.name, columns, answered, starts)


def _aiperf_failed(fields: ResultFields) -> int:
    if fields.requests is None:
        return fields.count("error_request_count", "avg")
    return _aiperf_records(fields)[1].count(False)


def _aiperf_asked(fields: ResultFields) -> dict[str, float]:
    """Requested `concurrency` or `rate`, and `cv`, of the profiling phase; empty if unknown."""
    asked = fields.within("input_config")
    phases = asked.data.get("phases") if isinstance(asked.data, dict) else None
    members = [item for item in phases or [] if isinstance(item, dict) and item.get("name", _PROFILING) == _PROFILING]
    # AIPerf's phases; GenAI-Perf's stimulus, in either place.
    for place in (*members, asked.at("perf_analyzer", "stimulus") or {}, asked.at("loadgen") or {}):
        stated = ResultFields(fields.name, place)
        slots, rate = stated.number("concurrency"), stated.number("rate")
        rate = rate if rate is not None else stated.number("request_rate")
        if slots or rate:
            cv = {"cv": 0.0 if "constant" in stated.text("type") else 1.0}
            return cv | ({"rate": rate} if rate else {"concurrency": slots or 0})
    return {}


def _aiperf_length(metric: str, fields: ResultFields) -> float | None:
    """The summary's mean; None where there are records, whose answered requests have it."""
    return fields.number(metric, "avg") if fields.requests is None else None


def _aiperf_rate(fields: ResultFields) -> float | None:
    """The requested rate, else the rate of arrivals."""
    asked, times = _aiperf_asked(fields), fields.requests
    if asked or times is None or times.start_s is None:
        return asked.get("rate")
    return (len(times) + _aiperf_failed(fields)) / max(float(times.start_s[-1]), 1e-3)


def _aiperf_notes(fields: ResultFields) -> Iterator[str]:
    if not _aiperf_asked(fields):
        yield "the file does not say how requests were sent; their starting times are replayed"


def _aiperf_model(fields: ResultFields) -> str:
    asked = fields.at("input_config")
    if not isinstance(asked, dict):
        return ""
    models = asked.get("models") or asked.get("model_names") or (asked.get("endpoint") or {}).get("model_names")
    items = models.get("items") if isinstance(models, dict) else models
    first = items[0] if isinstance(items, list) and items else None
    model = first.get("name") if isinstance(first, dict) else first
    return model if isinstance(model, str) else ""


# Of a summary, of "records" (lines of requests, in any order), or of a summary that has them, too.
AIPERF = known_format(
    "aiperf",
    tool=lambda fields: (
        "AIPerf" if "aiperf_version" in fields.data or "input_config" not in fields.data else "GenAI-Perf"
    ),
    figures=_aiperf_figures,
    completed=lambda fields: fields.count("request_count", "avg") if fields.requests is None else len(fields.requests),
    failed=_aiperf_failed,
    requests=_aiperf_requests,
    load={
        "concurrency": lambda fields: _aiperf_asked(fields).get("concurrency"),
        "rate": _aiperf_rate,
        "cv": lambda fields: _aiperf_asked(fields).get("cv"),
        "prompt": partial(_aiperf_length, "input_sequence_length"),
        "answer": partial(_aiperf_length, "output_sequence_length"),
    },
    says={"model": _aiperf_model},
    notes=_aiperf_notes,
)


# A request's times: in its timings, and beside its figures in older reports.
_GUIDELLM_TIMES = {
    "start": ("request_start", "start_time"),
    "first": ("first_token_iteration", "first_token_time"),
    "end": ("request_end", "end_time"),
}


def _is_guidellm(data: Object) -> bool:
    first = data["benchmarks"][0] if isinstance(data["benchmarks"], list) and data["benchmarks"] else None
    return isinstance(first, dict) and {"metrics", "requests"} <= set(first)


def _guidellm_runs(name: str, data: Object) -> list[tuple[str, Object]]:
    """(name, benchmark) pairs of a report, with the tool's version."""
    version, benchmarks = ResultFields(name, data).text("metadata", "guidellm_version"), data["benchmarks"]
    return [
        (
            f"{name}, benchmark {number}" if len(benchmarks) > 1 else name,
            {**benchmark, "guidellm_version": version} if isinstance(benchmark, dict) else benchmark,
        )
        for number, benchmark in enumerate(benchmarks, 1)
    ]


def _guidellm_requests(fields: ResultFields) -> RequestTimes | None:
    """None for a report with a sample of its requests: replayed alone they would be another load."""
    requests = fields.at("requests", "successful")
    completed = fields.count("metrics", "request_totals", "successful")
    if not isinstance(requests, list) or len(requests) != completed or not completed:
        return None
    rows = []
    for request in requests:
        item = ResultFields(fields.name, request)
        timings = item.at("info", "timings")
        newer = ResultFields(fields.name, timings if isinstance(timings, dict) else None)
        start, first, end = (
            next((t for t in (newer.number(key), item.number(older)) if t is not None), None)
            for key, older in _GUIDELLM_TIMES.values()
        )
        if start is None or end is None:
            raise SpecError(f"{fields.name}: a request that was answered has no time of its start or its end.")
        row = {"start": start, "ttft": None if first is None else first - start, "e2el": end - start}
        for key, group in (("prompt", "input_metrics"), ("output", "output_metrics")):
            places = ((f"{key}_tokens",), (group, "total_tokens"), (group, "text_tokens"))
            row[key] = next((n for path in places if (n := item.number(*path)) is not None), None)
        rows.append(row)
    columns = {key: [row[key] for row in rows] for key in ("prompt", "output", "ttft", "e2el")}
    return request_times(fields.name, columns, [True] * len(requests), [row["start"] for row in rows])


def _guidellm_strategy(fields: ResultFields) -> ResultFields:
    """Strategies: constant, poisson, concurrent, synchronous (one at a time), throughput (as many as possible)."""
    return ResultFields(fields.name, fields.at("config", "strategy") or fields.at("args", "strategy"))


def _guidellm_slots(fields: ResultFields) -> float | None:
    strategy = _guidellm_strategy(fields)
    slots = strategy.number("streams") or (1 if strategy.text("type_") == "synchronous" else None)
    return strategy.number("max_concurrency") if slots is None and strategy.number("rate") is None else slots


GUIDELLM = known_format(
    "guidellm",
    matches=_is_guidellm,
    runs=_guidellm_runs,
    failed=lambda fields: sum(fields.count("metrics", "request_totals", key) for key in ("incomplete", "errored")),
    requests=_guidellm_requests,
    load={
        "concurrency": _guidellm_slots,
        "rate": lambda fields: _guidellm_strategy(fields).number("rate"),
        "cv": lambda fields: 0.0 if _guidellm_strategy(fields).text("type_") == "constant" else 1.0,
    },
    says={
        "model": lambda fields: (
            fields.text("config", "backend", "model") or fields.text("benchmarker", "backend", "model")
        )
    },
    notes=lambda fields: (
        "GuideLLM's time per output token counts the first token; compared is what leaves it out, its inter-token "
        "latency",
    ),
)


_REQUESTS_PER_SLOT = 10  # of its recipes


def _is_true(fields: ResultFields, key: str) -> bool:
    return str(fields.data.get(key)).lower() == "true"


def _devices(fields: ResultFields) -> int:
    return int(fields.number("tp") or 1)


def _inferencex_figures(fields: ResultFields) -> list[Figure]:
    return [
        *known_figures("inferencex"),
        ("total_token_throughput", ("tput_per_gpu",), _devices(fields)),
        ("output_throughput", ("output_tput_per_gpu",), _devices(fields)),
    ]


def _inferencex_refusal(fields: ResultFields) -> str:
    if _is_true(fields, "disagg") or _is_true(fields, "is_multinode"):
        return (
            "is of separate prefill and decode workers, whose network the file does not say; describe them in "
            "a scenario, and give the result of the load tool itself (bench_serving's .json) with --scenario."
        )
    if not fields.count("conc") or not any(fields.number(*path) for _, path, _ in _inferencex_figures(fields)):
        return "states no concurrency or no figure; there is nothing to compare."
    return ""


INFERENCEX = known_format(
    "inferencex",
    refusal=_inferencex_refusal,
    figures=_inferencex_figures,
    completed=lambda fields: _REQUESTS_PER_SLOT * fields.count("conc"),
    says={
        "engine.profile": lambda fields: engine_of(fields.text("framework"))[0],
        "engine.version": lambda fields: engine_of(fields.text("framework"))[1] or engine_of(fields.text("image"))[1],
        "engine.quantization": lambda fields: quantization_of(fields.text("precision")),
        "engine.data_parallel_size": lambda fields: _devices(fields) if _is_true(fields, "dp_attention") else None,
        "engine.tensor_parallel_size": lambda fields: None if _is_true(fields, "dp_attention") else _devices(fields),
        "engine.enable_expert_parallel": lambda fields: (
            _is_true(fields, "dp_attention") or (fields.number("ep") or 1) > 1
        ),
    },
    notes=lambda fields: (
        f"the file does not say how many requests were sent, nor how they were drawn down from isl and osl: "
        f"{_REQUESTS_PER_SLOT} per slot, all as long as these",
    ),
)
