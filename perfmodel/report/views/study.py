"""A study's answer: who is best where, where a variant stops paying, what a ladder gains, who is on a front; in
sentences, pictures and tables. Numbers come from `perfmodel.planning.findings`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

from perfmodel.cost.calibrations.provenance import provenance_of, resolved
from perfmodel.planning.findings import TIE, best_at, better_by, crossings, ladder_gains, pareto_front, stretches
from perfmodel.planning.metrics import Metric
from perfmodel.planning.study import Answers, Label, PlotSpec, Study, StudyPart, StudyResult
from perfmodel.report.document import Block, Document, Heading, Notes, Paragraph, Plot, Sentences, Span, Table
from perfmodel.report.drawing import charts
from perfmodel.report.drawing.figures import BLUE, COLOURS, ORANGE, SKY, Figure, Trace, line
from perfmodel.report.numbers import MISSING, format_factor, format_metric, format_short
from perfmodel.report.views.scenario import headline
from perfmodel.specs.overrides import as_overrides

_LADDER_COLOURS = (BLUE, ORANGE, SKY)
_MAX_PLACES = 4  # named of the points without values that have one reason
Fixed = Mapping[str, Label]  # the place on the axes but the one that is looked along


def answer_sentences(answers: Answers) -> list[str]:
    """Sentences for each picture of the study, without repetition."""
    plots = [plot for plot in answers.study.plots if _metric(answers.study, plot).key in answers.metrics]
    return list(dict.fromkeys(line for plot in plots for line in _of_plot(answers, plot)))


def agreement_sentence(executed: Answers, simulated: Answers) -> str:
    """How far executed gains over the baseline are from simulated ones, over all variants, values and metrics; nothing
    where there are none."""
    reference, apart = executed.reference, []
    for name in executed.metrics:
        metric = executed.study.metric_named(name)
        for at in executed.places():
            for variant in executed.variants:
                gains = [answers.gain(variant, reference, at, metric) for answers in (executed, simulated)]
                if variant != reference and gains[0] and gains[1]:
                    apart.append(abs(gains[1] / gains[0] - 1))
    if not apart:
        return ""
    return (
        f"Gains over {reference}, simulated vs executed: over {len(apart)} of them the difference is "
        f"{median(apart):.0%} in the median, {max(apart):.0%} at most."
    )


def _of_plot(answers: Answers, plot: PlotSpec) -> Iterator[str]:
    metric = _metric(answers.study, plot)
    if plot.kind == "pareto":
        yield from _front(answers, answers.study.metric_named(plot.x or ""), metric)
        return
    axis = answers.study.x_axis(plot) if plot.kind == "lines" else None
    for fixed in answers.places(axis):
        name = f"{metric.name}{_where(fixed)}"
        if plot.kind == "waterfall":
            yield from _ladder(answers, metric, fixed, name)
        elif axis is None:
            yield from _bars(answers, metric, fixed, name)
        else:
            yield from _lines(answers, metric, axis, fixed, name, plot.relative)


def _lines(answers: Answers, metric: Metric, axis: str, fixed: Fixed, name: str, relative: bool) -> Iterator[str]:
    """Who is best along the axis; how much better winners (or all, where that is drawn) are than the reference."""
    xs, is_low, reference = list(answers.axes[axis].numbers), metric.is_better_low, answers.reference
    lines = {variant: answers.line(variant, metric.key, axis, fixed) for variant in answers.variants}
    unit = f" {answers.axes[axis].unit_label}".rstrip()
    parts, winners = [], set[str]()
    best_along = stretches(xs, lines, is_low)
    for stretch in best_along:
        winners.update(stretch.winners)
        who = _listed(stretch.winners) + (" best" if len(stretch.winners) == 1 else " tied for best")
        if len(stretch.winners) == len(lines) > 1:
            who = f"a tie of all (within {TIE:.0%})"
        first, last = format_short(stretch.first), format_short(stretch.last)
        if len(best_along) == 1:
            where = f"at all values of {axis}, {first} to {last}{unit}"
        elif stretch.begins < stretch.first:
            where = f"from about {format_short(stretch.begins)}{unit} on"
        else:
            where = f"at {first}{unit}" if stretch.first == stretch.last else f"from {first} to {last}{unit}"
        parts.append(f"{who} {where}")
    yield f"{name}: {'; '.join(parts) or 'no variant has a value'}."
    for variant in answers.variants:
        pairs = zip(xs, lines[variant], lines[reference], strict=True)
        gains = [(x, better_by(a, b, is_low)) for x, a, b in pairs if a is not None and b is not None]
        if gains and variant != reference and (relative or variant in winners):
            evens = crossings(xs, lines[variant], lines[reference])
            yield f"{name}: {_gains(variant, reference, gains, axis, unit, evens)}."


def _gains(
    variant: str, reference: str, gains: Sequence[tuple[float, float]], axis: str, unit: str, evens: Sequence[float]
) -> str:
    best, worst = max(gains, key=lambda pair: pair[1]), min(gains, key=lambda pair: pair[1])
    if max(best[1], 1 / max(worst[1], 1e-12)) <= 1 + TIE:
        return f"{variant} and {reference} are a tie everywhere"
    if best[1] <= worst[1] * (1 + TIE):
        return f"{variant} is {_better(best[1])} {reference} everywhere"
    low, high = (f"{format_factor(gain)} at {format_short(x)}" for x, gain in (worst, best))
    gain = f"{variant} over {reference} from {low} to {high}{unit} ({axis})"
    real = [x for x in evens if worst[1] < 1 - TIE and best[1] > 1 + TIE]
    return gain + (f", a tie at about {' and '.join(map(format_short, real))}{unit}" if real else "")


def _bars(answers: Answers, metric: Metric, fixed: Fixed, name: str) -> Iterator[str]:
    values = {variant: answers.value(variant, fixed, metric.key) for variant in answers.variants}
    winners, reference = best_at(values, metric.is_better_low), answers.reference
    if winners:
        best, base = values[winners[0]], values.get(reference)
        assert best is not None  # winners have values
        is_other = base and winners != (reference,)
        gain = f", {_better(better_by(best, base, metric.is_better_low))} {reference}" if is_other and base else ""
        yield f"{name}: {_listed(winners)} best ({f'{format_metric(metric, best)} {metric.unit}'.rstrip()}{gain})."


def _ladder(answers: Answers, metric: Metric, fixed: Fixed, name: str) -> Iterator[str]:
    values = [answers.value(variant, fixed, metric.key) for variant in answers.variants]
    there = [value for value in values if value is not None]
    if len(there) < 2:
        return
    gains = zip(answers.variants[1:], ladder_gains(values, metric.is_better_low)[1:], strict=True)
    steps = [(rung, gain) for rung, gain in gains if gain is not None]
    largest = [rung for rung, gain in sorted(steps, key=lambda step: -step[1])[:3] if gain > 1 + TIE]
    lost = [rung for rung, gain in steps if gain < 1 - TIE]
    most = f"; most of it from {_listed(largest)}" if largest else ""
    slower = f"; slower with {_listed(lost)}" if lost else ""
    yield f"{name}: together {format_factor(better_by(there[-1], there[0], metric.is_better_low))}{most}{slower}."
    yield f"{name}, each over the one below: {', '.join(f'{rung} {format_factor(gain)}' for rung, gain in steps)}."


def _front(answers: Answers, x: Metric, y: Metric) -> Iterator[str]:
    members: dict[str, str] = {}  # where -> who
    for fixed in answers.places():
        points, front = _points_and_front(answers, fixed, x, y)
        if front:
            rest = [name for name, values in points.items() if name not in front and None not in values]
            members[_where(fixed)] = ", ".join(front) + (f"; dominated: {', '.join(rest)}" if rest else "")
    same = len(set(members.values())) == 1
    for where, who in list(members.items())[: 1 if same else None]:
        yield f"Pareto front of {y.label} and {x.label}{'' if same else where}: {who}."


def _points_and_front(
    answers: Answers, fixed: Fixed, x: Metric, y: Metric
) -> tuple[dict[str, tuple[float | None, float | None]], tuple[str, ...]]:
    points = {
        variant: (answers.value(variant, fixed, x.key), answers.value(variant, fixed, y.key))
        for variant in answers.variants
    }
    return points, pareto_front(points, [x.is_better_low, y.is_better_low])


def _metric(study: Study, plot: PlotSpec) -> Metric:
    return study.metric_named(plot.metric or study.metrics[0])


def _label(label: Label) -> str:
    return format_short(label) if isinstance(label, int | float) and not isinstance(label, bool) else str(label)


def _place(fixed: Fixed) -> str:
    """`pattern bursts, rate 4`"""
    return ", ".join(f"{name} {_label(label)}" for name, label in fixed.items())


def _where(fixed: Fixed) -> str:
    return f" ({_place(fixed)})" if fixed else ""


def _better(factor: float) -> str:
    """`1.52x better than`"""
    return f"{format_factor(factor)} better than" if factor >= 1 else f"{format_factor(1 / factor)} worse than"


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _plots(parts: Sequence[StudyPart]) -> Iterator[Plot]:
    """One for each of the study's plots and each machine that it was asked on; of two clocks the first is drawn, the
    second dashed beside it."""
    study = parts[0].first.study
    for number, plot in enumerate(study.plots, 1):
        metric = _metric(study, plot)
        if plot.kind == "waterfall":
            title = f"{study.study.replace('_', ' ')}: gain in {metric.label}, rung by rung"
            yield Plot(title, partial(_waterfall, parts, metric), name=f"{number}-waterfall")
            continue
        x = study.metric_named(plot.x) if plot.kind == "pareto" and plot.x else None
        names = [metric.key, *([x.key] if x else [])]
        for which, part in enumerate(parts):
            records = part.first.records.values()
            if any(all(record.values.get(name) is not None for name in names) for record in records):
                title = f"{metric.name}{f' and {x.label}' if x else ''}: {_title(part)}"
                if plot.kind == "lines" and len(part.answers) > 1:
                    title += f" (line: {next(iter(part.answers))}, dashed: {list(part.answers)[1]})"
                name = f"{number}-{plot.kind}{'-here' if which else ''}"
                yield Plot(title, partial(_DRAWN[plot.kind], part.answers, plot), name=name)


def _title(part: StudyPart) -> str:
    """`Simulated, llama-3.1-8b on 1 x a100-sxm-80gb`"""
    where = "Executed here" if "executed" in part.answers else "Simulated"
    return f"{where}, {headline(part.scenario)}"


def _drawn(answers: Answers, variant: str, at: Fixed, metric: Metric, plot: PlotSpec) -> float | None:
    """The metric in the unit that it is shown in; of a relative plot how many times better than the reference."""
    if plot.relative:
        return answers.gain(variant, answers.reference, at, metric)
    value = answers.value(variant, at, metric.key)
    return None if value is None else value * metric.scale


def _lines_drawn(by_clock: Mapping[str, Answers], plot: PlotSpec) -> Figure:
    first = next(iter(by_clock.values()))
    metric, axis = _metric(first.study, plot), first.study.x_axis(plot)
    assert axis is not None  # the study's file was checked for it
    colours = dict(zip(first.variants, cycle(COLOURS), strict=False))
    panels = {}
    for fixed in first.places(axis):
        lines = panels[_place(fixed)] = list[Trace]()
        for number, (clock, answers) in enumerate(by_clock.items()):
            for variant in answers.variants:
                if not plot.relative or variant != answers.reference:
                    along, colour = answers.axes[axis], colours.get(variant, COLOURS[0])
                    ys = [_drawn(answers, variant, {**fixed, axis: label}, metric, plot) for label in along.labels]
                    dash, look = ("dash", {}) if number else ("solid", {"mode": "lines+markers"})
                    hover = f"{variant}, {clock}: %{{y:.4g}}<extra></extra>"
                    trace = line(along.numbers, ys, variant, colour, hover, width=2, dash=dash, showlegend=not number)
                    lines.append({**trace, "marker": {"color": colour, "size": 5}, **look})
    unit = first.axes[axis].unit_label
    titles = (axis if not unit or unit in axis else f"{axis}, {unit}", _axis_title(first, metric, plot))
    return charts.lines_figure(panels, *titles, plot.log, 1.0 if plot.relative else None)


def _pareto(by_clock: Mapping[str, Answers], plot: PlotSpec) -> Figure:
    answers = next(iter(by_clock.values()))
    x, y = answers.study.metric_named(plot.x or ""), _metric(answers.study, plot)
    panels: dict[str, list[charts.Dot]] = {}
    ends = {name: axis.shortened for name, axis in answers.axes.items()}  # panels for all values would be too small
    for fixed in replace(answers, axes=ends).places():
        points, front = _points_and_front(answers, fixed, x, y)
        panels[_place(fixed)] = [
            charts.Dot(name, a * x.scale, b * y.scale, colour, name in front)
            for (name, (a, b)), colour in zip(points.items(), cycle(COLOURS), strict=False)
            if a is not None and b is not None
        ]
    panels = {name: dots for name, dots in panels.items() if dots}
    if all(dots == next(iter(panels.values())) for dots in panels.values()):
        panels = {"": next(iter(panels.values()))}  # the axes change nothing of it
    return charts.pareto_figure(panels, _axis_title(answers, x), _axis_title(answers, y), plot.log)


def _bars_drawn(by_clock: Mapping[str, Answers], plot: PlotSpec) -> Figure:
    first = next(iter(by_clock.values()))
    metric, bars = _metric(first.study, plot), []
    for fixed in first.places():
        for variant in first.variants:
            for number, (clock, answers) in enumerate(by_clock.items()):
                name = ", ".join(filter(None, (variant, clock if len(by_clock) > 1 else "", _place(fixed))))
                bars.append(charts.Bar(name, _drawn(answers, variant, fixed, metric, plot), COLOURS[number]))
    return charts.bars_figure(bars, _axis_title(first, metric, plot))


_DRAWN = {"lines": _lines_drawn, "pareto": _pareto, "bars": _bars_drawn}


def _waterfall(parts: Sequence[StudyPart], metric: Metric) -> Figure:
    ladders: list[charts.Ladder] = []
    variants = parts[0].first.variants
    for part in parts:
        for clock, answers in part.answers.items():
            fixed = next(iter(answers.places()))
            gains = ladder_gains([answers.value(v, fixed, metric.key) for v in variants], metric.is_better_low)
            name = f"{_title(part)}, {clock}" if len(part.answers) > 1 else _title(part)
            ladders.append(charts.Ladder(name, gains, _LADDER_COLOURS[len(ladders) % 3]))
    return charts.waterfall_figure(variants, ladders, "times better than the first rung")


def _axis_title(answers: Answers, metric: Metric, plot: PlotSpec | None = None) -> str:
    quality = answers.study.quality
    if plot is not None and plot.relative:
        return f"times better than {answers.reference}"
    if quality is not None and metric.key == quality.metric and quality.model:
        return f"{metric.label} of {quality.model}"
    return metric.title


def study_view(result: StudyResult, command: str = "") -> Document:
    """The question, the answer, pictures, tables of each part, notes."""
    study = result.study
    blocks: list[Block] = [Paragraph(Span(sentence, "bad")) for sentence in _quick(result)]
    blocks += [Sentences(_sentences(part), _title(part)) for part in result.parts]
    blocks += _plots(result.parts)
    for part in result.parts:
        blocks.append(Heading(_title(part)))
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
    scenarios = [part.scenario for part in result.parts]
    inputs = {"study": resolved(result.study), "scenario": resolved(scenarios[0])}
    return {
        "study": result.study.study,
        "question": result.study.question,
        "metrics": result.study.all_metrics,
        "baseline": result.study.reference,
        "quick": result.is_quick,
        "parts": [
            {
                "title": _title(part),
                "answer": [*_quick(result), *_sentences(part)],
                "points": [
                    {
                        "variant": variant,
                        **({"at": dict(zip(answers.axes, at, strict=True))} if at else {}),
                        "clock": clock,
                        "origin": record.origin,
                        "values": dict(record.values),
                        **({"problem": record.problem} if record.problem else {}),
                    }
                    for clock, answers in part.answers.items()
                    for (variant, at), record in answers.records.items()
                ],
                "notes": _notes(part),
            }
            for part in result.parts
        ],
        "notes": list(result.notes),
        "provenance": provenance_of(scenarios).to_json("study", inputs),
    }


def _sentences(part: StudyPart) -> list[str]:
    lines = answer_sentences(part.first)
    if len(part.answers) > 1 and (agreement := agreement_sentence(*list(part.answers.values())[:2])):
        lines.append(agreement)
    return lines


def _notes(part: StudyPart) -> list[str]:
    """Why there are points without values, and what the records say."""
    notes = []
    for answers in part.answers.values():
        problems: dict[str, list[str]] = {}
        for (variant, at), record in answers.records.items():
            if record.problem:
                place = _place(dict(zip(answers.axes, at, strict=True)))
                problems.setdefault(record.problem, []).append(f"{variant} at {place}" if place else variant)
        for problem, places in problems.items():
            more = f" and {len(places) - _MAX_PLACES} more" if len(places) > _MAX_PLACES else ""
            notes.append(f"{'; '.join(places[:_MAX_PLACES])}{more}: {problem}")
    return list(dict.fromkeys([*notes, *part.notes]))


def _tables(part: StudyPart) -> Iterator[Table]:
    """Answers by clock side by side; without an axis one table of all metrics, else one for each metric."""
    first, by_clock, several = part.first, part.answers, len(part.answers) > 1
    metrics = [first.study.metric_named(name) for name in part.metrics]
    if not first.axes:
        pairs = [(metric, clock) for metric in metrics for clock in by_clock]
        head = ["variant", *(f"{metric.title}{f', {clock}' if several else ''}" for metric, clock in pairs)]
        variants = dict.fromkeys(variant for answers in by_clock.values() for variant in answers.variants)
        rows = [[name, *(_cell(by_clock[clock], name, {}, metric) for metric, clock in pairs)] for name in variants]
        yield Table(head, rows)
        return
    axis = next((name for name, values in first.axes.items() if values.is_numeric), list(first.axes)[-1])
    labels, unit = first.axes[axis].labels, f" ({first.axes[axis].unit})" if first.axes[axis].unit else ""
    names = [*(name for name in first.axes if name != axis), "variant", *(["clock"] if several else [])]
    for metric in metrics:
        rows = []
        for fixed in first.places(axis):
            for variant in first.variants:
                for clock, answers in by_clock.items():
                    if variant in answers.variants:
                        place = [*map(_label, fixed.values()), variant, *([clock] if several else [])]
                        cells = (_cell(answers, variant, {**fixed, axis: label}, metric) for label in labels)
                        rows.append([*place, *cells])
        yield Table([*names, *map(_label, labels)], rows, f"{metric.title}, by {axis}{unit}", left=len(names))


def _cell(answers: Answers, variant: str, at: Fixed, metric: Metric) -> str:
    """The value, and in brackets how many times better than the baseline's."""
    value = answers.value(variant, at, metric.key)
    gain = None if variant == answers.reference else answers.gain(variant, answers.reference, at, metric)
    text = MISSING if value is None else format_metric(metric, value)
    return text if gain is None else f"{text} ({format_factor(gain)})"
