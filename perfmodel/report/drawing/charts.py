"""Charts as SVG text, for documents that a code host renders: no script, no font file, no dependency.

`lines_svg`: a metric over an axis, labelled at the ends of its lines. `bars_svg`: a metric by name. `waterfall_svg`:
what each rung of a ladder gains. `pareto_svg`: one metric over another, with the front. Panels stand side by side.
"""

__all__ = ["Bar", "Dot", "Line", "Panel", "bars_svg", "document", "lines_svg", "pareto_svg", "text_width"]

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from math import isfinite

from perfmodel.report.drawing.chart_axes import Scale, scale_over, ticks_at
from perfmodel.report.drawing.colours import BLUE, GREEN, GREY, GRID, INK, ORANGE, PINK, SKY, VERMILION
from perfmodel.report.numbers import format_short

COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PINK, SKY, GREY)
_WIDTH = 860
_LEFT, _TOP, _HEIGHT, _BOTTOM = 64, 76, 300, 52  # beside the first panel; above, of, below all of them
_BETWEEN = 44  # panels
_LINE = 15  # pixels between two labels
_LEGEND_LINE = 18
_LIFT = 7  # of a number over the line that leads on from its dot


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


def text_width(text: str, size: float = 12) -> float:
    """About how many pixels a text takes."""
    return len(text) * size * 0.6


def document(parts: Sequence[str], title: str, width: float, height: float, has_heading: bool = True) -> str:
    """The SVG file around its parts, with a title; width and height in pixels; has_heading: the title is drawn, too."""
    heading = f'<text x="12" y="20" font-size="14" font-weight="600">{escape(title)}</text>'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img" font-family="system-ui, sans-serif" font-size="12" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width:g}" height="{height:g}" fill="#FFFFFF"/>',
            *((heading,) if has_heading else ()),
            *parts,
            "</svg>\n",
        ]
    )


def lines_svg(
    panels: Sequence[Panel], title: str, x_title: str, y_title: str, log: Sequence[str] = (), even: float | None = None
) -> str:
    """Lines by panel, all over the same axes.

    panels: pictures side by side; title, x_title, y_title: of the whole and of its axes
    log:    which of the axes are logarithmic, of "x" and "y"
    even:   a value at which a thin line says "no difference"
    """
    xs = list(dict.fromkeys(x for panel in panels for line in panel.lines for x in line.xs))
    ys = [y for panel in panels for line in panel.lines for _, y in line.points] + ([even] if even is not None else [])
    y = scale_over(ys, _TOP + _HEIGHT, _TOP, "y" in log, from_zero=True)
    margin = 18 + max((text_width(line.name) for panel in panels for line in panel.lines), default=0)
    shares_labels = len(panels) > 1  # labels only at the last panel, where all have the same lines
    width = (_WIDTH - _LEFT - margin - _BETWEEN * (len(panels) - 1)) / len(panels)
    parts = [f'<text x="12" y="40" fill="{GREY}">{escape(y_title)}</text>']
    for number, panel in enumerate(panels):
        left = _LEFT + number * (width + _BETWEEN)
        x = scale_over(xs, left, left + width, "x" in log)
        parts += _frame(x, y, sorted(xs), panel.title if shares_labels else "", x_title)
        if even is not None:
            parts.append(_rule(x.start, x.end, y(even)))
        for line in panel.lines:
            parts += _drawn(line, x, y)
        if number == len(panels) - 1:
            parts += _end_labels(panel.lines, x, y)
    return document(parts, title, _WIDTH, _TOP + _HEIGHT + _BOTTOM)


def bars_svg(groups: Mapping[str, Sequence[Bar]], title: str, x_title: str, is_log: bool = False) -> str:
    """Horizontal bars by group, each with its value at its end; long names stand over their bars, not before them.

    groups: by heading, which may be empty; title, x_title: of the whole and of the axis; is_log: a logarithmic axis
    """
    bars = [bar for group in groups.values() for bar in group]
    left = 24 + max(text_width(bar.name) for bar in bars)
    is_over = left > _WIDTH / 2
    left = 12 if is_over else left
    right = _WIDTH - 24 - max(66.0, *(text_width(bar.text) for bar in bars))
    ends = [end for bar in bars for end in bar.interval or () if isfinite(end)]
    x = scale_over([*(bar.value for bar in bars if bar.value), *ends], left, right, is_log, from_zero=True)
    parts, at = [], 44.0
    for name, group in groups.items():
        if name:
            parts.append(f'<text x="12" y="{at + 4:.0f}" font-weight="600">{escape(name)}</text>')
            at += 20
        for bar in group:
            if is_over:
                parts.append(f'<text x="{left}" y="{at + 12:.1f}">{escape(bar.name)}</text>')
                bar, at = replace(bar, name=""), at + 18
            parts += _bar(bar, x, at)
            at += 28 if is_over else 22
        at += 10
    parts.append(f'<text x="{(left + right) / 2:.0f}" y="{at + 12:.0f}" text-anchor="middle" fill="{GREY}">')
    parts.append(f"{escape(x_title)}</text>")
    return document(parts, title, _WIDTH, at + 26)


def pareto_svg(
    panels: Mapping[str, Sequence[Dot]],
    title: str,
    x_title: str,
    y_title: str,
    log: Sequence[str] = (),
    legend: Sequence[str] = (),
) -> str:
    """Dots by panel; the front is filled and joined by a line, what it dominates is hollow.

    panels: by heading; title, x_title, y_title: of the whole and of its axes
    log:    which of the axes are logarithmic, of "x" and "y"; legend: lines below
    """
    width = (_WIDTH - _LEFT - 90 - _BETWEEN * (len(panels) - 1)) / len(panels)
    parts = [f'<text x="12" y="40" fill="{GREY}">{escape(y_title)}</text>']
    for number, (name, dots) in enumerate(panels.items()):
        y = scale_over([dot.y for dot in dots], _TOP + _HEIGHT, _TOP, "y" in log)
        left = _LEFT + number * (width + _BETWEEN)
        x = scale_over([dot.x for dot in dots], left, left + width, "x" in log)
        parts += _frame(x, y, x.ticks, name if len(panels) > 1 else "", x_title)
        front = sorted((dot for dot in dots if dot.is_front), key=lambda dot: dot.x)
        path = " ".join(f"{x(dot.x):.1f},{y(dot.y):.1f}" for dot in front)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{GREY}" stroke-dasharray="3 3"/>')
        parts += _dots(dots, x, y, _LIFT if legend else 0)
    bottom = _TOP + _HEIGHT + _BOTTOM
    parts += [
        f'<text x="{_LEFT}" y="{bottom + _LEGEND_LINE * place:.0f}">{escape(line)}</text>'
        for place, line in enumerate(legend, 1)
    ]
    return document(parts, title, _WIDTH, bottom + (_LEGEND_LINE * len(legend) + 12 if legend else 0))


def _frame(x: Scale, y: Scale, x_values: Sequence[float], name: str, x_title: str) -> Iterator[str]:
    for tick in y.ticks:
        at = y(tick)
        yield _rule(x.start, x.end, at, GRID)
        yield f'<text x="{x.start - 8:.1f}" y="{at + 4:.1f}" text-anchor="end">{format_short(tick)}</text>'
    room = 8 + max(text_width(format_short(value), 11) for value in x_values)
    for tick in ticks_at(x_values, x, room):
        at = x(tick)
        yield f'<line x1="{at:.1f}" y1="{y.start:.1f}" x2="{at:.1f}" y2="{y.start + 4:.1f}" stroke="{GREY}"/>'
        yield f'<text x="{at:.1f}" y="{y.start + 18:.1f}" text-anchor="middle">{format_short(tick)}</text>'
    yield _rule(x.start, x.end, y.start, GREY)
    middle = (x.start + x.end) / 2
    yield f'<text x="{middle:.1f}" y="{y.start + 38:.1f}" text-anchor="middle" fill="{GREY}">{escape(x_title)}</text>'
    if name:
        yield f'<text x="{x.start:.1f}" y="{y.end - 8:.1f}" font-weight="600">{escape(name)}</text>'


def _rule(x1: float, x2: float, y: float, colour: str = GREY) -> str:
    return f'<line x1="{x1:.1f}" y1="{y:.1f}" x2="{x2:.1f}" y2="{y:.1f}" stroke="{colour}"/>'


def _drawn(line: Line, x: Scale, y: Scale) -> Iterator[str]:
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line.points)
    dash = ' stroke-dasharray="5 4"' if line.is_dashed else ""
    yield f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"{dash}/>'
    if not line.is_dashed:
        dots = "".join(f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.6"/>' for a, b in line.points)
        yield f'<g fill="{line.colour}" stroke="none">{dots}</g>'


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
        yield (
            f'<text x="{x.end + 10:.1f}" y="{at + 4:.1f}" fill="{line.colour}" font-weight="600">'
            f"{escape(line.name)}</text>"
        )


def _bar(bar: Bar, x: Scale, at: float) -> Iterator[str]:
    if bar.name:
        yield f'<text x="{x.start - 8:.1f}" y="{at + 12:.1f}" text-anchor="end">{escape(bar.name)}</text>'
    if bar.value is None:
        yield f'<text x="{x.start + 4:.1f}" y="{at + 12:.1f}" fill="{GREY}">{escape(bar.text or "none")}</text>'
        return
    end = x(bar.value)
    yield f'<rect x="{x.start:.1f}" y="{at:.1f}" width="{max(end - x.start, 1):.1f}" height="16" fill="{bar.colour}"/>'
    if bar.interval is not None:
        low, high = (min(x(each), x.end) if isfinite(each) else x.end for each in bar.interval)
        yield f'<path d="M{low:.1f},{at + 8:.1f}H{high:.1f}" stroke="{INK}" stroke-width="1.5"/>'
        for tip in (low, high):
            yield f'<path d="M{tip:.1f},{at + 4:.1f}v8" stroke="{INK}" stroke-width="1.5"/>'
        end = max(end, high)
    yield f'<text x="{end + 6:.1f}" y="{at + 12:.1f}">{escape(bar.text or format_short(bar.value))}</text>'


def _dots(dots: Sequence[Dot], x: Scale, y: Scale, lift: float = 0) -> Iterator[str]:
    """Each with its name beside it in its colour, left of it near the right end, lower where names would collide; names
    have a white rim, which lines do not cross."""
    circles = []
    taken = [(x(dot.x) - 5, x(dot.x) + 5, y(dot.y) + 4) for dot in dots]  # left, right, height of dots and names
    for dot in sorted(dots, key=lambda each: (y(each.y), x(each.x))):
        left, at, width = x(dot.x) + 8, y(dot.y) + 4 - lift, text_width(dot.name)
        if left + width > x.end + 12:
            left -= 16 + width
        right = left + width
        while any(abs(at - other) < _LINE - 2 and left < end and right > start for start, end, other in taken):
            at += -2 if lift else 2
        if dot.name:
            taken.append((left, right, at))
        fill = dot.colour if dot.is_front else "#FFFFFF"
        ring = f'fill="{fill}" stroke="{dot.colour}" stroke-width="2"'
        circles.append(f'<circle cx="{x(dot.x):.1f}" cy="{y(dot.y):.1f}" r="5" {ring}/>')
        anchor, beside = ("start", left) if left > x(dot.x) else ("end", right)
        where = f'x="{beside:.1f}" y="{at:.1f}" text-anchor="{anchor}"'
        rim = 'stroke="#FFFFFF" stroke-width="3" paint-order="stroke"'
        yield f'<text {where} fill="{dot.colour}" {rim}>{escape(dot.name)}</text>'
    yield from circles
