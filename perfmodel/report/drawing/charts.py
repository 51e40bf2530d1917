"""Charts as SVG files, for documents that a code host renders: no script, no font file, no dependency.

`lines_svg`: a metric over an axis, labelled at the ends of its lines. `bars_svg`: a metric by name. `waterfall_svg`:
what each rung of a ladder gains. `pareto_svg`: one metric over another, with the front. `scatter_svg`: predicted over
measured. `ecdf_svg`: which share of the rows lies within which error. Panels stand side by side."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, isfinite, log10
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.report.drawing import figures as fig
from perfmodel.report.drawing.figures import COLOURS, GREY, Scale, document, element, scale_over, text, text_width
from perfmodel.report.numbers import format_short

if TYPE_CHECKING:
    from perfmodel.evidence.report import Rows

# In pixels.
_WIDTH = 860
_LEFT, _TOP, _HEIGHT, _BOTTOM = 64, 76, 300, 52  # beside the first panel; above, of, below all of them
_BETWEEN = 44  # panels
_LINE, _LEGEND_LINE = 15, 18  # between two labels
_LIFT = 7  # of a number over the line that leads on from its dot
_RUNG, _RUNGS_TOP, _BETWEEN_LADDERS = 24, 72, 56
_SQUARE = (74, 24, 520, 400)  # left, top, right and bottom of the axes of rows
_ROWS_WIDTH, _ROWS_HEIGHT = 760, 470

_MAX_POINTS = 3000  # of all series together: beyond, a fixed sample is drawn
_MAX_SERIES = 6
Series = tuple[str, "Rows"]  # a group of rows with its name
_ECDF_STEPS = 120
_ECDF_ERRORS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_ECDF_SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
_BOLD: dict[str, Any] = {"font_weight": "600"}
# Lines do not cross what has a rim.
_RIM: dict[str, Any] = {"stroke": "#FFFFFF", "stroke_width": 3, "paint_order": "stroke"}


@dataclass(frozen=True)
class Line:
    """A line with its label; `is_dashed` for what stands beside (the simulation of what was executed)."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    colour: str
    is_dashed: bool = False

    @property
    def points(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in zip(self.xs, self.ys, strict=True) if y is not None]


@dataclass(frozen=True)
class Panel:
    """One of the pictures side by side."""

    title: str
    lines: Sequence[Line]


@dataclass(frozen=True)
class Bar:
    """A bar with what is written at its end, and a line over it from one end of an interval to the other."""

    name: str
    value: float | None
    colour: str
    text: str = ""
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Dot:
    """A point with its name; `is_front` for what nothing dominates."""

    name: str
    x: float
    y: float
    colour: str
    is_front: bool


@dataclass(frozen=True)
class Ladder:
    """gains: how many times better each rung is than the one below, the first being 1; None where one is missing"""

    title: str
    gains: Sequence[float | None]
    colour: str = fig.BLUE


def lines_svg(
    panels: Sequence[Panel], title: str, x_title: str, y_title: str, log: Sequence[str] = (), even: float | None = None
) -> str:
    """Lines by panel, all over the same axes; only the last panel has their names.

    panels: pictures side by side; title, x_title, y_title: of the whole and of its axes
    log:    which of the axes are logarithmic, of "x" and "y"
    even:   a value at which a thin line says "no difference"
    """
    lines = [line for panel in panels for line in panel.lines]
    xs = list(dict.fromkeys(x for line in lines for x in line.xs))
    ys = [y for line in lines for _, y in line.points] + ([even] if even is not None else [])
    y = scale_over(ys, _TOP + _HEIGHT, _TOP, "y" in log, from_zero=True)
    margin = 18 + max((text_width(line.name) for line in lines), default=0)
    parts = [text(12, 40, y_title, fill=GREY)]
    for panel, (left, right) in zip(panels, _columns(len(panels), margin), strict=True):
        x = scale_over(xs, left, right, "x" in log)
        parts += _frame(x, y, sorted(xs), panel.title if len(panels) > 1 else "", x_title)
        if even is not None:
            parts.append(_rule(x, y(even), GREY))
        for line in panel.lines:
            parts += _line(line, x, y)
    parts += _end_labels(panels[-1].lines, x, y)
    return document(parts, title, _WIDTH, _TOP + _HEIGHT + _BOTTOM)


def bars_svg(groups: Mapping[str, Sequence[Bar]], title: str, x_title: str) -> str:
    """Horizontal bars by group, each with its value at its end; long names stand over their bars, not before them.
    groups: by heading, which may be empty; title, x_title: of the whole and of the axis"""
    bars = [bar for group in groups.values() for bar in group]
    left = 24 + max(text_width(bar.name) for bar in bars)
    is_over = left > _WIDTH / 2
    left = 12 if is_over else left
    right = _WIDTH - 24 - max(66.0, *(text_width(bar.text) for bar in bars))
    ends = [end for bar in bars for end in bar.interval or () if isfinite(end)]
    x = scale_over([*(bar.value for bar in bars if bar.value), *ends], left, right, False, from_zero=True)
    parts, at = [], 44.0
    for name, group in groups.items():
        if name:
            parts.append(text(12, at + 4, name, **_BOLD))
            at += 20
        for bar in group:
            if is_over:
                parts.append(text(left, at + 12, bar.name))
                bar, at = replace(bar, name=""), at + 18
            parts += _bar(bar, x, at)
            at += 28 if is_over else 22
        at += 10
    parts.append(text((left + right) / 2, at + 12, x_title, "middle", fill=GREY))
    return document(parts, title, _WIDTH, at + 26)


def pareto_svg(
    panels: Mapping[str, Sequence[Dot]],
    title: str,
    x_title: str,
    y_title: str,
    log: Sequence[str] = (),
    legend: Sequence[str] = (),
) -> str:
    """Dots by panel; the front is filled and joined by a line, what it dominates is hollow. panels: by heading; title,
    x_title, y_title: of the whole and of its axes; log: logarithmic axes, of "x" and "y"; legend: lines below"""
    parts = [text(12, 40, y_title, fill=GREY)]
    for (name, dots), (left, right) in zip(panels.items(), _columns(len(panels), 90), strict=True):
        y = scale_over([dot.y for dot in dots], _TOP + _HEIGHT, _TOP, "y" in log)
        x = scale_over([dot.x for dot in dots], left, right, "x" in log)
        parts += _frame(x, y, x.ticks, name if len(panels) > 1 else "", x_title)
        front = sorted((dot for dot in dots if dot.is_front), key=lambda dot: dot.x)
        path = fig.points_of((x(dot.x), y(dot.y)) for dot in front)
        parts.append(element("polyline", points=path, fill="none", stroke=GREY, stroke_dasharray="3 3"))
        parts += _dots(dots, x, y, _LIFT if legend else 0)
    bottom = _TOP + _HEIGHT + _BOTTOM
    parts += [text(_LEFT, bottom + _LEGEND_LINE * place, line) for place, line in enumerate(legend, 1)]
    return document(parts, title, _WIDTH, bottom + (_LEGEND_LINE * len(legend) + 12 if legend else 0))


def _columns(count: int, margin: float) -> Iterator[tuple[float, float]]:
    """Where each of the panels side by side starts and ends. margin: right of the last"""
    width = (_WIDTH - _LEFT - margin - _BETWEEN * (count - 1)) / count
    for number in range(count):
        left = _LEFT + number * (width + _BETWEEN)
        yield left, left + width


def _frame(x: Scale, y: Scale, x_values: Sequence[float], name: str, x_title: str) -> Iterator[str]:
    room = 8 + max(text_width(format_short(value), 11) for value in x_values)
    ticks = _labelled(x, fig.ticks_at(x_values, x, room)), _labelled(y, y.ticks)
    yield from fig.frame(x, y, *ticks, x_title)
    yield _rule(x, y.start, GREY)
    if name:
        yield text(x.start, y.end - 8, name, **_BOLD)


def _labelled(
    scale: Scale, values: Sequence[float], label: Callable[[float], str] = format_short
) -> list[tuple[float, str]]:
    """(pixel, label) of the values at which an axis has ticks."""
    return [(scale(value), label(value)) for value in values]


def _rule(x: Scale, y: float, colour: str) -> str:
    return element("line", x1=x.start, y1=y, x2=x.end, y2=y, stroke=colour)


def _line(line: Line, x: Scale, y: Scale) -> Iterator[str]:
    places = [(x(a), y(b)) for a, b in line.points]
    dash = "5 4" if line.is_dashed else None
    stroke: dict[str, Any] = {"fill": "none", "stroke": line.colour, "stroke_width": 2, "stroke_dasharray": dash}
    yield element("polyline", points=fig.points_of(places), **stroke)
    if not line.is_dashed:
        dots = "".join(element("circle", cx=a, cy=b, r=2.6) for a, b in places)
        yield element("g", dots, fill=line.colour, stroke="none")


def _end_labels(lines: Sequence[Line], x: Scale, y: Scale) -> Iterator[str]:
    """The name of each line right of the axes, at the height where it ends, pushed apart where they would collide."""
    labelled = [line for line in lines if line.points and not line.is_dashed]
    ends = sorted(((y(line.points[-1][1]), line) for line in labelled), key=lambda end: end[0])
    heights = [at for at, _ in ends]
    for index in range(1, len(heights)):
        heights[index] = max(heights[index], heights[index - 1] + _LINE)
    beyond = max(0.0, heights[-1] - y.start) if heights else 0.0
    for index in range(len(heights) - 1, -1, -1):
        heights[index] -= beyond
        beyond = max(0.0, beyond - (heights[index] + beyond - (heights[index - 1] + _LINE))) if index else 0.0
    for at, (_, line) in zip(heights, ends, strict=True):
        yield text(x.end + 10, at + 4, line.name, fill=line.colour, **_BOLD)


def _bar(bar: Bar, x: Scale, at: float) -> Iterator[str]:
    if bar.name:
        yield text(x.start - 8, at + 12, bar.name, "end")
    if bar.value is None:
        yield text(x.start + 4, at + 12, bar.text or "none", fill=GREY)
        return
    end = x(bar.value)
    yield element("rect", x=x.start, y=at, width=max(end - x.start, 1), height=16, fill=bar.colour)
    if bar.interval is not None:
        low, high = (min(x(value), x.end) if isfinite(value) else x.end for value in bar.interval)
        paths = (f"M{low:.1f},{at + 8:.1f}H{high:.1f}", *(f"M{tip:.1f},{at + 4:.1f}v8" for tip in (low, high)))
        yield from (element("path", d=path, stroke=fig.INK, stroke_width=1.5) for path in paths)
        end = max(end, high)
    yield text(end + 6, at + 12, bar.text or format_short(bar.value))


def _dots(dots: Sequence[Dot], x: Scale, y: Scale, lift: float = 0) -> Iterator[str]:
    """Each with its name beside it in its colour, left of it near the right end, lower where names would collide."""
    circles = []
    taken = [(x(dot.x) - 5, x(dot.x) + 5, y(dot.y) + 4) for dot in dots]  # left, right, height of dots and names
    for dot in sorted(dots, key=lambda dot: (y(dot.y), x(dot.x))):
        left, at, width = x(dot.x) + 8, y(dot.y) + 4 - lift, text_width(dot.name)
        if left + width > x.end + 12:
            left -= 16 + width
        right = left + width
        while any(abs(at - other) < _LINE - 2 and left < end and right > start for start, end, other in taken):
            at += -2 if lift else 2
        if dot.name:
            taken.append((left, right, at))
        fill = dot.colour if dot.is_front else "#FFFFFF"
        circles.append(element("circle", cx=x(dot.x), cy=y(dot.y), r=5, fill=fill, stroke=dot.colour, stroke_width=2))
        is_left = left < x(dot.x)
        yield text(right if is_left else left, at, dot.name, "end" if is_left else None, fill=dot.colour, **_RIM)
    yield from circles


def waterfall_svg(names: Sequence[str], ladders: Sequence[Ladder], title: str, x_title: str) -> str:
    """One panel for each of `ladders`; rungs from top to bottom, each from where the one above ends, on a logarithmic
    axis, so that equal gains are equally long. names: of the rungs; title, x_title: of the whole and of the axis"""
    left = 24 + max(map(text_width, [*names, "together"]))
    width = max(240.0, (960 - left - 30 - _BETWEEN_LADDERS * (len(ladders) - 1)) / len(ladders))
    bottom = _RUNGS_TOP + _RUNG * (len(names) + 1)
    parts = [text(left - 10, _RUNGS_TOP + _RUNG * n + 15, name, "end") for n, name in enumerate([*names, "together"])]
    for number, ladder in enumerate(ladders):
        start = left + number * (width + _BETWEEN_LADDERS)
        reached = np.cumprod([1.0 if gain is None else gain for gain in ladder.gains]).tolist()
        x = scale_over([1.0, *reached], start, start + width - 40, is_log=True)
        for line, words in enumerate(ladder.title.split(", ", 1)):
            parts.append(text(x.start, _RUNGS_TOP - 26 + 15 * line, words, **_BOLD))
        parts += fig.frame(x, Scale(0, 1, bottom, _RUNGS_TOP), _labelled(x, x.ticks), (), x_title)
        parts += _rungs(ladder, reached, x)
    whole = left + len(ladders) * (width + _BETWEEN_LADDERS) - _BETWEEN_LADDERS + 20
    return document(parts, title, whole, bottom + 48)


def _rungs(ladder: Ladder, reached: Sequence[float], x: Scale) -> Iterator[str]:
    """A bar for each rung, from what the rungs below reach to what it reaches; then one for all of them."""
    below = 1.0
    for row, (gain, above) in enumerate(zip(ladder.gains, reached, strict=True)):
        low, high = sorted((x(below), x(above)))
        colour = ladder.colour if above >= below else fig.VERMILION
        label = "not run" if gain is None else "start" if row == 0 else f"x{_times(gain)}"
        at = _RUNGS_TOP + _RUNG * row
        yield element("rect", x=low, y=at + 3, width=max(high - low, 2), height=16, fill=colour)
        yield text(high + 6, at + 15, label, fill=GREY if gain is None else colour)
        below = above
    at, start = _RUNGS_TOP + _RUNG * len(ladder.gains), x(1.0)
    yield element("rect", x=start, y=at + 3, width=max(x(below) - start, 2), height=16, fill=GREY)
    yield text(x(below) + 6, at + 15, f"{_times(below)}x", **_BOLD)


def _times(factor: float) -> str:
    return f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}" if factor >= 10 else f"{factor:.2f}"


def scatter_svg(series: Sequence[Series], unit: str, title: str) -> str:
    """Predicted over measured, one colour per series; beside the diagonal, dashed, a factor of 1.25 either way."""
    shown = _largest(series)
    values = np.concatenate([ends for _, rows in shown for ends in (rows.predicted, rows.measured)])
    low, high = 10 ** floor(log10(values.min())), 10 ** ceil(log10(values.max()))
    high = low * 10 if low == high else high
    left, top, right, bottom = _SQUARE
    x, y = Scale(low, high, left, right, True), Scale(low, high, bottom, top, True)
    powers = [10.0**power for power in range(round(log10(low)), round(log10(high)) + 1)]
    ticks = _labelled(x, powers, _power), _labelled(y, powers, _power)
    parts = [*fig.frame(x, y, *ticks, f"measured, {unit}", f"predicted, {unit}")]
    for factor in (1.0, 1.25, 0.8):
        start, end = max(low, low / factor), min(high, high / factor)
        ends = {"x1": x(start), "y1": y(start * factor), "x2": x(end), "y2": y(end * factor)}
        parts.append(element("line", **ends, stroke=GREY, stroke_dasharray=None if factor == 1 else "4 4"))
    for (_, rows), colour in zip(shown, COLOURS, strict=False):
        count = max(1, min(len(rows), round(_MAX_POINTS * 2 * len(rows) / len(values))))
        sample = np.unique(np.linspace(0, len(rows) - 1, count).astype(np.int64))
        pairs = zip(rows.measured[sample].tolist(), rows.predicted[sample].tolist(), strict=True)
        dots = "".join(element("circle", cx=x(measured), cy=y(predicted), r=2) for measured, predicted in pairs)
        parts.append(element("g", dots, fill=colour, fill_opacity=0.45, stroke="none"))
    return _rows_svg(shown, parts, title)


def ecdf_svg(series: Sequence[Series], title: str) -> str:
    """The share of each series' rows whose absolute error is at most that on the axis."""
    shown = _largest(series)
    left, top, right, bottom = _SQUARE
    x, y = Scale(_ECDF_ERRORS[0], _ECDF_ERRORS[-1], left, right, True), Scale(0.0, 1.0, bottom, top)
    errors = np.geomspace(x.low, x.high, _ECDF_STEPS)
    ticks = _labelled(x, _ECDF_ERRORS, _percent), _labelled(y, _ECDF_SHARES, _percent)
    parts = [*fig.frame(x, y, *ticks, "absolute error, at most", "share of rows")]
    for (_, rows), colour in zip(shown, COLOURS, strict=False):
        within = np.searchsorted(np.sort(np.abs(rows.errors)), errors, side="right") / len(rows)
        path = fig.points_of(zip(map(x, errors.tolist()), map(y, within.tolist()), strict=True))
        parts.append(element("polyline", points=path, fill="none", stroke=colour, stroke_width=2))
    return _rows_svg(shown, parts, title)


def _largest(series: Sequence[Series]) -> list[Series]:
    """At most `_MAX_SERIES`, those with the most rows; the others together are the last."""
    filled = sorted(((name, rows) for name, rows in series if len(rows)), key=lambda group: (-len(group[1]), group[0]))
    if len(filled) <= _MAX_SERIES:
        return filled
    from perfmodel.evidence.report import Rows

    kept, rest = filled[: _MAX_SERIES - 1], [rows for _, rows in filled[_MAX_SERIES - 1 :]]
    predicted, measured = (np.concatenate([getattr(rows, of) for rows in rest]) for of in ("predicted", "measured"))
    labels = [label for rows in rest for label in rows.labels]
    return [*kept, (f"{len(rest)} others", Rows(predicted, measured, labels))]


def _rows_svg(series: Sequence[Series], parts: Sequence[str], title: str) -> str:
    """A picture of rows, with the legend beside it. parts: its frame and marks"""
    _, top, right, _ = _SQUARE
    legend = []
    for number, ((name, rows), colour) in enumerate(zip(series, COLOURS, strict=False)):
        at = top + 10 + 22 * number
        legend.append(element("rect", x=right + 18, y=at - 9, width=11, height=11, fill=colour))
        legend.append(text(right + 36, at + 1, f"{name} ({len(rows):,})"))
    return document([*parts, *legend], title, _ROWS_WIDTH, _ROWS_HEIGHT, has_heading=False)


def _percent(share: float) -> str:
    return f"{share * 100:g} %"


def _power(value: float) -> str:
    """1, 10, 0.01; powers beyond as 1e-6."""
    exponent = round(log10(value))
    return f"1e{exponent}" if abs(exponent) > 3 else f"{value:g}"
