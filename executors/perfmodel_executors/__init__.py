"""The executed clock: the engine's plans run on real tensors. The only package that imports torch.

`import perfmodel_executors` itself loads nothing heavy; the functions load torch when they are called.
"""

__all__ = ["calibrate_cpu", "execute_scenario", "validate_executor"]

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfmodel.cost.calibration import Calibration
    from perfmodel.sim.result import RunResult
    from perfmodel.specs.scenario import Scenario
    from perfmodel.validate.report import ValidationReport


def calibrate_cpu(scenario: "Scenario", budget_s: float = 45.0, min_rounds: int = 10) -> "Calibration":
    """Measures this machine on the scenario's model; see `perfmodel_executors.measure.calibrate`."""
    from perfmodel_executors.measure import calibrate

    return calibrate.calibrate_cpu(scenario, budget_s, min_rounds)


def execute_scenario(scenario: "Scenario", live: bool = False) -> "RunResult":
    """Serves the scenario's workload for real; see `perfmodel_executors.run`."""
    from perfmodel_executors import run

    return run.execute_scenario(scenario, live)


def validate_executor(scenario: "Scenario", budget_s: float = 45.0, min_rounds: int = 10) -> "ValidationReport":
    """Calibrates, simulates, executes and compares; see `perfmodel_executors.run`."""
    from perfmodel_executors import run

    return run.validate_executor(scenario, budget_s, min_rounds)
