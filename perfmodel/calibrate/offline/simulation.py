"""Recorded offline throughput on the simulated clock."""

__all__ = ["OfflinePair", "simulate_offline_runs"]

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import nan

import numpy as np

from perfmodel.calibrate.offline.runs import OfflineRun
from perfmodel.calibrate.over_cores import over_cores
from perfmodel.cost import EngineProfile, ServerFit, load_engine_profile, plan_memory
from perfmodel.errors import PerfmodelError
from perfmodel.sim import RequestColumns, simulate
from perfmodel.specs import Scenario, Traffic

Progress = Callable[[int, int], None]
_KV_OF_FREE = 0.9  # kv_cache_free_gpu_mem_fraction's default
_ROUNDS = 3  # of requests: one that begins together, one counted, one that still runs


@dataclass(frozen=True)
class OfflinePair:
    """One row with its prediction, in the row's unit; None and a reason where it could not be simulated.

    batch:    sequences that run together at most
    interval: the ends of the 80 % interval, as factors of the predicted value
    """

    row: OfflineRun
    predicted: float | None = None
    reason: str = ""
    batch: int = 0
    interval: tuple[float, float] = (nan, nan)


def simulate_offline_runs(rows: Sequence[OfflineRun], progress: Progress | None = None) -> list[OfflinePair]:
    """Predictions of all rows, over the cores of this machine."""
    return over_cores(_simulated, rows, lambda row: _server(row.scenario), progress)


def _server(scenario: Scenario) -> tuple[str, str, str, int]:
    weights = str(scenario.model.quantization.weights)
    return scenario.model.name, weights, scenario.hardware.name, scenario.engine.tensor_parallel_size


def _simulated(row: OfflineRun) -> OfflinePair:
    try:
        row = replace(row, scenario=_with_kv_of_the_free(row.scenario))
        if row.is_saturated:
            return _of_a_queue(row, _most_together(row.scenario))
        return _of_a_batch(row)
    except PerfmodelError as error:
        return OfflinePair(row, reason=str(error))


def _of_a_queue(row: OfflineRun, batch: int) -> OfflinePair:
    """Output tokens per second and device of an engine that always has a full batch.

    Requests are alike, so each round of them follows the one before as that followed its own: the second is as all
    later ones, within 1.5 % of what 25 rounds come to (ten rows).
    """
    count = _ROUNDS * batch + 1
    requests, interval = _run(row.scenario.model_copy(update={"traffic": _with_requests(row.scenario, count)}))
    ends = np.sort(requests.finished_s)
    duration = float(ends[2 * batch] - ends[batch])
    outputs = batch * float(requests.num_output_tokens.mean())
    return OfflinePair(row, outputs / duration / row.scenario.engine.num_devices, "", batch, _inverse(interval))


def _of_a_batch(row: OfflineRun) -> OfflinePair:
    """Output tokens per second and device, or ms to the first token, of one batch."""
    engine = load_engine_profile(row.scenario.engine.profile)
    requests, interval = _run(row.scenario, engine.model_copy(update={"server": ServerFit()}))
    if row.metric == "ttft":
        return OfflinePair(row, float(requests.ttft_s.mean()) * 1e3, "", len(requests), interval)
    duration = float(requests.finished_s.max() - requests.arrival_s.min())
    rate = float(requests.num_output_tokens.sum()) / duration / row.scenario.engine.num_devices
    return OfflinePair(row, rate, "", len(requests), _inverse(interval))


def _run(scenario: Scenario, profile: EngineProfile | None = None) -> tuple[RequestColumns, tuple[float, float]]:
    """The requests' records, and the 80 % interval of the run's duration as factors."""
    result = simulate(scenario, profile=profile, keep_steps=False, intervals=True)
    assert result.requests is not None
    return result.requests, result.ensemble.duration_factor() if result.ensemble is not None else (nan, nan)


def _inverse(interval: tuple[float, float]) -> tuple[float, float]:
    low, high = interval
    return 1 / high, 1 / low


def _with_kv_of_the_free(scenario: Scenario) -> Scenario:
    """KV gets a share of what weights and activations leave free, as in TensorRT-LLM, not of the whole memory."""
    whole = scenario.engine.model_copy(update={"gpu_memory_utilization": 1.0})
    plan = plan_memory(scenario.model, scenario.hardware, whole)
    used = 1 - (1 - _KV_OF_FREE) * plan.kv_bytes / plan.visible_bytes
    return scenario.model_copy(update={"engine": whole.model_copy(update={"gpu_memory_utilization": used})})


def _with_requests(scenario: Scenario, count: int) -> Traffic:
    return scenario.traffic.model_copy(update={"num_requests": count})


def _most_together(scenario: Scenario) -> int:
    """Sequences of the scenario's fixed lengths that the KV cache holds whole, up to max_num_seqs."""
    tokens = scenario.engine.max_model_len
    assert tokens is not None  # the reader sets it to the lengths of the row
    plan = plan_memory(scenario.model, scenario.hardware, scenario.engine)
    return max(min(plan.max_batch(tokens), scenario.engine.max_num_seqs), 1)
