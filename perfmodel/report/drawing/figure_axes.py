"""Panels of a figure in plotly's terms: where its axes lie, and where its points and bars are drawn."""

__all__ = ["MARGIN", "FigurePanel", "panels_of"]

from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, isfinite, log10
from typing import Any

import numpy as np

from perfmodel.report.drawing.chart_axes import Scale
from perfmodel.report.drawing.charts import COLOURS, text_width
from perfmodel.report.numbers import format_short

MARGIN = {"l": 64, "r": 24, "t": 48, "b": 48}
_HEADROOM = 0.05  # of a linear axis without a given range, beyond its values


@dataclass(frozen=True)
class FigurePanel:
    """A pair of axes with its traces.

    x, y:             from values to pixels; y_name, x_name: what plotly calls the axes: x2, y
    names:            of the rows of bars, from below
    x_ticks, y_ticks: (pixel, label); paper: over the width of all panels, from 0 to 1
    """

    x_name: str
    y_name: str
    x: Scale
    y: Scale
    traces: Sequence[Mapping[str, Any]]
    names: Sequence[str]
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    x_title: str
    y_title: str
    has_y_labels: bool
    paper: Scale
    filled: dict[str, float] = field(default_factory=dict)  # row -> where its next bar starts

    @property
    def left(self) -> float:
        """Pixels left of the panel."""
        return self.x.start

    @property
    def row_height(self) -> float:
        """Pixels from one bar to the next."""
        return abs(self.y.start - self.y.end) / max(len(self.names), 1)

    def points(self, trace: Mapping[str, Any], bases: dict[str, list[float]]) -> list[tuple[float, float, float]]:
        """(x, y, y of what lies below) in pixels. bases: sums of what is stacked so far, which this trace adds to"""
        xs, ys = trace["x"], trace["y"]
        below = [0.0] * len(ys)
        if group := trace.get("stackgroup"):
            below = bases.get(group, below)
            ys = bases[group] = [base + y for base, y in zip(below, ys, strict=True)]
        triples = (
            each for each in zip(xs, ys, below, strict=True) if _is_drawn(*each[:2]) and self._is_within(each[1])
        )
        return [(self.x(x), self.y(y), self.y(base)) for x, y, base in triples]

    def has_room_for(self, shape: Mapping[str, Any]) -> bool:
        """Whether a rule lies on the axes, rather than beyond their ends."""
        return str(shape.get("yref", "y")).endswith("domain") or self._is_within(shape["y0"])

    def _is_within(self, y: float) -> bool:
        margin = 1e-9 * abs(self.y.high - self.y.low)
        return self.y.low - margin <= y <= self.y.high + margin

    def bars(self, trace: Mapping[str, Any]) -> list[tuple[float, float, float]]:
        """(start, end, height of the middle) of each bar, in pixels; the next trace goes on from their ends."""
        found = []
        for value, name in zip(trace["x"], trace["y"], strict=True):
            start = self.filled.get(name, 0.0)
            self.filled[name] = start + value
            row = self.y.start - (self.names.index(name) + 0.5) * self.row_height
            found.append((self.x(start), self.x(start + value), row))
        return found

    def place(self, item: Mapping[str, Any], axis: str, keys: Iterable[str]) -> list[float]:
        """Pixels of an item's values on an axis, which may be shares of the panel (`x domain`) or of the paper."""
        scale, values = (self.x if axis == "x" else self.y), [item[key] for key in keys]
        reference = str(item.get(f"{axis}ref", axis))
        if reference == "paper" and axis == "x":  # of all panels together: a title over one of them
            return [self.paper(value) for value in values]
        if reference == "paper" or reference.endswith(" domain"):
            return [scale.start + value * (scale.end - scale.start) for value in values]
        # Annotations have their places on logarithmic axes as exponents, shapes as values.
        is_exponent = scale.is_log and "text" in item
        return [scale(10.0**value if is_exponent else value) for value in values]


def panels_of(data: Sequence[Mapping[str, Any]], layout: Mapping[str, Any], width: float) -> list[FigurePanel]:
    """The panels of a figure, from the left."""
    traces = [_plain(trace, COLOURS[number % len(COLOURS)]) for number, trace in enumerate(data)]
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for trace in traces:
        groups.setdefault((trace.get("xaxis", "x"), trace.get("yaxis", "y")), []).append(trace)
    margin = {**MARGIN, **(layout.get("margin") or {})}
    names = [str(name) for trace in traces if trace["type"] == "bar" for name in trace["y"]]
    left = max(margin["l"], 14 + max(map(text_width, names), default=0.0))
    box = (left, width - margin["r"], margin["t"], layout["height"] - margin["b"])
    return [_panel(x_name, y_name, mine, layout, box) for (x_name, y_name), mine in groups.items()]


def _panel(
    x_name: str,
    y_name: str,
    traces: Sequence[Mapping[str, Any]],
    layout: Mapping[str, Any],
    box: tuple[float, float, float, float],
) -> FigurePanel:
    left, right, top, bottom = box
    x_axis, y_axis = layout.get(f"xaxis{x_name[1:]}") or {}, layout.get(f"yaxis{y_name[1:]}") or {}
    shared = layout.get("yaxis") or {} if "matches" in y_axis else y_axis
    start, end = x_axis.get("domain", (0.0, 1.0))
    x = _scale(x_axis, _values(traces, "x"), left + start * (right - left), left + end * (right - left))
    names = _names(traces, y_axis)
    y = Scale(0.0, 1.0, bottom, top) if names else _scale(shared, _values(traces, "y"), bottom, top)
    row = (bottom - top) / max(len(names), 1)
    rows = [(bottom - (number + 0.5) * row, name) for number, name in enumerate(names)]
    x_title, y_title = ((axis.get("title") or {}).get("text", "") for axis in (x_axis, y_axis))
    y_ticks, has_labels = rows if names else _ticks(shared, y), y_axis.get("showticklabels", True)
    paper = Scale(0.0, 1.0, left, right)
    return FigurePanel(
        x_name, y_name, x, y, traces, names, _ticks(x_axis, x), y_ticks, x_title, y_title, has_labels, paper
    )


def _names(traces: Sequence[Mapping[str, Any]], axis: Mapping[str, Any]) -> list[str]:
    """The names of the rows of bars, the lowest first; none for lines."""
    bars = [str(name) for trace in traces if trace["type"] == "bar" for name in trace["y"]]
    found = list(dict.fromkeys(axis.get("categoryarray") or bars)) if bars else []
    return found[::-1] if axis.get("autorange") == "reversed" else found


def _values(traces: Sequence[Mapping[str, Any]], axis: str) -> list[float]:
    """All values on an axis: of bars and of stacked lines their sums."""
    found: list[float] = []
    sums: dict[Any, float] = {}
    for trace in traces:
        if trace["type"] == "bar":
            for value, name in zip(trace["x"], trace["y"], strict=True):
                sums[name] = sums.get(name, 0.0) + value
        elif axis == "y" and "stackgroup" in trace:
            for x, y in zip(trace["x"], trace["y"], strict=True):
                sums[x] = sums.get(x, 0.0) + y
        else:
            found += trace[axis]
    return [value for value in (*found, *sums.values(), *([0.0] if sums else [])) if _is_drawn(value)]


def _scale(axis: Mapping[str, Any], values: Sequence[float], start: float, end: float) -> Scale:
    if axis.get("type") == "log":
        positive = [value for value in values if value > 0] or [1.0]
        low, high = axis.get("range") or (log10(min(positive)), log10(max(positive)))
        return Scale(10.0**low, 10.0 ** max(high, low + 0.1), start, end, True)
    low, high = axis.get("range") or (min(values, default=0.0), max(values, default=1.0))
    if axis.get("rangemode") == "tozero":
        low = min(low, 0.0)
    if "range" not in axis and start > end:  # heights: a little room above
        high += _HEADROOM * (high - low)
    return Scale(low, high if high > low else low + 1.0, start, end)


def _ticks(axis: Mapping[str, Any], scale: Scale) -> list[tuple[float, str]]:
    values, step = axis.get("tickvals"), axis.get("dtick")
    if values is None and scale.is_log and step is not None:
        values = [10.0**power for power in range(ceil(log10(scale.low) - 1e-9), floor(log10(scale.high) + 1e-9) + 1)]
    elif values is None and step is not None:
        values = [step * number for number in range(ceil(scale.low / step), floor(scale.high / step) + 1)]
    elif values is None:
        values = scale.ticks
    labels = axis.get("ticktext") or [format_short(value) for value in values]
    pairs = zip(values, labels, strict=True)
    return [
        (scale(value), str(label)) for value, label in pairs if scale.low * 0.999999 <= value <= scale.high * 1.000001
    ]


def _is_drawn(*values: Any) -> bool:
    return all(isinstance(value, int | float) and isfinite(value) for value in values)


def _plain(trace: Mapping[str, Any], colour: str) -> dict[str, Any]:
    """The trace with its arrays as lists: plotly has numpy's, or from version 6 on their bytes in base 64.

    colour: of a line that names none
    """
    found = {key: _listed(value) for key, value in trace.items()}
    return {**found, "line": {"color": colour, **(found.get("line") or {})}}


def _listed(value: Any) -> Any:
    if isinstance(value, Mapping) and "bdata" in value:
        return np.frombuffer(b64decode(value["bdata"]), value["dtype"]).tolist()
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else list(value) if isinstance(value, tuple) else value
