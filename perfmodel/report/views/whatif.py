"""A what-if in sentences: which resource counts, where the bound changes, where an alternative pays."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from perfmodel.planning.axes import Axis
from perfmodel.planning.metrics import Metric, metric_of, study_metric
from perfmodel.planning.points import Record
from perfmodel.planning.sweep import SweepResult
from perfmodel.planning.whatif import NEAR, Payoff, Sensitivity, WhatIfAnswers, WhatIfResult
from perfmodel.report.document import Block, Document, Line, Notes, Paragraph, Picture, Sentences, Span, Table
from perfmodel.report.drawing import charts
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
from perfmodel.report.numbers import MISSING, format_metric, format_short
from perfmodel.report.views.scenario import MORE, few_notes, headline_with_slo, trust_blocks, trust_line
from perfmodel.trust import trust_of

_LABELS = {
    "peak_flops": "peak FLOPs",
    "bandwidth": "bandwidth",
    "capacity": "capacity",
    "power_cap_w": "power cap in W",
    "kernels": "kernel overheads",
    "host": "host time",
    "rate": "arrival rate",
    "concurrency": "concurrency",
}
_OF_NETWORKS = {"bandwidth_bytes_per_s": "network bandwidth", "latency_s": "network latency"}
_NAMES = {"hbm": "HBM", "nvlink": "NVLink", "pcie": "PCIe", "infinity_fabric": "Infinity Fabric", "ici": "ICI"}
_SMALL = 0.02  # an elasticity below is reported as none
_FAR = 0.1  # of a metric's logarithm over a whole axis: reported where no elasticity is
_MOST = 3  # values that are named in a sentence
_PHYSICAL = ("compute", "memory", "communication")


def path_label(path: str) -> str:
    """`HBM bandwidth` for hardware.hbm.bandwidth; other paths stay as they are."""
    parts = path.split(".")
    if parts[:2] == ["cluster", "network"] and parts[-1] in _OF_NETWORKS:
        return _OF_NETWORKS[parts[-1]]
    if parts[:2] == ["cluster", "pools"] and "hardware" in parts:
        return f"{path_label('.'.join(parts[3:]))} of pool {parts[2]}"
    if path == "cluster.kv_transfer.bandwidth_bytes_per_s":
        return "KV link bandwidth"
    if path == "hardware":
        return "device"
    label = _LABELS.get(parts[-1])
    if label is None or parts[0] not in ("hardware", "overheads", "traffic"):
        return path
    owner = _NAMES.get(parts[-2], "")
    return f"{owner} {label}" if owner else label if len(parts) == 2 or parts[0] == "traffic" else path


def x_label(x: float, unit: str) -> str:
    """A value on an axis with its unit."""
    return f"{format_short(x)}x" if unit == "x" else f"{format_short(x)} {unit}".strip()


def place_label(path: str, x: float, unit: str) -> str:
    """A place on an axis in a sentence: `6 req/s`, `1.3x the HBM bandwidth`, `batch 148`."""
    if path == "step.batch":
        return f"batch {format_short(x)}"
    if path == "traffic.arrivals.rate" and not unit:
        return f"{format_short(x)} req/s"
    return f"{x_label(x, unit)} the {path_label(path)}" if unit == "x" else f"{path_label(path)} {x_label(x, unit)}"


def whatif_sentences(result: WhatIfResult, counts: bool = True) -> list[str]:
    """Sentences, the largest effect first; without `counts` those that say what no table of the ends of axes has."""
    metrics = result.answers.question.base.metrics
    lines = [*_choices(result), *_load(result)]
    lines += [line for metric in metrics if counts for line in _counts(result, metric)]
    lines += _bounds(result)
    lines += [_payoff(each, " ".join(result.answers.question.against)) for each in result.payoffs]
    return [*lines, *_no_payoff(result)]


def _choices(result: WhatIfResult) -> Iterator[str]:
    """Which value is best, by each metric, on axes that have names for values (devices, policies)."""
    answers = result.answers
    for axis in answers.question.axes:
        if axis.xs:
            continue
        records = dict(zip(axis.texts, answers.by_axis[axis.path], strict=True))
        for name in answers.question.base.metrics:
            metric = study_metric(name)
            known = {text: value for text, each in records.items() if (value := each.values.get(name)) is not None}
            ranked = sorted(known.items(), key=lambda item: item[1] if metric.is_better_low else -item[1])
            if ranked:
                named = [f"{text} {format_metric(metric, value)}" for text, value in ranked]
                yield f"Which {path_label(axis.path)}? By {metric.title}: {', '.join(named)}."
        for name, record in records.items():
            if record.problem:
                yield f"No answer for {name}: {record.problem}"


def _load(result: WhatIfResult) -> Iterator[str]:
    """How much may arrive, where rates are varied."""
    load = result.load
    if load is None:
        return
    if (kept := load.within_slo) is not None:
        if kept.max_rate is None:
            yield f"The SLO is missed even at {format_short(min(load.rates))} req/s."
        elif kept.users is not None:
            more = ", the largest that was tried" if kept.is_all else ""
            pause = f"who pause {format_short(load.think_time_s)} s after an answer" if load.think_time_s else "at once"
            yield f"Within the SLO up to {format_short(kept.max_rate)} req/s{more}: {kept.users:,.0f} users {pause}."
    if load.knee is not None:
        yield f"The knee, where throughput over latency is largest, is at {format_short(load.knee)} req/s."


def _counts(result: WhatIfResult, metric: str) -> Iterator[str]:
    answers = result.answers
    base = answers.base.values.get(metric)
    found = [each for each in answers.of_metric(metric) if each.elasticity is not None]
    large = sorted((e for e in found if abs(e.elasticity or 0) >= _SMALL), key=lambda e: -abs(e.elasticity or 0))
    if base is None or not found:
        return
    asked = study_metric(metric)
    name = f"{asked.name} ({format_metric(asked, base)} {asked.unit})".replace(" )", ")")
    if not large:
        yield f"{name}: no small change of what was varied moves it (elasticities below {_SMALL:g}){_far(found)}."
        return
    effects = "; ".join(_percent(each) for each in large[:_MOST])
    yield f"{name}: {effects}."


def _far(found: Sequence[Sensitivity]) -> str:
    """What large changes do where small ones do nothing."""
    moving = [each for each in found if each.swing >= _FAR and each.axis.xs and each.low and each.high]
    if not moving:
        return ""
    each = max(moving, key=lambda one: one.swing)
    low, high = (x_label(x, each.axis.unit) for x in (each.axis.xs[0], each.axis.xs[-1]))
    assert each.low is not None  # of those that move
    assert each.high is not None
    asked = study_metric(each.metric)
    ends = f"{format_metric(asked, each.low)} to {format_metric(asked, each.high)}"
    return f"; from {low} to {high}, {path_label(each.axis.path)} takes it from {ends}"


def _percent(each: Sensitivity) -> str:
    assert each.elasticity is not None  # those without are left out
    sign = "more" if each.elasticity > 0 else "less"
    return f"1 % more {path_label(each.axis.path)} is {abs(each.elasticity):.2f} % {sign}"


def _bounds(result: WhatIfResult) -> Iterator[str]:
    yield f"{result.step_label}: {result.step_bound}-bound."
    for change in result.bounds:
        if change.what == "step":
            at = place_label(change.path, change.at, change.unit)
            yield f"The step is {change.after}-bound from {at} on, {change.before}-bound below."
    operators = [c for c in result.bounds if c.what != "step" and c.before in _PHYSICAL and c.after in _PHYSICAL]
    if result.largest_batch:  # batches far beyond those that can be are not worth a sentence
        operators = [change for change in operators if change.at <= 2 * result.largest_batch]
    turns: dict[tuple[str, float], list[str]] = {}
    for change in operators:
        turns.setdefault((change.after, change.at), []).append(change.what)
    for (after, batch), names in sorted(turns.items(), key=lambda turn: turn[0][1]):
        yield f"From batch {format_short(batch)} on {after}-bound: {', '.join(names)}."
    yield from _batches(result)


def _batches(result: WhatIfResult) -> Iterator[str]:
    """Whether batches get as large as is looked at, and the step as a whole turns."""
    along = [change for change in result.bounds if change.path == "step.batch"]
    if not result.step.batch or not along:
        return
    turns = [change.after for change in along if change.what == "step"]
    if (turns[-1] if turns else result.step_bound) == "memory" and result.step.context:
        yield (
            f"No batch makes the step as a whole compute-bound: each sequence brings {result.step.context:,} tokens of "
            f"KV cache that are read for it alone."
        )
    if result.largest_batch and max(change.at for change in along) > result.largest_batch:
        yield f"Batches of such sequences end at {result.largest_batch:,} here, by {result.largest_by}."


def _payoff(each: Payoff, alternative: str) -> str:
    where = "above" if each.begins else "below"
    span = (
        f"{x_label(each.low, each.unit)} to {x_label(each.high, each.unit)} over {each.num_seeds} draws of the traffic"
    )
    return (
        f"{alternative} pays {where} {place_label(each.path, each.at, each.unit)} by "
        f"{study_metric(each.metric).label} ({span})."
    )


def _no_payoff(result: WhatIfResult) -> Iterator[str]:
    """Axes along which the alternative is never, or always, better."""
    answers, turned = result.answers, {(each.path, each.metric) for each in result.payoffs}
    if not answers.others:
        return
    for axis in answers.question.axes:
        for metric in answers.question.base.metrics:
            if (axis.path, metric) in turned or not axis.xs:
                continue
            ratio = _ratio(result, axis.path, metric)
            if ratio:
                yield f"Along {path_label(axis.path)} no crossover by {study_metric(metric).label}: {ratio}"


def _ratio(result: WhatIfResult, path: str, metric: str) -> str:
    answers = result.answers
    pairs = [
        (other.values.get(metric), base.values.get(metric))
        for base, other in zip(answers.by_axis[path], answers.others[path], strict=True)
    ]
    ratios = [other / base for other, base in pairs if other is not None and base]
    if not ratios:
        return ""
    alternative = " ".join(answers.question.against)
    return f"with {alternative} it is {min(ratios):.2f} to {max(ratios):.2f} times what it is without."


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

    lines = [charts.Line("as it is" if answers.others else "", axis.xs, values(answers.by_axis[axis.path]), BLUE)]
    if axis.path in answers.others:
        name = " ".join(answers.question.against)
        name = name if len(name) <= _LONGEST_NAME else "alternative"
        lines.append(charts.Line(name, axis.xs, values(answers.others[axis.path]), ORANGE))
    x_title = path_label(axis.path) + (f", {axis.unit}" if axis.unit else "")
    log = ["x"] if min(axis.xs) > 0 else []
    return charts.lines_svg(
        [charts.Panel("", lines)], f"{metric.name} along {path_label(axis.path)}", x_title, metric.title, log
    )


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


_MOST_AXES, _MOST_METRICS, _MOST_SENTENCES = 8, 4, 6
_MOST_TABLES, _MOST_VALUES = 2, 9  # of axes that have one of their own
_ENDS = "Each varied alone (* counts most)"
_SHORT = {
    "mean_ttft_ms": "TTFT, ms", "mean_tpot_ms": "TPOT, ms",
    "output_throughput": "output tok/s", "request_goodput": "goodput req/s", "request_throughput": "req/s",
}  # fmt: skip


def whatif_brief(result: WhatIfResult) -> Document:
    """What the ends of each axis do to the first metrics, and the sentences that no table has."""
    answers = result.answers
    sentences = whatif_sentences(result, counts=False)
    left = f" {len(sentences) - _MOST_SENTENCES} more sentences." if len(sentences) > _MOST_SENTENCES else ""
    metrics = [study_metric(name) for name in answers.question.base.metrics[:_MOST_METRICS]]
    blocks: list[Block] = [
        *_ends(answers),
        *[replace(table, rows=table.rows[:_MOST_VALUES]) for table in values_tables(answers, metrics)][:_MOST_TABLES],
        Sentences(sentences[:_MOST_SENTENCES]),
        *trust_line(trust_of(answers.scenario)),
        *few_notes(whatif_notes(result)),
        Paragraph(f"Next: `plan` says which deployment serves it. {MORE}, --report FILE.{left}"),
    ]
    return Document(f"What if: {answers.scenario.name}", blocks, headline_with_slo(answers.scenario), "what if")


def _ends(answers: WhatIfAnswers) -> Iterator[Table]:
    """The base values, then a row per numeric axis: `126 .. 666` from its low to its high end."""
    names = answers.question.base.metrics[:_MOST_METRICS]
    effects = {name: [effect for effect in answers.of_metric(name) if effect.axis.xs] for name in names}
    strongest = {
        name: max(candidates, key=lambda each: abs(each.elasticity or 0.0), default=None)
        for name, candidates in effects.items()
    }
    axes = [axis for axis in answers.question.axes if not has_own_table(answers, axis)][:_MOST_AXES]
    rows: list[list[Line]] = []
    for axis in axes:
        low, high = (x_label(x, axis.unit) for x in (axis.xs[0], axis.xs[-1]))
        row: list[Line] = [path_label(axis.path), f"{low} .. {high}"]
        for name, candidates in effects.items():
            own = next((effect for effect in candidates if effect.axis is axis), None)
            row.append("" if own is None else _ends_of(own, is_strongest=own is strongest[name]))
        rows.append(row)
    metrics = [study_metric(name) for name in names]
    base: list[Line] = [format_metric(metric, answers.base.values.get(metric.key)) for metric in metrics]
    if rows:
        titles = [_SHORT.get(metric.key, metric.title) for metric in metrics]
        yield Table(("varied", "from .. to", *titles), [["as given", "", *base], *rows], _ENDS, left=2)


def _ends_of(each: Sensitivity, is_strongest: bool) -> Line:
    metric = study_metric(each.metric)
    text = " .. ".join(MISSING if end is None else format_metric(metric, end) for end in (each.low, each.high))
    return Span(f"* {text}", "strong") if is_strongest else text
