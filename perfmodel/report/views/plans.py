"""Replayed plans as a document: how many cases are equal, by what they exercise, and where the others first differ."""

from collections.abc import Iterator

from perfmodel.evidence.kinds.plans import PlansReport
from perfmodel.report.document import Block, Document, Notes, Paragraph, Sentences, Table

_MAX_SHOWN = 3
_MAX_WORDS = 90


def plans_view(report: PlansReport, command: str = "") -> Document:
    """Equal cases of all, by engine and feature; the first difference of some cases that differ."""
    rows = [(name, f"{group['equal']:,}", f"{group['rows']:,}") for name, group in report.by.items()]
    blocks: list[Block] = [
        Table(("cases with", "equal", "cases"), rows),
        *_differences(report),
        Notes(report.notes[:_MAX_SHOWN]),
    ]
    share = f" ({report.equal / report.rows:.1%})" if report.rows else ""
    subtitle = f"{report.equal:,} of {report.rows:,} cases equal from the first plan to the last{share}"
    return Document("Plans: the engine's own scheduler vs ours", blocks, subtitle, "plans", command)


def _differences(report: PlansReport) -> Iterator[Block]:
    for row in report.worst[:_MAX_SHOWN]:
        title = f"Case {row['case']} ({', '.join(row['features'])}), step {row['step']}"
        yield Sentences([f"recorded: {_cut(row['recorded'])}", f"ours: {_cut(row['ours'])}"], title)
    if len(report.worst) > _MAX_SHOWN:
        yield Paragraph("--json lists more of the cases that differ.")


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_WORDS else text[: _MAX_WORDS - 4] + " ..."
