"""`ValidationReport`: predicted beside measured, the same document for every kind of truth."""

__all__ = ["ValidationReport"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perfmodel.cost.calibrations.provenance import Provenance
from perfmodel.printable import Printable
from perfmodel.validate.groups import Comparison
from perfmodel.validate.rows import ErrorStats


@dataclass(frozen=True, repr=False)
class ValidationReport(Printable):
    """What `perfmodel validate` answers; it prints itself as the command does.

    rows, covered: rows of the truth, and those that could be predicted
    metrics:       metric -> errors over all rows
    by:            group -> metric -> errors over the group's rows
    worst:         the rows with the largest errors, with metric, row, predicted, measured, error and, where parts of
                   a prediction can be separated, breakdown (see `perfmodel.validate.breakdown`)
    notes:         sentences a reader needs beside the figures
    comparisons:   the rows themselves, for a written report; not part of the document
    provenance:    what predictions came from
    about:         what was compared, and what of it the calibrations were fitted to, as text
    figures:       every row by itself (id, technique, metric, unit, predicted, published, ratio, source, reason), where
                   rows are single published figures
    techniques:  every technique by itself (technique, file, page, metric, speedups simulated and executed, their
                 quotient, and the bias of single steps with and without it)
    """

    kind: str
    rows: int
    covered: int
    metrics: Mapping[str, ErrorStats]
    by: Mapping[str, Mapping[str, ErrorStats]] = field(default_factory=dict)
    worst: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    comparisons: Sequence[Comparison] = field(default=(), repr=False)
    provenance: Provenance = field(default_factory=Provenance)
    about: str = ""
    figures: Sequence[Mapping[str, Any]] = ()
    techniques: Sequence[Mapping[str, Any]] = ()

    def to_json(self) -> dict[str, Any]:
        """The report as one JSON document, the same for every kind of truth."""
        return {
            "kind": self.kind,
            "rows": self.rows,
            "covered": self.covered,
            "metrics": {name: stats.to_json() for name, stats in self.metrics.items()},
            "by": {g: {name: s.to_json() for name, s in group.items()} for g, group in self.by.items()},
            "worst": [dict(row) for row in self.worst],
            "notes": list(self.notes),
            "calibrations": [each.to_json() for each in self.provenance.fitted],
            "provenance": self.provenance.to_json("validation", {"kind": self.kind}),
            **({"figures": [dict(row) for row in self.figures]} if self.figures else {}),
            **({"techniques": [dict(row) for row in self.techniques]} if self.techniques else {}),
        }
