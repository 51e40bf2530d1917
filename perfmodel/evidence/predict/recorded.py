"""Simulates recorded runs: open-loop stages, steady states, offline jobs, logs of single requests.

Steady states are simulated in part: one slice of a large deployment, or fewer rounds of a closed loop. A cluster of 16
prefill and 32 decode ranks under 8,192 requests is sixteen times one prefill and two decode ranks under 512; a slice
lacks load balancing with other slices. Against whole simulations, mean TPOT differs by at most 0.3 %, mean TTFT is 5 to
12 % longer in a slice of a single prefill engine.

The first round of a closed loop starts on an idle server with everyone queued, the second still follows in its waves,
the last sees the server drain; all others are alike. So of four simulated rounds the third stands for the whole middle
(of five the fourth)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any

import numpy as np

from perfmodel.cost import EngineProfile, ServerFit, load_calibration, load_engine_profile, plan_memory, profile_of
from perfmodel.evidence.observation import (
    NO_INTERVAL,
    Interval,
    Observation,
    Prediction,
    Progress,
    parallel_map,
    predictions_of,
)
from perfmodel.evidence.sources.recorded import SATURATED
from perfmodel.sim import RequestColumns, RunResult, simulate
from perfmodel.specs import PoolSpec, Scenario


def with_traffic(scenario: Scenario, arrivals: dict[str, Any] | None = None, **update: Any) -> Scenario:
    """The scenario with changed traffic fields and `arrivals`."""
    traffic = scenario.traffic
    if arrivals:
        update["arrivals"] = traffic.arrivals.model_copy(update=arrivals)
    return scenario.model_copy(update={"traffic": traffic.model_copy(update=update)})


def requests_of(result: RunResult) -> RequestColumns:
    assert result.requests is not None
    return result.requests


def _mean_intervals(result: RunResult, window: tuple[float, float] | None = None) -> dict[str, Interval]:
    """80 % intervals of means as factors, over requests arriving in the window."""
    factors = result.ensemble.factors(window) if result.ensemble is not None else {}
    return {f"{metric}_mean": ends for metric, ends in factors.items()}


def spread_of(scenario: Scenario) -> float:
    """Spread of the fits of the scenario's device."""
    return load_calibration(scenario.hardware, scenario.engine.profile).spread


# ---------------------------------------------------------------- open-loop stages


def simulate_runs(
    rows: Sequence[Observation],
    progress: Progress | None = None,
    profile: EngineProfile | None = None,
    intervals: bool = False,
) -> list[Prediction]:
    """Simulate all stages of all runs on all cores, with equal results on any number. profile: replaces the committed
    one; intervals: compute 80 % intervals; progress: called with runs done"""
    runs: list[list[Observation]] = []
    for row in rows:
        if not runs or row.name != runs[-1][0].name or (row.window or (0.0,))[0] == 0:
            runs.append([])
        runs[-1].append(row)
    work = partial(_simulate_run, profile=profile, intervals=intervals)
    return [pair for pairs in parallel_map(work, runs, lambda run: run[0].name, progress) for pair in pairs]


def _simulate_run(stages: Sequence[Observation], profile: EngineProfile | None, intervals: bool) -> list[Prediction]:
    scenario = stages[0].scenario
    result = simulate(scenario, profile=profile, keep_steps=False, intervals=intervals)
    requests = requests_of(result)
    return [
        Prediction(row, stage_latencies(row, requests), "", _mean_intervals(result, row.window), scenario=scenario)
        for row in stages
    ]


def stage_latencies(row: Observation, requests: RequestColumns) -> dict[str, float]:
    """Latencies in ms of simulated requests that arrived in the stage."""
    assert row.window is not None
    start, end = row.window
    # The last request of a stage falls on its end, give or take a rounding.
    members = (requests.arrival_s > start + 1e-9) & (requests.arrival_s <= end + 1e-9)
    figures: dict[str, float] = {}
    for name, seconds in (("e2el", requests.e2el_s[members]), ("ttft", requests.ttft_s[members])):
        figures[f"{name}_mean"] = 1e3 * float(seconds.mean())
        figures[f"{name}_p90"], figures[f"{name}_p99"] = (1e3 * np.quantile(seconds, [0.9, 0.99])).tolist()
    answer = float(requests.num_output_tokens[members].mean())
    figures["itl_mean"] = (figures["e2el_mean"] - figures["ttft_mean"]) / max(answer - 1, 1)
    return figures


def shortened_stages(rows: Sequence[Observation], share: float) -> list[Observation]:
    """Stages cut to `share` of their duration at the same rate, with nearly the same means. Initially uncached prompts
    stay uncached, so their share grows."""
    return [_with_stages(row, share, 1.0) for row in rows]


def accelerated(rows: Sequence[Observation], factor: float) -> list[Observation]:
    """The requests arriving `factor` times as fast. With time rescaled, this equals the run on an engine with steps
    `factor` times as long."""
    return [_with_stages(row, 1.0 / factor, factor) for row in rows]


def _with_stages(row: Observation, longer: float, faster: float) -> Observation:
    """The row with stages `longer` times as long and arrivals `faster` times as fast."""
    stages = tuple(
        stage.model_copy(update={"duration_s": stage.duration_s * longer, "rate": stage.rate * faster})
        for stage in row.scenario.traffic.arrivals.stages
    )
    assert row.window is not None
    start, end = row.window
    scenario = with_traffic(row.scenario, {"stages": stages})
    return replace(row.under(scenario), window=(start * longer, end * longer))


# ---------------------------------------------------------------- steady states

_FEW = 256  # requests in flight; a smaller system is simulated whole, and no slice is cut below
_MAX_REQUESTS = 500  # of a disaggregated run, for it to have an ensemble: draws of pools take long
# Rounds simulated of those that a run has, from so many slots on: fewer slots draw too few lengths in a round. Against
# whole runs, five rounds move mean TPOT by 0.3 % and mean TTFT by 2 % (medians of 33 rows), four by 0.6 % and 3 %.
_ROUNDS = {32: 5}
_ROUNDS_OF_UNRELIABLE = {4: 4}


def num_slices(scenario: Scenario) -> int:
    """Number of equal slices of a disaggregated closed-loop deployment; 1 for any other."""
    concurrency = scenario.traffic.arrivals.concurrency
    if not scenario.cluster.is_disaggregated or concurrency is None or concurrency <= _FEW:
        return 1
    most = gcd(concurrency, *(_num_alike(pool) for pool in scenario.pools))
    return max(count for count in range(1, most + 1) if most % count == 0 and concurrency // count >= _FEW)


def _num_alike(pool: PoolSpec) -> int:
    """Parts of a pool with equal loads: ranks, or whole replicas where the load of a replica's ranks is left to chance,
    since each step waits for the one with most."""
    is_even = pool.engine.described.facts.ranks_by.get(pool.role) != "random"
    return pool.replicas * (pool.engine.data_parallel_size if is_even else 1)


def slice_of(scenario: Scenario, count: int) -> Scenario:
    """The scenario with 1/`count` of its traffic; `simulate` cuts its engines (`one_of`)."""
    slots, requests = scenario.traffic.arrivals.concurrency or 0, scenario.traffic.num_requests or 0
    return with_traffic(scenario, {"concurrency": slots // count}, num_requests=requests // count)


def shortened(scenario: Scenario, is_reliable: bool = True) -> Scenario:
    """`scenario` with fewer requests if it has many slots; even fewer if its figures are unreliable."""
    slots, count = scenario.traffic.arrivals.concurrency or 0, scenario.traffic.num_requests or 0
    kept = _ROUNDS if is_reliable else _ROUNDS_OF_UNRELIABLE
    num_requests = min((rounds * slots for least, rounds in kept.items() if slots >= least), default=count)
    return scenario if num_requests >= count else with_traffic(scenario, num_requests=num_requests)


def weighted_means(requests: RequestColumns, slots: int, num_requests: int) -> tuple[float, float]:
    """(mean TTFT, mean TPOT) in s, extrapolated from simulated `requests` to a run of `num_requests`."""
    count = len(requests)
    weights = np.ones(count)
    if count < num_requests:
        rounds = np.argsort(np.argsort(requests.request_id)) // slots
        simulated = count // slots
        weights[rounds == simulated - 2] = num_requests / slots - simulated + 1
    ttft, tpot = requests.ttft_s, requests.tpot_s
    has_gap = np.isfinite(tpot)
    return float(np.average(ttft, weights=weights)), float(np.average(tpot[has_gap], weights=weights[has_gap]))


def simulate_steady_states(
    rows: Sequence[Observation],
    progress: Progress | None = None,
    profile: EngineProfile | None = None,
    intervals: bool = False,
) -> list[Prediction]:
    """Predict all rows on all cores; servers measured twice are simulated once. profile: replaces the committed
    one; intervals: of reliable rows; unrecorded facts have no 80 % interval; progress: called with rows done"""
    work = partial(_simulate_steady, profile=profile, intervals=intervals)

    def key(row: Observation) -> tuple[bool, str]:
        return row.is_reliable, row.scenario.model_dump_json(exclude={"name"})

    return predictions_of(rows, work, key, _server, progress)


def _server(row: Observation) -> tuple[str, ...]:
    """Rows that share step costs have equal keys; then shorter loads first."""
    scenario, engine, traffic = row.scenario, row.scenario.engine, row.scenario.traffic
    engines = [pool.engine for pool in scenario.pools]
    degrees = [(e.tensor_parallel_size, e.data_parallel_size, e.enable_expert_parallel) for e in engines]
    weights = str(scenario.model.quantization.weights)
    server = (scenario.model.name, weights, scenario.hardware.name, engine.profile, engine.version or "")
    return *server, *map(str, degrees), f"{traffic.input_tokens}", f"{traffic.arrivals.concurrency or 0:05d}"


def _simulate_steady(row: Observation, profile: EngineProfile | None, intervals: bool) -> Prediction:
    scenario = row.scenario
    count = num_slices(scenario)
    part = scenario if count == 1 else slice_of(scenario, count)
    simulated = shortened(part, row.is_reliable)
    is_small = part.cluster.is_disaggregated and (part.traffic.num_requests or 0) <= _MAX_REQUESTS
    has_intervals = intervals and (row.is_reliable or is_small)
    result = simulate(simulated, profile=profile, keep_steps=False, one_of=count, intervals=has_intervals)
    slots, sent = part.traffic.arrivals.concurrency or 0, part.traffic.num_requests or 0
    ttft_s, tpot_s = weighted_means(requests_of(result), slots, sent)
    metrics = {"tpot_mean": tpot_s * 1e3, "ttft_mean": ttft_s * 1e3}
    details = {"is_shortened": simulated is not part}
    return Prediction(row, metrics, "", _mean_intervals(result), scenario=scenario, details=details)


# ---------------------------------------------------------------- offline jobs

_KV_OF_FREE = 0.9  # kv_cache_free_gpu_mem_fraction's default
_QUEUE_ROUNDS = 3  # of requests: one that begins together, one counted, one that still runs


def simulate_offline_runs(rows: Sequence[Observation], progress: Progress | None = None) -> list[Prediction]:
    """Predictions of all rows, on all cores."""
    return predictions_of(rows, _simulate_offline, lambda row: row.name, _server, progress)


def _simulate_offline(row: Observation) -> Prediction:
    """Output tokens/s per device of an engine with a full batch; for a single batch also ms to the first token.
    Requests of a queue are alike, so rounds repeat: the second is within 1.5 % of 25 rounds (ten rows)."""
    # KV gets a share of what weights and activations leave free, as in TensorRT-LLM, not of the whole memory.
    whole = row.scenario.engine.model_copy(update={"gpu_memory_utilization": 1.0})
    plan = plan_memory(row.scenario.model, row.scenario.hardware, whole)
    share = 1 - (1 - _KV_OF_FREE) * plan.kv_bytes / plan.visible_bytes
    engine = whole.model_copy(update={"gpu_memory_utilization": share})
    scenario = row.scenario.model_copy(update={"engine": engine})
    is_queue, profile = SATURATED in row.flags, None
    if is_queue:
        tokens = engine.max_model_len
        assert tokens is not None  # the reader sets it to the lengths of the row
        held = plan_memory(scenario.model, scenario.hardware, engine).max_batch(tokens)
        batch = max(min(held, engine.max_num_seqs), 1)
        simulated = with_traffic(scenario, num_requests=_QUEUE_ROUNDS * batch + 1)
    else:
        simulated, profile = scenario, profile_of(engine).model_copy(update={"server": ServerFit()})
    result = simulate(simulated, profile=profile, keep_steps=False, intervals=True)
    requests = requests_of(result)
    low, high = result.ensemble.duration_factor() if result.ensemble is not None else NO_INTERVAL
    if is_queue:
        ends = np.sort(requests.finished_s)
        rate = batch * float(requests.num_output_tokens.mean()) / float(ends[2 * batch] - ends[batch])
        metrics, intervals = {"throughput": rate / engine.num_devices}, {"throughput": (1 / high, 1 / low)}
    else:
        batch = len(requests)
        duration = float(requests.finished_s.max() - requests.arrival_s.min())
        rate = float(requests.num_output_tokens.sum()) / duration / engine.num_devices
        metrics = {"static_throughput": rate, "ttft": float(requests.ttft_s.mean()) * 1e3}
        intervals = {"static_throughput": (1 / high, 1 / low), "ttft": (low, high)}
    return Prediction(row, metrics, "", intervals, scenario=scenario, details={"batch": batch})


# ---------------------------------------------------------------- logs of single requests


def simulate_log(row: Observation, progress: Any = None) -> Prediction:
    """Replay the run from its log, without HTTP, as the log was written in the engine's process."""
    profile = load_engine_profile(row.scenario.engine.profile).model_copy(update={"server": ServerFit()})
    result = simulate(row.scenario, profile=profile, progress=progress, keep_steps=True, intervals=True)
    requests = requests_of(result)
    order = np.argsort(requests.request_id)
    seconds = {name: getattr(requests, f"{name}_s")[order] for name in ("e2el", "ttft", "tpot")}
    return Prediction(row, {}, "", _mean_intervals(result), seconds, row.scenario, result=result)
