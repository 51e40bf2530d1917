"""Draw a plotly figure as SVG text. Supports only what `perfmodel.report.plots` uses.

A page with these pictures needs no script; plotly.js alone is 4.8 MB. Axes are linear, logarithmic or categorical;
panels are laid out side by side. `<title>` elements carry the hover text of `hovertemplate`.
"""

__all__ = ["figure_svg", "hover_text"]

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from perfmodel.report.drawing.charts import text_width
from perfmodel.report.drawing.colours import GREY, GRID, INK
from perfmodel.report.drawing.figure_axes import MARGIN, FigurePanel, panels_of
from perfmodel.report.numbers import format_si

_WIDTH, _HEIGHT = 1000, 320  # the layout may set another height
_DASHES = {"dash": "6 5", "dot": "2 4"}
_NO_POINTER = ' pointer-events="none"'  # for elements without hover text, so that those below them get the pointer
_ANCHORS = {"left": "start", "center": "middle", "right": "end"}
_LINE = 15  # pixels between two lines of text
_LEGEND_LINE = 18
_FONT, _MIN_FONT = 13, 9  # pixels
_BAR = 0.65  # height of a bar as a share of its row
# Of a `hovertemplate`: `%{name[position]:form}`, and what is left out of its text.
_PLACE = re.compile(r"%\{(\w+)(?:\[(\d+)\])?(?::([^}]*))?\}")
_TAGS = re.compile(r"<extra>.*?</extra>|</?b>")

Trace = Mapping[str, Any]


def figure_svg(figure: Mapping[str, Any], title: str) -> str:
    """A figure's `data` and `layout` as an `<svg>` element.

    figure: as returned by `to_plotly_json`; title: read by screen readers
    """
    layout = {"height": _HEIGHT, **figure["layout"]}
    panels = panels_of(figure["data"], layout, _WIDTH)
    legend = _legend_rows(layout, panels)
    is_below = (layout.get("legend") or {}).get("y", 1) < 0
    if (more := _LEGEND_LINE * (len(legend) - 1)) > 0:
        side = "b" if is_below else "t"
        margin = {**MARGIN, **(layout.get("margin") or {})}
        layout |= {"height": layout["height"] + more, "margin": {**margin, side: margin[side] + more}}
        panels = panels_of(figure["data"], layout, _WIDTH)
    parts: list[str] = []
    for panel in panels:
        parts += _frame(panel)
        parts += _hover_strips(panel)  # below the markers, which have hover text of their own
        parts += _traces(panel)
    parts += _shapes(layout.get("shapes") or (), panels)
    parts += _annotations(layout.get("annotations") or (), panels)
    top = layout["height"] - 14 - max(more, 0) if is_below else 18
    for number, row in enumerate(legend):
        parts += _legend(row, top + _LEGEND_LINE * number)
    head = (
        f'<svg viewBox="0 0 {_WIDTH} {layout["height"]:g}" role="img" font-family="system-ui, sans-serif" '
        f'font-size="{_FONT}" fill="{INK}">'
    )
    return f"{head}{_title(title)}{''.join(parts)}</svg>"


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _frame(panel: FigurePanel) -> Iterator[str]:
    """Grid lines, ticks, and the titles of the axes."""
    y = panel.y
    for at, label in panel.x_ticks:
        yield f'<path d="M{at:.1f},{y.end:.1f}V{y.start:.1f}" stroke="{GRID}"/>'
        yield _text(at, y.start + 18, label)
    for at, label in panel.y_ticks:
        if not panel.names:
            yield f'<path d="M{panel.left:.1f},{at:.1f}H{panel.x.end:.1f}" stroke="{GRID}"/>'
        if panel.has_y_labels:
            yield _text(panel.left - 8, at + 4, label, "end")
    yield _text((panel.left + panel.x.end) / 2, y.start + 38, panel.x_title, more=f' fill="{GREY}"')
    if panel.y_title:
        middle = (y.start + y.end) / 2
        rotated = f' transform="rotate(-90 16 {middle:.1f})" fill="{GREY}"'
        yield _text(16, middle, panel.y_title, more=rotated)


def _traces(panel: FigurePanel) -> Iterator[str]:
    bases: dict[str, list[float]] = {}
    for trace in panel.traces:
        if trace["type"] == "bar":
            yield from _bars(trace, panel)
            continue
        points = panel.points(trace, bases)
        mode = trace.get("mode", "lines")
        if "lines" in mode:
            yield from _line(trace, points)
        if "markers" in mode:
            yield from _markers(trace, points)


def _line(trace: Trace, points: Sequence[tuple[float, float, float]]) -> Iterator[str]:
    """A line and the area below it. points: (x, y, y of the baseline), in pixels"""
    line = trace.get("line") or {}
    colour, width = line.get("color", GREY), line.get("width", 2)
    top = [(x, y) for x, y, _ in points]
    if line.get("shape") == "hv":
        top = [corner for (a, b), (c, d) in pairwise(top) for corner in ((a, b), (c, b), (c, d))]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in top)
    is_stacked = "stackgroup" in trace
    if is_stacked or trace.get("fill"):
        bottom = [] if trace.get("fill") == "toself" else [(x, base) for x, _, base in reversed(points)]
        area = path + "".join(f" {x:.1f},{y:.1f}" for x, y in bottom)
        fill = f'fill="{colour}" fill-opacity="0.5"' if is_stacked else f'fill="{trace["fillcolor"]}"'
        yield f'<polygon points="{area}" {fill}{_NO_POINTER}/>'
    if width:
        dash = f' stroke-dasharray="{_DASHES[line["dash"]]}"' if line.get("dash") in _DASHES else ""
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}{_NO_POINTER}/>'


def _markers(trace: Trace, points: Sequence[tuple[float, float, float]]) -> Iterator[str]:
    marker = trace.get("marker") or {}
    sizes, places = marker.get("size", 6), trace.get("textposition", "top center")
    fill, opacity = marker.get("color", GREY), marker.get("opacity", 1)
    for number, (x, y, _) in enumerate(points):
        radius = (sizes[number] if isinstance(sizes, Sequence) else sizes) / 2
        tooltip = _title(hover_text(trace, number))
        pointer = "" if tooltip else _NO_POINTER
        if marker.get("symbol") == "x":
            arm = 2 * radius
            arms = f"M{x - radius:.1f},{y - radius:.1f}l{arm},{arm}m0,{-arm}l{-arm},{arm}"
            yield f'<path d="{arms}" stroke="{fill}" stroke-width="3"{pointer}>{tooltip}</path>'
        else:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{fill}" '
            yield f'fill-opacity="{opacity}"{pointer}>{tooltip}</circle>'
        label = (trace.get("text") or [""] * len(points))[number]
        if label:
            place = places if isinstance(places, str) else places[number]
            yield _marker_label(x, y, radius, label, place, (trace.get("textfont") or {}).get("size", 12))


def _marker_label(x: float, y: float, radius: float, label: str, place: str, size: float) -> str:
    """The label of a marker. place: plotly's `textposition`, such as `bottom center`"""
    height, side = place.split()
    dy = {"top": -radius - 4, "middle": 4, "bottom": radius + 12}[height]
    dx = 0 if side == "center" else radius + 3 if side == "right" else -radius - 3
    anchor = {"left": "end", "center": "middle", "right": "start"}[side]
    return _text(x + dx, y + dy, label, anchor, f' font-size="{size}"')


def _bars(trace: Trace, panel: FigurePanel) -> Iterator[str]:
    """Horizontal bars with their labels, stacked on those of earlier traces."""
    colour = (trace.get("marker") or {}).get("color", GREY)
    for number, (start, end, at) in enumerate(panel.bars(trace)):
        high = _BAR * panel.row_height
        tooltip = _title(hover_text(trace, number))
        yield f'<rect x="{start:.1f}" y="{at - high / 2:.1f}" width="{max(end - start, 0):.1f}" height="{high:.1f}" '
        yield f'fill="{colour}">{tooltip}</rect>'
        texts = trace.get("text")
        if texts and texts[number]:
            lines = str(texts[number]).split("<br>")
            width, room = max(text_width(line, _FONT) for line in lines), end - start - 4
            is_outside = trace["textposition"] == "outside" or (trace["textposition"] == "auto" and room < width)
            size = _FONT if is_outside else min(_FONT, _FONT * room / width)
            if size < _MIN_FONT:
                continue
            x, anchor = (end + 6, "start") if is_outside else ((start + end) / 2, "middle")
            ink = INK if is_outside else (trace.get("textfont") or {}).get("color", "white")
            for place, line in enumerate(lines):
                y = at + 4 + _LINE * (place - (len(lines) - 1) / 2)
                yield _text(x, y, line, anchor, f' fill="{ink}" font-size="{size:.3g}"{_NO_POINTER}')


def _shapes(shapes: Sequence[Trace], panels: Sequence[FigurePanel]) -> Iterator[str]:
    """Lines across a panel."""
    for shape in shapes:
        panel = _panel(shape, panels)
        line = shape.get("line") or {}
        (x1, x2), (y1, y2) = (panel.place(shape, axis, (f"{axis}0", f"{axis}1")) for axis in ("x", "y"))
        if not panel.has_room_for(shape):
            continue
        dash = f' stroke-dasharray="{_DASHES[line["dash"]]}"' if line.get("dash") in _DASHES else ""
        yield f'<path d="M{x1:.1f},{y1:.1f}L{x2:.1f},{y2:.1f}" stroke="{line["color"]}" '
        yield f'stroke-width="{line.get("width", 1)}"{dash}/>'


def _annotations(notes: Sequence[Trace], panels: Sequence[FigurePanel]) -> Iterator[str]:
    for note in notes:
        panel = _panel(note, panels)
        (x,), (y,) = (panel.place(note, axis, (axis,)) for axis in ("x", "y"))
        lines, font = note["text"].split("<br>"), note.get("font") or {}
        above = _LINE * (len(lines) - 1) if note.get("yanchor") == "bottom" else 0
        y -= above + note.get("yshift", 0) + 5
        side = note.get("xanchor", "center")
        x += {"left": 5, "right": -5}.get(side, 0)
        rim = ' stroke="#FFFFFF" stroke-width="3" paint-order="stroke"'
        more = f' fill="{font.get("color", INK)}" font-size="{min(font.get("size", 12), 14)}"{rim}'
        for place, line in enumerate(lines):
            yield _text(x, y + _LINE * place, line, _ANCHORS[side], more)


def _panel(item: Trace, panels: Sequence[FigurePanel]) -> FigurePanel:
    """The panel that an annotation or shape refers to by its axes; the first one for `paper`."""
    named = {str(item.get(f"{axis}ref", axis)).partition(" ")[0] for axis in ("x", "y")}
    return next((panel for panel in panels if panel.x_name in named or panel.y_name in named), panels[0])


def hover_text(trace: Trace, number: int) -> str:
    """The hover text of point `number` by plotly's `hovertemplate`, with line breaks; empty without a template."""

    def value(place: re.Match[str]) -> str:
        name, position, form = place.groups()
        item = trace[name][number]
        item = item if position is None else item[int(position)]
        return format_si(item, "", int(form[1:-1])) if (form or "").endswith("s") else format(item, form or "")

    return _PLACE.sub(value, _TAGS.sub("", trace.get("hovertemplate") or "").replace("<br>", "\n"))


def _hover_strips(panel: FigurePanel) -> Iterator[str]:
    """For line plots: a strip for every pixel column with points, whose hover text lists all of them."""
    texts_at: dict[int, list[str]] = {}
    for trace in panel.traces:
        if trace["type"] == "scatter" and "lines" in trace.get("mode", "lines") and trace.get("hovertemplate"):
            for number, (x, _, _) in enumerate(panel.points(trace, {})):
                texts = texts_at.setdefault(round(x), [])
                texts += [text for text in [hover_text(trace, number)] if text not in texts]
    columns = sorted(texts_at)
    if not columns:
        return
    edges = [panel.left, *((a + b) / 2 for a, b in pairwise(columns)), panel.x.end]
    for (left, right), column in zip(pairwise(edges), columns, strict=True):
        yield f'<rect class="hover" x="{left:.1f}" y="{panel.y.end:.0f}" width="{right - left:.1f}" '
        yield f'height="{panel.y.start - panel.y.end:.0f}">{_title(chr(10).join(texts_at[column]))}</rect>'


def _legend_rows(layout: Mapping[str, Any], panels: Sequence[FigurePanel]) -> list[list[tuple[float, Trace]]]:
    """The rows of the legend: (x in pixels, trace) of every entry."""
    traces = [trace for panel in panels for trace in panel.traces]
    if not layout.get("showlegend", len(traces) > 1):
        return []
    rows: list[list[tuple[float, Trace]]] = [[]]
    x = panels[0].left
    for trace in traces:
        if not trace.get("name") or trace.get("showlegend") is False:
            continue
        width = 20 + text_width(trace["name"], 13) + 18
        if rows[-1] and x + width > _WIDTH:
            rows.append([])
            x = panels[0].left
        rows[-1].append((x, trace))
        x += width
    return rows


def _legend(row: Sequence[tuple[float, Trace]], y: float) -> Iterator[str]:
    for x, trace in row:
        line, marker = trace.get("line") or {}, trace.get("marker") or {}
        colour = marker.get("color") or line.get("color") or GREY
        dash = f' stroke-dasharray="{_DASHES[line["dash"]]}"' if line.get("dash") in _DASHES else ""
        thick = 3 if trace["type"] == "scatter" and "lines" in trace.get("mode", "lines") else 10
        yield f'<path d="M{x:.0f},{y - 4:.0f}h14" stroke="{colour}" stroke-width="{thick}"{dash}/>'
        yield _text(x + 20, y, trace["name"], "start")
