"""Scenarios executed round by round in random order, beside simulations; one drift meter restates all durations."""

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from perfmodel.errors import PerfmodelError
from perfmodel.models.spec import ModelSpec
from perfmodel.sim import RunResult, simulate
from perfmodel.specs.scenario import Scenario
from perfmodel_executors.measure.calibrate import CalibratedMachine, Progress, calibrate_machine
from perfmodel_executors.run import execute_scenario

Served = tuple[ModelSpec, str, str, str, str]
_BUDGET_S = 12.0  # of wall time for calibrating each model in each format


class RepeatedRuns(NamedTuple):
    """A scenario's executed runs, and the simulation of it with what the machine was calibrated to; or why not."""

    runs: Sequence[RunResult]
    simulated: RunResult | None
    problem: str = ""


def execute_repeatedly(
    scenarios: Sequence[Scenario], rounds: int, progress: Progress | None = None
) -> list[RepeatedRuns]:
    """Each of `scenarios` executed `rounds` times and simulated once. A scenario that is not executed has the sentence
    that says why."""
    machines: dict[Served, CalibratedMachine] = {}
    refused: dict[Served, str] = {}
    for scenario in scenarios:
        served = _served(scenario)
        if served not in machines and served not in refused:
            try:
                machines[served] = calibrate_machine(scenario, _BUDGET_S)
            except PerfmodelError as error:
                refused[served] = str(error)
    problems = [refused.get(_served(scenario), "") for scenario in scenarios]
    runs: list[list[RunResult]] = [[] for _ in scenarios]
    if not machines:
        return [RepeatedRuns((), None, problem) for problem in problems]
    meter = next(iter(machines.values())).times.drift_meter(every=4)
    rng = random.Random(scenarios[0].seed)
    for number in range(rounds):
        order = list(range(len(scenarios)))
        rng.shuffle(order)
        for done, index in enumerate(order, 1):
            if not problems[index]:
                try:
                    runs[index].append(execute_scenario(scenarios[index], drift=meter))
                except PerfmodelError as error:
                    problems[index] = str(error)
            if progress is not None:
                progress(number * len(order) + done, rounds * len(order))
    results = []
    for scenario, own, problem in zip(scenarios, runs, problems, strict=True):
        simulated = None
        if own:  # with the acceptance that its first run measured, which is the text's and no machine's
            config = {"speculative_config": own[0].scenario.engine.speculative_config}
            measured = scenario.model_copy(update={"engine": scenario.engine.model_copy(update=config)})
            with suppress(PerfmodelError):
                simulated = simulate(measured, calibration=machines[_served(scenario)].calibration)
        results.append(RepeatedRuns(own, simulated, problem))
    return results


def _served(scenario: Scenario) -> Served:
    """What a calibration is of: the model, the formats of its weights and KV, how attention and cache work, drafts."""
    model, engine = scenario.model, scenario.engine
    config = engine.speculative_config
    drafts = "" if config is None else config.model_dump_json(exclude={"acceptance"})
    return (model, engine.kv_cache_dtype, engine.kv_cache, engine.attention, drafts)
