"""Recorded serving runs as scenarios: open-loop load in stages, with latencies measured per stage.

The file is a JSON list. What it says of arrivals is what the load tool calls them: its "constant" rate draws
exponential gaps and rescales them to fill each stage exactly, so the process is `poisson_fixed_count`. Prompts are
`num_groups` x `num_prompts_per_group` distinct texts that repeat; their nominal length grows by some 5 % when the
server tokenises them again, and varies a little from text to text.

Runs with a log of each request are folders, `<run>/e2e/meta.json` and `requests.csv`. The engine ran inside the load
generator's process, so there is no server in front of it; sampling was plain.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.memory.groups import kv_groups
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.observation import MALFORMED, incomplete, recorded_engine
from perfmodel.files.bounded import read_json, read_rows
from perfmodel.sim.records.columns import RequestColumns
from perfmodel.specs import (
    Arrivals,
    EngineSpec,
    HardwareSpec,
    Lengths,
    ModelSpec,
    Prefix,
    Scenario,
    Stage,
    Traffic,
    load_hardware,
    load_model,
)
from perfmodel.specs.traffic import Sampling, Trace

METRICS = ("e2el_mean", "e2el_p90", "e2el_p99", "ttft_mean", "ttft_p90", "ttft_p99", "itl_mean")

_RETOKENIZED = 1.05
_LENGTH_SPREAD = 8  # tokens: about one half of a KV block either way

StageLatencies = dict[str, float]  # metric -> milliseconds
Floats = NDArray[np.float64]
_LOGGED_ENGINE = "vllm"  # that logs of each request are of


@dataclass(frozen=True)
class ServingRun:
    """One run: its scenario, when its stages end, and what was measured in each."""

    run_id: str
    scenario: Scenario
    stage_ends_s: tuple[float, ...]
    measured: tuple[StageLatencies, ...]

    def is_overloaded(self, stage: int) -> bool:
        """Whether requests were answered so much later than their answers take that a backlog must have grown."""
        latencies = self.measured[stage]
        return latencies["ttft_mean"] > 0.5 * latencies["e2el_mean"]


def read_serving_runs(path: str | Path) -> tuple[list[ServingRun], list[tuple[str, str]]]:
    """(runs that can be described as scenarios, (run, reason) for those that cannot).

    Raises SpecError for a file that is not a list of runs.
    """
    path = Path(path)
    try:
        entries = read_json(path)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SpecError(f"{path}: is not JSON ({error})") from None
    if not isinstance(entries, list) or not entries:
        raise SpecError(f"{path}: expected a list of at least one run")
    runs, left_out = [], []
    for number, entry in enumerate(entries):
        name = str(entry.get("id", number)) if isinstance(entry, dict) else str(number)
        try:
            runs.append(_run(name, entry))
        except PerfmodelError as error:
            left_out.append((name, str(error)))
        except MALFORMED as error:
            left_out.append((name, incomplete(error)))
    return runs, left_out


def _run(name: str, entry: dict[str, Any]) -> ServingRun:
    workload = entry["workload"]
    stages = tuple(Stage(rate=s["rate"], duration_s=s["duration_s"]) for s in workload["stages"])
    hardware = load_hardware(entry["gpu"])
    model = load_model(entry["model"])
    scenario = Scenario(
        name=name,
        model=model,
        hardware=hardware,
        engine=_engine(entry, model, hardware),
        traffic=_traffic(workload, stages),
    )
    if len(entry["measured"]) != len(stages):
        raise ValueError(f"measured has {len(entry['measured'])} objects for {len(stages)} stages")
    ends = np.cumsum([stage.duration_s for stage in stages])
    outputs = workload["output_len"]
    return ServingRun(name, scenario, tuple(ends.tolist()), tuple(_measured(m, outputs) for m in entry["measured"]))


def _engine(entry: dict[str, Any], model: ModelSpec, hardware: HardwareSpec) -> EngineSpec:
    server = entry["server"]
    kept = ("tensor_parallel_size", "data_parallel_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len")
    arguments = {name: server[name] for name in (*kept, "gpu_memory_utilization", "block_size") if server.get(name)}
    name, _, version = entry["engine"].partition(" ")
    engine = recorded_engine(name.lower().replace("-", ""), version, hardware, arguments)
    logged = server.get("total_kv_blocks")
    if not logged:
        return engine
    # What a server logs are tokens: those of sequences with a block in each group of layers ("GPU KV cache size").
    blocks = logged * max(1, len(kv_groups(model, hardware, engine)))
    return engine.model_copy(update={"num_gpu_blocks_override": blocks})


def _traffic(workload: dict[str, Any], stages: tuple[Stage, ...]) -> Traffic:
    length = round((workload["system_prompt_len"] + workload["question_len"]) * _RETOKENIZED)
    low, high = max(length - _LENGTH_SPREAD, 1), length + _LENGTH_SPREAD
    return Traffic(
        arrivals=Arrivals(process="poisson_fixed_count", stages=stages),
        input_tokens=Lengths(distribution="uniform", low=low, high=high),
        output_tokens=Lengths(distribution="fixed", value=workload["output_len"]),
        prefix=Prefix(
            num_groups=workload["num_groups"],
            shared_tokens=max(workload["system_prompt_len"], 1),
            num_prompts_per_group=workload["num_prompts_per_group"],
        ),
    )


def _measured(row: dict[str, Any], output_tokens: int) -> StageLatencies:
    """A stage's latencies in ms; the gap between tokens is (E2E - TTFT) / (output - 1), see the truth's notes."""
    found = {}
    for metric in METRICS:
        kind, _, statistic = metric.partition("_")
        value = row.get(f"{'e2e' if kind == 'e2el' else kind}_{statistic}_ms") if kind != "itl" else None
        if value is not None:
            found[metric] = float(value)
    found["itl_mean"] = (found["e2el_mean"] - found["ttft_mean"]) / max(output_tokens - 1, 1)
    return found


def stage_latencies(run: ServingRun, requests: RequestColumns) -> list[StageLatencies]:
    """The same figures from simulated requests, by the stage in which each arrived."""
    starts = (0.0, *run.stage_ends_s[:-1])
    found = []
    for start, end in zip(starts, run.stage_ends_s, strict=True):
        # The last request of a stage falls on its end, give or take a rounding.
        mine = (requests.arrival_s > start + 1e-9) & (requests.arrival_s <= end + 1e-9)
        found.append(_latencies(requests.e2el_s[mine], requests.ttft_s[mine], requests.num_output_tokens[mine]))
    return found


def _latencies(e2el: Any, ttft: Any, outputs: Any) -> StageLatencies:
    figures: StageLatencies = {}
    for name, seconds in (("e2el", e2el), ("ttft", ttft)):
        figures[f"{name}_mean"] = 1e3 * float(seconds.mean())
        figures[f"{name}_p90"], figures[f"{name}_p99"] = (1e3 * np.quantile(seconds, [0.9, 0.99])).tolist()
    figures["itl_mean"] = (figures["e2el_mean"] - figures["ttft_mean"]) / max(float(outputs.mean()) - 1, 1)
    return figures


@dataclass(frozen=True)
class RequestLog:
    """A run: its scenario (the trace is the log itself) and the measured latencies, in order of arrival."""

    name: str
    scenario: Scenario
    ttft_s: Floats
    e2el_s: Floats
    num_prompt_tokens: NDArray[np.int64]
    num_output_tokens: NDArray[np.int64]

    @property
    def tpot_s(self) -> Floats:
        return (self.e2el_s - self.ttft_s) / np.maximum(self.num_output_tokens - 1, 1)


def read_request_log(folder: str | Path, trace_folder: str | Path) -> RequestLog:
    """Read a run; its requests are written as a trace to `trace_folder`, for the scenario to refer to.

    Raises SpecError for files that are missing or not as described above.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise SpecError(f"{folder}: found a file, allowed the folder of a run with e2e/meta.json and e2e/requests.csv.")
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
    trace = Path(trace_folder) / f"{folder.name}.jsonl"
    lines = zip(arrival.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    trace.write_text(
        "\n".join(json.dumps({"arrival_s": t, "input_tokens": p, "output_tokens": o}) for t, p, o in lines),
        encoding="utf-8",
        newline="\n",
    )
    try:
        scenario = _scenario(folder.name, meta, trace)
    except MALFORMED as error:
        said = " ".join(str(error).split())[:200]
        raise SpecError(f"{folder / 'e2e' / 'meta.json'}: its description is incomplete: {said}") from None
    return RequestLog(folder.name, scenario, first - arrival, last - arrival, prompts, outputs)


def _scenario(name: str, meta: dict[str, Any], trace: Path) -> Scenario:
    arguments = meta["engine_kwargs"]
    kept = (
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel"),
        *("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_cache_dtype"),
    )
    chosen = {key: arguments[key] for key in kept if arguments.get(key) is not None}
    cache = meta.get("kv_cache") or {}
    if cache.get("num_gpu_blocks"):
        chosen |= {"num_gpu_blocks_override": cache["num_gpu_blocks"], "block_size": cache.get("block_size", 16)}
    hardware = load_hardware(_device(name, meta))
    return Scenario(
        name=name,
        model=load_model(arguments["model"]),
        hardware=hardware,
        engine=recorded_engine(_LOGGED_ENGINE, str(meta.get(f"{_LOGGED_ENGINE}_version") or ""), hardware, chosen),
        traffic=Traffic(arrivals=Arrivals(process="trace"), trace=Trace(path=str(trace), format="jsonl")),
        sampling=Sampling(method="greedy"),
    )


def _device(name: str, meta: dict[str, Any]) -> str:
    """The device as the run recorded it, else the beginning of the folder's name (`<gpu>-<model>`)."""
    recorded = (meta.get("hardware") or {}).get("device_name")
    return str(recorded or name.split("-")[0])
