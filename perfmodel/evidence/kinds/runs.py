"""`validate per-request`: a recorded run replayed from its log, and compared request by request."""

from collections.abc import Callable, Sequence
from functools import partial
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost import ServerFit, load_engine_profile, plan_memory
from perfmodel.cost.calibrations.provenance import provenance_of
from perfmodel.evidence.breakdown import TypicalSteps, latency_breakdown
from perfmodel.evidence.predict.serving import StageRow, simulate_runs
from perfmodel.evidence.report import (
    Comparison,
    Rows,
    ValidationReport,
    by_dimension,
    dimensions_of,
    pooled,
    range_names,
    worst_of,
)
from perfmodel.evidence.sources.offline import OfflinePair, OfflineRun, read_offline_runs, simulate_offline_runs
from perfmodel.evidence.sources.serving import METRICS, RequestLog, ServingRun, read_request_log, read_serving_runs
from perfmodel.planning.sweeps.typical_step import StepChoice, mean_step
from perfmodel.sim import RequestColumns, simulate
from perfmodel.specs import Scenario
from perfmodel.trust.index import MeasuredSetup, setup_of

Progress_per_request = Callable[[int, int | None], None]
Floats = NDArray[np.float64]
_METRICS = ("e2el", "ttft", "tpot")
_TOKENS = (32, 128, 512, 2048)
_ABOUT_per_request = (
    "One recorded run replayed request by request: the arrivals, prompt lengths and answer lengths of its log,"
    " the engine arguments and KV blocks that it had. The log was written inside the engine's process: no "
    "server in front. The device's calibration comes from a layer profile or kernel tables; where that profile"
    " was taken on this card, kernel times are training data and whole requests (batches, queueing, host time)"
    " are not."
)


def validate_per_request(folder: str | Path, progress: Progress_per_request | None = None) -> ValidationReport:
    """Simulate the run and compare single requests, and their means."""
    with TemporaryDirectory() as traces:
        log = read_request_log(folder, traces)
        # without HTTP: the log was written inside the engine's process
        profile = load_engine_profile(log.scenario.engine.profile).model_copy(update={"server": ServerFit()})
        result = simulate(log.scenario, profile=profile, progress=progress, keep_steps=True, intervals=True)
    requests = result.requests
    assert requests is not None
    predicted = _in_order(requests)
    factors = result.ensemble.factors() if result.ensemble is not None else {}
    measured = {"e2el": log.e2el_s, "ttft": log.ttft_s, "tpot": log.tpot_s}
    pairs = {metric: Rows(predicted[metric], measured[metric], _labels(log)) for metric in _METRICS}
    means = {
        f"{metric}_mean": Rows(
            [rows.predicted.mean()], [rows.measured.mean()], ["mean over requests"], factors.get(metric)
        ).stats()
        for metric, rows in pairs.items()
    }
    sizes = {
        "prompt": range_names(log.num_prompt_tokens, _TOKENS),
        "answer": range_names(log.num_output_tokens, _TOKENS),
    }
    setups = [_setup(log)] * len(log.ttft_s)
    comparisons = [Comparison.of(metric, rows, "s", sizes, setups) for metric, rows in pairs.items()]
    steps = mean_step(result)
    parts = partial(_breakdown_per_request, log, steps, predicted["ttft"])
    return ValidationReport(
        kind="per-request",
        rows=len(log.ttft_s),
        covered=len(requests),
        metrics=means | pooled(comparisons),
        by=by_dimension(comparisons),
        worst=worst_of(comparisons, 3, parts),
        comparisons=comparisons,
        provenance=provenance_of([log.scenario]),
        about=_ABOUT_per_request,
    )


def _setup(log: RequestLog) -> MeasuredSetup:
    """The run's setup, with the mean lengths of its log."""
    prompts, answers = float(log.num_prompt_tokens.mean()), float(log.num_output_tokens.mean())
    return setup_of(log.scenario)._replace(input_tokens=prompts, output_tokens=answers)


def _breakdown_per_request(
    log: RequestLog, steps: StepChoice | None, ttft_s: Floats, comparison: Comparison, number: int
) -> dict[str, Any]:
    """Parts of one request's latency, with the run's mean decode step."""
    rows, request = comparison.rows, int(np.flatnonzero(comparison.rows.kept)[number])
    typical = TypicalSteps.of(log.scenario, steps, int(log.num_prompt_tokens[request]), ServerFit())
    predicted_ms, measured_ms = 1e3 * float(rows.predicted[number]), 1e3 * float(rows.measured[number])
    return latency_breakdown(comparison.metric, predicted_ms, measured_ms, 1e3 * float(ttft_s[request]), typical)


def _in_order(requests: RequestColumns) -> dict[str, Floats]:
    order = np.argsort(requests.request_id)
    return {
        "e2el": requests.e2el_s[order],
        "ttft": requests.ttft_s[order],
        "tpot": requests.tpot_s[order],
    }


def _labels(log: RequestLog) -> list[str]:
    sizes = zip(log.num_prompt_tokens.tolist(), log.num_output_tokens.tolist(), strict=True)
    return [
        f"request {i}, {prompt} prompt tokens, {outputs} output tokens" for i, (prompt, outputs) in enumerate(sizes)
    ]


Progress_serving = Callable[[int, int], None]
_DIMENSIONS_serving: dict[str, Callable[[StageRow], str]] = {
    "device": lambda row: row.run.scenario.hardware.name,
    "model": lambda row: row.run.scenario.model.name,
    "load": lambda row: "overloaded" if row.run.is_overloaded(row.stage) else "steady",
    "engine": lambda row: row.run.scenario.engine.profile,
    "tensor parallel": lambda row: str(row.run.scenario.engine.tensor_parallel_size),
}
_RATES = (2, 5, 10, 20)
_ABOUT_serving = (
    "Recorded runs of a server under open-loop load in stages, each simulated whole: the same engine "
    "arguments, arrivals drawn by the same process, prompts that repeat as the load tool repeats them. One row"
    " is one stage. Calibrations of devices come from kernel tables or layer profiles, never from serving "
    "runs, so what they say of models, loads and parallelism is no training data. The engine's profile (host "
    "time, front end, sampling traffic: the same few numbers for all runs) was fitted to the means of steady "
    "stages of the runs that its source names; if these are those runs, means are training data for these"
    " numbers, while percentiles and overloaded stages are not."
)


def validate_serving(path: str | Path, progress: Progress_serving | None = None) -> ValidationReport:
    """Simulate every run of the file and compare each stage. Runs that cannot be described are listed with a reason."""
    runs, left_out = read_serving_runs(path)
    rows = simulate_runs(runs, progress, intervals=True)
    return report_serving(rows, left_out)


def report_serving(rows: Sequence[StageRow], left_out: Sequence[tuple[str, str]] = ()) -> ValidationReport:
    """Errors over all stages, and by device, model and load."""
    comparisons = [_comparison_serving(rows, metric) for metric in METRICS]
    return ValidationReport(
        kind="serving",
        rows=len(rows) + len(left_out),
        covered=len(rows),
        metrics=pooled(comparisons),
        by=by_dimension(comparisons),
        worst=worst_of(comparisons, 3, partial(_breakdown_serving, rows)),
        notes=[
            *_memory_notes([row.run for row in rows]),
            *_overload_notes(rows),
            *(f"not covered: {n}: {why}" for n, why in left_out),
        ],
        comparisons=comparisons,
        provenance=provenance_of([row.run.scenario for row in rows]),
        about=_ABOUT_serving,
    )


def _memory_notes(runs: Sequence[ServingRun]) -> list[str]:
    """The plan's KV blocks beside those that servers logged: the runs above are simulated with the latter."""
    found: dict[str, None] = {}
    for run in runs:
        engine, logged = run.scenario.engine, run.scenario.engine.num_gpu_blocks_override
        if logged is None:
            continue
        model, hardware = run.scenario.model, run.scenario.hardware
        free = engine.model_copy(update={"num_gpu_blocks_override": None})
        planned = plan_memory(model, hardware, free).num_kv_blocks
        where = f"memory: {model.name} on {engine.num_devices} x {hardware.name}"
        found[f"{where}: {planned:,} KV blocks planned, {logged:,} logged ({planned / logged - 1:+.1%})."] = None
    return list(found)


def mean_backlog_wait_s(rate: float, capacity: float, duration_s: float) -> float:
    """Mean wait in a queue that begins empty and grows by what `capacity` cannot take of `rate`, both in requests/s,
    over the `duration_s` seconds in which requests arrive: one that arrives at t waits t (rate / capacity - 1)."""
    return max(rate / capacity - 1, 0.0) * duration_s / 2


def _overload_notes(rows: Sequence[StageRow]) -> list[str]:
    """What an error of the steps' durations makes of the wait, where more requests arrive than all slots serve."""
    notes = []
    for row in rows:
        if not row.run.is_overloaded(row.stage):
            continue
        scenario, (measured, predicted) = row.run.scenario, (row.measured, row.predicted)
        stage = scenario.traffic.arrivals.stages[row.stage]
        served, expected = (
            scenario.engine.max_num_seqs * 1e3 / (each["e2el_mean"] - each["ttft_mean"])
            for each in (measured, predicted)
        )
        waits = [mean_backlog_wait_s(stage.rate, each, stage.duration_s) for each in (served, expected)]
        if waits[0]:
            notes.append(
                f"overloaded: {row.label}: all slots serve {served:.2f} requests/s as measured, {expected:.2f} "
                f"({expected / served - 1:+.1%}) as predicted, of {stage.rate:g} that arrive; what is left over waits, "
                f"which alone makes TTFT {waits[1] / waits[0] - 1:+.0%} "
                f"({predicted['ttft_mean'] / measured['ttft_mean'] - 1:+.0%} found)."
            )
    return notes


def _comparison_serving(rows: Sequence[StageRow], metric: str) -> Comparison:
    kept = _with(rows, metric)
    rates = [row.run.scenario.traffic.arrivals.stages[row.stage].rate for row in kept]
    dimensions = dimensions_of(kept, _DIMENSIONS_serving) | {"rate": range_names(rates, _RATES, "req/s")}
    setups = [setup_of(row.run.scenario) for row in kept]
    return Comparison.of(metric, _pairs(kept, metric), "ms", dimensions, setups)


def _with(rows: Sequence[StageRow], metric: str) -> list[StageRow]:
    return [row for row in rows if metric in row.measured]


def _breakdown_serving(rows: Sequence[StageRow], comparison: Comparison, number: int) -> dict[str, Any]:
    kept = np.flatnonzero(comparison.rows.kept)
    row, metric = _with(rows, comparison.metric)[kept[number]], comparison.metric
    ttft = row.predicted["ttft_mean"]
    return latency_breakdown(metric, row.predicted[metric], row.measured[metric], ttft, TypicalSteps.of(_at_stage(row)))


def _at_stage(row: StageRow) -> Scenario:
    """The run's scenario under the load of one stage only."""
    scenario = row.run.scenario
    stages = scenario.traffic.arrivals.stages[row.stage : row.stage + 1]
    arrivals = scenario.traffic.arrivals.model_copy(update={"stages": stages})
    return scenario.model_copy(update={"traffic": scenario.traffic.model_copy(update={"arrivals": arrivals})})


def _pairs(kept: Sequence[StageRow], metric: str) -> Rows:
    ends = [row.intervals[metric] for row in kept if metric in row.intervals]
    has_interval = len(ends) == len(kept)
    return Rows(
        [row.predicted[metric] for row in kept],
        [row.measured[metric] for row in kept],
        [row.label for row in kept],
        ([low for low, _ in ends], [high for _, high in ends]) if has_interval else None,
    )


_UNITS = {"throughput": "tok/s", "static_throughput": "tok/s", "ttft": "ms"}
_DIMENSIONS_throughput: dict[str, Callable[[OfflinePair], str]] = {
    "device": lambda pair: pair.row.scenario.hardware.name,
    "model": lambda pair: pair.row.scenario.model.name,
    "precision": lambda pair: pair.row.scenario.model.quantization.weights or pair.row.scenario.model.dtype,
    "tensor parallel": lambda pair: str(pair.row.scenario.engine.tensor_parallel_size),
    "tokens": lambda pair: pair.row.lengths,
}
_ABOUT_throughput = (
    "Output tokens per second and device of TensorRT-LLM: with in-flight batching under more requests than it can run "
    "at once (throughput), and of single static batches (static_throughput; ttft: of one prompt alone). None of these "
    "rows was fitted to: kernels were calibrated on tables of kernels of later versions, the engine's profile on "
    "servers of later versions. How the engine was configured is not in the data; it is taken to have run with its "
    "defaults of that time (2,048 sequences, 8,192 tokens a step, KV in FP8 where weights are)."
)


def validate_throughput(path: str | Path, progress: Progress_serving | None = None) -> ValidationReport:
    """Simulate every row of a table, or of a folder of tables; rows that cannot be simulated are listed with why."""
    rows, left_out = read_offline_runs(path)
    return report_throughput(simulate_offline_runs(rows, progress), left_out)


def report_throughput(pairs: Sequence[OfflinePair], left_out: Sequence[tuple[str, str]] = ()) -> ValidationReport:
    """Errors over all rows, and by device, model, precision, parallelism and lengths."""
    covered = [pair for pair in pairs if not pair.reason]
    comparisons = [_comparison_throughput(covered, metric) for metric in _UNITS]
    reasons = [*left_out, *((pair.row.row_id, pair.reason) for pair in pairs if pair.reason)]
    return ValidationReport(
        kind="throughput",
        rows=len(pairs) + len(left_out),
        covered=len(covered),
        metrics=pooled(comparisons),
        by=by_dimension(comparisons),
        worst=worst_of(comparisons, 5, lambda comparison, number: _described(covered, comparison, number)),
        notes=[f"not covered: {name}: {reason}" for name, reason in reasons],
        comparisons=comparisons,
        provenance=provenance_of([pair.row.scenario for pair in covered]),
        about=_ABOUT_throughput,
    )


def _metric(row: OfflineRun) -> str:
    return row.metric if row.is_saturated or row.metric != "throughput" else "static_throughput"


def _of(pairs: Sequence[OfflinePair], metric: str) -> list[OfflinePair]:
    return [pair for pair in pairs if _metric(pair.row) == metric]


def _comparison_throughput(pairs: Sequence[OfflinePair], metric: str) -> Comparison:
    mine = _of(pairs, metric)
    rows = Rows(
        [pair.predicted or nan for pair in mine],
        [pair.row.measured for pair in mine],
        [pair.row.label for pair in mine],
        ([pair.interval[0] for pair in mine], [pair.interval[1] for pair in mine]),
    )
    setups = [setup_of(pair.row.scenario) for pair in mine]
    return Comparison.of(metric, rows, _UNITS[metric], dimensions_of(mine, _DIMENSIONS_throughput), setups)


def _described(pairs: Sequence[OfflinePair], comparison: Comparison, number: int) -> dict[str, Any]:
    pair = _of(pairs, comparison.metric)[np.flatnonzero(comparison.rows.kept)[number]]
    return {"sizes": {"sequences together": pair.batch}}
