"""What a study's `quality` part names, measured: the perplexity of a real model in each variant's format."""

__all__ = ["measure_study_quality"]

import json
from pathlib import Path
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.plan.studies.file import StudyFile
from perfmodel.plan.studies.spec import QualitySpec
from perfmodel.specs import load_scenario
from perfmodel.specs.overrides import as_overrides
from perfmodel.validate.executed.bridge import Progress, measure_quality

_TEXT = "pydoc"


def measure_study_quality(file: StudyFile, model: str, progress: Progress | None = None) -> Path:
    """Measure every variant that the study's `quality.keys` name on `model` (a .gguf) and write `quality.file`.

    Raises SpecError for a study without that part, MissingExtraError without what reads and runs the model.
    """
    quality = file.study.quality
    if quality is None:
        raise SpecError(f"{file.path}: has no `quality` part, so there is nothing to measure; leave --quality out.")
    command = f"perfmodel study {file.study.study} --quality {Path(model).name}"
    found: dict[str, Any] = {"measured": {"command": command}}
    for number, (variant, key) in enumerate(quality.keys.items()):
        if progress is not None:
            progress(number, len(quality.keys))
        entry = _measured(file, quality, variant, model)
        found["measured"] |= {name: entry.pop(name) for name in ("text", "num_tokens", "note")}
        found[key] = entry
    path = file.path.parent / quality.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return path


def _measured(file: StudyFile, quality: QualitySpec, variant: str, model: str) -> dict[str, Any]:
    setting = quality.variants.get(variant, file.study.variants[variant])
    scenario = load_scenario(quality.base, (f"model={model}", *as_overrides(quality.set | setting)))
    measured = measure_quality(scenario, None, _TEXT, None).to_json()
    return {
        "set": list(as_overrides(setting)),
        quality.metric: round(measured["perplexity"], 3),
        **{name: measured[name] for name in ("text", "num_tokens", "note")},
    }
