"""Recorded runs with a log of each request: `<run>/e2e/meta.json` and `requests.csv`.

The engine ran inside the load generator's process, so there is no server in front of it; sampling was plain.
"""

__all__ = ["RequestLog", "read_request_log"]

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.calibrate.origins import recorded_engine
from perfmodel.errors import SpecError
from perfmodel.files.bounded import read_json, read_rows
from perfmodel.specs import Scenario, Traffic, load_hardware, load_model
from perfmodel.specs.traffic import Arrivals, Sampling, Trace

Floats = NDArray[np.float64]
_ENGINE = "vllm"  # that such logs are of


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
    )
    return RequestLog(
        folder.name, _scenario(folder.name, meta, trace), first - arrival, last - arrival, prompts, outputs
    )


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
        engine=recorded_engine(_ENGINE, str(meta.get(f"{_ENGINE}_version") or ""), hardware, chosen),
        traffic=Traffic(arrivals=Arrivals(process="trace"), trace=Trace(path=str(trace), format="jsonl")),
        sampling=Sampling(method="greedy"),
    )


def _device(name: str, meta: dict[str, Any]) -> str:
    """The device as the run recorded it, else the beginning of the folder's name (`<gpu>-<model>`)."""
    recorded = (meta.get("hardware") or {}).get("device_name")
    return str(recorded or name.split("-")[0])
