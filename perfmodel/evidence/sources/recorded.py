"""Recorded runs as scenarios: open-loop stages with latencies, logs of single requests, offline jobs.

Serving runs are a JSON list. The load tool's "constant" rate draws exponential gaps and rescales them to fill each
stage exactly: `poisson_fixed_count`. Prompts are `num_groups` x `num_prompts_per_group` distinct repeating texts;
retokenization on the server lengthens them by some 5 %, with little variation. Each stage is an observation; those of a
run share one scenario.

Request logs are folders, `<run>/e2e/meta.json` and `requests.csv`. The engine ran in the load generator's process,
without a server; sampling was plain.

Offline TensorRT-LLM tables come in two kinds, recognised by their columns:

    in-flight batching   output tokens/s of a saturated engine, fixed prompt and answer lengths
    static batches       one batch of `batch_size` from prompts to last tokens: output tokens/s, or with one output
                         token the time to it (`ttft_ms`)

Assumed where the tables are silent: TensorRT-LLM's defaults of that time, up to 2,048 sequences, 8,192 tokens a step of
in-flight batching (more if a whole prompt needs it), FP8 KV with FP8 weights; a saturated engine. Static batches are
its C++ session: no server."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel import specs
from perfmodel.cost.memory.groups import kv_groups
from perfmodel.errors import SpecError
from perfmodel.evidence import observation
from perfmodel.files.sandbox import read_json, read_rows
from perfmodel.models.number_formats import with_quantization
from perfmodel.specs.traffic import Sampling, Trace

METRICS = ("e2el_mean", "e2el_p90", "e2el_p99", "ttft_mean", "ttft_p90", "ttft_p99", "itl_mean")
_RETOKENIZED = 1.05
_LENGTH_SPREAD = 8  # tokens: about one half of a KV block either way
_KEPT = ("tensor_parallel_size", "data_parallel_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len")
_LOGGED_ENGINE = "vllm"  # that logs of each request are of


def read_serving_runs(path: str | Path) -> tuple[list[observation.Observation], observation.Reasons]:
    """(stages of runs, (run, reason) for undescribed runs). Raises SpecError for a file that is no list of runs."""
    path = Path(path)
    try:
        entries = read_json(path)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SpecError(f"{path}: is not JSON ({error})") from None
    if not isinstance(entries, list) or not entries:
        raise SpecError(f"{path}: expected a list of at least one run")
    names = (str(e.get("id", i)) if isinstance(e, dict) else str(i) for i, e in enumerate(entries))
    runs, left_out = observation.described(zip(names, entries, strict=True), _stages)
    return [stage for run in runs for stage in run], left_out


def _stages(name: str, entry: dict[str, Any]) -> list[observation.Observation]:
    workload, measured = entry["workload"], entry["measured"]
    stages = tuple(specs.Stage(rate=s["rate"], duration_s=s["duration_s"]) for s in workload["stages"])
    hardware, model = specs.load_hardware(entry["gpu"]), specs.load_model(entry["model"])
    length = round((workload["system_prompt_len"] + workload["question_len"]) * _RETOKENIZED)
    answer = workload["output_len"]
    low, high = max(length - _LENGTH_SPREAD, 1), length + _LENGTH_SPREAD
    traffic = specs.Traffic(
        arrivals=specs.Arrivals(process="poisson_fixed_count", stages=stages),
        input_tokens=specs.Lengths(distribution="uniform", low=low, high=high),
        output_tokens=specs.Lengths(distribution="fixed", value=answer),
        prefix=specs.Prefix(
            num_groups=workload["num_groups"],
            shared_tokens=max(workload["system_prompt_len"], 1),
            num_prompts_per_group=workload["num_prompts_per_group"],
        ),
    )
    engine = _engine(entry, model, hardware)
    scenario = specs.Scenario(name=name, model=model, hardware=hardware, engine=engine, traffic=traffic)
    if len(measured) != len(stages):
        raise ValueError(f"measured has {len(measured)} objects for {len(stages)} stages")
    windows = pairwise([0.0, *np.cumsum([stage.duration_s for stage in stages]).tolist()])
    rows = []
    for number, (row, window) in enumerate(zip(measured, windows, strict=True)):
        keys = {metric: f"{metric.replace('e2el', 'e2e')}_ms" for metric in METRICS[:-1]}
        metrics = {metric: float(row[key]) for metric, key in keys.items() if row.get(key) is not None}
        # See the truth's notes.
        metrics["itl_mean"] = (metrics["e2el_mean"] - metrics["ttft_mean"]) / max(answer - 1, 1)
        rows.append(observation.Observation(name, scenario, metrics, label=f"{name}, stage {number}", window=window))
    return rows


def _engine(entry: dict[str, Any], model: specs.ModelSpec, hardware: specs.HardwareSpec) -> specs.EngineSpec:
    server = entry["server"]
    arguments = {name: server[name] for name in (*_KEPT, "gpu_memory_utilization", "block_size") if server.get(name)}
    name, _, version = entry["engine"].partition(" ")
    engine = observation.recorded_engine(name.lower().replace("-", ""), version, hardware, arguments)
    logged = server.get("total_kv_blocks")
    if not logged:
        return engine
    # What a server logs are tokens: those of sequences with a block in each group of layers ("GPU KV cache size").
    blocks = logged * max(1, len(kv_groups(model, hardware, engine)))
    return engine.model_copy(update={"num_gpu_blocks_override": blocks})


def read_request_log(folder: str | Path, trace_folder: str | Path) -> observation.Observation:
    """Read a run and write its requests as a trace to `trace_folder`. Raises SpecError for missing or invalid files."""
    folder = Path(folder)
    if not folder.is_dir():
        raise SpecError(f"{folder}: got a file; expected the folder of a run with e2e/meta.json and e2e/requests.csv.")
    try:
        meta = read_json(folder / "e2e" / "meta.json")
        rows = sorted(read_rows(folder / "e2e" / "requests.csv"), key=lambda row: float(row["client_arrival_s"]))
        arrival, first, last = (
            np.array([float(row[name]) for row in rows])
            for name in ("client_arrival_s", "first_token_s", "last_token_s")
        )
        prompts, outputs = (np.array([int(row[name]) for row in rows]) for name in ("input_toks", "output_toks"))
    except OSError as error:
        raise SpecError(f"{error.filename}: cannot be read: {error.strerror}") from None
    except (KeyError, ValueError) as error:
        raise SpecError(f"{folder}: not a run with a log of requests ({error})") from None
    if not rows:
        raise SpecError(f"{folder}: requests.csv has no requests")
    times = observation.RequestTimes(arrival, prompts, outputs, first - arrival, last - arrival)
    trace = write_trace(times, Path(trace_folder) / f"{folder.name}.jsonl")
    try:
        scenario = _logged_scenario(folder.name, meta, trace)
    except observation.MALFORMED as error:
        stated_as = " ".join(str(error).split())[:200]
        raise SpecError(f"{folder / 'e2e' / 'meta.json'}: its description is incomplete: {stated_as}") from None
    return observation.Observation(folder.name, scenario, {}, times)


def write_trace(times: observation.RequestTimes, file: Path) -> Path:
    """Write the requests as a trace that scenarios can replay."""
    starts = np.zeros(len(times)) if times.start_s is None else times.start_s
    columns = (starts.tolist(), times.num_prompt_tokens.tolist(), times.num_output_tokens.tolist())
    lines = (
        json.dumps({"arrival_s": start, "input_tokens": prompt, "output_tokens": output})
        for start, prompt, output in zip(*columns, strict=True)
    )
    file.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    return file


def _logged_scenario(name: str, meta: dict[str, Any], trace: Path) -> specs.Scenario:
    arguments = meta["engine_kwargs"]
    kept = (*_KEPT, "pipeline_parallel_size", "enable_expert_parallel", "kv_cache_dtype")
    chosen = {key: arguments[key] for key in kept if arguments.get(key) is not None}
    cache = meta.get("kv_cache") or {}
    if cache.get("num_gpu_blocks"):
        chosen |= {"num_gpu_blocks_override": cache["num_gpu_blocks"], "block_size": cache.get("block_size", 16)}
    # The device as the run recorded it, else the beginning of the folder's name (`<gpu>-<model>`).
    hardware = specs.load_hardware(str((meta.get("hardware") or {}).get("device_name") or name.split("-")[0]))
    return specs.Scenario(
        name=name,
        model=specs.load_model(arguments["model"]),
        hardware=hardware,
        engine=observation.recorded_engine(
            _LOGGED_ENGINE, str(meta.get(f"{_LOGGED_ENGINE}_version") or ""), hardware, chosen
        ),
        traffic=specs.Traffic(arrivals=specs.Arrivals(process="trace"), trace=Trace(path=str(trace), format="jsonl")),
        sampling=Sampling(method="greedy"),
    )


SATURATED = "saturated"  # flag of a row: more requests wait than run, all the time; else all of its requests run
_ENGINE = "trtllm"  # that such tables are of
_MAX_SEQUENCES = 2048
_TOKEN_BUDGET = 8192
_IN_FLIGHT = {"model", "gpu", "precision", "tp", "isl", "osl", "throughput_out_tok_s_gpu"}
_STATIC = {"model", "gpu", "precision", "tp", "isl", "osl", "batch_size", "metric", "value"}
_QUANTIZATION = {"FP8": "fp8", "FP16": None, "BF16": None}
_STATIC_METRICS = {"throughput_out_tok_s_gpu": "static_throughput", "ttft_ms": "ttft"}


def read_offline_runs(path: str | Path) -> tuple[list[observation.Observation], observation.Reasons]:
    """(rows, (row, reason) for those that cannot be described) of a CSV or a folder of them. Metrics: throughput,
    static_throughput (output tokens/s per device), ttft (ms). Raises SpecError if unreadable, or of another kind."""
    path = Path(path)
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    if not files:
        raise SpecError(f"{path}: has no .csv file; give one, or a folder of them.")
    entries: list[tuple[str, observation.Entry]] = []
    for file in files:
        rows = observation.table_rows(file)
        columns = set(rows[0]) if rows else set()
        if not (columns >= _IN_FLIGHT or columns >= _STATIC):
            raise SpecError(
                f"{file}: expected a CSV of throughputs with columns {', '.join(sorted(_IN_FLIGHT))}; or, of static "
                f"batches, {', '.join(sorted(_STATIC))}."
            )
        entries += ((f"{file.name}:{number}", row) for number, row in enumerate(rows, 2))
    return observation.described(entries, _row)


def _row(name: str, entry: observation.Entry) -> observation.Observation:
    is_static = "batch_size" in entry
    model, quantization = specs.load_model(entry["model"]), _QUANTIZATION[entry["precision"]]
    hardware = specs.load_hardware(entry["gpu"])
    if quantization is not None:
        model = with_quantization(model, quantization)
    inputs, outputs = int(entry["isl"]), int(entry["osl"])
    count = int(entry["batch_size"]) if is_static else _MAX_SEQUENCES
    least = count * inputs if is_static else inputs + count
    arguments = {
        "tensor_parallel_size": int(entry["tp"]),
        "dtype": "float16",
        "kv_cache_dtype": "fp8" if entry["precision"] == "FP8" else "auto",
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "max_num_seqs": count,
        "max_num_batched_tokens": max(_TOKEN_BUDGET, least),
        "max_model_len": inputs + outputs,
        **({"batching": "static"} if is_static else {}),
    }
    engine = observation.recorded_engine(_ENGINE, entry.get("trtllm_version") or "", hardware, arguments)
    traffic = specs.Traffic(
        arrivals=specs.Arrivals(process="burst"),
        num_requests=count,
        input_tokens=specs.Lengths(distribution="fixed", value=inputs),
        output_tokens=specs.Lengths(distribution="fixed", value=outputs),
    )
    scenario = specs.Scenario(name=name, model=model, hardware=hardware, engine=engine, traffic=traffic)
    metric = _STATIC_METRICS[entry["metric"]] if is_static else "throughput"
    measured = float(entry["value"] if is_static else entry["throughput_out_tok_s_gpu"])
    served = scenario.model  # in the format that the engine computes in
    lengths = f"{inputs:,} in, {outputs:,} out"
    label = f"{served.name} {served.quantization.weights or served.dtype} on {entry['tp']} x {hardware.name}, {lengths}"
    label, flags = f"{label}, batch {count}" if is_static else label, "" if is_static else SATURATED
    labels, metrics = {"tokens": lengths}, {metric: measured}
    return observation.Observation(name, scenario, metrics, label=label, labels=labels, flags=flags)
