"""`validate per-request`: a recorded run replayed from its log, and compared request by request."""

__all__ = ["validate_per_request"]

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.calibrate.serving.runs import RequestLog, read_request_log
from perfmodel.cost import ServerFit, load_engine_profile
from perfmodel.cost.calibrations.provenance import provenance_of
from perfmodel.planning.typical_step import StepChoice, mean_step
from perfmodel.sim import RequestColumns, simulate
from perfmodel.trust.setups import MeasuredSetup, setup_of
from perfmodel.validate.report import Comparison, Rows, ValidationReport, by_dimension, pooled, range_names, worst_of
from perfmodel.validate.typical_steps import TypicalSteps, latency_breakdown

Progress = Callable[[int, int | None], None]
Floats = NDArray[np.float64]
_METRICS = ("e2el", "ttft", "tpot")
_TOKENS = (32, 128, 512, 2048)
_ABOUT = (
    "One recorded run replayed request by request: the arrivals, prompt lengths and answer lengths of its log,"
    " the engine arguments and KV blocks that it had. The log was written inside the engine's process: no "
    "server in front. The device's calibration comes from a layer profile or kernel tables; where that profile"
    " was taken on this card, kernel times are training data and whole requests (batches, queueing, host time)"
    " are not."
)


def validate_per_request(folder: str | Path, progress: Progress | None = None) -> ValidationReport:
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
    parts = partial(_breakdown, log, steps, predicted["ttft"])
    return ValidationReport(
        kind="per-request",
        rows=len(log.ttft_s),
        covered=len(requests),
        metrics=means | pooled(comparisons),
        by=by_dimension(comparisons),
        worst=worst_of(comparisons, 3, parts),
        comparisons=comparisons,
        provenance=provenance_of([log.scenario]),
        about=_ABOUT,
    )


def _setup(log: RequestLog) -> MeasuredSetup:
    """The run's setup, with the mean lengths of its log."""
    prompts, answers = float(log.num_prompt_tokens.mean()), float(log.num_output_tokens.mean())
    return setup_of(log.scenario)._replace(input_tokens=prompts, output_tokens=answers)


def _breakdown(
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
