"""Which techniques there are, and what has been shown of each: `perfmodel techniques`."""

__all__ = ["answer_techniques"]

from typing import TYPE_CHECKING

from perfmodel.answers.answer import Answer
from perfmodel.errors import SpecError, did_you_mean

if TYPE_CHECKING:
    from perfmodel.evidence.executed.technique import TechniqueStatus
    from perfmodel.report.document import Document


def answer_techniques(family: str | None = None) -> Answer:
    """Every technique, or those of one family; `result` is a list of TechniqueStatus.

    Raises SpecError for a family that is none.
    """
    from perfmodel.evidence.executed.technique import read_status

    rows = _of_family(read_status(), family)

    def document() -> "Document":
        from perfmodel.report.views.catalog import techniques_view

        return techniques_view(rows)

    return Answer(lambda: [row.to_json() for row in rows], document, rows)


def _of_family(rows: "list[TechniqueStatus]", family: str | None) -> "list[TechniqueStatus]":
    from perfmodel.files.catalog import normal_name

    if family is None:
        return rows
    known = list(dict.fromkeys(row.family for row in rows))
    found = [row for row in rows if normal_name(row.family) == normal_name(family)]
    if not found:
        near = did_you_mean(family, known)
        raise SpecError(f"--family: found {family!r}, allowed: {', '.join(known)}.{near}")
    return found
