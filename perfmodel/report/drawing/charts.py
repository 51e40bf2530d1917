"""Figures that answers of several kinds have.

`lines_figure`: a metric over an axis. `bars_figure`: a metric by name. `waterfall_figure`: what each rung of a ladder
gains. `pareto_figure`: one metric over another, with the front. `scatter_figure`: predicted over measured.
`ecdf_figure`: which share of the rows lies within which error. Panels stand side by side."""

import textwrap
from collections.abc import Mapping, Sequence
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from perfmodel.report.drawing import figures as fig
from perfmodel.report.drawing.figures import COLOURS, GREY, Figure, Trace, axis, figure, line, text_width
from perfmodel.report.numbers import format_short

if TYPE_CHECKING:
    from perfmodel.evidence.report import Rows

_HEIGHT, _ROW = 400, 26  # pixels, of a figure and of a bar
_GAP = 0.06  # between panels, of the width of all
_PLOT_PIXELS = (860, 300)  # about: the axes of a figure
_LONGEST_NAME = 48  # letters in a line
_MAX_POINTS = 3000  # of all series together: beyond, a fixed sample is drawn
_MAX_SERIES = 6
Series = tuple[str, "Rows"]  # a group of rows with its name
_ECDF_STEPS = 120
_ECDF_ERRORS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_ECDF_SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)


class Bar(NamedTuple):
    """A bar with what is written at its end, and a line over it from one end of an interval to the other."""

    name: str
    value: float | None
    colour: str
    text: str = ""
    interval: tuple[float, float] | None = None


class Dot(NamedTuple):
    """A point with its name; `is_front` for what nothing dominates."""

    name: str
    x: float
    y: float
    colour: str
    is_front: bool


class Ladder(NamedTuple):
    """gains: how many times better each rung is than the one below, the first being 1; None where one is missing"""

    title: str
    gains: Sequence[float | None]
    colour: str = fig.BLUE


def _panels(
    groups: Mapping[str, Sequence[Trace]], height: float, x: Trace, y: Trace, is_shared: bool = True, **layout: Any
) -> Figure:
    """A figure of panels side by side. groups: the traces of each by its heading; a name that several have is in the
    legend once; height: in pixels; x, y: axes; is_shared: all panels have one y axis"""
    traces, notes, named, axes = list[Trace](), list[Trace](), set[str](), dict[str, Trace]()
    width = (1 - _GAP * (len(groups) - 1)) / len(groups)
    for number, (heading, group) in enumerate(groups.items()):
        of, start = str(number + 1) if number else "", number * (width + _GAP)
        for trace in group:
            name = trace.get("name", "")
            is_new = trace.get("showlegend", True) and name not in named
            traces.append({**trace, "xaxis": f"x{of}", "yaxis": f"y{of}", "showlegend": is_new})
            named.add(name)
        axes[f"xaxis{of}"] = {**x, "anchor": f"y{of}", "domain": [start, start + width]}
        axes[f"yaxis{of}"] = {**y, "anchor": f"x{of}"}
        if number:
            axes[f"yaxis{of}"] |= {"title": {"text": ""}} | (
                {"matches": "y", "showticklabels": False} if is_shared else {}
            )
        places = {"xref": "paper", "yref": "paper", "xanchor": "center", "yanchor": "bottom"}
        notes += [fig.note(heading, start + width / 2, 1, 14, **places)] if heading else []
    return {"data": traces, "layout": {"height": height, **axes, "annotations": notes, **layout}}


def lines_figure(
    panels: Mapping[str, Sequence[Trace]],
    x_title: str,
    y_title: str,
    log: Sequence[str] = (),
    even: float | None = None,
) -> Figure:
    """Lines by panel, all over the same axes.

    panels: lines by heading; x_title, y_title: of the axes; log: which are logarithmic, of "x" and "y"
    even:   a value at which a thin line says "no difference" """
    xs = sorted({x for group in panels.values() for trace in group for x in trace["x"]})
    ticks = {"tickvals": xs, "ticktext": [format_short(x) for x in xs], "tickmode": "array"}
    x, y = ({"type": "log" if name in log else "linear"} for name in ("x", "y"))
    rules = [] if even is None else [fig.across(even, GREY, width=1)]
    return _panels(panels, _HEIGHT, axis(x_title, **x, **ticks), axis(y_title, rangemode="tozero", **y), shapes=rules)


def bars_figure(bars: Sequence[Bar], x_title: str) -> Figure:
    """Horizontal bars from top to bottom, each with its value at its end."""
    names = ["<br>".join(textwrap.wrap(bar.name, _LONGEST_NAME)) for bar in bars]
    words = [bar.text or ("none" if bar.value is None else format_short(bar.value)) for bar in bars]
    look: Trace = {"text": words, "textposition": "outside", "cliponaxis": False}
    if any(bar.interval for bar in bars):
        ends = [(bar.value or 0.0, *(bar.interval or (bar.value or 0.0,) * 2)) for bar in bars]
        finite = max(end for three in ends for end in three if np.isfinite(end))
        above, below = [min(high, finite) - value for value, _, high in ends], [value - low for value, low, _ in ends]
        look["error_x"] = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1.5}
    trace = fig.bars([bar.value or 0.0 for bar in bars], names, [bar.colour for bar in bars], "", **look)
    y, height = {"autorange": "reversed", "categoryarray": names}, 110 + _ROW * sum(x.count("<br>") + 1 for x in names)
    margin = {"r": 30 + max(text_width(x, 13) for x in words)}
    return figure([trace], height, axis(x_title, rangemode="tozero"), y, showlegend=False, margin=margin)


def pareto_figure(panels: Mapping[str, Sequence[Dot]], x_title: str, y_title: str, log: Sequence[str] = ()) -> Figure:
    """Dots by panel; the front is filled and joined by a line, what it dominates is hollow. panels: by heading;
    x_title, y_title: of the axes; log: logarithmic axes, of "x" and "y" """
    wide, high = _PLOT_PIXELS[0] / len(panels), _PLOT_PIXELS[1]
    groups: dict[str, list[Trace]] = {}
    for heading, dots in panels.items():
        front = sorted((dot for dot in dots if dot.is_front), key=lambda dot: dot.x)
        xs, ys = [dot.x for dot in dots], [dot.y for dot in dots]
        places = [
            (a * wide, -b * high, 6.0) for a, b in zip(_shares(xs, "x" in log), _shares(ys, "y" in log), strict=True)
        ]
        colours = [dot.colour for dot in dots]
        marker = {"color": colours, "size": 11, "symbol": ["circle" if dot.is_front else "circle-open" for dot in dots]}
        names = [dot.name for dot in dots]
        look = {"text": names, "textposition": fig.text_places(places, names), "textfont": {"color": colours}}
        groups[heading] = [
            line([dot.x for dot in front], [dot.y for dot in front], "", GREY, "", dash="dot", width=1.5),
            fig.dots(xs, ys, marker, mode="markers+text", cliponaxis=False, **look),
        ]
    x, y = (axis(title, type="log" if name in log else "linear") for title, name in ((x_title, "x"), (y_title, "y")))
    return _panels(groups, _HEIGHT, x, y, is_shared=False, showlegend=False, margin={"r": 60})


def _shares(values: Sequence[float], is_log: bool) -> list[float]:
    """Where values lie between the least and the largest of them, from 0 to 1."""
    at = np.log10(values) if is_log else np.array(values)
    shares: list[float] = ((at - at.min()) / (np.ptp(at) or 1.0)).tolist()
    return shares


def waterfall_figure(names: Sequence[str], ladders: Sequence[Ladder], x_title: str) -> Figure:
    """One panel for each of `ladders`; rungs from top to bottom, each from where the one above ends, on a logarithmic
    axis, so that equal gains are equally long. names: of the rungs; x_title: of the axis"""
    groups, rows = {}, [*names, "together"]
    for ladder in ladders:
        reached = np.cumprod([1.0, *(gain or 1.0 for gain in ladder.gains)]).tolist()
        colours = [ladder.colour if gain is None or gain >= 1 else fig.VERMILION for gain in ladder.gains]
        words = ["not run" if gain is None else f"x{_times(gain)}" for gain in ladder.gains]
        words[0] = "start"
        starts, ends = [*reached[:-1], 1.0], [*reached[1:], reached[-1]]
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        look = {"base": starts, "text": [*words, f"{_times(reached[-1])}x"], "textposition": "outside"}
        hover = "%{y}: %{text}<extra></extra>"
        groups[ladder.title] = [fig.bars(lengths, rows, [*colours, GREY], hover, cliponaxis=False, **look)]
    y = {"autorange": "reversed", "categoryarray": rows}
    x = axis(x_title, type="log")
    return _panels(groups, 130 + _ROW * len(rows), x, y, showlegend=False, margin={"r": 70})


def _times(factor: float) -> str:
    return f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}" if factor >= 10 else f"{factor:.2f}"


def scatter_figure(series: Sequence[Series], unit: str) -> Figure:
    """Predicted over measured, one colour per series; beside the diagonal, dashed, a factor of 1.25 either way."""
    shown = _largest(series)
    values = np.concatenate([ends for _, rows in shown for ends in (rows.predicted, rows.measured)])
    low, high = floor(log10(values.min())), ceil(log10(values.max()))
    high = low + 1 if low == high else high
    traces = []
    for factor in (1.0, 1.25, 0.8):
        start, end = max(10.0**low, 10.0**low / factor), min(10.0**high, 10.0**high / factor)
        dash = {} if factor == 1 else {"dash": "dash"}
        ends = [start * factor, end * factor]
        traces.append(line([start, end], ends, "", GREY, "", width=1, showlegend=False, **dash))
    for (name, rows), colour in zip(shown, COLOURS, strict=False):
        count = max(1, min(len(rows), round(_MAX_POINTS * 2 * len(rows) / len(values))))
        sample = np.unique(np.linspace(0, len(rows) - 1, count).astype(np.int64))
        marker = {"color": colour, "size": 4, "opacity": 0.45}
        traces.append(fig.dots(rows.measured[sample], rows.predicted[sample], marker, name=f"{name} ({len(rows):,})"))
    powers = [10.0**power for power in range(low, high + 1)]
    ticks = {"type": "log", "range": [low, high], "tickvals": powers, "ticktext": list(map(_power, powers))}
    x, y = (axis(f"{what}, {unit}", **ticks) for what in ("measured", "predicted"))
    return figure(traces, 520, x, y, showlegend=True, margin={"r": 400})


def ecdf_figure(series: Sequence[Series]) -> Figure:
    """The share of each series' rows whose absolute error is at most that on the axis."""
    first, last = log10(_ECDF_ERRORS[0]), log10(_ECDF_ERRORS[-1])
    errors, traces = np.geomspace(_ECDF_ERRORS[0], _ECDF_ERRORS[-1], _ECDF_STEPS), []
    for (name, rows), colour in zip(_largest(series), COLOURS, strict=False):
        within = np.searchsorted(np.sort(np.abs(rows.errors)), errors, side="right") / len(rows)
        traces.append(line(errors, within, f"{name} ({len(rows):,})", colour, "", width=2))
    ticks = [{"tickvals": list(at), "ticktext": [f"{x * 100:g} %" for x in at]} for at in (_ECDF_ERRORS, _ECDF_SHARES)]
    x = axis("absolute error, at most", type="log", range=[first, last], **ticks[0])
    return figure(traces, 460, x, axis("share of rows", range=[0, 1], **ticks[1]), showlegend=True)


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


def _power(value: float) -> str:
    """1, 10, 0.01; powers beyond as 1e-6."""
    exponent = round(log10(value))
    return f"1e{exponent}" if abs(exponent) > 3 else f"{value:g}"
