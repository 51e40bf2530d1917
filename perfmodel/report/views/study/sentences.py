"""A study's answer in sentences: who is best where, where a variant stops paying, what a ladder gains, who is on a
front. Numbers come from `perfmodel.planning.sweeps.findings`."""

__all__ = ["agreement_sentence", "answer_sentences", "place_label"]

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from perfmodel.planning.studies.spec import PlotSpec
from perfmodel.planning.studies.study import Answers, Label
from perfmodel.planning.sweeps.findings import (
    Stretch,
    best_at,
    better_by,
    crossings,
    ladder_gains,
    pareto_front,
    stretches,
)
from perfmodel.report.numbers import format_factor, format_metric, format_short

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
