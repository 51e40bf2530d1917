"""What came of a study: its answers on each machine that it was asked on."""

__all__ = ["StudyPart", "StudyResult"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
