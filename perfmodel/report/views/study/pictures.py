"""A study's pictures: what its `plots` describe, drawn from its answers."""

__all__ = ["part_title", "study_pictures"]

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle

from perfmodel.planning.metrics import Metric
from perfmodel.planning.studies.spec import PlotSpec, Study
from perfmodel.planning.studies.study import Answers, Label, StudyPart
from perfmodel.planning.sweeps.findings import better_by, ladder_gains, pareto_front
from perfmodel.report.document import Picture
from perfmodel.report.drawing.charts import (
    Bar,
    Dot,
    Ladder,
    Line,
    Panel,
    bars_svg,
    lines_svg,
    pareto_svg,
    waterfall_svg,
)
from perfmodel.report.drawing.figures import BLUE, COLOURS, ORANGE, SKY
from perfmodel.report.views.scenario import headline
from perfmodel.report.views.study.sentences import place_label

_LADDER_COLOURS = (BLUE, ORANGE, SKY)


def study_pictures(parts: Sequence[StudyPart]) -> Iterator[Picture]:
    """A picture for each of the study's plots and each machine that it was asked on; of two clocks the first is drawn,
    the second dashed beside it."""
    for number, plot in enumerate(parts[0].first.study.plots, 1):
        if plot.kind == "waterfall":
            yield Picture(f"{number}-waterfall", partial(_waterfall, parts, plot))
            continue
        for which, part in enumerate(parts):
            if _has_values(part.first, plot):
                name = f"{number}-{plot.kind}{'-here' if which else ''}"
                yield Picture(name, partial(_DRAWN[plot.kind], part_title(part), part.answers, plot))


def part_title(part: StudyPart) -> str:
    """`Simulated, llama-3.1-8b on 1 x a100-sxm-80gb`"""
    where = "Executed here" if "executed" in part.answers else "Simulated"
    return f"{where}, {headline(part.scenario)}"


def _metric(study: Study, plot: PlotSpec) -> Metric:
    return study.metric_named(plot.metric or study.metrics[0])


def _has_values(answers: Answers, plot: PlotSpec) -> bool:
    """Whether a point has all that it is to be drawn by."""
    names = [_metric(answers.study, plot).key, *([plot.x] if plot.kind == "pareto" and plot.x else [])]
    return any(all(record.values.get(name) is not None for name in names) for record in answers.records.values())


def _lines(title: str, answers: Mapping[str, Answers], plot: PlotSpec) -> str:
    first = next(iter(answers.values()))
    metric = _metric(first.study, plot)
    axis = first.study.x_axis(plot)
    assert axis is not None  # the study's file was checked for it
    panels = [
        Panel(place_label(fixed), _panel_lines(answers, plot, metric, axis, fixed)) for fixed in first.places(axis)
    ]
    unit = first.axes[axis].unit_label
    y_title = f"times better than {first.reference}" if plot.relative else _axis_title(first.study, metric)
    if len(answers) > 1:
        title += f" (line: {next(iter(answers))}, dashed: {list(answers)[1]})"
    x_title = axis if not unit or unit in axis else f"{axis}, {unit}"
    heading = f"{metric.name}: {title}"
    return lines_svg(panels, heading, x_title, y_title, plot.log, 1.0 if plot.relative else None)


def _panel_lines(
    answers: Mapping[str, Answers], plot: PlotSpec, metric: Metric, axis: str, fixed: Mapping[str, Label]
) -> list[Line]:
    lines = []
    variants = next(iter(answers.values())).variants
    colours = dict(zip(variants, cycle(COLOURS), strict=False))
    for number, each in enumerate(answers.values()):
        for variant in each.variants:
            if plot.relative and variant == each.reference:
                continue
            xs = list(each.axes[axis].numbers)
            ys = each.line(variant, metric.key, axis, fixed)
            if plot.relative:
                base, is_low = each.line(each.reference, metric.key, axis, fixed), metric.is_better_low
                ys = [better_by(a, b, is_low) if a and b else None for a, b in zip(ys, base, strict=True)]
            else:
                ys = [None if y is None else y * metric.scale for y in ys]
            lines.append(Line(variant, xs, ys, colours.get(variant, COLOURS[0]), is_dashed=number > 0))
    return lines


def _pareto(title: str, by_clock: Mapping[str, Answers], plot: PlotSpec) -> str:
    answers = next(iter(by_clock.values()))
    x, y = answers.study.metric_named(plot.x or ""), _metric(answers.study, plot)
    panels: dict[str, list[Dot]] = {}
    ends = {name: axis.shortened for name, axis in answers.axes.items()}  # panels for all values would be too small
    for fixed in replace(answers, axes=ends).places():
        points = {v: (answers.value(v, fixed, x.key), answers.value(v, fixed, y.key)) for v in answers.variants}
        front = pareto_front(points, [x.is_better_low, y.is_better_low])
        panels[place_label(fixed)] = [
            Dot(name, a * x.scale, b * y.scale, colour, name in front)
            for (name, (a, b)), colour in zip(points.items(), cycle(COLOURS), strict=False)
            if a is not None and b is not None
        ]
    panels = {name: dots for name, dots in panels.items() if dots}
    if all(dots == next(iter(panels.values())) for dots in panels.values()):
        panels = dict([next(iter(panels.items()))])  # the axes change nothing of it
    heading = f"{y.name} and {x.label}: {title}"
    x_title, y_title = (_axis_title(answers.study, metric) for metric in (x, y))
    return pareto_svg(panels, heading, x_title, y_title, plot.log)


def _bars(title: str, answers: Mapping[str, Answers], plot: PlotSpec) -> str:
    first = next(iter(answers.values()))
    metric = _metric(first.study, plot)
    groups: dict[str, list[Bar]] = {}
    for fixed in first.places():
        for variant in first.variants:
            for number, (origin, each) in enumerate(answers.items()):
                name = f"{variant}, {origin}" if len(answers) > 1 else variant
                bar = Bar(name, _bar_value(each, variant, fixed, metric, plot), COLOURS[number])
                groups.setdefault(place_label(fixed), []).append(bar)
    x_title = f"times better than {first.reference}" if plot.relative else _axis_title(first.study, metric)
    return bars_svg(groups, f"{metric.name}: {title}", x_title)


def _bar_value(
    answers: Answers, variant: str, fixed: Mapping[str, Label], metric: Metric, plot: PlotSpec
) -> float | None:
    """The metric in the unit that it is shown in; of a relative plot how many times better than the reference."""
    value = answers.value(variant, fixed, metric.key) if variant in answers.variants else None
    if value is None or not plot.relative:
        return None if value is None else value * metric.scale
    base = answers.value(answers.reference, fixed, metric.key)
    return better_by(value, base, metric.is_better_low) if value and base else None


_DRAWN = {"lines": _lines, "pareto": _pareto, "bars": _bars}


def _waterfall(parts: Sequence[StudyPart], plot: PlotSpec) -> str:
    first = parts[0].first
    metric = _metric(first.study, plot)
    ladders: list[Ladder] = []
    for part in parts:
        for origin, each in part.answers.items():
            fixed = next(iter(each.places()))
            values = [each.value(v, fixed, metric.key) if v in each.variants else None for v in first.variants]
            name = f"{part_title(part)}, {origin}" if len(part.answers) > 1 else part_title(part)
            gains = ladder_gains(values, metric.is_better_low)
            ladders.append(Ladder(name, gains, _LADDER_COLOURS[len(ladders) % 3]))
    heading = f"{first.study.study.replace('_', ' ')}: gain in {metric.label}, rung by rung"
    return waterfall_svg(first.variants, ladders, heading, "times better than the first rung")


def _axis_title(study: Study, metric: Metric) -> str:
    if study.quality is not None and metric.key == study.quality.metric and study.quality.model:
        return f"{metric.label} of {study.quality.model}"
    return metric.title
