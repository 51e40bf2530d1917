"""InferenceX's `agg_*.json`: one object for a run, or the list of a sweep, each from a result of `bench_serving`.

Latencies are in s (the script takes `_ms` out of vLLM's keys and divides), throughput is per device. Tensor, expert and
data parallelism are of the one server; of disaggregated ones the file has both roles. `isl` and `osl` are what was
asked for: lengths are drawn down from there by the recipe's range, which the file does not say, as it does not say how
many requests were sent.

Fields: InferenceX, utils/process_result.py (2026).
"""

__all__ = ["is_inferencex_result", "read_inferencex_result"]

from collections.abc import Mapping
from typing import Any

from perfmodel.calibrate.bench.runs import BenchLoad, BenchRun, Said, figure, text_of
from perfmodel.calibrate.served.setups import engine_of, quantization_of
from perfmodel.errors import SpecError

_STATISTICS = ("mean", "median", "p90", "p95", "p99")
_LATENCIES = ("ttft", "tpot", "itl", "e2el")
_REQUESTS_PER_SLOT = 10  # of its recipes
_SECONDS_TO_MS = 1e3


def is_inferencex_result(data: Mapping[str, Any]) -> bool:
    """Whether it is such an object."""
    return {"hw", "conc", "tput_per_gpu"} <= set(data)


def read_inferencex_result(name: str, data: Mapping[str, Any]) -> BenchRun:
    """The run that `data` is of, called `name`. Raises SpecError for what cannot be compared."""
    if _is_true(data.get("disagg")) or _is_true(data.get("is_multinode")):
        raise SpecError(
            f"{name}: is of separate prefill and decode workers, whose network the file does not say; describe them in "
            f"a scenario, and give the result of the load tool itself (bench_serving's .json) with --scenario."
        )
    slots = int(figure(name, data, "conc") or 0)
    prompt, answer = figure(name, data, "isl"), figure(name, data, "osl")
    devices = int(figure(name, data, "tp") or 1)
    measured = _figures(name, data, devices)
    if not slots or not measured:
        raise SpecError(f"{name}: states no concurrency or no figure; there is nothing to compare.")
    return BenchRun(
        name=name,
        tool="InferenceX",
        version="",
        says=_says(name, data, devices),
        load=BenchLoad("closed", _REQUESTS_PER_SLOT * slots, slots, prompt=prompt, answer=answer),
        measured=measured,
        completed=_REQUESTS_PER_SLOT * slots,
        failed=0,
        notes=(
            f"the file does not say how many requests were sent, nor how they were drawn down from isl and osl: "
            f"{_REQUESTS_PER_SLOT} per slot, all as long as these",
        ),
    )


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"


def _figures(name: str, data: Mapping[str, Any], devices: int) -> dict[str, float]:
    found = {
        f"{statistic}_{metric}_ms": figure(name, data, f"{statistic}_{metric}", scale=_SECONDS_TO_MS)
        for metric in _LATENCIES
        for statistic in _STATISTICS
    }
    found["total_token_throughput"] = figure(name, data, "tput_per_gpu", scale=devices)
    found["output_throughput"] = figure(name, data, "output_tput_per_gpu", scale=devices)
    return {key: value for key, value in found.items() if value}


def _says(name: str, data: Mapping[str, Any], devices: int) -> dict[str, Said]:
    found: dict[str, Said] = {"hardware": text_of(name, data, "hw"), "model": text_of(name, data, "model")}
    profile, version = engine_of(text_of(name, data, "framework"))
    found["engine.profile"] = profile
    image = engine_of(text_of(name, data, "image"))
    if version or image[1]:
        found["engine.version"] = version or image[1]
    quantization = quantization_of(text_of(name, data, "precision"))
    if quantization is not None:
        found["engine.quantization"] = quantization
    if _is_true(data.get("dp_attention")):
        found |= {"engine.data_parallel_size": devices, "engine.enable_expert_parallel": True}
    else:
        found["engine.tensor_parallel_size"] = devices
        if (figure(name, data, "ep") or 1) > 1:
            found["engine.enable_expert_parallel"] = True
    return {key: value for key, value in found.items() if value}
