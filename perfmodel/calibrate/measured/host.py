"""Measured steps as the cost model sees them, and the host's time in them, whose kernels are known.

    graphed step   t = serial_step + serial_per_sequence S + kernels
    eager step     t = the same + prompt_step, and not less than the launches: serial + max(launches, kernels)

Fitted to the logarithm of measured over predicted, by few non-negative numbers.
"""

__all__ = ["costs_of", "fit_host", "step_rows", "steps_scenario"]

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from perfmodel.calibrate.measured.records import MeasuredStep
from perfmodel.calibrate.robust import residuals_of
from perfmodel.calibrate.whole_steps import features
from perfmodel.cost import StepCosts, step_costs
from perfmodel.cost.calibrations.calibration import Calibration, HostFit
from perfmodel.cost.calibrations.engine_profile import EngineProfile
from perfmodel.cost.forms.fits import Residuals
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.scenario_file import load_scenario

Floats = NDArray[np.float64]

# What a step of an engine in Python takes, seconds: priors, and where the search begins.
_PRIORS = {
    "serial_step_s": 2e-4,
    "serial_per_sequence_s": 2e-6,
    "prompt_step_s": 2e-4,
    "hidden_prompt_layer_s": 1e-4,
    "hidden_prompt_moe_layer_s": 1e-4,
}
_MOST = 100.0  # times the prior
_STARTS = (1.0, 3.0, 10.0)  # times the priors of launches: what is shorter than the kernels does not show, and stays
_PULL = 0.02  # of the logarithm of a parameter, beside relative errors of steps


def fit_host(
    hardware: HardwareSpec, calibration: Calibration, steps: Sequence[MeasuredStep]
) -> tuple[HostFit, Residuals]:
    """The host of `steps` under the kernels of `calibration`, and what stays unexplained of whole steps."""
    from scipy.optimize import least_squares

    measured = np.array([step.seconds for step in steps])
    unhosted = calibration.model_copy(update={"host": HostFit(replays_graphs=True)})
    estimates = [costs_of(step, hardware, unhosted).estimate(step.batch) for step in steps]
    device = np.array([estimate.device_s for estimate in estimates])
    sequences = np.array([step.batch.num_decodes + len(step.batch.prefills) for step in steps], dtype=float)
    has_prompts = np.array([bool(step.batch.prefills) for step in steps])
    layers, expert_layers, _ = np.array(
        [costs_of(step, hardware, unhosted).graph.launched_layers for step in steps], dtype=float
    ).T

    def predicted(values: Floats) -> Floats:
        step_s, per_sequence, prompt, of_layer, of_experts = values
        serial = step_s + per_sequence * sequences + has_prompts * prompt
        launches = has_prompts * (of_layer * layers + of_experts * expert_layers)
        total: Floats = serial + np.maximum(device, launches)
        return total

    prior = np.array(list(_PRIORS.values()))

    def errors(logs: Floats) -> Floats:
        return np.concatenate([np.log(predicted(prior * np.exp(logs)) / measured), _PULL * logs])

    most = np.log(_MOST)
    is_launch = np.array([name.startswith("hidden") for name in _PRIORS])
    fits = [
        least_squares(errors, start * is_launch, bounds=(-most, most), loss="soft_l1", f_scale=0.1)
        for start in np.log(_STARTS)
    ]
    found = min(fits, key=lambda fit: float(fit.cost))
    values = prior * np.exp(found.x)
    host = HostFit(replays_graphs=True, **dict(zip(_PRIORS, map(float, values), strict=True)))
    return host, residuals_of(predicted(values), measured)


STEPS_SCENARIO = "executor/steps"  # workloads/scenarios: what all measured steps have in common


@lru_cache(maxsize=64)
def steps_scenario(model: str, overrides: tuple[str, ...], hardware: str) -> Scenario:
    """The scenario whose steps were measured."""
    return load_scenario(STEPS_SCENARIO, [f"model={model}", f"hardware={hardware}", *overrides])


def costs_of(step: MeasuredStep, hardware: HardwareSpec, calibration: Calibration) -> StepCosts:
    """The step's graph and timer under `calibration`, host time included as the calibration has it."""
    scenario = steps_scenario(step.model, step.overrides, hardware.name)
    return step_costs(scenario, calibration, EngineProfile(engine=calibration.engine))


def step_rows(hardware: HardwareSpec, steps: Sequence[MeasuredStep]) -> list[Mapping[tuple[str, str], float]]:
    """The features of each step, for a fit of whole steps."""
    nothing = Calibration(device=hardware.name, engine="none")
    return [features(costs_of(step, hardware, nothing).graph, hardware, step.batch) for step in steps]
