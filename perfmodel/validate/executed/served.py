"""Served scenarios of a measured device beside their simulation: every step, and techniques beside their baselines."""

__all__ = ["ServedStep", "pair_verdicts", "served_steps"]

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from perfmodel.calibrate.measured.records import SIDES, ServingRecord, shape_of
from perfmodel.cost import step_costs
from perfmodel.cost.calibrations.calibration import Calibration
from perfmodel.cost.calibrations.engine_profile import EngineProfile
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.files.base import block_as
from perfmodel.ops.work import BatchShape
from perfmodel.planning.points import run_metric
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario
from perfmodel.specs.scenario import Scenario
from perfmodel.validate.techniques.runs import Sides, Technique, TechniqueRun, TechniqueVerdict

_PS_PER_S = 1e12


class ServedStep(NamedTuple):
    """One executed step of a scenario, seconds."""

    scenario: str
    label: str
    predicted: float
    executed: float


def served_steps(run: ServingRecord, scenario: Scenario, calibration: Calibration) -> list[ServedStep]:
    """Each step that was executed, predicted for exactly its shape."""
    pricer = step_costs(scenario, calibration, EngineProfile(engine=calibration.engine)).pricer()
    found = []
    for fields, seconds in zip(run.steps.shapes, run.steps.seconds, strict=True):
        batch = shape_of(dict(zip(BatchShape._fields, fields, strict=False)))  # those at their defaults are left out
        ticks = pricer.price(batch)
        drafts = f", {batch.num_draft_tokens} drafted" if batch.num_draft_tokens else ""
        label = f"{batch.num_decodes} decodes, {len(batch.prefills)} prompts, {batch.num_tokens} tokens{drafts}"
        found.append(ServedStep(run.scenario, f"{run.scenario}: {label}", ticks / _PS_PER_S, seconds))
    return found


def pair_verdicts(
    pairs: Mapping[str, ServingRecord], calibration: Calibration, date: str, unpredicted: list[str]
) -> list[TechniqueVerdict]:
    """What each pair with both sides has shown; what cannot be simulated is said in `unpredicted`.

    pairs: by file and side; calibration: what simulates them; date: of the runs, ISO
    """
    found = []
    for name in dict.fromkeys(key.rpartition(" ")[0] for key in pairs):
        sides = [pairs.get(f"{name} {side}") for side in SIDES]
        if None in sides:
            continue
        try:
            found.append(_verdict([side for side in sides if side is not None], calibration, date))
        except PerfmodelError as error:
            unpredicted.append(f"{name}: {error}")
    return found


def _verdict(sides: list[ServingRecord], calibration: Calibration, date: str) -> TechniqueVerdict:
    scenarios = [load_scenario(side.scenario, side.overrides) for side in sides]
    technique = block_as(scenarios[0].technique, Technique)
    if technique is None:
        raise SpecError(f"{sides[0].scenario}: has no `technique` block any more.")
    simulated = [run_metric(simulate(each, calibration=calibration), technique.metric) for each in scenarios]
    executed = [side.summary.get(technique.metric) for side in sides]
    if not all((*simulated, *executed)):
        raise SpecError(f"{sides[0].scenario}: these runs have no {technique.metric}.")
    biases = [_bias(served_steps(side, each, calibration)) for side, each in zip(sides, scenarios, strict=True)]
    gained, measured = (Sides(*(float(value or 0.0) for value in clock)) for clock in (simulated, executed))
    file = f"{PurePosixPath(sides[0].scenario).name}.yaml"
    return TechniqueVerdict.of(technique, file, [TechniqueRun(gained, measured, Sides(*biases))], "", date)


def _bias(steps: list[ServedStep]) -> float:
    """How much longer the steps were predicted to take than they took, all together."""
    return sum(step.predicted for step in steps) / sum(step.executed for step in steps) - 1
