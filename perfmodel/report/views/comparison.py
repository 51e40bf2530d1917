"""Two results as a document: what differs in inputs and versions, and which numbers got better."""

__all__ = ["comparison_view"]

from collections.abc import Iterator, Sequence
from typing import Any

from perfmodel.planning.comparison import Change, MetricChange, ResultComparison
from perfmodel.report.document import Block, Document, Line, Paragraph, Span, Table, Tone
from perfmodel.report.numbers import MISSING, format_metric, format_short

_NAMED = (".hardware.name", ".model.name")  # whose other facts are in a file
_TONES: dict[str, Tone] = {"better": "good", "worse": "bad", "": ""}


def comparison_view(result: ResultComparison) -> Document:
    """Inputs, versions, answers; or that nothing differs."""
    blocks: list[Block] = [
        _changes("Inputs", list(_folded(result.inputs)), result),
        _changes("Versions", result.versions, result),
        _answers(result),
        _changes("Other answers", result.texts, result),
    ]
    if result.is_same:
        blocks = [Paragraph("Nothing differs.")]
    return Document(f"{result.one} and {result.other}", blocks, f"Two results of kind {result.kind}")


def _folded(changes: Sequence[Change]) -> Iterator[Change]:
    """Without the facts of a device or a model that is another: its name says it."""
    others = {each.field.removesuffix(".name"): 0 for each in changes if each.field.endswith(_NAMED)}
    for each in changes:
        owner = next((name for name in others if each.field.startswith(f"{name}.")), "")
        if not owner or each.field == f"{owner}.name":
            yield each
        else:
            others[owner] += 1
    for owner, count in others.items():
        if count:
            yield Change(f"{owner}: {count} facts", "as in its file", "as in its file")


def _changes(title: str, changes: Sequence[Change], result: ResultComparison) -> Table:
    rows = [(each.field, _text(each.one), _text(each.other)) for each in changes]
    return Table(("field", result.one, result.other), rows, title, left=3)


def _answers(result: ResultComparison) -> Table:
    has_places = any(each.place for each in result.answers)
    head = (*(["of"] * has_places), "metric", result.one, result.other, "difference", "relative", "")
    rows = [(*([each.place] * has_places), *_cells(each)) for each in result.answers]
    return Table(head, rows, "Answers, best first", left=1 + has_places, texts=(len(head) - 1,))


def _cells(change: MetricChange) -> tuple[Line, ...]:
    metric = change.metric
    difference = format_short(change.difference * metric.scale)
    return (
        metric.title,
        format_metric(metric, change.one),
        format_metric(metric, change.other),
        difference if difference.startswith("-") else f"+{difference}",
        MISSING if change.relative is None else f"{change.relative:+.1%}",
        Span(change.verdict, _TONES[change.verdict]),
    )


def _text(value: Any) -> str:
    return MISSING if value is None else str(value)
