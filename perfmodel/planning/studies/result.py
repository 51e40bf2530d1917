"""What came of a study: its answers on each machine that it was asked on, and measured quality beside them."""

__all__ = ["StudyPart", "StudyResult", "quality_note", "with_quality"]

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.planning.studies.file import StudyFile
from perfmodel.planning.studies.spec import Study
from perfmodel.planning.studies.study import Answers
from perfmodel.printable import Printable
from perfmodel.specs.scenario import Scenario


@dataclass(frozen=True)
class StudyPart:
    """The study asked on one machine. scenario: its first point's; answers: by clock, the one that counts first"""

    scenario: Scenario
    answers: Mapping[str, Answers]

    @property
    def first(self) -> Answers:
        """The answers that count."""
        return next(iter(self.answers.values()))

    @property
    def metrics(self) -> list[str]:
        """The metrics of the study that were asked here."""
        records = self.first.records.values()
        return [name for name in self.first.study.all_metrics if any(name in record.values for record in records)]

    @property
    def notes(self) -> list[str]:
        """What points' records say beside their values, once each."""
        records = [record for each in self.answers.values() for record in each.records.values()]
        return list(dict.fromkeys(note for record in records for note in record.notes))


@dataclass(frozen=True, repr=False)
class StudyResult(Printable):
    """All parts of a study: simulated, and executed here where that was asked for."""

    study: Study
    parts: Sequence[StudyPart]
    notes: Sequence[str] = ()


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
        document = json.loads(path.read_text(encoding="utf-8"))
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
