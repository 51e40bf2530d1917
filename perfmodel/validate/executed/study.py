"""The executed part of a study: every point run on this machine, and its simulation, calibrated here and now."""

__all__ = ["execute_study"]

from collections.abc import Sequence
from functools import partial
from statistics import median

from perfmodel.plan.studies.study import Answers, StudyPoints
from perfmodel.plan.sweeps.metrics import run_metric
from perfmodel.plan.sweeps.points import Record, load_point
from perfmodel.sim.records.result import RunResult
from perfmodel.validate.executed.bridge import Progress, load_executor


def execute_study(points: StudyPoints, progress: Progress | None = None) -> dict[str, Answers]:
    """Answers by clock, executed first; executed metrics are medians over the study's rounds."""
    scenarios = [points.located(partial(load_point, point))[0] for point in points.points.values()]
    part = points.file.study.executed
    rounds = part.rounds if part is not None else 1
    found = load_executor().execute_repeatedly(scenarios, rounds, progress)
    executed, simulated = [], []
    for each in found:
        executed.append(_record(each.runs, points.metrics, each.problem))
        beside = [each.simulated] if each.simulated is not None else []
        simulated.append(_record(beside, points.metrics, ""))
    return {"executed": points.answered(executed), "simulated": points.answered(simulated)}


def _record(runs: Sequence[RunResult], metrics: Sequence[str], problem: str) -> Record:
    if not runs:
        return Record(problem=problem)
    values: dict[str, float | None] = {}
    for name in metrics:
        there = [value for run in runs if (value := run_metric(run, name)) is not None]
        values[name] = median(there) if there else None
    return Record(values, "", runs[0].clock, str(runs[0].summary.get("origin") or ""), runs[0].notes)
