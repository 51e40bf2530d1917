"""A study's numbers as rows of text: by metric, variants down, the values of an axis across."""

__all__ = ["StudyTable", "markdown_table", "problems_of", "study_tables"]

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from perfmodel.plan.studies.study import Answers, Label
from perfmodel.plan.sweeps.findings import better_by
from perfmodel.report.drawing.chart_axes import short_number
from perfmodel.report.drawing.metric_labels import capital, metric_label, metric_unit
from perfmodel.report.studies.words import place_words, times

_MISSING = "–"


@dataclass(frozen=True)
class StudyTable:
    """A title, the columns' heads, and rows whose first `num_names` cells are names."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_names: int


def study_tables(answers: Mapping[str, Answers], metrics: Sequence[str]) -> list[StudyTable]:
    """`answers` by where they come from (simulated, executed), side by side; all have the same axes.

    Without an axis one table of all metrics, else one for each metric.
    """
    first = next(iter(answers.values()))
    if not first.axes:
        return [_without_axes(answers, metrics)]
    return [_over_axis(answers, metric) for metric in metrics]


def markdown_table(table: StudyTable) -> Iterator[str]:
    """The table's lines, its title before it."""
    if table.title:
        yield f"{table.title}:"
        yield ""
    yield f"| {' | '.join(table.head)} |"
    yield "|" + "|".join("---" if index < table.num_names else "---:" for index in range(len(table.head))) + "|"
    for row in table.rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"
    yield ""


def problems_of(answers: Answers) -> list[str]:
    """Why there are points without values, a sentence each with the points it is of."""
    found: dict[str, list[str]] = {}
    for (variant, at), record in answers.records.items():
        if record.problem:
            place = place_words(dict(zip(answers.axes, at, strict=True)))
            found.setdefault(record.problem, []).append(f"{variant} at {place}" if place else variant)
    return [f"{_some(where)}: {what}" for what, where in found.items()]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{'; '.join(names[:4])}{more}"


def _without_axes(answers: Mapping[str, Answers], metrics: Sequence[str]) -> StudyTable:
    several = len(answers) > 1
    head = ["", *(_head(metric, origin if several else "") for metric in metrics for origin in answers)]
    variants = list(dict.fromkeys(v for each in answers.values() for v in each.variants))
    rows = [
        [variant, *(_cell(each, variant, {}, metric) for metric in metrics for each in answers.values())]
        for variant in variants
    ]
    return StudyTable("", head, rows, 1)


def _over_axis(answers: Mapping[str, Answers], metric: str) -> StudyTable:
    first = next(iter(answers.values()))
    axis = next((name for name, each in first.axes.items() if each.is_numeric), list(first.axes)[-1])
    others = [name for name in first.axes if name != axis]
    names = [*others, "", *(["clock"] if len(answers) > 1 else [])]
    head = [*names, *(_label(label) for label in first.axes[axis].labels)]
    rows = []
    for fixed in first.places(axis):
        for variant in first.variants:
            for origin, each in answers.items():
                if variant not in each.variants:
                    continue
                cells = [_cell(each, variant, {**fixed, axis: label}, metric) for label in first.axes[axis].labels]
                whose = [*(_label(fixed[name]) for name in others), variant, *([origin] if len(answers) > 1 else [])]
                rows.append([*whose, *cells])
    unit = metric_unit(metric)
    title = f"{capital(metric_label(metric))}{f', {unit}' if unit else ''}, by {axis}"
    return StudyTable(title + (f" ({first.axes[axis].unit})" if first.axes[axis].unit else ""), head, rows, len(names))


def _cell(answers: Answers, variant: str, at: Mapping[str, Label], metric: str) -> str:
    """The value, and in brackets how many times better than the baseline's."""
    if variant not in answers.variants:
        return _MISSING
    value = answers.value(variant, at, metric)
    if value is None:
        return _MISSING
    reference = answers.reference
    base = answers.value(reference, at, metric) if reference in answers.variants and variant != reference else None
    is_low = answers.study.metric_named(metric).is_better_low
    return short_number(value) + (f" ({times(better_by(value, base, is_low))})" if base and value else "")


def _head(metric: str, origin: str) -> str:
    unit = metric_unit(metric)
    return f"{metric_label(metric)}{f', {unit}' if unit else ''}{f', {origin}' if origin else ''}"


def _label(label: Label) -> str:
    return short_number(label) if isinstance(label, int | float) and not isinstance(label, bool) else str(label)
