"""Measured quality beside answers: perplexity by variant, from a file that a measurement wrote."""

__all__ = ["quality_note", "with_quality"]

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.bounded import read_json
from perfmodel.planning.studies.file import StudyFile
from perfmodel.planning.studies.study import Answers


def with_quality(answers: Answers, file: StudyFile) -> Answers:
    """`answers` with the quality that the study's file names, where a variant has one.

    Raises SpecError for a file that is not there, is not JSON, or lacks an entry.
    """
    quality = file.study.quality
    if quality is None:
        return answers
    measured = _read(file, quality.file)
    values = {variant: _value(measured, key, quality.metric, file) for variant, key in quality.keys.items()}
    records = {
        key: replace(record, values={**record.values, quality.metric: values.get(key[0])}) if record.values else record
        for key, record in answers.records.items()
    }
    return replace(answers, records=records)


def quality_note(file: StudyFile) -> str:
    """What the measurement that the study's quality comes from says of itself; nothing without one."""
    quality = file.study.quality
    said = _read(file, quality.file).get("measured") if quality is not None else None
    if quality is None or not isinstance(said, Mapping):
        return ""
    what = f"{quality.metric.capitalize()}: `{said.get('command')}`, over {said.get('num_tokens'):,} tokens of "
    return f"{what}{said.get('text')}. {said.get('note')}"


def _read(file: StudyFile, name: str) -> Mapping[str, Any]:
    path = file.path.parent / name
    try:
        document = read_json(path)
    except (OSError, ValueError) as error:
        raise SpecError(f"{file.where(('quality', 'file'))}: {name} cannot be read ({error}).") from None
    return document if isinstance(document, dict) else {}


def _value(measured: Mapping[str, Any], key: str, metric: str, file: StudyFile) -> float:
    entry: Any = measured
    for part in key.split("/"):
        entry = entry.get(part) if isinstance(entry, Mapping) else None
    value = entry.get(metric) if isinstance(entry, Mapping) else entry
    if not isinstance(value, int | float):
        raise SpecError(f"{file.where(('quality', 'keys'))}: found {key!r}, which the file has no {metric} for.")
    return float(value)
