"""The panels of a plotly figure: axis positions, and the pixels of points and bars."""

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
_HEADROOM = 0.05  # above the values of a linear axis without an explicit range, as a share of their span


@dataclass(frozen=True)
class FigurePanel:
    """A pair of axes with its traces.

    x_name, y_name:   plotly's names of the axes, such as `x2` and `y`
    x, y:             scales from values to pixels
    names:            row names of a bar chart, bottom to top
    x_ticks, y_ticks: (pixel, label)
    paper:            scale from 0..1 to the width of all panels
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
    filled: dict[str, float] = field(default_factory=dict)  # row -> value at which its next bar starts

    @property
    def left(self) -> float:
        """Pixel at which the panel starts."""
        return self.x.start

    @property
    def row_height(self) -> float:
        """Pixels from one bar to the next."""
        return abs(self.y.start - self.y.end) / max(len(self.names), 1)

    def points(self, trace: Mapping[str, Any], bases: dict[str, list[float]]) -> list[tuple[float, float, float]]:
        """(x, y, y of the baseline) in pixels. bases: running sums by stack group, which this trace adds to"""
        xs, ys = trace["x"], trace["y"]
        below = [0.0] * len(ys)
        if group := trace.get("stackgroup"):
            below = bases.get(group, below)
            ys = bases[group] = [base + y for base, y in zip(below, ys, strict=True)]
        return [
            (self.x(x), self.y(y), self.y(base))
            for x, y, base in zip(xs, ys, below, strict=True)
            if _is_drawn(x, y) and self._is_within(y)
        ]

    def has_room_for(self, shape: Mapping[str, Any]) -> bool:
        """Whether a rule lies within the range of the y axis."""
        return str(shape.get("yref", "y")).endswith("domain") or self._is_within(shape["y0"])

    def _is_within(self, y: float) -> bool:
        margin = 1e-9 * abs(self.y.high - self.y.low)
        return self.y.low - margin <= y <= self.y.high + margin

    def bars(self, trace: Mapping[str, Any]) -> list[tuple[float, float, float]]:
        """(start, end, y of the middle) of each bar, in pixels. The bars of the next trace start at their ends."""
        spans = []
        for value, name in zip(trace["x"], trace["y"], strict=True):
            start = self.filled.get(name, 0.0)
            self.filled[name] = start + value
            row = self.y.start - (self.names.index(name) + 0.5) * self.row_height
            spans.append((self.x(start), self.x(start + value), row))
        return spans

    def place(self, item: Mapping[str, Any], axis: str, keys: Iterable[str]) -> list[float]:
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


def panels_of(data: Sequence[Mapping[str, Any]], layout: Mapping[str, Any], width: float) -> list[FigurePanel]:
    """The panels of a figure, left to right."""
    traces = [_plain(trace, COLOURS[number % len(COLOURS)]) for number, trace in enumerate(data)]
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for trace in traces:
        groups.setdefault((trace.get("xaxis", "x"), trace.get("yaxis", "y")), []).append(trace)
    margin = {**MARGIN, **(layout.get("margin") or {})}
    names = [str(name) for trace in traces if trace["type"] == "bar" for name in trace["y"]]
    left = max(margin["l"], 14 + max(map(text_width, names), default=0.0))
    box = (left, width - margin["r"], margin["t"], layout["height"] - margin["b"])
    return [_panel(x_name, y_name, panel_traces, layout, box) for (x_name, y_name), panel_traces in groups.items()]


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
    """Row names of a bar chart, bottom to top; none for lines."""
    bars = [str(name) for trace in traces if trace["type"] == "bar" for name in trace["y"]]
    names = list(dict.fromkeys(axis.get("categoryarray") or bars)) if bars else []
    return names[::-1] if axis.get("autorange") == "reversed" else names


def _values(traces: Sequence[Mapping[str, Any]], axis: str) -> list[float]:
    """All values on an axis; bars and stacked lines count by their sums."""
    single: list[float] = []
    sums: dict[Any, float] = {}
    for trace in traces:
        if trace["type"] == "bar":
            for value, name in zip(trace["x"], trace["y"], strict=True):
                sums[name] = sums.get(name, 0.0) + value
        elif axis == "y" and "stackgroup" in trace:
            for x, y in zip(trace["x"], trace["y"], strict=True):
                sums[x] = sums.get(x, 0.0) + y
        else:
            single += trace[axis]
    return [value for value in (*single, *sums.values(), *([0.0] if sums else [])) if _is_drawn(value)]


def _scale(axis: Mapping[str, Any], values: Sequence[float], start: float, end: float) -> Scale:
    if axis.get("type") == "log":
        positive = [value for value in values if value > 0] or [1.0]
        low, high = axis.get("range") or (log10(min(positive)), log10(max(positive)))
        return Scale(10.0**low, 10.0 ** max(high, low + 0.1), start, end, True)
    low, high = axis.get("range") or (min(values, default=0.0), max(values, default=1.0))
    if axis.get("rangemode") == "tozero":
        low = min(low, 0.0)
    if "range" not in axis and start > end:  # vertical: some headroom
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
    """The trace with its arrays as lists; plotly has numpy arrays, since version 6 as base-64 bytes.

    colour: default for lines
    """
    plain = {key: _listed(value) for key, value in trace.items()}
    return {**plain, "line": {"color": colour, **(plain.get("line") or {})}}


def _listed(value: Any) -> Any:
    if isinstance(value, Mapping) and "bdata" in value:
        return np.frombuffer(b64decode(value["bdata"]), value["dtype"]).tolist()
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else list(value) if isinstance(value, tuple) else value
