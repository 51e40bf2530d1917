"""The executed part of a study: every point executed here and simulated, and the measured quality."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.evidence.executed.bridge import Progress, load_executor
from perfmodel.planning.points import Record, load_point, run_metric
from perfmodel.planning.study import Answers, QualitySpec, StudyFile, StudyPoints
from perfmodel.sim.records.result import RunResult
from perfmodel.specs import load_scenario
from perfmodel.specs.overrides import as_overrides


def execute_study(points: StudyPoints, progress: Progress | None = None) -> dict[str, Answers]:
    """Answers by clock, executed first; executed metrics are medians over the study's rounds."""
    scenarios = [points.located(partial(load_point, point))[0] for point in points.points.values()]
    part = points.file.study.executed
    rounds = part.rounds if part is not None else 1
    result = load_executor().execute_repeatedly(scenarios, rounds, progress)
    executed, simulated = [], []
    for item in result:
        executed.append(_record(item.runs, points.metrics, item.problem))
        predictions = [item.simulated] if item.simulated is not None else []
        simulated.append(_record(predictions, points.metrics, ""))
    return {"executed": points.answered(executed), "simulated": points.answered(simulated)}


def _record(runs: Sequence[RunResult], metrics: Sequence[str], problem: str) -> Record:
    if not runs:
        return Record(problem=problem)
    values: dict[str, float | None] = {}
    for name in metrics:
        there = [value for run in runs if (value := run_metric(run, name)) is not None]
        values[name] = median(there) if there else None
    return Record(values, "", runs[0].clock, str(runs[0].summary.get("origin") or ""), runs[0].notes)


_TEXT = "pydoc"


def measure_study_quality(file: StudyFile, model: str, progress: Progress | None = None) -> Path:
    """Measure every variant of the study's `quality.keys` on `model` (a .gguf) and write `quality.file`. Raises
    SpecError for a study without that part, MissingExtraError without the packages to run the model."""
    quality = file.study.quality
    if quality is None:
        raise SpecError(f"{file.path}: has no `quality` part, so there is nothing to measure; leave --quality out.")
    command = f"perfmodel study {file.study.study} --quality {Path(model).name}"
    result: dict[str, Any] = {"measured": {"command": command}}
    for number, (variant, key) in enumerate(quality.keys.items()):
        if progress is not None:
            progress(number, len(quality.keys))
        entry = _measured(file, quality, variant, model)
        result["measured"] |= {name: entry.pop(name) for name in ("text", "num_tokens", "note")}
        result[key] = entry
    path = file.path.parent / quality.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8", newline="\n")
    return path


def _measured(file: StudyFile, quality: QualitySpec, variant: str, model: str) -> dict[str, Any]:
    setting = quality.variants.get(variant, file.study.variants[variant])
    scenario = load_scenario(quality.base, (f"model={model}", *as_overrides(quality.set | setting)))
    measured = load_executor().measure_quality(scenario, text=_TEXT).to_json()
    return {
        "set": list(as_overrides(setting)),
        quality.metric: round(measured["perplexity"], 3),
        **{name: measured[name] for name in ("text", "num_tokens", "note")},
    }
