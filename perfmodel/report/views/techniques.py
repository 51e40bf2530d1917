"""Every technique in a line: simulated, executed, and how far from what was published."""

__all__ = ["techniques_view"]

from collections.abc import Sequence

from perfmodel.report.document import Block, Document, Heading, Paragraph, Span, Table
from perfmodel.validate.techniques.status import TechniqueStatus

_HEAD = ("technique", "simulated", "executed", "validated: predicted / published")


def techniques_view(rows: Sequence[TechniqueStatus]) -> Document:
    """A table for each family, and how many techniques have got how far."""
    blocks: list[Block] = []
    for family in dict.fromkeys(row.family for row in rows):
        members = [row for row in rows if row.family == family]
        blocks.append(Heading(family))
        cells = [(row.entry.name, _simulated(row), _executed(row), _validated(row)) for row in members]
        blocks.append(Table(_HEAD, cells, left=4))
        for reason in dict.fromkeys(row.entry.missing for row in members if row.entry.missing):
            names = ", ".join(row.entry.name for row in members if row.entry.missing == reason)
            blocks.append(Paragraph(Span(f"Not yet: {names}: {reason}", "muted")))
    counts = {
        "simulated": sum(row.is_simulated for row in rows),
        "executed": sum(row.is_executed for row in rows),
        "validated": sum(row.validated == "yes" for row in rows),
        "missed": sum(row.validated == "missed" for row in rows),
    }
    text = ", ".join(f"{count} {name}" for name, count in counts.items())
    return Document("", [*blocks, Paragraph(f"{len(rows)} techniques: {text}")])


def _simulated(row: TechniqueStatus) -> str:
    return "yes" if row.is_simulated else "not yet"


def _executed(row: TechniqueStatus) -> str:
    if not row.is_executed:
        return f"no: {row.why_not_executed}"
    return "yes" if row.quotient is None else f"yes, simulated / executed {row.quotient:.2f}"


def _validated(row: TechniqueStatus) -> str:
    if row.ratio is None:
        return "no figure"
    count = f"{len(row.ratios)} figures" if len(row.ratios) > 1 else next(iter(row.ratios))
    return f"{'missed, ' if row.validated == 'missed' else ''}{row.ratio:.2f} ({count})"
