"""Fits an engine's profile (host time per step, server in front) to recorded serving runs, through the simulator.

Kernels are not touched: they come from kernel tables. What is left of the measured means is the engine's own, and few
numbers describe it: each moves another part of the latencies (steps, load, time to first token).
"""

__all__ = ["PARAMETERS", "fit_engine_profile", "log_errors", "starting_profile", "step_residuals"]

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from perfmodel.calibrate.profile_fit import STEP_PARAMETERS, Parameter, fit_parameters, with_values
from perfmodel.calibrate.robust import residuals_of
from perfmodel.calibrate.serving.runs import ServingRun
from perfmodel.calibrate.serving.simulation import StageRow, accelerated, shortened, simulate_runs
from perfmodel.cost import EngineProfile, Residuals

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
