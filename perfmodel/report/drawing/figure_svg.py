"""A figure as an SVG element, or as a file for a code host: what shows it needs no script; plotly's alone is 1 MB.

Only what the figures of reports use is known: axes are linear, logarithmic or categorical, panels stand side by side.
`<title>` elements carry the hover text of `hovertemplate`."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from math import ceil, floor, isfinite, log10
from typing import Any

from perfmodel.report.drawing.figures import COLOURS, GREY, INK, Scale, element, frame, points_of, text, text_width
from perfmodel.report.numbers import format_short, format_si

_WIDTH, _HEIGHT = 1000, 320  # the layout may set another height
_MARGIN = {"l": 64, "r": 24, "t": 48, "b": 48}
_HEADROOM = 0.05  # beyond the values of an axis without an explicit range, as a share of their span
_DASHES = {"dash": "6 5", "dot": "2 4"}
_ANCHORS = {"left": None, "center": "middle", "right": "end"}
_LINE, _LEGEND_LINE = 15, 18  # pixels between two lines of text
_FONT, _MIN_FONT = 13, 9  # pixels
_BAR = 0.65  # height of a bar as a share of its row
_HEADING = 30  # pixels, of a file
_RIM: dict[str, Any] = {"stroke": "#FFFFFF", "stroke_width": 3, "paint_order": "stroke"}  # that no line crosses
# Of a `hovertemplate`: `%{name[position]:form}`, and what is left out of its text.
_PLACE = re.compile(r"%\{(\w+)(?:\[(\d+)\])?(?::([^}]*))?\}")
_TAGS = re.compile(r"<extra>.*?</extra>|</?b>")

Data = Mapping[str, Any]


def figure_svg(figure: Data, title: str, is_file: bool = False) -> str:
    """A figure's `data` and `layout` as an `<svg>` element. title: read by screen readers; is_file: as a document of
    its own, under its title"""
    layout = {"height": _HEIGHT, **figure["layout"]}
    layout["margin"] = {**_MARGIN, **(layout.get("margin") or {})}
    panels = _panels(figure["data"], layout)
    legend = _legend_rows(layout, panels)
    is_below = (layout.get("legend") or {}).get("y", 1) < 0
    more = max(_LEGEND_LINE * (len(legend) - 1), 0)
    if more:
        side = "b" if is_below else "t"
        margin = {**layout["margin"], side: layout["margin"][side] + more}
        layout |= {"height": layout["height"] + more, "margin": margin}
        panels = _panels(figure["data"], layout)
    parts: list[str] = []
    for panel in panels:
        parts += panel.frame
        parts += () if is_file else _hover_strips(panel)  # below the markers, which have hover text of their own
        parts += _traces(panel)
    for shape in layout.get("shapes") or ():  # lines across a panel, where they lie within its y axis
        panel = _panel_of(shape, panels)
        if str(shape.get("yref", "y")).endswith("domain") or panel.is_within(shape["y0"]):
            (x1, x2), (y1, y2) = (panel.place(shape, axis, (f"{axis}0", f"{axis}1")) for axis in ("x", "y"))
            path = f"M{x1:.1f},{y1:.1f}L{x2:.1f},{y2:.1f}"
            parts.append(element("path", d=path, **_stroke(shape.get("line") or {}, 1)))
    for note in layout.get("annotations") or ():
        parts += _annotation(note, _panel_of(note, panels))
    top = layout["height"] - 14 - more if is_below else 18
    for number, row in enumerate(legend):
        for x, trace in row:
            y = top + _LEGEND_LINE * number
            stroke = {**_stroke(trace["line"]), "stroke_width": 3 if _is_line(trace) else 10}
            stroke["stroke"] = (trace.get("marker") or {}).get("color") or stroke["stroke"]
            parts += [element("path", d=f"M{x:.0f},{y - 4:.0f}h14", **stroke), text(x + 20, y, trace["name"], "start")]
    look: dict[str, Any] = {"font_family": "system-ui, sans-serif", "font_size": _FONT, "fill": INK}
    height = layout["height"] + (_HEADING if is_file else 0)
    if is_file:
        heading = text(12, 20, title, font_size=16, font_weight="600")
        body = element("g", "\n".join(parts), transform=f"translate(0 {_HEADING})")
        parts = [element("rect", width=_WIDTH, height=height, fill="#FFFFFF"), heading, body, ""]
        look |= {"xmlns": "http://www.w3.org/2000/svg", "width": _WIDTH, "height": height}
    return element("svg", "\n".join([_title(title), *parts]), viewBox=f"0 0 {_WIDTH} {height:g}", role="img", **look)


@dataclass(frozen=True)
class _Panel:
    """A pair of axes with its traces.

    x_name, y_name: plotly's names of the axes, such as `x2` and `y`
    x, y:   scales from values to pixels
    names:  row names of a bar chart, bottom to top
    frame:  grid, labels and titles of the axes
    paper:  scale from 0..1 to the width of all panels
    filled: row -> value at which its next bar starts"""

    x_name: str
    y_name: str
    x: Scale
    y: Scale
    traces: Sequence[Data]
    names: Sequence[str]
    frame: Sequence[str]
    paper: Scale
    filled: dict[str, float] = field(default_factory=dict)

    def points(self, trace: Data, bases: dict[str, list[float]]) -> list[tuple[float, float, float]]:
        """(x, y, y of the baseline) in pixels. bases: running sums by stack group, which this trace adds to"""
        ys = trace["y"]
        below = [0.0] * len(ys)
        if group := trace.get("stackgroup"):
            below = bases.get(group, below)
            ys = bases[group] = [base + y for base, y in zip(below, ys, strict=True)]
        return [
            (self.x(x), self.y(y), self.y(base))
            for x, y, base in zip(trace["x"], ys, below, strict=True)
            if _is_drawn(x) and _is_drawn(y) and self.is_within(y)
        ]

    def is_within(self, y: float) -> bool:
        margin = 1e-9 * abs(self.y.high - self.y.low)
        return self.y.low - margin <= y <= self.y.high + margin

    def place(self, item: Data, axis: str, keys: Iterable[str]) -> list[float]:
        """Pixels of an item's values on an axis; values may be fractions of the panel (`x domain`) or of the paper."""
        scale, values = (self.x if axis == "x" else self.y), [item[key] for key in keys]
        reference = str(item.get(f"{axis}ref", axis))
        if reference == "paper" and axis == "x":  # across all panels, as panel titles are
            return [self.paper(value) for value in values]
        if reference == "paper" or reference.endswith(" domain"):
            return [scale.start + value * (scale.end - scale.start) for value in values]
        # On logarithmic axes plotly positions annotations by exponent and shapes by value.
        is_exponent = scale.is_log and "text" in item
        return [scale(10.0**value if is_exponent else value) for value in values]


def _panels(data: Sequence[Data], layout: Data) -> list[_Panel]:
    """The panels of a figure, left to right."""
    groups: dict[tuple[str, str], list[Data]] = {}
    for number, trace in enumerate(data):
        line = {"color": COLOURS[number % len(COLOURS)], **(trace.get("line") or {})}
        groups.setdefault((trace.get("xaxis", "x"), trace.get("yaxis", "y")), []).append({**trace, "line": line})
    margin, top, bottom = layout["margin"], layout["margin"]["t"], layout["height"] - layout["margin"]["b"]
    lines = [line for name in _bar_names(data) for line in name.split("<br>")]
    left = max(margin["l"], 14 + max((text_width(line, _FONT) for line in lines), default=0.0))
    paper = Scale(0.0, 1.0, left, _WIDTH - margin["r"])
    panels, is_shared = [], "matches" in layout.get("yaxis2", {})
    for (x_name, y_name), traces in groups.items():
        x_axis, y_axis = layout.get(f"xaxis{x_name[1:]}") or {}, layout.get(f"yaxis{y_name[1:]}") or {}
        shared = layout.get("yaxis") or {} if "matches" in y_axis else y_axis
        alike = [trace for group in groups.values() for trace in group] if is_shared else traces
        x = _scale(x_axis, traces, "x", *map(paper, x_axis.get("domain", (0.0, 1.0))))
        bars = _bar_names(traces)
        names = list(dict.fromkeys(y_axis.get("categoryarray") or bars)) if bars else []
        names = names[::-1] if y_axis.get("autorange") == "reversed" else names
        y = Scale(0.0, 1.0, bottom, top) if names else _scale(shared, alike, "y", bottom, top)
        rows = [(bottom - (number + 0.5) * (bottom - top) / len(names), name) for number, name in enumerate(names)]
        y_ticks = rows if names else _ticks(shared, y)
        y_ticks = y_ticks if y_axis.get("showticklabels", True) else [(at, "") for at, _ in y_ticks]
        x_title, y_title = ((axis.get("title") or {}).get("text", "") for axis in (x_axis, y_axis))
        grid = list(frame(x, y, _ticks(x_axis, x), y_ticks, x_title, y_title, bool(names)))
        panels.append(_Panel(x_name, y_name, x, y, traces, names, grid, paper))
    return panels


def _bar_names(traces: Sequence[Data]) -> list[str]:
    return [str(name) for trace in traces if trace["type"] == "bar" for name in trace["y"]]


def _values(traces: Sequence[Data], axis: str) -> list[float]:
    """All values on an axis; bars and stacked lines count by their sums."""
    single: list[float] = []
    sums: dict[Any, float] = {}
    for trace in traces:
        is_bar = trace["type"] == "bar"
        if is_bar or (axis == "y" and "stackgroup" in trace):
            values, places = (trace["x"], trace["y"]) if is_bar else (trace["y"], trace["x"])
            for number, (value, place) in enumerate(zip(values, places, strict=True)):
                if "base" in trace:
                    single += [_at(trace["base"], number), _at(trace["base"], number) + (value or 0.0)]
                elif value is not None:
                    sums[place] = sums.get(place, 0.0) + value
                    single += [value + error for error in _errors(trace, number)]
        else:
            single += trace[axis]
    return [value for value in (*single, *sums.values(), *([0.0] if sums else [])) if _is_drawn(value)]


def _at(value: Any, number: int) -> Any:
    """What is the same for all points, or that of a point."""
    return value[number] if isinstance(value, list | tuple) else value


def _errors(trace: Data, number: int) -> tuple[float, ...]:
    """Distances from a bar's end to those of its interval."""
    error = trace.get("error_x")
    return () if error is None else (-error["arrayminus"][number], error["array"][number])


def _scale(axis: Data, traces: Sequence[Data], name: str, start: float, end: float) -> Scale:
    """Without a range of its own an axis has room around markers, and above lines. name: x or y, of the axis"""
    values, is_log = _values(traces, name), axis.get("type") == "log"
    if is_log:
        values = [log10(value) for value in values if value > 0] or [0.0]
    low, high = axis.get("range") or (min(values, default=0.0), max(values, default=1.0))
    if "range" not in axis:
        room = _HEADROOM * (high - low or abs(high))
        is_around = is_log or any("markers" in trace.get("mode", "") for trace in traces)
        is_from_zero = axis.get("rangemode") == "tozero" and low >= 0
        high += room if is_around or start > end else 0.0
        low = 0.0 if is_from_zero and not is_log else low - (room if is_around else 0.0)
    high = high if high > low else low + 1.0
    return Scale(10.0**low, 10.0**high, start, end, True) if is_log else Scale(low, high, start, end)


def _ticks(axis: Data, scale: Scale) -> list[tuple[float, str]]:
    values, step = axis.get("tickvals"), axis.get("dtick")
    if values is None and step is None:
        values = scale.ticks
    elif values is None and scale.is_log:
        values = [10.0**power for power in range(ceil(log10(scale.low) - 1e-9), floor(log10(scale.high) + 1e-9) + 1)]
    elif values is None and step is not None:
        values = [step * number for number in range(ceil(scale.low / step), floor(scale.high / step) + 1)]
    labels = axis.get("ticktext") or [format_short(value) for value in values or ()]
    ticks = zip(values or (), labels, strict=True)
    shown = [(scale(at), str(x)) for at, x in ticks if scale.low * 0.999999 <= at <= scale.high * 1.000001]
    return shown if scale.start > scale.end or not shown else _apart(shown, 8 + max(text_width(x) for _, x in shown))


def _apart(ticks: Sequence[tuple[float, str]], room: float) -> list[tuple[float, str]]:
    """Those of an axis whose labels do not run into each other: at least `room` pixels apart, the last among them."""
    kept: list[tuple[float, str]] = []
    for tick in ticks:
        if not kept or tick[0] - kept[-1][0] >= room:
            kept.append(tick)
    return kept if kept[-1] == ticks[-1] else [*kept[: max(len(kept) - 1, 1)], ticks[-1]]


def _is_drawn(value: Any) -> bool:
    return isinstance(value, int | float) and isfinite(value)


def _is_line(trace: Data) -> bool:
    return trace["type"] == "scatter" and "lines" in trace.get("mode", "lines")


def _title(words: str) -> str:
    return f"<title>{escape(words)}</title>" if words else ""


def _stroke(line: Data, width: float = 2) -> dict[str, Any]:
    """The attributes of a stroke. width: where the line has none"""
    dash = _DASHES.get(line.get("dash", ""))
    return {"stroke": line.get("color", GREY), "stroke_width": line.get("width", width), "stroke_dasharray": dash}


def _traces(panel: _Panel) -> Iterator[str]:
    bases: dict[str, list[float]] = {}
    for trace in panel.traces:
        if trace["type"] == "bar":
            yield from _bars(trace, panel)
            continue
        points, mode = panel.points(trace, bases), trace.get("mode", "lines")
        if "lines" in mode:
            yield from _line(trace, points)
        if "markers" in mode:
            yield from _markers(trace, points)


def _line(trace: Data, points: Sequence[tuple[float, float, float]]) -> Iterator[str]:
    """A line and the area below it. points: (x, y, y of the baseline), in pixels"""
    top = [(x, y) for x, y, _ in points]
    if trace["line"].get("shape") == "hv":
        top = [corner for (a, b), (c, d) in pairwise(top) for corner in ((a, b), (c, b), (c, d))]
    stroke, is_stacked = _stroke(trace["line"]), "stackgroup" in trace
    if is_stacked or trace.get("fill"):
        bottom = [] if trace.get("fill") == "toself" else [(x, base) for x, _, base in reversed(points)]
        fill = {"fill": stroke["stroke"], "fill_opacity": 0.5} if is_stacked else {"fill": trace["fillcolor"]}
        yield element("polygon", points=points_of([*top, *bottom]), **fill, pointer_events="none")
    if stroke["stroke_width"]:
        yield element("polyline", points=points_of(top), fill="none", **stroke, pointer_events="none")


def _markers(trace: Data, points: Sequence[tuple[float, float, float]]) -> Iterator[str]:
    """Markers, then the texts beside them."""
    marker, texts = trace.get("marker") or {}, trace.get("text") if "text" in trace.get("mode", "") else None
    look: dict[str, Any] = {"fill_opacity": marker.get("opacity", 1)}
    shapes = [_marker(marker, x, y, number) for number, (x, y, _) in enumerate(points)]
    if not trace.get("hovertemplate"):  # what lies below them keeps its text
        yield element("g", "".join(element(tag, **form) for tag, form in shapes), **look, pointer_events="none")
    else:
        for number, (tag, form) in enumerate(shapes):
            yield element(tag, _title(hover_text(trace, number)), **form, **look)
    font, places = trace.get("textfont") or {}, trace.get("textposition", "top center")
    for number, (x, y, _) in enumerate(points if texts else ()):
        radius, (height, side) = _at(marker.get("size", 6), number) / 2, _at(places, number).split()  # "bottom center"
        dy = {"top": -radius - 4, "middle": 4, "bottom": radius + 12}[height]
        dx, anchor = {"left": (-radius - 3, "end"), "center": (0, "middle"), "right": (radius + 3, "start")}[side]
        ink = {"fill": _at(font.get("color", INK), number), "font_size": font.get("size", 12), "pointer_events": "none"}
        rim = {} if (height, side) == ("middle", "center") else _RIM
        yield text(x + dx, y + dy, str(texts[number]), anchor, **ink, **rim) if texts and texts[number] else ""


def _marker(marker: Data, x: float, y: float, number: int) -> tuple[str, dict[str, Any]]:
    """The tag and the attributes of the marker of a point."""
    symbol, colour = _at(marker.get("symbol", "circle"), number), _at(marker.get("color", GREY), number)
    radius = _at(marker.get("size", 6), number) / 2
    if symbol == "x":
        arms = (
            f"M{x - radius:.1f},{y - radius:.1f}l{2 * radius},{2 * radius}m0,{-2 * radius}l{-2 * radius},{2 * radius}"
        )
        return "path", {"d": arms, "stroke": colour, "stroke_width": 3}
    if symbol == "square":
        box = {"x": x - radius, "y": y - radius, "width": 2 * radius, "height": 2 * radius}
        return "rect", {**box, "fill": colour}
    is_open = symbol.endswith("-open")
    rim = {"stroke": colour, "stroke_width": 2} if is_open else {}
    return "circle", {"cx": x, "cy": y, "r": radius, "fill": "#FFFFFF" if is_open else colour, **rim}


def _bars(trace: Data, panel: _Panel) -> Iterator[str]:
    """Horizontal bars with their labels, from a base of their own, else stacked on those of earlier traces."""
    texts, row_height = trace.get("text"), abs(panel.y.start - panel.y.end) / max(len(panel.names), 1)
    height = trace.get("width", _BAR) * row_height
    for number, (value, name) in enumerate(zip(trace["x"], trace["y"], strict=True)):
        if value is None:
            continue
        low = _at(trace["base"], number) if "base" in trace else panel.filled.get(name, 0.0)
        panel.filled[name] = low + value
        start, end = sorted((panel.x(low), panel.x(low + value)))
        at = panel.y.start - (panel.names.index(name) + 0.5) * row_height
        at -= trace.get("offset", 0.0) * row_height + height / 2 if "offset" in trace else 0.0
        box = {"x": start, "y": at - height / 2, "width": max(end - start, 0), "height": height}
        colour = _at((trace.get("marker") or {}).get("color", GREY), number)
        yield element("rect", _title(hover_text(trace, number)), **box, fill=colour)
        if errors := [panel.x(low + value + error) for error in _errors(trace, number)]:
            ticks = "".join(f"M{tip:.1f},{at - 4:.1f}v8" for tip in errors)
            yield element("path", d=f"M{errors[0]:.1f},{at:.1f}H{errors[1]:.1f}{ticks}", stroke=INK, stroke_width=1.5)
            end = max(end, errors[1])
        if not texts or not texts[number]:
            continue
        lines = str(texts[number]).split("<br>")
        width, room = max(text_width(line, _FONT) for line in lines), end - start - 4
        is_outside = trace["textposition"] == "outside" or (trace["textposition"] == "auto" and room < width)
        size = _FONT if is_outside else min(_FONT, _FONT * room / width)
        if size < _MIN_FONT:
            continue
        label_end = (start - 6, "end") if value < 0 else (end + 6, "start")
        x, anchor = label_end if is_outside else ((start + end) / 2, "middle")
        ink = INK if is_outside else (trace.get("textfont") or {}).get("color", "white")
        for place, line in enumerate(lines):
            y = at + 4 + _LINE * (place - (len(lines) - 1) / 2)
            yield text(x, y, line, anchor, fill=ink, font_size=f"{size:.3g}", pointer_events="none")


def _annotation(note: Data, panel: _Panel) -> Iterator[str]:
    (x,), (y,) = (panel.place(note, axis, (axis,)) for axis in ("x", "y"))
    lines, font = note["text"].split("<br>"), note.get("font") or {}
    above = _LINE * (len(lines) - 1) if note.get("yanchor") == "bottom" else 0
    y -= above + note.get("yshift", 0) + 5
    side = note.get("xanchor", "center")
    x += {"left": 5, "right": -5}.get(side, 0)
    look: dict[str, Any] = {"fill": font.get("color", INK), "font_size": min(font.get("size", 12), 14)}
    look |= _RIM
    for place, line in enumerate(lines):
        yield text(x, y + _LINE * place, line, _ANCHORS[side], **look)


def _panel_of(item: Data, panels: Sequence[_Panel]) -> _Panel:
    """The panel that an annotation or shape refers to by its axes; the first one for `paper`."""
    named = {str(item.get(f"{axis}ref", axis)).partition(" ")[0] for axis in ("x", "y")}
    return next((panel for panel in panels if panel.x_name in named or panel.y_name in named), panels[0])


def hover_text(trace: Data, number: int) -> str:
    """The hover text of point `number` by plotly's `hovertemplate`, with line breaks; empty without a template."""

    def value(place: re.Match[str]) -> str:
        name, position, form = place.groups()
        item = trace[name][number]
        item = item if position is None else item[int(position)]
        return format_si(item, "", int(form[1:-1])) if (form or "").endswith("s") else format(item, form or "")

    return _PLACE.sub(value, _TAGS.sub("", trace.get("hovertemplate") or "").replace("<br>", "\n"))


def _hover_strips(panel: _Panel) -> Iterator[str]:
    """For line plots: a strip for every pixel column with points, whose hover text lists all of them."""
    texts_at: dict[int, dict[str, None]] = {}
    for trace in panel.traces:
        if _is_line(trace) and trace.get("hovertemplate"):
            for number, (x, _, _) in enumerate(panel.points(trace, {})):
                texts_at.setdefault(round(x), {})[hover_text(trace, number)] = None
    columns = sorted(texts_at)
    if not columns:
        return
    edges = [panel.x.start, *((a + b) / 2 for a, b in pairwise(columns)), panel.x.end]
    for (left, right), column in zip(pairwise(edges), columns, strict=True):
        box = {"x": left, "y": round(panel.y.end), "width": right - left, "height": round(panel.y.start - panel.y.end)}
        yield element("rect", _title("\n".join(texts_at[column])), class_="hover", **box)


def _legend_rows(layout: Data, panels: Sequence[_Panel]) -> list[list[tuple[float, Data]]]:
    """The rows of the legend: (x in pixels, trace) of every entry."""
    traces = [trace for panel in panels for trace in panel.traces]
    if not layout.get("showlegend", len(traces) > 1):
        return []
    rows: list[list[tuple[float, Data]]] = [[]]
    left = x = panels[0].x.start
    for trace in traces:
        if trace.get("name") and trace.get("showlegend") is not False:
            width = 20 + text_width(trace["name"], 13) + 18
            if rows[-1] and x + width > _WIDTH:
                rows.append([])
                x = left
            rows[-1].append((x, trace))
            x += width
    return rows
