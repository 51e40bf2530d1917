"""`validate bench`: a load tool's measurements vs. predictions, run by run: request by request if the file lists them,
else means and percentiles."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.cost import profile_of
from perfmodel.cost.calibrations.provenance import provenance_of
from perfmodel.errors import SpecError
from perfmodel.evidence import report
from perfmodel.evidence.breakdown import TypicalSteps, latency_breakdown
from perfmodel.evidence.observation import Prediction, Progress
from perfmodel.evidence.predict.bench import GivenSetup, predict_runs
from perfmodel.evidence.sources.bench import read_bench_files
from perfmodel.evidence.sources.bench_run import LoadTest
from perfmodel.planning.typical_step import mean_step

_REQUESTS = ("e2el", "ttft", "tpot")
_MAX_REQUESTS_SHOWN = 5000  # of a run, one by one in the JSON: half a megabyte
# Of whole runs: the key of the figure, and the metric that it is compared as.
_FIGURES = {
    "mean_e2el_ms": ("e2el_mean", "ms"),
    "mean_ttft_ms": ("ttft_mean", "ms"),
    "mean_tpot_ms": ("tpot_mean", "ms"),
    "output_throughput": ("throughput", "tok/s"),
    "prompt_tokens_per_s": ("prompt_tokens_per_s", "tok/s"),
    "decode_tokens_per_s": ("decode_tokens_per_s", "tok/s"),
}


def validate_bench(
    paths: Sequence[str | Path], given: GivenSetup, progress: Progress | None = None
) -> report.ValidationReport:
    """Predict every run of the files and compare. paths, given: files in any format, and the user's setup; progress:
    called with (runs done, of how many). Raises SpecError if no file can be read or no run predicted."""
    runs, left_out = read_bench_files(paths)
    pairs = predict_runs(runs, given, progress)
    covered = [pair for pair in pairs if not pair.reason]
    if not covered:
        raise SpecError(pairs[0].reason)
    single = [item for metric in _REQUESTS if len((item := _requests(covered, metric)).rows)]
    whole = [item for key in _FIGURES if len((item := _figures(covered, key)).rows)]
    comparisons = [*whole, *single]
    breakdown, notes = partial(_breakdown, covered), _notes(covered)
    shown = report.report_of("bench", pairs, left_out, comparisons, breakdown, notes, 3, counted=single)
    return replace(
        shown,
        metrics=report.pooled(comparisons),
        provenance=provenance_of([pair.scenario for pair in covered if pair.scenario is not None and pair.result]),
        runs=[_described(pair) for pair in covered],
    )


def _requests(pairs: Sequence[Prediction], metric: str) -> report.Comparison:
    members = [pair for pair in pairs if pair.requests]
    labels = [f"{pair.row.name}, request {i}" for pair in members for i in range(len(pair.requests[metric]))]
    predicted = [seconds for pair in members for seconds in pair.requests[metric].tolist()]
    measured = [seconds for pair in members for seconds in _measured(pair, metric)]
    runs = [pair.row.name for pair in members for _ in pair.requests[metric]]
    rows = report.Rows(predicted, measured, labels, None, report.median_of_others(measured, runs))
    return report.Comparison.of(metric, rows, "s", {"run": report.Dimension.of(runs)})


def _measured(pair: Prediction, metric: str) -> list[float]:
    result: list[float] = getattr(pair.row.requests, f"{metric}_s").tolist()
    return result


def _figures(pairs: Sequence[Prediction], key: str) -> report.Comparison:
    members = [pair for pair in pairs if key in pair.metrics]
    metric, unit = _FIGURES[key]
    names = [(pair.row.source, *_names(pair)) for pair in members]
    groups = {key: report.Dimension.of([row[i] for row in names]) for i, key in enumerate(("tool", "model", "device"))}
    return report.Comparison.of(metric, report.rows_of(key, members), unit, groups)


def _names(pair: Prediction) -> tuple[str, str]:
    scenario = pair.scenario
    return (scenario.model.name, scenario.hardware.name) if scenario is not None else ("not said", "not said")


def _steps(pair: Prediction, prompt: int | None = None) -> TypicalSteps | None:
    if pair.result is None or pair.scenario is None or pair.result.steps is None:
        return None
    prompt = prompt or round(pair.row.load.prompt or 0) or None
    return TypicalSteps.of(pair.scenario, mean_step(pair.result), prompt, profile_of(pair.scenario.engine).server)


def _breakdown(pairs: Sequence[Prediction], comparison: report.Comparison, number: int) -> dict[str, Any]:
    place = int(np.flatnonzero(comparison.rows.kept)[number])
    for pair in (pair for pair in pairs if pair.requests):
        count = len(pair.requests[comparison.metric])
        if place < count:
            break
        place -= count
    assert pair.row.requests is not None
    steps = _steps(pair, int(pair.row.requests.num_prompt_tokens[place]))
    assert steps is not None
    predicted, measured = (1e3 * float(item[number]) for item in (comparison.rows.predicted, comparison.rows.measured))
    return latency_breakdown(comparison.metric, predicted, measured, 1e3 * float(pair.requests["ttft"][place]), steps)


def _described(pair: Prediction) -> dict[str, Any]:
    """One run: its setup, figures, breakdown of means, and assumptions."""
    run, steps, metrics = pair.row, _steps(pair), pair.metrics
    test: LoadTest = run.setup
    model, device = _names(pair)
    facts, ttft_ms = pair.details["facts"], metrics.get("mean_ttft_ms", 0.0)
    parts = {
        key: latency_breakdown(metric, metrics[key], run.metrics[key], ttft_ms, steps)
        for key, (metric, unit) in _FIGURES.items()
        if unit == "ms" and key in metrics and steps is not None
    }
    return {
        "run": run.name,
        "tool": " ".join((run.source, test.version)).strip(),
        "model": model,
        "hardware": device,
        "origin": pair.result.summary["origin"] if pair.result is not None else "calibrated",
        "completed": test.completed,
        "failed": test.failed,
        "is_by_request": bool(pair.requests),
        "figures": [_figure(pair, key) for key in run.metrics if key in metrics],
        "not_predicted": sorted(set(run.metrics) - set(metrics)),
        "breakdown": parts,
        "facts": [fact.to_json() for fact in facts],
        "assumed": [fact.name for fact in facts if fact.is_assumed],
        "notes": [*pair.details["notes"], *test.notes],
        **({"requests": _by_request(pair)} if pair.requests and len(run.requests or ()) <= _MAX_REQUESTS_SHOWN else {}),
    }


def _by_request(pair: Prediction) -> dict[str, list[dict[str, float | None]]]:
    """Each request's latencies in seconds, in sending order; null if missing."""
    return {
        metric: [
            {"predicted": p if isfinite(p) else None, "measured": m if isfinite(m) else None}
            for p, m in zip(predicted.tolist(), _measured(pair, metric), strict=True)
        ]
        for metric, predicted in pair.requests.items()
    }


def _figure(pair: Prediction, key: str) -> dict[str, Any]:
    predicted, measured = pair.metrics[key], pair.row.metrics[key]
    result = {"metric": key, "predicted": predicted, "measured": measured, "error": predicted / measured - 1}
    if key in pair.intervals:
        low, high = (predicted * end for end in pair.intervals[key])
        result |= {"interval": [low, high], "is_within": low <= measured <= high}
    return result


def _notes(pairs: Sequence[Prediction]) -> list[str]:
    tests = [(pair.row.name, pair.row.setup) for pair in pairs]  # names may be equal
    failed = [
        f"{name}: {test.failed:,} of {test.completed + test.failed:,} requests failed or were cut off; they are no "
        f"part of the load or of its figures."
        for name, test in tests
        if test.failed
    ]
    notes = dict.fromkeys(note for pair in pairs for note in (*pair.details["notes"], *pair.row.setup.notes))
    return [*failed, *(f"{note[0].upper()}{note[1:]}." for note in notes)]
