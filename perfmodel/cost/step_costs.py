"""`StepCosts`: how a scenario's steps are timed, set up in one place: the operators, their timer, the engine's profile.

Whoever predicts a scenario (the simulator, `explain`, reports) asks here, so that all of them predict the same.
"""

__all__ = ["StepCosts", "scenario_fits", "scenario_graph", "step_costs"]

from dataclasses import dataclass

from perfmodel.cost.calibration import Calibration
from perfmodel.cost.calibrations import load_calibration
from perfmodel.cost.estimate import StepEstimate, estimate_step
from perfmodel.cost.roofline import OperatorTimer
from perfmodel.cost.server import EngineProfile, load_engine_profile
from perfmodel.ops.expert_routing import routing_of
from perfmodel.ops.graph import StepGraph, build_graph
from perfmodel.ops.ragged import ContextSpread
from perfmodel.ops.work import BatchShape
from perfmodel.specs.scenario import Scenario


@dataclass(frozen=True)
class StepCosts:
    """The step graph of a scenario, what times its operators, and what the engine adds.

    `timer.calibration` is the one that counts: with the host time and launches of the engine's profile.
    """

    graph: StepGraph
    timer: OperatorTimer
    profile: EngineProfile

    @property
    def calibration(self) -> Calibration:
        return self.timer.calibration

    def estimate(self, shape: BatchShape) -> StepEstimate:
        """One step of `shape`, operator by operator."""
        return estimate_step(self.graph, self.timer, shape)


def scenario_fits(
    scenario: Scenario, calibration: Calibration | None = None, profile: EngineProfile | None = None
) -> tuple[Calibration, EngineProfile]:
    """The calibration as the engine runs its kernels, and its profile; by default what `engine.profile` names."""
    profile = profile or load_engine_profile(scenario.engine.profile)
    engine = scenario.engine
    calibration = calibration or load_calibration(scenario.hardware, engine.profile)
    return profile.applied_to(calibration, is_eager=engine.enforce_eager), profile


def scenario_graph(scenario: Scenario, profile: EngineProfile, spread: ContextSpread | None = None) -> StepGraph:
    """The operators of the scenario's steps: sampling as the engine does it, experts as the scenario routes to them."""
    method = scenario.sampling.method
    return build_graph(
        scenario.model,
        scenario.engine,
        sampling=method,
        bytes_per_logit=profile.bytes_per_logit(method, scenario.model),
        routing=routing_of(scenario.routing, scenario.engine),
        spread=spread,
    )


def step_costs(
    scenario: Scenario, calibration: Calibration | None = None, profile: EngineProfile | None = None
) -> StepCosts:
    """The costs of `scenario`; see `scenario_fits` for the defaults."""
    calibration, profile = scenario_fits(scenario, calibration, profile)
    return StepCosts(scenario_graph(scenario, profile), OperatorTimer(scenario.hardware, calibration), profile)
