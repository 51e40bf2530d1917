"""A study's pictures: what its `plots` describe, drawn from its answers."""

__all__ = ["study_pictures"]

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle

from perfmodel.plan.studies.spec import PlotSpec, Study
from perfmodel.plan.studies.study import Answers, Label
from perfmodel.plan.sweeps.findings import better_by, ladder_gains, pareto_front
from perfmodel.report.drawing.charts import COLOURS, Bar, Dot, Line, Panel, bars_svg, lines_svg, pareto_svg
from perfmodel.report.drawing.metric_labels import capital, metric_label, metric_unit
from perfmodel.report.drawing.style import BLUE, ORANGE, SKY
from perfmodel.report.drawing.waterfall import Ladder, waterfall_svg
from perfmodel.report.studies.words import place_words

_LADDER_COLOURS = (BLUE, ORANGE, SKY)


def study_pictures(parts: Sequence[tuple[str, Mapping[str, Answers]]]) -> dict[str, str]:
    """Name -> SVG. parts: (title, answers by clock) for each machine that the study was asked on; of two clocks the
    first is drawn, the second dashed beside it."""
    pictures: dict[str, str] = {}
    study = next(iter(parts[0][1].values())).study
    for number, plot in enumerate(study.plots, 1):
        if plot.kind == "waterfall":
            pictures[f"{number}-waterfall"] = _waterfall(parts, plot)
            continue
        for which, (title, answers) in enumerate(parts):
            drawn = _drawn(title, answers, plot)
            if drawn:
                pictures[f"{number}-{plot.kind}{'-here' if which else ''}"] = drawn
    return pictures


def _drawn(title: str, answers: Mapping[str, Answers], plot: PlotSpec) -> str:
    first = next(iter(answers.values()))
    metric = plot.metric or first.study.metrics[0]
    has_values = any(record.values.get(metric) is not None for record in first.records.values())
    if not has_values:
        return ""
    if plot.kind == "lines":
        return _lines(title, answers, plot, metric)
    return _pareto(title, first, plot, metric) if plot.kind == "pareto" else _bars(title, answers, metric)


def _lines(title: str, answers: Mapping[str, Answers], plot: PlotSpec, metric: str) -> str:
    first = next(iter(answers.values()))
    axis = first.study.x_axis(plot)
    assert axis is not None  # the study's file was checked for it
    panels = [
        Panel(place_words(fixed), _panel_lines(answers, plot, metric, axis, fixed)) for fixed in first.places(axis)
    ]
    unit = first.axes[axis].unit
    y_title = f"times better than {first.reference}" if plot.relative else _axis_title(first.study, metric)
    if len(answers) > 1:
        title += f" (line: {next(iter(answers))}, dashed: {list(answers)[1]})"
    x_title = axis if not unit or unit in axis else f"{axis}, {unit}"
    heading = f"{capital(metric_label(metric))}: {title}"
    return lines_svg(panels, heading, x_title, y_title, plot.log, 1.0 if plot.relative else None)


def _panel_lines(
    answers: Mapping[str, Answers], plot: PlotSpec, metric: str, axis: str, fixed: Mapping[str, Label]
) -> list[Line]:
    lines = []
    variants = next(iter(answers.values())).variants
    colours = dict(zip(variants, cycle(COLOURS), strict=False))
    for number, each in enumerate(answers.values()):
        for variant in each.variants:
            if plot.relative and variant == each.reference:
                continue
            xs = [float(label) for label in each.axes[axis].labels]
            ys = each.line(variant, metric, axis, fixed)
            if plot.relative:
                is_low = each.study.metric_named(metric).is_better_low
                base = each.line(each.reference, metric, axis, fixed)
                ys = [better_by(a, b, is_low) if a and b else None for a, b in zip(ys, base, strict=True)]
            lines.append(Line(variant, xs, ys, colours.get(variant, COLOURS[0]), is_dashed=number > 0))
    return lines


def _pareto(title: str, answers: Answers, plot: PlotSpec, metric: str) -> str:
    x = plot.x or ""
    low = [answers.study.metric_named(name).is_better_low for name in (x, metric)]
    panels: dict[str, list[Dot]] = {}
    ends = {name: axis.shortened for name, axis in answers.axes.items()}  # panels for all values would be too small
    for fixed in replace(answers, axes=ends).places():
        points = {v: (answers.value(v, fixed, x), answers.value(v, fixed, metric)) for v in answers.variants}
        front = pareto_front(points, low)
        panels[place_words(fixed)] = [
            Dot(name, a, b, colour, name in front)
            for (name, (a, b)), colour in zip(points.items(), cycle(COLOURS), strict=False)
            if a is not None and b is not None
        ]
    panels = {name: dots for name, dots in panels.items() if dots}
    if panels and all(dots == next(iter(panels.values())) for dots in panels.values()):
        panels = dict([next(iter(panels.items()))])  # the axes change nothing of it
    heading = f"{capital(metric_label(metric))} and {metric_label(x)}: {title}"
    x_title, y_title = (_axis_title(answers.study, name) for name in (x, metric))
    return pareto_svg(panels, heading, x_title, y_title, plot.log) if panels else ""


def _bars(title: str, answers: Mapping[str, Answers], metric: str) -> str:
    first = next(iter(answers.values()))
    groups: dict[str, list[Bar]] = {}
    for fixed in first.places():
        for variant in first.variants:
            for origin, each in answers.items():
                colour = COLOURS[list(answers).index(origin)]
                name = f"{variant}, {origin}" if len(answers) > 1 else variant
                groups.setdefault(place_words(fixed), []).append(Bar(name, each.value(variant, fixed, metric), colour))
    return bars_svg(groups, f"{capital(metric_label(metric))}: {title}", _axis_title(first.study, metric))


def _waterfall(parts: Sequence[tuple[str, Mapping[str, Answers]]], plot: PlotSpec) -> str:
    first = next(iter(parts[0][1].values()))
    metric = plot.metric or first.study.metrics[0]
    is_low = first.study.metric_named(metric).is_better_low
    ladders: list[Ladder] = []
    for title, answers in parts:
        for origin, each in answers.items():
            fixed = next(iter(each.places()))
            values = [each.value(v, fixed, metric) if v in each.variants else None for v in first.variants]
            name = f"{title}, {origin}" if len(answers) > 1 else title
            ladders.append(Ladder(name, ladder_gains(values, is_low), _LADDER_COLOURS[len(ladders) % 3]))
    heading = f"{first.study.study.replace('_', ' ')}: gain in {metric_label(metric)}, rung by rung"
    return waterfall_svg(first.variants, ladders, heading, "times better than the first rung")


def _axis_title(study: Study, metric: str) -> str:
    if study.quality is not None and metric == study.quality.metric and study.quality.model:
        return f"{metric} of {study.quality.model}"
    unit = metric_unit(metric)
    return f"{metric_label(metric)}{f', {unit}' if unit else ''}"
