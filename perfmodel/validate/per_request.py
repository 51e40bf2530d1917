"""`validate per-request`: a recorded run replayed from its log, and compared request by request."""

__all__ = ["validate_per_request"]

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from perfmodel.calibrate.request_logs import RequestLog, read_request_log
from perfmodel.cost import EngineProfile, ServerFit, load_engine_profile
from perfmodel.sim import RequestColumns, simulate
from perfmodel.validate.report import ErrorStats, Rows, ValidationReport

Progress = Callable[[int, int | None], None]
_METRICS = ("e2el", "ttft", "tpot")


def validate_per_request(folder: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Simulate the run and compare single requests, and their means."""
    with TemporaryDirectory() as traces:
        log = read_request_log(folder, traces)
        requests = simulate(log.scenario, profile=_without_server(log), progress=progress).requests
    assert requests is not None
    predicted = _in_order(requests)
    measured = {"e2el": log.e2el_s, "ttft": log.ttft_s, "tpot": log.tpot_s}
    pairs = {metric: Rows(predicted[metric], measured[metric], _labels(log)) for metric in _METRICS}
    means = {
        f"{metric}_mean": Rows([rows.predicted.mean()], [rows.measured.mean()], ["mean over requests"]).stats()
        for metric, rows in pairs.items()
    }
    singles: dict[str, ErrorStats] = {metric: rows.stats() for metric, rows in pairs.items()}
    return ValidationReport(
        kind="per-request",
        rows=len(log.ttft_s),
        covered=len(requests),
        metrics=means | singles,
        worst=[row for metric, rows in pairs.items() for row in rows.worst(metric, 3)],
    )


def _without_server(log: RequestLog) -> EngineProfile:
    """The engine's host time, without HTTP: the log was written inside the engine's process."""
    return load_engine_profile(log.scenario.engine.profile).model_copy(update={"server": ServerFit()})


def _in_order(requests: RequestColumns) -> dict[str, np.ndarray]:
    order = np.argsort(requests.request_id)
    return {
        "e2el": requests.e2el_s[order],
        "ttft": requests.ttft_s[order],
        "tpot": requests.tpot_s[order],
    }


def _labels(log: RequestLog) -> list[str]:
    return [f"request {i}, {outputs} output tokens" for i, outputs in enumerate(log.num_output_tokens.tolist())]
