"""Files of load tools, format by format: a table of where each figure stands, and what is particular to the tool.

vLLM, SGLang   `vllm bench serve --save-result [--save-detailed]` and `bench_serving` descend from one script: latencies
               are in ms under the same keys, arrays in s. SGLang says `e2e_latency` for `e2el` and `total_throughput`
               for `total_token_throughput`, and nothing of the model; neither says anything of the devices. Details
               have no starting times in SGLang's files and in older ones of vLLM's; its lists have failed requests,
               too, with their error and no tokens (vllm/benchmarks/serve.py, sglang/benchmark/serving.py 0.5.23)
AIPerf         `profile_export_aiperf.json` has figures of the run (`{"unit", "avg", "p50", ...}` by metric) and what it
               was asked for, `profile_export.jsonl` one line for each request; GenAI-Perf's is the former alone. Its
               inter-token latency is a request's (latency - TTFT) / (tokens - 1). Requests of a warm-up are left out
               (aiperf 0.13.0, schema 1.4; genai-perf 0.0.16)
GuideLLM       `benchmarks.json`, versions 1 and 2: a benchmark for each rate or concurrency, with all its requests. Its
               time per output token counts the first token; compared is what leaves it out. Times of requests are
               seconds of a clock, of metrics ms but for `request_latency`, in s. `incomplete` requests were cut off by
               the end of the run (guidellm/schemas 0.8.1)
InferenceX     `agg_*.json`: one object for a run, or the list of a sweep. Latencies are in s, throughput is per device.
               Tensor, expert and data parallelism are of the one server. `isl` and `osl` are what was asked for:
               lengths are drawn down from there by the recipe's range, which the file does not say, as it does not say
               how many requests were sent (utils/process_result.py, 2026)
"""

from collections.abc import Mapping, Sequence
from math import isinf
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.evidence.observation import RequestTimes
from perfmodel.evidence.sources.bench_run import (
    BenchLoad,
    BenchRun,
    Figure,
    ResultFields,
    Said,
    figures_of,
    request_times,
    stated,
)
from perfmodel.evidence.sources.setups import engine_of, quantization_of

Object = Mapping[str, Any]
_STATISTICS = ("mean", "median", "p90", "p95", "p99")
_METRICS = ("ttft", "tpot", "itl", "e2el")


# ---------------------------------------------------------------- vLLM and SGLang

_RATES = ("request_throughput", "output_throughput", "total_token_throughput")
_VLLM_FIGURES: tuple[Figure, ...] = (
    *((f"{s}_{metric}_ms", (f"{s}_{metric}_ms",), 1.0) for metric in _METRICS for s in _STATISTICS),
    *((f"{s}_e2el_ms", (f"{s}_e2e_latency_ms",), 1.0) for s in _STATISTICS),
    *((key, (key,), 1.0) for key in _RATES),
    ("total_token_throughput", ("total_throughput",), 1.0),
)
_ARRAYS = ("input_lens", "output_lens", "ttfts", "itls")
_OF_ENGINES = ("sglang", "vllm", "tensorrt-llm", "trt")


def read_vllm_result(name: str, data: Object) -> BenchRun:
    """The run that `data` is of, called `name`. Raises SpecError for what cannot be compared, as all of these do."""
    fields = ResultFields(name, data)
    completed = fields.count("completed")
    times = _vllm_times(name, data) if all(isinstance(data.get(key), list) for key in _ARRAYS) else None
    if not completed:
        raise fields.unanswered()
    measured = fields.figures(_VLLM_FIGURES)
    if times is not None:
        measured |= figures_of(times, fields.duration_s(times))
    listed = len(data["input_lens"]) if times is not None else 0
    sent = max(listed, fields.count("num_prompts"), completed + fields.count("failed"))
    is_sglang = "mean_e2e_latency_ms" in data or "sharegpt_output_len" in data
    speed = ResultFields(name, {"perfmodel_speed": 1, **data}).number("perfmodel_speed")  # of --metadata
    if not speed:
        raise SpecError(f"{name}: perfmodel_speed: got {data['perfmodel_speed']}; expected more than 0.")
    return BenchRun(
        name=name,
        tool="SGLang bench_serving" if is_sglang else "vllm bench serve",
        says=_vllm_says(fields),
        load=_vllm_load(fields, sent, completed),
        measured=measured,
        completed=completed,
        failed=max(sent - completed, 0),
        times=times,
        notes=tuple(_vllm_notes(fields, times)),
        speed=speed,
    )


def _vllm_times(name: str, data: Object) -> RequestTimes:
    prompts, outputs, ttfts, itls = lists = [data[key] for key in _ARRAYS]
    errors = data.get("errors")
    errors = errors if isinstance(errors, list) else [""] * len(prompts)
    for key, values in zip((*_ARRAYS, "errors"), (*lists, errors), strict=True):
        if len(values) != len(prompts):
            raise SpecError(
                f"{name}: found {len(values):,} {key} for {len(prompts):,} input_lens, allowed as many of each; the "
                f"file was cut off, or put together from several runs."
            )
    # The script has 0 tokens of a failed request, and sometimes no error.
    answered = [not error and output != 0 for error, output in zip(errors, outputs, strict=True)]
    e2els = [_whole(name, number, ttft, gaps) for number, (ttft, gaps) in enumerate(zip(ttfts, itls, strict=True))]
    starts = data.get("start_times")
    columns = {"prompt": prompts, "output": outputs, "ttft": ttfts, "e2el": e2els}
    return request_times(name, columns, answered, starts if isinstance(starts, list) else None)


def _whole(name: str, number: int, ttft: Any, gaps: Any) -> Any:
    """Seconds from a request to its last token: what came first, and the gaps behind."""
    if not isinstance(gaps, list):
        raise SpecError(f"{name}: request {number} has {str(gaps)[:20]!r} as its itls, expected a list of seconds.")
    try:
        return ttft + sum(gaps)
    except TypeError:
        raise SpecError(f"{name}: request {number} has an entry in its itls that is no number.") from None


def _vllm_load(fields: ResultFields, sent: int, completed: int) -> BenchLoad:
    """An infinite rate sends all at once, or as places come free."""
    rate = fields.data["request_rate"]
    is_unlimited = rate in ("inf", "trace", None) or (isinstance(rate, float) and isinf(rate))
    burstiness = fields.number("burstiness") or 1.0
    return BenchLoad.of(
        sent,
        fields.count("max_concurrency") or None,
        None if is_unlimited else fields.number("request_rate"),
        cv=burstiness**-0.5,  # of gamma-distributed gaps whose shape the script calls so
        prompt=(fields.number("total_input_tokens") or 0) / completed or None,
        answer=(fields.number("total_output_tokens") or 0) / completed or None,
    )


def _vllm_says(fields: ResultFields) -> dict[str, Said]:
    """Setups are not in these files, but for what `--metadata` has added."""
    backend = fields.text("backend") or fields.text("endpoint_type")
    # Any server of OpenAI's API may be "vllm".
    is_engine = backend.startswith(_OF_ENGINES) and not backend.startswith("vllm")
    counts = (
        fields.count(key) or fields.count("server_info", key) for key in ("tensor_parallel_size", "tp", "tp_size")
    )
    return stated(
        {
            "model": fields.text("model_id") or fields.text("server_info", "model_path"),
            "engine.profile": engine_of(backend)[0] if is_engine else None,
            "engine.tensor_parallel_size": next((count for count in counts if count), None),
            "engine.version": fields.text("server_info", "version"),
        }
    )


def _vllm_notes(fields: ResultFields, times: RequestTimes | None) -> list[str]:
    notes, data = [], fields.data
    asked = [f"{s}_{name}_ms" for name in (*_METRICS, "e2e_latency") for s in _STATISTICS]
    given = {key: data[key] for key in (*asked, *_RATES, "duration") if data.get(key) is not None}
    wrong = [key for key, value in given.items() if isinstance(value, int | float) and not 0 < value < float("inf")]
    if wrong:
        notes.append(f"left out, since zero or not finite: {', '.join(wrong)}")
    if times is not None and times.start_s is None:
        notes.append("the file has no starting times: arrivals are drawn at its rate, lengths are its own, in order")
    if data.get("request_rate") == "trace":
        notes.append("requests were sent by a trace's times, which are not in the file: taken as sent at once")
    if fields.number("spec_decode_acceptance_length") or fields.number("accept_length"):
        notes.append("the server speculated: without --set engine.speculative_config=... tokens come one by one here")
    return notes


# ---------------------------------------------------------------- AIPerf and GenAI-Perf

_AIPERF_LATENCIES = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "e2el": "request_latency"}
_AIPERF_STATISTICS = {"mean": "avg", "median": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}
_AIPERF_RATES: tuple[Figure, ...] = (
    ("request_throughput", ("request_throughput", "avg"), 1.0),
    ("output_throughput", ("output_token_throughput", "avg"), 1.0),
)
_MILLISECONDS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "sec": 1e3, "s": 1e3}
_PROFILING = "profiling"


def is_aiperf_summary(data: Object) -> bool:
    """Whether it has the figures of a run."""
    return "input_config" in data and isinstance(data.get("request_latency"), dict)


def is_aiperf_record(data: Object) -> bool:
    """Whether it is of one request."""
    metadata = data.get("metadata")
    return "metrics" in data and isinstance(metadata, dict) and "request_start_ns" in metadata


def read_aiperf(name: str, summary: Object | None, records: Sequence[Object]) -> BenchRun:
    """The run of a summary, of records (lines of requests, in any order), or of both."""
    fields = ResultFields(name, summary)
    measured = _aiperf_figures(fields)
    if records:
        times, failed = _aiperf_times(name, records)
        measured |= figures_of(times)
        completed = len(times)
    else:
        times = None
        completed, failed = fields.count("request_count", "avg"), fields.count("error_request_count", "avg")
    if not completed:
        raise fields.unanswered(f" ({failed:,} failed)")
    slots, rate, cv = _aiperf_asked(fields)
    is_known = rate is not None or slots is not None
    prompt, answer = (fields.number(f"{key}_sequence_length", "avg") for key in ("input", "output"))
    if times is not None:
        prompt, answer = float(times.num_prompt_tokens.mean()), float(times.num_output_tokens.mean())
        if not is_known:
            span_s = float(times.start_s[-1]) if times.start_s is not None else 0.0
            rate = (completed + failed) / max(span_s, 1e-3)
    unknown = "the file does not say how requests were sent; their starting times are replayed"
    return BenchRun(
        name=name,
        tool="AIPerf" if summary is None or "aiperf_version" in summary else "GenAI-Perf",
        version=fields.text("aiperf_version"),
        says=_aiperf_says(fields),
        load=BenchLoad.of(completed + failed, slots, rate, cv=cv, prompt=prompt, answer=answer),
        measured=measured,
        completed=completed,
        failed=failed,
        times=times,
        notes=() if is_known else (unknown,),
    )


def _aiperf_figures(fields: ResultFields) -> dict[str, float]:
    table = [
        (f"{statistic}_{metric}_ms", (key, theirs), _unit(fields, key))
        for metric, key in _AIPERF_LATENCIES.items()
        if fields.data is not None and key in fields.data
        for statistic, theirs in _AIPERF_STATISTICS.items()
    ]
    return fields.figures([*table, *_AIPERF_RATES])


def _unit(fields: ResultFields, *path: str) -> float:
    """Milliseconds in the unit of a figure."""
    unit = fields.text(*path, "unit")
    if unit not in _MILLISECONDS:
        raise SpecError(f"{fields.name}: {path[-1]} is in {unit!r}, allowed {', '.join(_MILLISECONDS)}.")
    return _MILLISECONDS[unit]


def _aiperf_times(name: str, records: Sequence[Object]) -> tuple[RequestTimes, int]:
    """(the answered requests, how many failed) of the profiling phase."""
    all_of = [ResultFields(name, record) for record in records]
    members = [item for item in all_of if (item.text("metadata", "benchmark_phase") or _PROFILING) == _PROFILING]
    answered = [not item.data.get("error") and not item.at("metadata", "was_cancelled") for item in members]
    columns = {
        "prompt": [item.number("metrics", "input_sequence_length", "value") for item in members],
        "output": [item.number("metrics", "output_sequence_length", "value") for item in members],
        "ttft": [_aiperf_seconds(item, "time_to_first_token") for item in members],
        "e2el": [_aiperf_seconds(item, "request_latency") for item in members],
    }
    starts = [item.number("metadata", "request_start_ns", scale=1e-9) for item in members]
    return request_times(name, columns, answered, starts), answered.count(False)


def _aiperf_seconds(record: ResultFields, key: str) -> float | None:
    scale = _unit(record, "metrics", key) if record.text("metrics", key, "unit") else 1.0
    return record.number("metrics", key, "value", scale=scale / 1e3)


def _aiperf_asked(fields: ResultFields) -> tuple[float | None, float | None, float]:
    """(concurrency, rate, variation of gaps) of the profiling phase."""
    asked = fields.within("input_config")
    phases = asked.data.get("phases") if isinstance(asked.data, dict) else None
    members = [item for item in phases or [] if isinstance(item, dict) and item.get("name", _PROFILING) == _PROFILING]
    # AIPerf's phases; GenAI-Perf's stimulus, in either place.
    for place in (*members, asked.at("perf_analyzer", "stimulus") or {}, asked.at("loadgen") or {}):
        stated = ResultFields(fields.name, place)
        slots, rate = stated.number("concurrency"), stated.number("rate")
        rate = rate if rate is not None else stated.number("request_rate")
        if slots or rate:
            return (None if rate else slots), rate, 0.0 if "constant" in stated.text("type") else 1.0
    return None, None, 1.0


def _aiperf_says(fields: ResultFields) -> dict[str, Said]:
    """The model, as it was asked for."""
    asked = fields.at("input_config")
    if not isinstance(asked, dict):
        return {}
    models = asked.get("models") or asked.get("model_names") or (asked.get("endpoint") or {}).get("model_names")
    items = models.get("items") if isinstance(models, dict) else models
    first = items[0] if isinstance(items, list) and items else None
    model = first.get("name") if isinstance(first, dict) else first
    return {"model": model} if isinstance(model, str) and model else {}


# ---------------------------------------------------------------- GuideLLM

_GUIDELLM_FIGURES: tuple[Figure, ...] = (
    *(
        (f"{s}_{metric}_ms", ("metrics", key, "successful", *(("percentiles",) if s[0] == "p" else ()), s), scale)
        for metric, key, scale in (
            ("ttft", "time_to_first_token_ms", 1.0),
            ("tpot", "inter_token_latency_ms", 1.0),
            ("e2el", "request_latency", 1e3),
        )
        for s in _STATISTICS
    ),
    ("request_throughput", ("metrics", "requests_per_second", "successful", "mean"), 1.0),
    ("output_throughput", ("metrics", "output_tokens_per_second", "successful", "mean"), 1.0),
)
_GUIDELLM_NOTE = (
    "GuideLLM's time per output token counts the first token; compared is what leaves it out, its inter-token latency"
)


def is_guidellm_report(data: Object) -> bool:
    """Whether it is such a report."""
    benchmarks = data.get("benchmarks")
    if not isinstance(benchmarks, list) or not benchmarks:
        return False
    return isinstance(benchmarks[0], dict) and {"metrics", "requests"} <= set(benchmarks[0])


def guidellm_benchmarks(name: str, data: Object) -> list[tuple[str, str, Any]]:
    """(name, GuideLLM's version, benchmark) of each benchmark of a report in the file `name`."""
    version = ResultFields(name, data).text("metadata", "guidellm_version")
    several = len(data["benchmarks"]) > 1
    return [
        (f"{name}, benchmark {number}" if several else name, version, benchmark)
        for number, benchmark in enumerate(data["benchmarks"], 1)
    ]


def read_guidellm_benchmark(name: str, version: str, data: Any) -> BenchRun:
    """The run of a benchmark; parameters as of `guidellm_benchmarks`."""
    fields = ResultFields(name, data)
    totals = fields.within("metrics", "request_totals")
    completed, cut, errored = (totals.count(key) for key in ("successful", "incomplete", "errored"))
    if not completed:
        raise fields.unanswered(f" ({errored:,} failed, {cut:,} were cut off)")
    requests = fields.at("requests", "successful")
    # A report may keep a sample of its requests: replayed alone they would be another load.
    is_whole = isinstance(requests, list) and len(requests) == completed
    times = _guidellm_times(name, requests) if is_whole else None
    model = fields.text("config", "backend", "model") or fields.text("benchmarker", "backend", "model")
    return BenchRun(
        name=name,
        tool="GuideLLM",
        version=version,
        says=stated({"model": model}),
        load=_guidellm_load(fields, completed + cut + errored),
        measured=fields.figures(_GUIDELLM_FIGURES) if times is None else figures_of(times, fields.duration_s(times)),
        completed=completed,
        failed=cut + errored,
        times=times,
        notes=(_GUIDELLM_NOTE,),
    )


def _guidellm_times(name: str, requests: Sequence[Any]) -> RequestTimes:
    columns: dict[str, list[Any]] = {key: [] for key in ("prompt", "output", "ttft", "e2el", "start")}
    for request in requests:
        fields = ResultFields(name, request)
        timings = fields.at("info", "timings")
        # Older reports have the same times beside the request's figures.
        places = ResultFields(name, timings if isinstance(timings, dict) else None), fields
        start, first, end = (
            next((t for t in (places[0].number(key), places[1].number(older)) if t is not None), None)
            for key, older in (
                ("request_start", "start_time"),
                ("first_token_iteration", "first_token_time"),
                ("request_end", "end_time"),
            )
        )
        if start is None or end is None:
            raise SpecError(f"{name}: a request that was answered has no time of its start or its end.")
        columns["start"].append(start)
        columns["ttft"].append(None if first is None else first - start)
        columns["e2el"].append(end - start)
        for key, group, older in (("prompt", "input_metrics", "prompt"), ("output", "output_metrics", "output")):
            stated = ((f"{older}_tokens",), (group, "total_tokens"), (group, "text_tokens"))
            columns[key].append(next((n for path in stated if (n := fields.number(*path)) is not None), None))
    starts = columns.pop("start")
    return request_times(name, columns, [True] * len(requests), starts)


def _guidellm_load(fields: ResultFields, sent: int) -> BenchLoad:
    """Its strategies: constant, poisson, concurrent, synchronous (one at a time) and throughput (as many as it can)."""
    strategy = ResultFields(fields.name, fields.at("config", "strategy") or fields.at("args", "strategy"))
    kind, rate = strategy.text("type_"), strategy.number("rate")
    prompt, answer = (
        fields.number("metrics", f"{key}_token_count", "successful", "mean") for key in ("prompt", "output")
    )
    slots = strategy.number("streams") or (1 if kind == "synchronous" else None)
    if slots is None and rate is None:
        slots = strategy.number("max_concurrency")
    return BenchLoad.of(sent, slots, rate, cv=0.0 if kind == "constant" else 1.0, prompt=prompt, answer=answer)


# ---------------------------------------------------------------- InferenceX

_REQUESTS_PER_SLOT = 10  # of its recipes


def read_inferencex_result(name: str, data: Object) -> BenchRun:
    """The run that `data` is of, called `name`."""
    fields = ResultFields(name, data)
    if _is_true(data.get("disagg")) or _is_true(data.get("is_multinode")):
        raise SpecError(
            f"{name}: is of separate prefill and decode workers, whose network the file does not say; describe them in "
            f"a scenario, and give the result of the load tool itself (bench_serving's .json) with --scenario."
        )
    slots, devices = fields.count("conc"), int(fields.number("tp") or 1)
    measured = fields.figures(
        [
            *((f"{s}_{metric}_ms", (f"{s}_{metric}",), 1e3) for metric in _METRICS for s in _STATISTICS),
            ("total_token_throughput", ("tput_per_gpu",), devices),
            ("output_throughput", ("output_tput_per_gpu",), devices),
        ]
    )
    if not slots or not measured:
        raise SpecError(f"{name}: states no concurrency or no figure; there is nothing to compare.")
    sent = _REQUESTS_PER_SLOT * slots
    return BenchRun(
        name=name,
        tool="InferenceX",
        says=_inferencex_says(fields, devices),
        load=BenchLoad("closed", sent, slots, prompt=fields.number("isl"), answer=fields.number("osl")),
        measured=measured,
        completed=sent,
        notes=(
            f"the file does not say how many requests were sent, nor how they were drawn down from isl and osl: "
            f"{_REQUESTS_PER_SLOT} per slot, all as long as these",
        ),
    )


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"


def _inferencex_says(fields: ResultFields, devices: int) -> dict[str, Said]:
    profile, version = engine_of(fields.text("framework"))
    is_parallel = _is_true(fields.data.get("dp_attention"))
    return stated(
        {
            "hardware": fields.text("hw"),
            "model": fields.text("model"),
            "engine.profile": profile,
            "engine.version": version or engine_of(fields.text("image"))[1],
            "engine.quantization": quantization_of(fields.text("precision")),
            "engine.data_parallel_size": devices if is_parallel else None,
            "engine.tensor_parallel_size": None if is_parallel else devices,
            "engine.enable_expert_parallel": is_parallel or (fields.number("ep") or 1) > 1,
        }
    )
