"""`validate executor SCENARIO --measured FOLDER`: the records of a run on another engine beside the simulation.

Steps are predicted for what each of them computed, requests by a run of the whole scenario, both as `engine.profile` is
calibrated: what `perfmodel calibrate --on` wrote, or what ships.
"""

__all__ = ["validate_recorded"]

from dataclasses import replace

from perfmodel.calibrate.engine_runs import Chunks, EngineSteps, shapes_of
from perfmodel.cost import step_costs
from perfmodel.cost.calibrations.provenance import provenance_of
from perfmodel.sim import RunResult, simulate
from perfmodel.sim.records.columns import RequestColumns, StepColumns
from perfmodel.specs.scenario import Scenario
from perfmodel.validate.executed.bridge import Progress
from perfmodel.validate.executed.compare import ExecutorComparison, StepPair, report_executor
from perfmodel.validate.report import ValidationReport

_PS_PER_S = 1e12


def validate_recorded(
    scenario: Scenario, requests: RequestColumns, steps: StepColumns, chunks: Chunks, progress: Progress | None = None
) -> ValidationReport:
    """Simulate the scenario and compare it with a run of it.

    requests, steps, chunks: the records of the run; steps of a server are none
    """
    simulated = simulate(scenario, progress=progress, keep_steps=True)
    executed = RunResult(scenario, "executed", {}, requests, steps)
    costs = step_costs(scenario)
    pricer = costs.pricer()
    pairs = [
        StepPair(
            int(steps.index[number]),
            shape.num_tokens,
            shape.num_decodes,
            shape.decode_context,
            len(shape.prefills),
            pricer.price(shape) / _PS_PER_S,
            float(steps.end_s[number] - steps.start_s[number]),
        )
        for number, shape in enumerate(shapes_of(EngineSteps(scenario, steps, chunks)))
    ]
    residuals = costs.calibration.step_residuals
    report = report_executor([ExecutorComparison(simulated, executed, pairs)], residuals)
    return replace(report, provenance=provenance_of([scenario]))
