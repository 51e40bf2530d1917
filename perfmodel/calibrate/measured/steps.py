"""Measured steps as the cost model sees them: the scenario that a step stands for, its graph, its predicted time."""

__all__ = ["costs_of", "step_rows", "steps_scenario"]

from collections.abc import Mapping, Sequence
from functools import lru_cache

from perfmodel.calibrate.measured.records import MeasuredStep
from perfmodel.calibrate.whole_steps import features
from perfmodel.cost import StepCosts, step_costs
from perfmodel.cost.calibration import Calibration
from perfmodel.cost.server import EngineProfile
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.scenario_file import load_scenario

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
