"""Runs of load tools on the simulated clock: the figures of each, request by request where its file has them.

What is predicted for a run has the keys that its measured figures have. Requests are matched by their place in line.
"""

__all__ = ["BenchPair", "predict_run", "predict_runs"]

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from perfmodel.calibrate.bench.runs import BenchRun
from perfmodel.calibrate.bench.scenarios import GivenSetup, SetupFact, bench_scenario, contradictions
from perfmodel.calibrate.local.predictions import predict_rows
from perfmodel.calibrate.served.scenarios import known_device
from perfmodel.cost import EngineProfile
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.sim import RequestColumns, RunResult, simulate
from perfmodel.specs.scenario import Scenario

Progress = Callable[[int, int], None]
Floats = NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True)
class BenchPair:
    """A run and what was predicted for it; a reason where nothing could be.

    predicted: figures by the keys of `run.measured`
    intervals: 80 % of them, as factors of what is predicted, by key, where there are any
    requests:  "ttft", "tpot", "e2el" -> predicted seconds of each request of `run.times`, nan of those refused
    """

    run: BenchRun
    predicted: Mapping[str, float] = field(default_factory=dict)
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    requests: Mapping[str, Floats] = field(default_factory=dict)
    scenario: Scenario | None = None
    facts: tuple[SetupFact, ...] = ()
    result: RunResult | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()  # what the file says and the scenario has otherwise


def predict_runs(
    runs: Sequence[BenchRun],
    given: GivenSetup,
    progress: Progress | None = None,
    profile: EngineProfile | None = None,
    intervals: bool = True,
) -> list[BenchPair]:
    """A prediction for each run, or the reason why there is none.

    runs, given: what was measured, and what the user says of the setup
    progress:    called with (runs done, of how many)
    profile:     of the engine, in place of the committed one; intervals: whether means get 80 % intervals
    """
    pairs = []
    for number, run in enumerate(runs, 1):
        try:
            pairs.append(predict_run(run, given, profile, intervals))
        except PerfmodelError as error:
            pairs.append(BenchPair(run, reason=str(error)))
        if progress is not None:
            progress(number, len(runs))
    return pairs


def predict_run(
    run: BenchRun, given: GivenSetup, profile: EngineProfile | None = None, intervals: bool = True
) -> BenchPair:
    """The prediction for one run. Raises PerfmodelError where there can be none.

    run, given, profile, intervals: as of `predict_runs`
    """
    run = run.at_real_speed(given.speed)
    if run.row is not None:
        return _local(run, given)
    with TemporaryDirectory() as folder:
        scenario, facts = bench_scenario(run, given, Path(folder))
        result = simulate(scenario, profile=profile, keep_steps=True, intervals=intervals)
    predicted = {key: float(result.summary[key]) for key in run.measured if result.summary.get(key) is not None}
    factors = result.ensemble.factors() if result.ensemble is not None else {}
    ends = {f"mean_{metric}_ms": found for metric, found in factors.items() if f"mean_{metric}_ms" in predicted}
    requests = _by_request(run, result.requests) if run.times is not None and result.requests is not None else {}
    notes = contradictions(run, scenario)
    return BenchPair(run, predicted, ends, requests, scenario, facts, result, notes=notes)


def _by_request(run: BenchRun, requests: RequestColumns) -> dict[str, Floats]:
    assert run.times is not None
    found = {}
    for metric, seconds in (("ttft", requests.ttft_s), ("tpot", requests.tpot_s), ("e2el", requests.e2el_s)):
        column = np.full(len(run.times), np.nan)
        column[requests.request_id] = seconds
        found[metric] = column
    return found


def _local(run: BenchRun, given: GivenSetup) -> BenchPair:
    """A test of llama-bench: its steps, priced."""
    if given.scenario is not None or given.overrides:
        raise SpecError(
            f"{run.name}: is a test of llama-bench, which says itself what ran; found --scenario or --set beside it, "
            f"allowed are --hardware and --model."
        )
    assert run.row is not None
    device = known_device(given.flags.get("hardware", run.row.device))
    if device is None:
        raise SpecError(f"{run.name}: ran on {run.row.device[:60]!r}, which no file describes; give --hardware.")
    row = replace(run.row, device=device.name, model=given.flags.get("model", run.row.model))
    pair = predict_rows([row], Path())[0]
    if pair.reason or pair.scenario is None:
        raise SpecError(f"{run.name}: {pair.reason}")
    metric = next(iter(run.measured))
    said = {name: f"--{name}" if name in given.flags else "the file" for name in ("model", "hardware")}
    facts: tuple[SetupFact, ...] = (
        SetupFact("model", f"{pair.scenario.model.name}, {row.gguf_type}", said["model"]),
        SetupFact("hardware", device.name, said["hardware"]),
        SetupFact("engine", pair.scenario.engine.described.label, "the file"),
        SetupFact("backend", row.backend, "the file"),
    )
    if not pair.is_known:
        facts = (SetupFact("shape of the model", "a decoder of the usual proportions", "assumed"), *facts)
    return BenchPair(run, {metric: pair.predicted}, {metric: pair.interval}, {}, pair.scenario, facts)
