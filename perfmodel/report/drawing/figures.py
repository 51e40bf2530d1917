"""What a figure is: plain data, in the form that plotly's script takes; and SVG as text, for what a code host or a page
without script shows: elements, scales with their ticks, colours.

A figure's traces are lines, dots, bars and bands over axes; its layout has the axes, lines across them, and notes. A
page with plotly draws it as it is, in its own theme; `figure_svg` draws it as a still picture. Arguments of builders
that no parameter names are plotly's. One meaning has one colour in every picture. The palette is Okabe and Ito's
(2008), made to be distinguished with any colour vision."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PINK, SKY, GREY = "#CC79A7", "#56B4E9", "#8A8F98"
INK, GRID = "#1F2933", "#E6E9ED"
COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PINK, SKY, GREY)
BOUND_COLOURS = {"compute": BLUE, "memory": GREEN, "communication": ORANGE, "overhead": GREY}
METRIC_COLOURS = {"ttft": BLUE, "tpot": GREEN, "itl": SKY, "e2el": PINK}

_MAX_TICKS, _FEWEST_TICKS = 7, 3
Ticks = Iterable[tuple[float, str]]


def element(tag: str, content: str = "", /, **attributes: Any) -> str:
    """An element with its attributes, in whose names `_` stands for `-`; those that are None are left out. content:
    markup inside of it"""
    pairs = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{value if isinstance(value, str) else format(round(value, 2), "g")}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{pairs}>{content}</{tag}>" if content else f"<{tag}{pairs}/>"


def text(x: float, y: float, words: str, anchor: str | None = None, **more: Any) -> str:
    """The text `words` at the place x, y in pixels. anchor: `middle` or `end`, if not their start"""
    return element("text", escape(words), x=x, y=y, text_anchor=anchor, **more)


def text_width(words: str, size: float = 12) -> float:
    """About how many pixels a text takes."""
    return len(words) * size * 0.6


def points_of(places: Iterable[tuple[float, float]]) -> str:
    """Places in pixels as the points of a line or an area."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def frame(
    x: "Scale", y: "Scale", x_ticks: Ticks, y_ticks: Ticks, x_title: str, y_title: str = "", has_rows: bool = False
) -> Iterator[str]:
    """The grid of a panel with its labels, and the titles of its axes. x, y: the axes; x_ticks, y_ticks: (pixel,
    label); x_title, y_title: of the axes; has_rows: the y axis has names of rows, which no lines go through"""
    for at, label in x_ticks:
        yield element("path", d=f"M{at:.1f},{y.end:.1f}V{y.start:.1f}", stroke=GRID)
        yield text(at, y.start + 18, label, "middle")
    for at, label in y_ticks:
        if not has_rows:
            yield element("path", d=f"M{x.start:.1f},{at:.1f}H{x.end:.1f}", stroke=GRID)
        lines = label.split("<br>")
        for place, line in enumerate(lines):
            yield text(x.start - 8, at + 4 + 13 * (place - (len(lines) - 1) / 2), line, "end")
    yield text((x.start + x.end) / 2, y.start + 38, x_title, "middle", fill=GREY)
    if y_title:
        middle = (y.start + y.end) / 2
        yield text(16, middle, y_title, "middle", transform=f"rotate(-90 16 {middle:.1f})", fill=GREY)


@dataclass(frozen=True)
class Scale:
    """Map from values between `low` and `high` to pixels between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, at = log10(low), log10(high), log10(at)
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """A few round values on the axis."""
        return _log_ticks(self.low, self.high) if self.is_log else _linear_ticks(self.low, self.high)


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    for steps in ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        ticks = [value for value in ticks if low <= value <= high]
        if len(ticks) <= _MAX_TICKS:
            break
    if len(ticks) < _FEWEST_TICKS:  # within a factor of two or three: few of 1, 2, 3 and 5 lie there
        ticks = [value for value in _linear_ticks(low, high) if value > 0]
    return ticks[:: ceil(len(ticks) / _MAX_TICKS)] if ticks else [low, high]


def _linear_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / (_MAX_TICKS - 1)
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return [round(index * step, 12) for index in range(ceil(low / step), floor(high / step) + 1)]


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
    hover: plotly's template of the text at a pointer; more: `width`, `dash`, `shape` of the line, else of the trace"""
    style: Trace = {"color": colour, **{key: more.pop(key) for key in ("width", "dash", "shape") if key in more}}
    style = {key: value for key, value in style.items() if value is not None}
    data = {"x": _plain(x), "y": _plain(y), "name": name, "line": style, "hovertemplate": hover}
    return {"type": "scatter", "mode": "lines", **data, **more}


def band(x: Values, low: Values, high: Values, fill: str, **more: Any) -> Trace:
    """An area from `low` to `high` over `x`. fill: its colour"""
    outline = {"x": [*_plain(x), *_plain(x)[::-1]], "y": [*_plain(high), *_plain(low)[::-1]], "line": {"width": 0}}
    style = {"fill": "toself", "fillcolor": fill, "hoverinfo": "skip"}
    return {"type": "scatter", "mode": "lines", **outline, **style, **more}


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


# Places of a text beside a marker, with where its middle is: in halves of its width, right and downwards.
_SIDES = {"bottom center": (0, 1), "top center": (0, -1), "middle right": (1, 0), "middle left": (-1, 0)}
_SIDES |= {
    f"{height} {side}": (dx, dy)
    for height, dy in (("bottom", 1), ("top", -1))
    for side, dx in (("right", 1), ("left", -1))
}


def text_places(markers: Sequence[tuple[float, float, float]], words: Sequence[str]) -> list[str]:
    """Where texts stand beside their markers, so that they cover no other text or marker where that can be. markers:
    (x, y, radius) in pixels, y downwards; words: of each, the most important first; none where empty"""
    taken = [(x - radius, x + radius, y - radius, y + radius) for x, y, radius in markers]
    places = []
    for (x, y, away), label in zip(markers, words, strict=True):
        half, boxes = text_width(label, 10.5) / 2, {}
        for name, (side, height) in _SIDES.items():
            middle, at = x + side * (away + half + 4), y + height * (away + 8)
            boxes[name] = middle - half, middle + half, at - 7, at + 7
        free = (name for name, box in boxes.items() if not any(_overlap(box, other) for other in taken))
        chosen = next(free, "bottom center")
        taken += [boxes[chosen]] if label else []
        places.append(chosen)
    return places


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    """Whether two boxes (left, right, top, bottom) have room in common."""
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]


def translucent(colour: str, opacity: float) -> str:
    """A colour of `#RRGGBB` through which one sees."""
    return f"rgba({','.join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))},{opacity:g})"


def _plain(values: Values) -> list[Any]:
    return list(values.tolist() if isinstance(values, np.ndarray) else values)
