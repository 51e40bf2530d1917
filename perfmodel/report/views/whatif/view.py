"""A what-if as a document: what each varied value does to a metric, the values of an axis, a grid."""

__all__ = ["whatif_json", "whatif_view"]

from collections.abc import Iterator
from typing import Any

from perfmodel.planning.metrics import Metric, study_metric
from perfmodel.planning.sensitivity.result import WhatIfResult
from perfmodel.planning.sensitivity.vary import Axis
from perfmodel.planning.sensitivity.whatif import NEAR, Sensitivity, WhatIfAnswers
from perfmodel.planning.sweeps.points import Record
from perfmodel.report.document import Block, Document, Notes, Sentences, Table
from perfmodel.report.numbers import MISSING, format_metric
from perfmodel.report.views.scenario import headline
from perfmodel.report.views.whatif.labels import path_label, x_label
from perfmodel.report.views.whatif.pictures import whatif_pictures
from perfmodel.report.views.whatif.sentences import whatif_sentences


def whatif_view(result: WhatIfResult, command: str = "") -> Document:
    """The answer, pictures, tables, notes."""
    answers = result.answers
    blocks: list[Block] = [Sentences(whatif_sentences(result)), *whatif_pictures(answers)]
    blocks += [*_tables(answers), Notes(_notes(answers))]
    return Document(f"What if: {answers.scenario.name}", blocks, headline(answers.scenario), "what if", command)


def whatif_json(result: WhatIfResult) -> dict[str, Any]:
    """Every point with its values, sensitivities, crossovers and the sentences."""
    return {**result.to_json(), "answer": whatif_sentences(result), "notes": _notes(result.answers)}


def _notes(answers: WhatIfAnswers) -> list[str]:
    origin = f"Times are {answers.base.origin}; a resource's elasticity is taken {NEAR - 1:.0%} up and down."
    return [*([origin] if answers.base.origin else []), *dict.fromkeys([*answers.problems, *answers.base.notes])]


def _tables(answers: WhatIfAnswers) -> Iterator[Table]:
    """Sensitivities by metric; then each axis of more than three values, or of names; then the grid."""
    metrics = [study_metric(name) for name in answers.question.base.metrics]
    for metric in metrics:
        yield _sensitivities(answers, metric)
    for axis in answers.question.axes:
        if len(axis.texts) > 3 or not axis.xs or answers.others:
            yield _values(answers, axis, metrics)
    if answers.grid:
        for metric in metrics:
            yield _grid(answers, metric)


def _sensitivities(answers: WhatIfAnswers, metric: Metric) -> Table:
    rows = [_sensitivity(each, metric) for each in answers.of_metric(metric.key) if each.axis.xs]
    title = f"{metric.title}: {format_metric(metric, answers.base.values.get(metric.key))} as it is"
    return Table(("varied", "from", "gives", "to", "gives", "elasticity"), rows, title)


def _sensitivity(each: Sensitivity, metric: Metric) -> list[str]:
    axis = each.axis
    low, high = (x_label(x, axis.unit) for x in (axis.xs[0], axis.xs[-1]))
    elasticity = MISSING if each.elasticity is None else f"{each.elasticity:+.2f}"
    elasticity = "0.00" if elasticity in ("+0.00", "-0.00") else elasticity
    values = (format_metric(metric, value) for value in (each.low, each.high))
    return [path_label(axis.path), low, next(values), high, next(values), elasticity]


def _values(answers: WhatIfAnswers, axis: Axis, metrics: list[Metric]) -> Table:
    sides = [("", answers.by_axis[axis.path])]
    if axis.path in answers.others:
        sides.append((", alternative", answers.others[axis.path]))
    head = [path_label(axis.path), *(f"{metric.title}{side}" for side, _ in sides for metric in metrics)]
    columns = [[_cell(record, metric) for record in records] for _, records in sides for metric in metrics]
    return Table(head, list(zip(axis.texts, *columns, strict=True)), f"Along {path_label(axis.path)}")


def _grid(answers: WhatIfAnswers, metric: Metric) -> Table:
    down, across = answers.question.axes
    rows = [
        [text, *(_cell(answers.grid[one, other], metric) for other in across.overrides)]
        for text, one in zip(down.texts, down.overrides, strict=True)
    ]
    return Table([f"{path_label(down.path)} \\ {path_label(across.path)}", *across.texts], rows, metric.title)


def _cell(record: Record, metric: Metric) -> str:
    return format_metric(metric, record.values.get(metric.key))
