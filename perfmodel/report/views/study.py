"""A study's answer in sentences: who is best where, where a variant stops paying, what a ladder gains, who is on a
front. Numbers come from `perfmodel.planning.findings`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

from perfmodel.cost.calibrations.provenance import provenance_of, resolved
from perfmodel.planning.findings import (
    Stretch,
    best_at,
    better_by,
    crossings,
    ladder_gains,
    pareto_front,
    stretches,
)
from perfmodel.planning.metrics import Metric
from perfmodel.planning.study import Answers, Label, PlotSpec, Study, StudyPart, StudyResult
from perfmodel.report.document import Block, Document, Heading, Notes, Paragraph, Picture, Sentences, Span, Table
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
from perfmodel.report.numbers import MISSING, format_factor, format_metric, format_short
from perfmodel.report.views.scenario import headline
from perfmodel.specs.overrides import as_overrides

_EVEN = 0.02  # a gain below is a tie


def answer_sentences(answers: Answers) -> list[str]:
    """Sentences for each picture of the study, without repetition."""
    lines: list[str] = []
    for plot in answers.study.plots:
        lines += _of_plot(answers, plot)
    return list(dict.fromkeys(lines))


def agreement_sentence(executed: Answers, simulated: Answers) -> str:
    """How far executed gains over the baseline are from simulated ones, over all variants, values and metrics; nothing
    where there are none."""
    reference = executed.reference
    apart = []
    for metric in _metrics(executed):
        is_low = executed.study.metric_named(metric).is_better_low
        for at in executed.places():
            for variant in executed.variants:
                if variant == reference:
                    continue
                gains = [_gain(each, variant, reference, at, metric, is_low) for each in (executed, simulated)]
                if gains[0] and gains[1]:
                    apart.append(abs(gains[1] / gains[0] - 1))
    if not apart:
        return ""
    return (
        f"Gains over {reference}, simulated beside executed: over {len(apart)} of them the difference is "
        f"{median(apart):.0%} in the median, {max(apart):.0%} at most."
    )


def place_label(fixed: Mapping[str, Label]) -> str:
    """`pattern bursts, rate 4`"""
    return ", ".join(f"{name} {_label(label)}" for name, label in fixed.items())


def _of_plot(answers: Answers, plot: PlotSpec) -> Iterator[str]:
    metric = plot.metric or answers.study.metrics[0]
    if metric not in _metrics(answers):
        return
    if plot.kind == "pareto":
        yield from _front(answers, plot.x or "", metric)
        return
    axis = answers.study.x_axis(plot) if plot.kind == "lines" else None
    for fixed in answers.places(axis):
        where = f" ({place_label(fixed)})" if fixed else ""
        name = f"{answers.study.metric_named(metric).name}{where}"
        if plot.kind == "waterfall":
            yield from _ladder(answers, metric, fixed, name)
        elif axis is None:
            yield from _bars(answers, metric, fixed, name)
        else:
            yield from _lines(answers, metric, axis, fixed, name, plot.relative)


def _lines(
    answers: Answers, metric: str, axis: str, fixed: Mapping[str, Label], name: str, relative: bool
) -> Iterator[str]:
    is_low = answers.study.metric_named(metric).is_better_low
    xs = list(answers.axes[axis].numbers)
    lines = {variant: answers.line(variant, metric, axis, fixed) for variant in answers.variants}
    found = stretches(xs, lines, is_low)
    unit = f" {answers.axes[axis].unit_label}".rstrip()
    yield f"{name}: {_stretches(found, len(lines), axis, unit)}."
    reference = answers.reference
    winners = {winner for stretch in found for winner in stretch.winners}
    named = [variant for variant in answers.variants if relative or variant in winners]
    for variant in named:
        if variant == reference:
            continue
        gains = [
            (x, better_by(one, base, is_low))
            for x, one, base in zip(xs, lines[variant], lines[reference], strict=True)
            if one is not None and base is not None
        ]
        if gains:
            evens = crossings(xs, lines[variant], lines[reference])
            yield f"{name}: {_gains(variant, reference, gains, axis, unit, evens)}."


def _stretches(found: Sequence[Stretch], count: int, axis: str, unit: str) -> str:
    parts = []
    for stretch in found:
        if len(stretch.winners) == count and count > 1:
            who = f"a tie of all (within {_EVEN:.0%})"
        else:
            who = _listed(stretch.winners) + (" best" if len(stretch.winners) == 1 else " tied for best")
        if len(found) == 1:
            where = f"at all values of {axis}, {format_short(stretch.first)} to {format_short(stretch.last)}{unit}"
        elif stretch.begins < stretch.first:
            where = f"from about {format_short(stretch.begins)}{unit} on"
        elif stretch.first == stretch.last:
            where = f"at {format_short(stretch.first)}{unit}"
        else:
            where = f"from {format_short(stretch.first)} to {format_short(stretch.last)}{unit}"
        parts.append(f"{who} {where}")
    return "; ".join(parts) or "no variant has a value"


def _gains(
    variant: str, reference: str, gains: Sequence[tuple[float, float]], axis: str, unit: str, evens: Sequence[float]
) -> str:
    best, worst = max(gains, key=lambda each: each[1]), min(gains, key=lambda each: each[1])
    if max(best[1], 1 / max(worst[1], 1e-12)) <= 1 + _EVEN:
        return f"{variant} and {reference} are a tie everywhere"
    if best[1] <= worst[1] * (1 + _EVEN):
        return f"{variant} is {_better(best[1])} {reference} everywhere"
    low, high = (f"{format_factor(gain)} at {format_short(x)}" for x, gain in (worst, best))
    gain = f"{variant} over {reference} from {low} to {high}{unit} ({axis})"
    real = [x for x in evens if worst[1] < 1 - _EVEN and best[1] > 1 + _EVEN]
    return gain + (f", a tie at about {' and '.join(map(format_short, real))}{unit}" if real else "")


def _bars(answers: Answers, metric: str, fixed: Mapping[str, Label], name: str) -> Iterator[str]:
    is_low = answers.study.metric_named(metric).is_better_low
    values = {variant: answers.value(variant, fixed, metric) for variant in answers.variants}
    there = {variant: value for variant, value in values.items() if value is not None}
    winners = best_at(values, is_low)
    if winners:
        reference = answers.reference
        base = there.get(reference)
        best, found = there[winners[0]], answers.study.metric_named(metric)
        value = f"{format_metric(found, best)} {found.unit}".rstrip()
        is_other = base and winners != (reference,)
        gain = f", {_better(better_by(best, base, is_low))} {reference}" if is_other and base else ""
        yield f"{name}: {_listed(winners)} best ({value}{gain})."


def _ladder(answers: Answers, metric: str, fixed: Mapping[str, Label], name: str) -> Iterator[str]:
    is_low = answers.study.metric_named(metric).is_better_low
    values = [answers.value(variant, fixed, metric) for variant in answers.variants]
    gains = list(zip(answers.variants, ladder_gains(values, is_low), strict=True))
    there = [value for value in values if value is not None]
    if len(there) < 2:
        return
    steps = [(rung, gain) for rung, gain in gains[1:] if gain is not None]
    largest = [rung for rung, gain in sorted(steps, key=lambda each: -each[1])[:3] if gain > 1 + _EVEN]
    lost = [rung for rung, gain in steps if gain < 1 - _EVEN]
    total = better_by(there[-1], there[0], is_low)
    most = f"; most of it from {_listed(largest)}" if largest else ""
    slower = f"; slower with {_listed(lost)}" if lost else ""
    yield f"{name}: together {format_factor(total)}{most}{slower}."
    yield f"{name}, each over the one below: {', '.join(f'{rung} {format_factor(gain)}' for rung, gain in steps)}."


def _front(answers: Answers, x: str, y: str) -> Iterator[str]:
    low = [answers.study.metric_named(name).is_better_low for name in (x, y)]
    found: dict[str, str] = {}  # where -> what
    for fixed in answers.places():
        points = {v: (answers.value(v, fixed, x), answers.value(v, fixed, y)) for v in answers.variants}
        front = pareto_front(points, low)
        if not front:
            continue
        where = f" ({place_label(fixed)})" if fixed else ""
        rest = [name for name, values in points.items() if name not in front and None not in values]
        tail = f"; dominated: {', '.join(rest)}" if rest else ""
        found[where] = f"{', '.join(front)}{tail}"
    same = len(set(found.values())) == 1
    both = " and ".join(answers.study.metric_named(name).label for name in (y, x))
    for where, members in list(found.items())[: 1 if same else None]:
        yield f"Pareto front of {both}{'' if same else where}: {members}."


def _gain(
    answers: Answers, variant: str, reference: str, at: Mapping[str, Label], metric: str, is_low: bool
) -> float | None:
    one, base = answers.value(variant, at, metric), answers.value(reference, at, metric)
    return None if one is None or base is None or not one or not base else better_by(one, base, is_low)


def _metrics(answers: Answers) -> list[str]:
    """Metrics that have a value somewhere."""
    values = [record.values.items() for record in answers.records.values()]
    return list(dict.fromkeys(name for pairs in values for name, value in pairs if value is not None))


def _label(label: Label) -> str:
    return format_short(label) if isinstance(label, int | float) and not isinstance(label, bool) else str(label)


def _better(factor: float) -> str:
    """`1.52x better than`"""
    return f"{format_factor(factor)} better than" if factor >= 1 else f"{format_factor(1 / factor)} worse than"


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


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


def _lines_drawn(title: str, answers: Mapping[str, Answers], plot: PlotSpec) -> str:
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


def _bars_drawn(title: str, answers: Mapping[str, Answers], plot: PlotSpec) -> str:
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


_DRAWN = {"lines": _lines_drawn, "pareto": _pareto, "bars": _bars_drawn}


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


_MOST_PLACES = 4  # named of the points without values that have one reason


def study_view(result: StudyResult, command: str = "") -> Document:
    """The question, the answer, pictures, tables of each part, notes."""
    study = result.study
    blocks: list[Block] = [Paragraph(Span(sentence, "bad")) for sentence in _quick(result)]
    blocks += [Sentences(_sentences(part), part_title(part)) for part in result.parts]
    blocks += study_pictures(result.parts)
    for part in result.parts:
        blocks.append(Heading(part_title(part)))
        blocks.append(Paragraph(f"In brackets: how many times better than {part.first.reference}."))
        blocks += _tables(part)
    notes = [*result.notes, *(note for part in result.parts for note in _notes(part))]
    blocks.append(Notes(list(dict.fromkeys(notes))))
    return Document(f"Study: {study.study.replace('_', ' ')}", blocks, study.question.strip(), "study", command)


def _quick(result: StudyResult) -> list[str]:
    """That a quick form is no answer to the study's question, and what it changes."""
    if not result.is_quick:
        return []
    changes = as_overrides(result.study.quick.set)
    changed = f" and {'; '.join(changes)}" if changes else ""
    return [
        f"Quick: fewer values of each axis{changed}. It shows that the study runs; the answer to its question is that "
        f"of the whole study, which may differ."
    ]


def study_json(result: StudyResult) -> dict[str, Any]:
    """Every point with its variant, place and values, and the sentences."""
    return {
        "study": result.study.study,
        "question": result.study.question,
        "metrics": result.study.all_metrics,
        "baseline": result.study.reference,
        "quick": result.is_quick,
        "parts": [
            {
                "title": part_title(part),
                "answer": [*_quick(result), *_sentences(part)],
                "points": [row for answers in part.answers.items() for row in _points(*answers)],
                "notes": _notes(part),
            }
            for part in result.parts
        ],
        "notes": list(result.notes),
        "provenance": _provenance(result),
    }


def _provenance(result: StudyResult) -> dict[str, Any]:
    scenarios = [part.scenario for part in result.parts]
    inputs = {"study": resolved(result.study), "scenario": resolved(scenarios[0])}
    return provenance_of(scenarios).to_json("study", inputs)


def _points(clock: str, answers: Answers) -> Iterator[dict[str, Any]]:
    for (variant, at), record in answers.records.items():
        yield {
            "variant": variant,
            **({"at": dict(zip(answers.axes, at, strict=True))} if at else {}),
            "clock": clock,
            "origin": record.origin,
            "values": dict(record.values),
            **({"problem": record.problem} if record.problem else {}),
        }


def _sentences(part: StudyPart) -> list[str]:
    lines = answer_sentences(part.first)
    if len(part.answers) > 1:
        executed, simulated = list(part.answers.values())[:2]
        lines.append(agreement_sentence(executed, simulated))
    return [line for line in lines if line]


def _notes(part: StudyPart) -> list[str]:
    """Why there are points without values, and what the records say."""
    problems = [text for each in part.answers.values() for text in _problems(each)]
    return list(dict.fromkeys([*problems, *part.notes]))


def _problems(answers: Answers) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for (variant, at), record in answers.records.items():
        if record.problem:
            place = place_label(dict(zip(answers.axes, at, strict=True)))
            found.setdefault(record.problem, []).append(f"{variant} at {place}" if place else variant)
    for problem, places in found.items():
        more = f" and {len(places) - _MOST_PLACES} more" if len(places) > _MOST_PLACES else ""
        yield f"{'; '.join(places[:_MOST_PLACES])}{more}: {problem}"


def _tables(part: StudyPart) -> list[Table]:
    """Answers by clock side by side; without an axis one table of all metrics, else one for each metric."""
    metrics = [part.first.study.metric_named(name) for name in part.metrics]
    if not part.first.axes:
        return [_without_axes(part.answers, metrics)]
    return [_over_axis(part.answers, metric) for metric in metrics]


def _without_axes(answers: Mapping[str, Answers], metrics: Sequence[Metric]) -> Table:
    of_clock = {origin: f", {origin}" if len(answers) > 1 else "" for origin in answers}
    head = ["variant", *(f"{metric.title}{of_clock[origin]}" for metric in metrics for origin in answers)]
    variants = list(dict.fromkeys(v for each in answers.values() for v in each.variants))
    rows = [
        [variant, *(_cell(each, variant, {}, metric) for metric in metrics for each in answers.values())]
        for variant in variants
    ]
    return Table(head, rows)


def _over_axis(answers: Mapping[str, Answers], metric: Metric) -> Table:
    first = next(iter(answers.values()))
    axis = next((name for name, each in first.axes.items() if each.is_numeric), list(first.axes)[-1])
    others = [name for name in first.axes if name != axis]
    names = [*others, "variant", *(["clock"] if len(answers) > 1 else [])]
    labels = first.axes[axis].labels
    rows = []
    for fixed in first.places(axis):
        for variant in first.variants:
            for origin, each in answers.items():
                if variant in each.variants:
                    place = [
                        *(_label(fixed[name]) for name in others),
                        variant,
                        *([origin] if len(answers) > 1 else []),
                    ]
                    rows.append([*place, *(_cell(each, variant, {**fixed, axis: label}, metric) for label in labels)])
    unit = f" ({first.axes[axis].unit})" if first.axes[axis].unit else ""
    title = f"{metric.title}, by {axis}{unit}"
    return Table([*names, *map(_label, labels)], rows, title, left=len(names))


def _cell(answers: Answers, variant: str, at: Mapping[str, Label], metric: Metric) -> str:
    """The value, and in brackets how many times better than the baseline's."""
    value = answers.value(variant, at, metric.key) if variant in answers.variants else None
    if value is None:
        return MISSING
    reference = answers.reference
    base = answers.value(reference, at, metric.key) if reference in answers.variants and variant != reference else None
    gain = f" ({format_factor(better_by(value, base, metric.is_better_low))})" if base and value else ""
    return format_metric(metric, value) + gain
