"""Measured points for the plot of throughput against interactivity: published ones of the index that predictions are
compared with, and those of a user's own result file. Knows no prediction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.evidence.observation import PUBLISHED_RESULTS, STEADY_STATES
from perfmodel.trust import MeasuredSetup, measured_rows

_PUBLISHERS = {"steady-state": STEADY_STATES.publisher, "served": PUBLISHED_RESULTS.publisher}


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """One measured load. speed: tokens/s of a user; throughput: output tokens/s of a device; is_alike: of the same
    engine, number format and number of devices; words: setup and source"""

    speed: float
    throughput: float
    is_alike: bool
    words: str


def published_points(scenario: Mapping[str, Any]) -> list[MeasuredPoint]:
    """Those of a resolved scenario's model and device, from servers whose prefill and decode share devices."""
    model, engine = scenario["model"], scenario["engine"]
    weights = (model.get("quantization") or {}).get("weights") or model["dtype"]
    alike = (engine["profile"], weights, _num_devices(engine))
    points = []
    for kind, setup, label, metrics in _rows_of(model["name"], scenario["hardware"]["name"]):
        throughput = _throughput(setup, metrics)
        if throughput and "tpot_mean" in metrics and not setup.separate:
            law = "" if "output_tokens_per_s" in metrics else "throughput by Little's law<br>"
            words = (
                f"{setup.engine} {setup.version}, {setup.weights}, {setup.devices:g} devices, "
                f"{setup.input_tokens:,.0f} in, {setup.output_tokens:,.0f} out, {setup.concurrency:g} in flight<br>"
                f"{law}{_PUBLISHERS.get(kind, kind)}<br>{label}"
            )
            is_alike = (setup.engine, setup.weights, setup.devices) == alike
            points.append(MeasuredPoint(1e3 / metrics["tpot_mean"], throughput / setup.devices, is_alike, words))
    return points


@lru_cache(maxsize=64)
def _rows_of(model: str, device: str) -> Sequence[tuple[str, MeasuredSetup, str, Mapping[str, float]]]:
    """(validation, setup, label, metric -> measured) of each measured load."""
    loads: dict[tuple[str, MeasuredSetup, str], dict[str, float]] = {}
    for row in measured_rows():
        if (row.setup.model, row.setup.device) == (model, device):
            loads.setdefault((row.kind, row.setup, row.label), {})[row.metric] = row.measured
    return [(*load, metrics) for load, metrics in loads.items()]


def _throughput(setup: MeasuredSetup, metrics: Mapping[str, float]) -> float:
    """Output tokens/s of all devices, as measured, else by Little's law from the requests in flight and the time of
    one; 0 if unknown. Of 119 rows that state both, the law's is 1.03 times the measured one in the median, within 25 %
    in three of four: requests are fewer while a run starts and ends."""
    if "output_tokens_per_s" in metrics:
        return metrics["output_tokens_per_s"]
    if "ttft_mean" not in metrics or "tpot_mean" not in metrics:
        return 0.0
    duration_ms = metrics["ttft_mean"] + max(setup.output_tokens - 1, 0.0) * metrics["tpot_mean"]
    return setup.concurrency * setup.output_tokens / duration_ms * 1e3


def _num_devices(engine: Mapping[str, Any]) -> int:
    return prod(engine[f"{kind}_parallel_size"] for kind in ("tensor", "pipeline", "data"))


def own_points(path: Path, scenario: Mapping[str, Any]) -> Sequence[MeasuredPoint]:
    """Points of a load tool's result file, on as many devices as a resolved scenario has. Raises SpecError for another
    file, and for one without a run that can be marked."""
    return _own_points(path, _num_devices(scenario["engine"]) * scenario["cluster"]["replicas"])


@lru_cache(maxsize=16)
def _own_points(path: Path, num_devices: int) -> Sequence[MeasuredPoint]:
    from perfmodel.evidence.sources.bench import read_bench_files

    points = []
    for run in read_bench_files((path,))[0]:
        tpot_ms, throughput = run.metrics.get("mean_tpot_ms"), run.metrics.get("output_throughput")
        if tpot_ms and throughput:
            version, concurrency = run.setup.version, getattr(run.load, "concurrency", None)
            load = f", {concurrency:g} in flight" if concurrency else ""
            words = f"{run.source} {version}".strip() + f", {num_devices} devices{load}<br>{run.name}"
            points.append(MeasuredPoint(1e3 / tpot_ms, throughput / num_devices, True, words))
    if not points:
        raise SpecError(f"{path.name}: no run has both a mean TPOT and an output throughput; nothing can be marked.")
    return points
