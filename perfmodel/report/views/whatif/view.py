"""A what-if as a document: what each varied value does to a metric, the values of an axis, a grid; a sweep.

Its pictures: a tornado (the widest on top), a heat map of a grid, lines of an axis.
"""

__all__ = ["has_own_table", "sweep_view", "values_tables", "whatif_json", "whatif_notes", "whatif_view"]

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from perfmodel.planning.metrics import Metric, metric_of, study_metric
from perfmodel.planning.sensitivity.ask import WhatIfResult
from perfmodel.planning.sensitivity.vary import Axis
from perfmodel.planning.sensitivity.whatif import NEAR, Sensitivity, WhatIfAnswers
from perfmodel.planning.sweeps.points import Record
from perfmodel.planning.sweeps.sweep import SweepResult
from perfmodel.report.document import Block, Document, Notes, Picture, Sentences, Table
from perfmodel.report.drawing.charts import Line, Panel, lines_svg
from perfmodel.report.drawing.figures import (
    BLUE,
    GREY,
    GRID,
    INK,
    ORANGE,
    Scale,
    document,
    element,
    scale_over,
    text,
    text_width,
)
from perfmodel.report.numbers import MISSING, format_metric
from perfmodel.report.views.scenario import headline_with_slo, trust_blocks
from perfmodel.report.views.whatif.sentences import path_label, whatif_sentences, x_label
from perfmodel.trust import trust_of

# Of the pictures, in pixels.
_WIDTH, _BAR, _ROW, _TOP = 860, 18, 28, 62
_LONGEST_NAME = 28  # of what a line is, in characters
_ROOM = 70  # for what is written at the ends of bars


def whatif_view(result: WhatIfResult, command: str = "") -> Document:
    """The answer, pictures, tables, notes."""
    answers = result.answers
    blocks: list[Block] = [Sentences(whatif_sentences(result)), *_whatif_pictures(answers)]
    blocks += [*_tables(answers), *trust_blocks(trust_of(answers.scenario)), Notes(whatif_notes(result))]
    return Document(
        f"What if: {answers.scenario.name}", blocks, headline_with_slo(answers.scenario), "what if", command
    )


def whatif_json(result: WhatIfResult) -> dict[str, Any]:
    """Every point with its values, sensitivities, crossovers and the sentences."""
    return {**result.to_json(), "answer": whatif_sentences(result), "notes": whatif_notes(result)}


def whatif_notes(result: WhatIfResult) -> list[str]:
    answers = result.answers
    origin = f"Times are {answers.base.origin}; a resource's elasticity is taken {NEAR - 1:.0%} up and down."
    return [
        *result.assumed,
        *([origin] if answers.base.origin else []),
        *dict.fromkeys([*answers.problems, *answers.base.notes]),
    ]


def _tables(answers: WhatIfAnswers) -> Iterator[Table]:
    """Sensitivities by metric; then each axis of more than three values, or of names; then the grid."""
    metrics = [study_metric(name) for name in answers.question.base.metrics]
    for metric in metrics:
        yield _sensitivities(answers, metric)
    yield from values_tables(answers, metrics)
    if answers.grid:
        for metric in metrics:
            yield _grid(answers, metric)


def values_tables(answers: WhatIfAnswers, metrics: list[Metric]) -> Iterator[Table]:
    """Each axis whose values count one by one: more than three, or names, or beside an alternative's."""
    for axis in answers.question.axes:
        if has_own_table(answers, axis):
            yield _values(answers, axis, metrics)


def has_own_table(answers: WhatIfAnswers, axis: Axis) -> bool:
    """Whether an axis' ends alone would not say enough of it."""
    return len(axis.texts) > 3 or not axis.xs or bool(answers.others)


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
    return Table(head, list(zip(_places(axis), *columns, strict=True)), f"Along {path_label(axis.path)}")


def _grid(answers: WhatIfAnswers, metric: Metric) -> Table:
    down, across = answers.question.axes
    rows = [
        [text, *(_cell(answers.grid[one, other], metric) for other in across.overrides)]
        for text, one in zip(_places(down), down.overrides, strict=True)
    ]
    return Table([f"{path_label(down.path)} \\ {path_label(across.path)}", *_places(across)], rows, metric.title)


def _places(axis: Axis) -> list[str]:
    """The values of an axis, numbers with three digits."""
    return [x_label(x, axis.unit) for x in axis.xs] if axis.xs else list(axis.texts)


def _cell(record: Record, metric: Metric) -> str:
    return format_metric(metric, record.values.get(metric.key))


def _whatif_pictures(answers: WhatIfAnswers) -> Iterator[Picture]:
    """A tornado for each metric, a heat map for each of a grid, lines beside an alternative's."""
    for name in answers.question.base.metrics:
        metric = study_metric(name)
        rows = [each for each in answers.of_metric(name) if each.axis.xs and each.base and each.swing > 0]
        if len(rows) > 1:
            yield Picture(f"tornado-{name}", partial(_tornado_svg, rows))
        if answers.grid:
            yield Picture(f"grid-{name}", partial(_heat_svg, answers, name))
        for axis in answers.question.axes:
            if len(axis.xs) > 3 or (axis.xs and answers.others):
                yield Picture(f"{axis.path}-{name}", partial(_lines, answers, axis, metric))


def _tornado_svg(rows: Sequence[Sensitivity]) -> str:
    """Bars from the metric at the low value of each axis to that at the high one, about what it is now."""
    metric, base = study_metric(rows[0].metric), rows[0].base or 0.0
    left = 24 + max(text_width(path_label(each.axis.path)) for each in rows)
    ends = [value for each in rows for value in (each.low, each.high) if value is not None]
    x = scale_over([base, *ends], left + _ROOM, _WIDTH - _ROOM, is_log=min([base, *ends]) > 0)
    bottom = _TOP + _ROW * len(rows)
    legend = f"from the low value (blue) to the high one (orange); now {format_metric(metric, base)} {metric.unit}"
    parts = [text(12, 40, legend, fill=GREY)]
    for tick in x.ticks:
        parts.append(element("line", x1=x(tick), y1=_TOP - 8, x2=x(tick), y2=bottom, stroke=GRID))
        parts.append(text(x(tick), bottom + 18, format_metric(metric, tick), "middle"))
    for number, effect in enumerate(rows):
        parts += _bars(effect, base, x, _TOP + _ROW * number, left)
    parts.append(element("line", x1=x(base), y1=_TOP - 8, x2=x(base), y2=bottom, stroke=GREY))
    return document(parts, metric.title, _WIDTH, bottom + 32)


def _bars(effect: Sensitivity, base: float, x: Scale, top: float, left: float) -> Iterator[str]:
    axis, low, high = effect.axis, effect.low, effect.high
    yield text(left - 8, top + 13, path_label(axis.path), "end")
    same_side = low is not None and high is not None and (low - base) * (high - base) > 0
    for number, (value, other, at, colour) in enumerate(
        ((low, high, axis.xs[0], BLUE), (high, low, axis.xs[-1], ORANGE))
    ):
        if value is None:
            continue
        start, end = sorted((x(base), x(value)))
        # Two bars on one side lie one above the other, else they would hide each other.
        height, y, shift = (_BAR / 2, top + number * _BAR / 2, 10 if number else 1) if same_side else (_BAR, top, 6)
        yield element("rect", x=start, y=y, width=max(end - start, 1), height=height, fill=colour)
        beside = number == 1 if other is None or other == base else other < base  # where the other bar is not
        is_right = value > base or (value == base and beside)
        place, anchor = (end + 6, "start") if is_right else (start - 6, "end")
        yield text(place, top + shift + 7, x_label(at, axis.unit), anchor, font_size=11)


def _heat_svg(answers: WhatIfAnswers, name: str) -> str:
    """The metric in each cell of the grid, darker where it is larger."""
    metric, (down, across) = study_metric(name), answers.question.axes
    values = {key: record.values.get(name) for key, record in answers.grid.items()}
    there = [value for value in values.values() if value is not None]
    shade = scale_over(there or [0, 1], 0.06, 0.75, is_log=bool(there) and min(there) > 0)
    rows, columns = _places(down), _places(across)
    left = 30 + max(map(text_width, (*rows, path_label(down.path))))
    wide = min((_WIDTH - left - 20) / len(columns), 120)
    parts = [text(left, 44, path_label(across.path), fill=GREY)]
    parts.append(text(left - 10, 62, path_label(down.path), "end", fill=GREY))
    parts += [text(left + (column + 0.5) * wide, 62, words, "middle") for column, words in enumerate(columns)]
    for row, (words, one) in enumerate(zip(rows, down.overrides, strict=True)):
        top = 70 + row * 30
        parts.append(text(left - 10, top + 19, words, "end"))
        for column, other in enumerate(across.overrides):
            value = values[one, other]
            dark, at = 0.0 if value is None else shade(value), left + column * wide
            box = {"x": at, "y": top, "width": wide - 2, "height": 28}
            parts.append(element("rect", **box, fill=BLUE, fill_opacity=dark))
            ink = "#FFFFFF" if dark > 0.45 else INK
            parts.append(text(at + wide / 2 - 1, top + 19, format_metric(metric, value), "middle", fill=ink))
    return document(parts, metric.title, _WIDTH, 80 + 30 * len(rows))


def _lines(answers: WhatIfAnswers, axis: Axis, metric: Metric) -> str:
    def values(records: Sequence[Record]) -> list[float | None]:
        found = [record.values.get(metric.key) for record in records]
        return [None if value is None else value * metric.scale for value in found]

    lines = [Line("as it is" if answers.others else "", axis.xs, values(answers.by_axis[axis.path]), BLUE)]
    if axis.path in answers.others:
        name = " ".join(answers.question.against)
        name = name if len(name) <= _LONGEST_NAME else "alternative"
        lines.append(Line(name, axis.xs, values(answers.others[axis.path]), ORANGE))
    x_title = path_label(axis.path) + (f", {axis.unit}" if axis.unit else "")
    log = ["x"] if min(axis.xs) > 0 else []
    return lines_svg([Panel("", lines)], f"{metric.name} along {path_label(axis.path)}", x_title, metric.title, log)


def sweep_view(result: SweepResult) -> Document:
    """Values by path, then the metrics; why points have none."""
    metrics = [metric_of(name) for name in result.metrics]
    rows = [
        (*map(str, values), *(format_metric(metric, record.values.get(metric.key)) for metric in metrics))
        for values, record in zip(result.values, result.records, strict=True)
    ]
    problems = dict.fromkeys(record.problem for record in result.records if record.problem)
    table = Table((*result.paths, *(metric.title for metric in metrics)), rows, left=0)
    return Document("", [table, Notes(list(problems))])
