"""Recorded runs on the simulated clock: open-loop stages, steady states, offline jobs, logs of single requests.

Of steady states less than the whole run is simulated, with the same means: one slice of a large deployment, or fewer
rounds of a closed loop. A cluster of 16 prefill and 32 decode ranks under 8,192 requests is sixteen times one prefill
and two decode ranks under 512. What a slice misses is that its engines could help those of others out. Where both were
simulated, mean TPOT of slice and whole differ by 0.3 % at most, mean TTFT is 5 to 12 % longer in a slice of a single
prefill engine.

The first round of a closed loop finds an idle server and a queue of all others, the second still follows in its waves,
the last sees a server that empties; every round between meets the same system. So of four simulated rounds the third
counts for all that the long run has there (of five the fourth).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any

import numpy as np

from perfmodel.cost import (
    Calibration,
    EngineProfile,
    ServerFit,
    load_calibration,
    load_engine_profile,
    plan_memory,
    profile_of,
)
from perfmodel.cost.calibrations.files import GenerationFit
from perfmodel.evidence.observation import (
    NO_INTERVAL,
    Interval,
    Observation,
    Prediction,
    Progress,
    over_cores,
    predictions_of,
)
from perfmodel.evidence.sources.recorded import SATURATED
from perfmodel.sim import RequestColumns, RunResult, simulate
from perfmodel.specs import Scenario


def with_traffic(scenario: Scenario, arrivals: dict[str, Any] | None = None, **update: Any) -> Scenario:
    """The scenario with fields of its traffic, and of its `arrivals`, changed."""
    traffic = scenario.traffic
    if arrivals:
        update["arrivals"] = traffic.arrivals.model_copy(update=arrivals)
    return scenario.model_copy(update={"traffic": traffic.model_copy(update=update)})


def requests_of(result: RunResult) -> RequestColumns:
    assert result.requests is not None
    return result.requests


def _mean_intervals(result: RunResult, window: tuple[float, float] | None = None) -> dict[str, Interval]:
    """80 % intervals of means, as factors, of the requests that arrive in the window."""
    factors = result.ensemble.factors(window) if result.ensemble is not None else {}
    return {f"{metric}_mean": ends for metric, ends in factors.items()}


def spread_of(scenario: Scenario) -> float:
    """How far the fits of the scenario's device have come."""
    return load_calibration(scenario.hardware, scenario.engine.profile).spread


# ---------------------------------------------------------------- open-loop stages


def simulate_runs(
    rows: Sequence[Observation],
    progress: Progress | None = None,
    profile: EngineProfile | None = None,
    intervals: bool = False,
) -> list[Prediction]:
    """All stages of all runs, simulated over the cores of this machine; the answer does not depend on how many.

    profile: instead of the committed one; intervals: whether predictions get 80 % intervals
    """
    runs: list[list[Observation]] = []
    for row in rows:
        if not runs or row.name != runs[-1][0].name or (row.window or (0.0,))[0] == 0:
            runs.append([])
        runs[-1].append(row)
    work = partial(_simulate_run, profile=profile, intervals=intervals)
    return [pair for pairs in over_cores(work, runs, lambda run: run[0].name, progress) for pair in pairs]


def _simulate_run(stages: Sequence[Observation], profile: EngineProfile | None, intervals: bool) -> list[Prediction]:
    scenario = stages[0].scenario
    result = simulate(scenario, profile=profile, keep_steps=False, intervals=intervals)
    requests = requests_of(result)
    return [
        Prediction(row, stage_latencies(row, requests), "", _mean_intervals(result, row.window), scenario=scenario)
        for row in stages
    ]


def stage_latencies(row: Observation, requests: RequestColumns) -> dict[str, float]:
    """Latencies in ms of the simulated requests that arrived in the stage."""
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
    """The stages cut to `share` of their duration at the same rate: the same means, sooner.

    Prompts that were all new at the beginning stay so: the shorter the stage, the larger their part.
    """
    return [_with_stages(row, share, 1.0) for row in rows]


def accelerated(rows: Sequence[Observation], factor: float) -> list[Observation]:
    """The same requests arriving `factor` times as fast.

    With time in units so much shorter, this is the run itself on an engine whose steps take `factor` times as long.
    """
    return [_with_stages(row, 1.0 / factor, factor) for row in rows]


def _with_stages(row: Observation, longer: float, faster: float) -> Observation:
    """The row of a run with stages `longer` times as long, requests arriving `faster` times as fast."""
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
_MOST_REQUESTS = 500  # of a disaggregated run, for it to have an ensemble: draws of pools take long
# Rounds simulated of those that a run has, from so many slots on: fewer slots draw too few lengths in a round. Against
# whole runs, five rounds move mean TPOT by 0.3 % and mean TTFT by 2 % (medians of 33 rows), four by 0.6 % and 3 %.
_ROUNDS = {32: 5}
_ROUNDS_OF_UNRELIABLE = {4: 4}


def num_slices(scenario: Scenario) -> int:
    """Into how many equal slices a disaggregated deployment in a closed loop can be cut; 1 for any other."""
    concurrency = scenario.traffic.arrivals.concurrency
    if not scenario.cluster.is_disaggregated or concurrency is None or concurrency <= _FEW:
        return 1
    most = gcd(concurrency, *(pool.replicas * pool.engine.data_parallel_size for pool in scenario.pools))
    return max(count for count in range(1, most + 1) if most % count == 0 and concurrency // count >= _FEW)


def slice_of(scenario: Scenario, count: int) -> Scenario:
    """The scenario with one of `count` parts of its traffic; `simulate` cuts its engines (`one_of`)."""
    slots, requests = scenario.traffic.arrivals.concurrency or 0, scenario.traffic.num_requests or 0
    return with_traffic(scenario, {"concurrency": slots // count}, num_requests=requests // count)


def shortened(scenario: Scenario, is_reliable: bool = True) -> Scenario:
    """`scenario` with fewer requests, if it has many slots; fewer still of one whose figures are not reliable."""
    slots, count = scenario.traffic.arrivals.concurrency or 0, scenario.traffic.num_requests or 0
    kept = _ROUNDS if is_reliable else _ROUNDS_OF_UNRELIABLE
    num_requests = min((rounds * slots for least, rounds in kept.items() if slots >= least), default=count)
    return scenario if num_requests >= count else with_traffic(scenario, num_requests=num_requests)


def weighted_means(requests: RequestColumns, slots: int, num_requests: int) -> tuple[float, float]:
    """(mean TTFT, mean TPOT), s, of the run of `num_requests` that `requests` were simulated for."""
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
    generation: GenerationFit | None = None,
    intervals: bool = False,
) -> list[Prediction]:
    """Predictions of all rows, over the cores of this machine; servers that were measured twice are simulated once.

    profile, generation: instead of the committed ones
    intervals:           of the reliable rows; what a run does not record has no 80 %
    """
    work = partial(_simulate_steady, profile=profile, generation=generation, intervals=intervals)

    def key(row: Observation) -> tuple[bool, str]:
        return row.is_reliable, row.scenario.model_dump_json(exclude={"name"})

    return predictions_of(rows, work, key, _server, progress)


def _server(row: Observation) -> tuple[str, ...]:
    """What rows have in common that share step costs; then the shorter load first."""
    scenario, engine, traffic = row.scenario, row.scenario.engine, row.scenario.traffic
    engines = [pool.engine for pool in scenario.pools]
    degrees = [(e.tensor_parallel_size, e.data_parallel_size, e.enable_expert_parallel) for e in engines]
    weights = str(scenario.model.quantization.weights)
    server = (scenario.model.name, weights, scenario.hardware.name, engine.profile, engine.version or "")
    return *server, *map(str, degrees), f"{traffic.input_tokens}", f"{traffic.arrivals.concurrency or 0:05d}"


def _simulate_steady(
    row: Observation, profile: EngineProfile | None, generation: GenerationFit | None, intervals: bool
) -> Prediction:
    scenario = row.scenario
    calibration: Calibration | None = None
    if generation is not None:
        calibration = load_calibration(scenario.hardware, scenario.engine.profile, generation=generation)
    count = num_slices(scenario)
    part = scenario if count == 1 else slice_of(scenario, count)
    simulated = shortened(part, row.is_reliable)
    is_small = part.cluster.is_disaggregated and (part.traffic.num_requests or 0) <= _MOST_REQUESTS
    result = simulate(
        simulated,
        calibration=calibration,
        profile=profile,
        keep_steps=False,
        one_of=count,
        intervals=intervals and (row.is_reliable or is_small),
    )
    slots, sent = part.traffic.arrivals.concurrency or 0, part.traffic.num_requests or 0
    ttft_s, tpot_s = weighted_means(requests_of(result), slots, sent)
    metrics = {"tpot_mean": tpot_s * 1e3, "ttft_mean": ttft_s * 1e3}
    details = {"is_shortened": simulated is not part}
    return Prediction(row, metrics, "", _mean_intervals(result), scenario=scenario, details=details)


# ---------------------------------------------------------------- offline jobs

_KV_OF_FREE = 0.9  # kv_cache_free_gpu_mem_fraction's default
_QUEUE_ROUNDS = 3  # of requests: one that begins together, one counted, one that still runs


def simulate_offline_runs(rows: Sequence[Observation], progress: Progress | None = None) -> list[Prediction]:
    """Predictions of all rows, over the cores of this machine."""
    return predictions_of(rows, _simulate_offline, lambda row: row.name, _server, progress)


def _simulate_offline(row: Observation) -> Prediction:
    """Output tokens per second and device of an engine that always has a full batch; or, of one batch alone, these and
    ms to the first token.

    Requests of a queue are alike, so each round of them follows the one before as that followed its own: the second is
    as all later ones, within 1.5 % of what 25 rounds come to (ten rows).
    """
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
    """The run replayed from its log, without HTTP: it was written inside the engine's process."""
    profile = load_engine_profile(row.scenario.engine.profile).model_copy(update={"server": ServerFit()})
    result = simulate(row.scenario, profile=profile, progress=progress, keep_steps=True, intervals=True)
    requests = requests_of(result)
    order = np.argsort(requests.request_id)
    seconds = {name: getattr(requests, f"{name}_s")[order] for name in ("e2el", "ttft", "tpot")}
    return Prediction(row, {}, "", _mean_intervals(result), seconds, row.scenario, result=result)
