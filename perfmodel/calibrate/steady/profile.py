"""Fits what serving at a fixed concurrency determines of an engine: steps with prompts, synchronous hosts, graphs.

Time to first token at low concurrency is the front end and one step with a prompt; time per output token at low
concurrency is a step's fixed costs, which the kernels' tables have too high where they were timed launch by launch.

And what a generation of devices leaves of the achieved tensor rate of the one before. Time to first token of long
prompts is compute; with the engines' profiles fitted on all devices, what is left on a generation's own rows is its
kernels'. One number for all engines, models and number formats.
"""

__all__ = ["fit_generation", "fit_steady_profile", "fitting_rows", "log_errors", "parameters_of", "steady_residuals"]

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from perfmodel.calibrate.profile_fit import STEP_PARAMETERS, Parameter, fit_parameters
from perfmodel.calibrate.robust import residuals_of
from perfmodel.calibrate.steady.simulation import SteadyStatePair, simulate_steady_states
from perfmodel.calibrate.steady.states import SteadyState
from perfmodel.cost import EngineProfile, Residuals, load_calibration
from perfmodel.cost.calibrations.unmeasured import GenerationFit
from perfmodel.errors import SpecError

Floats = NDArray[np.float64]

# Of every engine: a step's launches beside CUDA graphs, per layer and per layer of experts; what a replayed graph
# leaves of the experts' launches; tokenisation.
_OF_PROMPTS = (
    Parameter("host.prompt_step_s", 3e-3, 1e-4, 1e-1),
    Parameter("host.prompt_layer_s", 5e-5, 1e-6, 1e-3),
    Parameter("host.prompt_moe_layer_s", 3e-4, 1e-6, 5e-3),
    Parameter("graph_kernel_s", 2.5e-6, 5e-7, 1e-5),
    Parameter("server.in_per_prompt_token_s", 1e-6, 1e-7, 4e-6),
)
# Hidden beside the device when scheduled asynchronously; seen where an engine plans synchronously.
_HIDDEN = (
    Parameter("host.hidden_step_s", 1e-3, 5e-5, 5e-3),
    Parameter("host.hidden_per_sequence_s", 1e-5, 2e-7, 1e-4),
)
# Known from serving runs where an engine has any.
_OF_STEPS = (
    *STEP_PARAMETERS,
    Parameter("server.in_s", 1e-2, 3e-4, 8e-2),
)
_WEIGHTS = {"tpot": 1.0, "ttft": 0.4}
_MOST_ROWS = 60
_MOST_CONCURRENCY = 32  # larger batches take long to simulate and depend on kernels
# Of the fit of a generation.
_GENERATION_CONCURRENCY = 16
_GENERATION_ROWS = 48
_GENERATION_EVALUATIONS = 8
_LOSS_SCALE = 0.1


def fit_steady_profile(
    begin: EngineProfile,
    rows: Sequence[SteadyState],
    *,
    most_rows: int = _MOST_ROWS,
    progress: Callable[[int, int], None] | None = None,
) -> EngineProfile:
    """The profile of an engine that explains mean TTFT and TPOT of its rows best; the rest is that of `begin`."""
    mine = fitting_rows(rows, begin.engine, most_rows)
    profile = fit_parameters(
        begin,
        parameters_of(begin, mine),
        lambda profile: log_errors(simulate_steady_states(mine, profile=profile)),
        progress=progress,
    )
    pairs = [pair for pair in simulate_steady_states(mine, profile=profile) if not pair.reason]
    return profile.model_copy(update=steady_residuals(pairs))


def steady_residuals(pairs: Sequence[SteadyStatePair]) -> dict[str, Residuals]:
    """What the profile leaves unexplained; of steps, which are kernels mostly, in units of how far fits have come."""
    found = {}
    for metric, is_of_kernels in (("tpot", True), ("ttft", False)):
        predicted, measured = (
            np.array([value(pair, f"{metric}_mean") for pair in pairs])
            for value in (SteadyStatePair.predicted, SteadyStatePair.measured)
        )
        spread = np.array([_spread(pair) if is_of_kernels else 1.0 for pair in pairs])
        found[f"{metric}_residuals"] = residuals_of(predicted, measured, spread)
    return found


def _spread(pair: SteadyStatePair) -> float:
    scenario = pair.row.scenario
    return load_calibration(scenario.hardware, scenario.engine.profile).spread


def parameters_of(begin: EngineProfile, rows: Sequence[SteadyState]) -> list[Parameter]:
    """The parameters of an engine that `rows` determine and nothing else has."""
    parameters = list(_OF_PROMPTS)
    if not all(row.scenario.engine.async_scheduling for row in rows):
        parameters += _HIDDEN
    if not begin.latency_residuals.num_rows:
        parameters += _OF_STEPS
    return parameters


def fitting_rows(rows: Sequence[SteadyState], engine: str, most: int = _MOST_ROWS) -> list[SteadyState]:
    """Rows of `engine` that can be taken at face value and are quickly simulated, the same number of each model."""
    groups: dict[str, list[SteadyState]] = {}
    for row in rows:
        concurrency = row.scenario.traffic.arrivals.concurrency or 0
        if row.is_clear and row.scenario.engine.profile == engine and concurrency <= _MOST_CONCURRENCY:
            groups.setdefault(f"{row.scenario.model.name} {row.scenario.hardware.name}", []).append(row)
    chosen: list[SteadyState] = []
    for members in groups.values():
        step = max(1, len(members) * len(groups) // most)
        chosen += members[::step]
    return chosen


def log_errors(pairs: Sequence[SteadyStatePair]) -> Floats:
    """Weighted log(predicted / measured)."""
    errors = []
    for pair in pairs:
        if pair.ttft_ms is not None and pair.tpot_ms is not None:
            errors.append(_WEIGHTS["tpot"] * np.log(pair.tpot_ms / pair.row.measured_tpot_ms))
            errors.append(_WEIGHTS["ttft"] * np.log(pair.ttft_ms / pair.row.measured_ttft_ms))
    return np.array(errors)


def fit_generation(
    architecture: str, rows: Sequence[SteadyState], *, progress: Callable[[int, int], None] | None = None
) -> GenerationFit:
    """The fit of `architecture` from the rows on its devices that can be taken at face value.

    Raises SpecError where there are none.
    """
    from scipy.optimize import minimize_scalar

    mine = [row for row in rows if _is_clear(row) and row.scenario.hardware.declared.architecture == architecture]
    if not mine:
        raise SpecError(f"no rows on devices of architecture {architecture!r} to fit")
    mine = mine[:: max(1, len(mine) // _GENERATION_ROWS)]
    calls = 0

    def loss(log_compute: float) -> float:
        nonlocal calls
        calls += 1
        if progress is not None:
            progress(calls, _GENERATION_EVALUATIONS)
        generation = GenerationFit(architecture=architecture, compute=float(np.exp(log_compute)))
        errors = log_errors(simulate_steady_states(mine, generation=generation))
        return float(np.sum(np.sqrt(1 + (errors / _LOSS_SCALE) ** 2) - 1))

    found = minimize_scalar(
        loss,
        bounds=(np.log(0.25), np.log(1.2)),
        method="bounded",
        options={"maxiter": _GENERATION_EVALUATIONS, "xatol": 0.03},
    )
    return GenerationFit(architecture=architecture, compute=round(float(np.exp(found.x)), 4))


def _is_clear(row: SteadyState) -> bool:
    return row.is_clear and (row.scenario.traffic.arrivals.concurrency or 0) <= _GENERATION_CONCURRENCY
