"""Recorded serving runs on the simulated clock, for judging an engine's profile and for fitting it.

What is fitted is the host's time per step and the server in front. Kernels are not touched: they come from kernel
tables. What is left of the measured means is the engine's own, and few numbers describe it: each moves another part of
the latencies (steps, load, time to first token).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost import Calibration, EngineProfile, Residuals, load_calibration
from perfmodel.evidence.fit.forms import STEP_PARAMETERS, Parameter, fit_parameters, residuals_of, with_values
from perfmodel.evidence.observation import over_cores
from perfmodel.evidence.sources.serving import ServingRun, StageLatencies, stage_latencies
from perfmodel.sim import simulate

Progress = Callable[[int, int], None]
Floats = NDArray[np.float64]

# In: HTTP and hand-over. Out, per sequence sampled in the same step: streaming. Seconds, or bytes per logit.
PARAMETERS = (
    *STEP_PARAMETERS,
    Parameter("server.in_s", 5e-3, 3e-4, 4e-2),
    Parameter("server.out_per_sequence_s", 5e-5, 2e-6, 5e-4),
    Parameter("sampling_bytes_per_logit", 400.0, 20.0, 1500.0),
)
_OUT_S = 1e-3  # detokenisation and hand-over of a token: these runs do not separate it from `in_s`
_WEIGHTS = {"e2el_mean": 1.0, "itl_mean": 1.0, "ttft_mean": 0.5}
_RATE_FACTOR = 1.05
_SHARE = 0.1  # of each stage's duration: means settle long before


@dataclass(frozen=True)
class StageRow:
    """One stage of a run: what was predicted beside what was measured, in ms.

    intervals: the ends of the 80 % interval of means, as factors of the predicted value, by metric
    """

    run: ServingRun
    stage: int
    predicted: StageLatencies
    origin: str
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def spread(self) -> float:
        """How far the fits of the run's device have come."""
        scenario = self.run.scenario
        return load_calibration(scenario.hardware, scenario.engine.profile).spread

    @property
    def measured(self) -> StageLatencies:
        return self.run.measured[self.stage]

    @property
    def label(self) -> str:
        return f"{self.run.run_id}, stage {self.stage}"


def simulate_runs(
    runs: Sequence[ServingRun],
    progress: Progress | None = None,
    calibration: Calibration | None = None,
    profile: EngineProfile | None = None,
    intervals: bool = False,
) -> list[StageRow]:
    """All stages of all runs, simulated over the cores of this machine; the answer does not depend on how many.

    calibration, profile: instead of the committed ones
    intervals:            whether predictions get 80 % intervals
    """
    work = partial(_simulate_run, calibration=calibration, profile=profile, intervals=intervals)
    return [row for rows in over_cores(work, runs, lambda run: run.run_id, progress) for row in rows]


def shortened(run: ServingRun, share: float) -> ServingRun:
    """`run` with each stage cut to `share` of its duration at the same rate: its means, sooner.

    Prompts that were all new at the beginning stay so: the shorter the stage, the larger their part.
    """
    return _with_stages(run, share, 1.0)


def accelerated(run: ServingRun, factor: float) -> ServingRun:
    """`run` with the same requests arriving `factor` times as fast.

    With time in units so much shorter, this is the run itself on an engine whose steps take `factor` times as long.
    """
    return _with_stages(run, 1.0 / factor, factor)


def _with_stages(run: ServingRun, longer: float, faster: float) -> ServingRun:
    """`run` with stages `longer` times as long, requests arriving `faster` times as fast."""
    traffic = run.scenario.traffic
    stages = tuple(
        stage.model_copy(update={"duration_s": stage.duration_s * longer, "rate": stage.rate * faster})
        for stage in traffic.arrivals.stages
    )
    arrivals = traffic.arrivals.model_copy(update={"stages": stages})
    scenario = run.scenario.model_copy(update={"traffic": traffic.model_copy(update={"arrivals": arrivals})})
    return replace(run, scenario=scenario, stage_ends_s=tuple(end * longer for end in run.stage_ends_s))


def _simulate_run(
    run: ServingRun,
    calibration: Calibration | None = None,
    profile: EngineProfile | None = None,
    intervals: bool = False,
) -> list[StageRow]:
    result = simulate(run.scenario, calibration=calibration, profile=profile, keep_steps=False, intervals=intervals)
    assert result.requests is not None
    latencies = stage_latencies(run, result.requests)
    starts = (0.0, *run.stage_ends_s[:-1])
    rows = []
    for i, (start, end, found) in enumerate(zip(starts, run.stage_ends_s, latencies, strict=True)):
        factors = result.ensemble.factors((start, end)) if result.ensemble is not None else {}
        mine = {f"{metric}_mean": ends for metric, ends in factors.items()}
        rows.append(StageRow(run, i, found, result.summary["origin"], mine))
    return rows


def fit_engine_profile(
    begin: EngineProfile,
    runs: Sequence[ServingRun],
    *,
    share: float = _SHARE,
    progress: Callable[[int, int], None] | None = None,
) -> EngineProfile:
    """The profile of an engine that explains the measured means of `runs` best. Overloaded stages are left out.

    A backlog multiplies small errors of capacity; such stages are for judging, not for fitting. Of `begin`, what these
    runs do not determine stays.
    """
    mine = [shortened(run, share) for run in runs if run.scenario.engine.profile == begin.engine]
    profile = fit_parameters(
        starting_profile(begin),
        PARAMETERS,
        lambda profile: log_errors(simulate_runs(mine, profile=profile)),
        progress=progress,
    )
    return profile.model_copy(update={"latency_residuals": step_residuals(mine, profile)})


def step_residuals(runs: Sequence[ServingRun], profile: EngineProfile) -> Residuals:
    """What is left of steady stages, as factors on steps.

    Under open-loop load longer steps leave more requests in flight, which makes steps longer still: a latency errs by
    more than the steps do, g = 1 + d log(latency) / d log(rate) times as much (see `accelerated`).
    """
    rows, faster = (
        [row for row in simulate_runs(each, profile=profile) if not row.run.is_overloaded(row.stage)]
        for each in (runs, [accelerated(run, _RATE_FACTOR) for run in runs])
    )
    predicted, at_more_load = (np.array([row.predicted["e2el_mean"] for row in each]) for each in (rows, faster))
    measured = np.array([row.measured["e2el_mean"] for row in rows])
    gain = np.maximum(1 + np.log(at_more_load / predicted) / np.log(_RATE_FACTOR), 1.0)
    return residuals_of(predicted, measured, gain * np.array([row.spread for row in rows]))


def starting_profile(profile: EngineProfile) -> EngineProfile:
    """`profile` with the values that no runs separate."""
    return with_values(profile, {"server.out_s": _OUT_S})


def log_errors(rows: Sequence[StageRow]) -> Floats:
    """Weighted log(predicted / measured) of the means."""
    steady = [row for row in rows if not row.run.is_overloaded(row.stage)]
    return np.array(
        [
            weight * np.log(row.predicted[metric] / row.measured[metric])
            for row in steady
            for metric, weight in _WEIGHTS.items()
        ]
    )
