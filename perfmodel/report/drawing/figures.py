"""What a figure is: plain data, in the form that plotly's script takes. Its traces are lines, dots, bars and bands over
axes; its layout has the axes, lines across them, and notes.

A page with plotly draws it as it is, in its own theme; `figure_svg` draws it as a still picture. Arguments of builders
that no parameter names are plotly's.
"""

__all__ = [
    "Figure",
    "Floats",
    "Trace",
    "across",
    "axis",
    "band",
    "bars",
    "dots",
    "figure",
    "line",
    "note",
    "translucent",
    "upright",
]

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Values = Sequence[Any] | Floats
Trace = dict[str, Any]
Figure = dict[str, Any]


def figure(traces: Iterable[Trace], height: float, x: Trace, y: Trace, **layout: Any) -> Figure:
    """A figure of one panel. traces: what it shows; height: in pixels, the width follows the page; x, y: its axes"""
    return {"data": list(traces), "layout": {"height": height, "xaxis": x, "yaxis": y, **layout}}


def axis(title: str, **more: Any) -> Trace:
    """An axis with its title."""
    return {"title": {"text": title}, **more}


def line(x: Values, y: Values, name: str, colour: str | None, hover: str, **more: Any) -> Trace:
    """A line through the points x, y. name: in the legend; colour: `#RRGGBB`, or None for the next one of the theme;
    hover: plotly's template of the text at a pointer; more: `width`, `dash` and `shape` are of the line, others of the
    trace"""
    style: Trace = {"color": colour, **{key: more.pop(key) for key in ("width", "dash", "shape") if key in more}}
    style = {key: value for key, value in style.items() if value is not None}
    data = {"x": _plain(x), "y": _plain(y), "name": name, "line": style, "hovertemplate": hover}
    return {"type": "scatter", "mode": "lines", **data, **more}


def band(x: Values, low: Values, high: Values, fill: str, **more: Any) -> Trace:
    """An area from `low` to `high` over `x`. fill: its colour"""
    outline = {"x": [*_plain(x), *_plain(x)[::-1]], "y": [*_plain(high), *_plain(low)[::-1]], "line": {"width": 0}}
    return {
        "type": "scatter",
        "mode": "lines",
        **outline,
        "fill": "toself",
        "fillcolor": fill,
        "hoverinfo": "skip",
    } | more


def dots(x: Values, y: Values, marker: Trace, **more: Any) -> Trace:
    """Points without a line. marker: `color`, `size`, `symbol` of all or of each"""
    return {"type": "scatter", "mode": "markers", "x": _plain(x), "y": _plain(y), "marker": marker, **more}


def bars(values: Values, names: Sequence[str], colour: str | list[str], hover: str, **more: Any) -> Trace:
    """Horizontal bars of the given values, one for each of `names`, in one colour or one each. hover: as of `line`"""
    data = {"x": _plain(values), "y": list(names), "marker": {"color": colour}, "hovertemplate": hover}
    return {"type": "bar", "orientation": "h", **data, **more}


def upright(at: float, colour: str, **more: Any) -> Trace:
    """A line over the whole height. more: `width` and `dash` are of the line"""
    return _rule({"x0": at, "x1": at, "yref": "y domain", "y0": 0, "y1": 1}, colour, more)


def across(at: float, colour: str, **more: Any) -> Trace:
    """A line over the whole width. more: as of `upright`"""
    return _rule({"xref": "x domain", "x0": 0, "x1": 1, "y0": at, "y1": at}, colour, more)


def _rule(ends: Trace, colour: str, more: Trace) -> Trace:
    style: Trace = {"color": colour, **{key: more.pop(key) for key in ("width", "dash") if key in more}}
    return {"type": "line", **ends, "line": style, **more}


def note(words: str, x: float, y: float, size: float = 12, **places: Any) -> Trace:
    """`words` at the place x, y, which are exponents on a logarithmic axis. size: of its letters, in pixels"""
    return {"text": words, "x": x, "y": y, "showarrow": False, "font": {"size": size}, **places}


def translucent(colour: str, opacity: float) -> str:
    """A colour of `#RRGGBB` through which one sees."""
    return f"rgba({','.join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))},{opacity:g})"


def _plain(values: Values) -> list[Any]:
    plain: list[Any] = values.tolist() if isinstance(values, np.ndarray) else list(values)
    return plain
