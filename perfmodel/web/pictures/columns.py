"""Pictures of deployments side by side. Pure functions of what was found of each; colours of theme and paper are the
page's."""

__all__ = ["column_bars", "measured_dots"]

from collections.abc import Mapping, Sequence
from typing import Any

from perfmodel.planning.metrics import metric_of
from perfmodel.report.drawing.svg import BLUE, GREEN, GREY, ORANGE, PINK
from perfmodel.web.desk import Finding

_LETTERS = "ABCD"
_COLOURS = (BLUE, ORANGE, GREEN, PINK)
_SINGLE_ROWS = "Single rows near this setup"  # a table of every answer with trust
_ROW = 46  # of height for a column


def column_bars(findings: Sequence[Finding], metric: str) -> dict[str, Any]:
    """A metric of each run as a bar with its 80 % interval; columns without an answer have none."""
    known = [(number, each.shown.data) for number, each in enumerate(findings) if each.shown is not None]
    known = [(number, data) for number, data in known if data.get(metric) is not None]
    asked, values = metric_of(metric), [data[metric] for _, data in known]
    ends = [
        (data.get("interval") or {}).get(metric) or (value, value)
        for (_, data), value in zip(known, values, strict=True)
    ]
    bar = {
        "type": "bar",
        "orientation": "h",
        "x": values,
        "y": [_LETTERS[number] for number, _ in known],
        "marker": {"color": [_COLOURS[number] for number, _ in known]},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [high - value for (_, high), value in zip(ends, values, strict=True)],
            "arrayminus": [value - low for (low, _), value in zip(ends, values, strict=True)],
            "color": GREY,
            "thickness": 2,
        },
        "hovertemplate": f"%{{y}}: %{{x:,.4g}} {asked.unit}<extra></extra>",
    }
    axis = {"title": {"text": asked.title}, "rangemode": "tozero"}
    return {"data": [bar], "layout": _layout(axis, len(known))}


def measured_dots(findings: Sequence[Finding]) -> dict[str, Any] | None:
    """Predicted over measured of the single measurements near each, and of each kind's median; None where there are
    none. Signs of medians are not known: each is drawn on both sides of 1."""
    traces = []
    for number, finding in enumerate(findings):
        dots = [] if finding.shown is None else _rows(finding.shown.document)
        if dots:
            traces.append(_dots(number, [ratio for ratio, _ in dots], [label for _, label in dots], "circle"))
        cells = [] if finding.shown is None else finding.shown.data.get("trust", {}).get("nearest", [])
        ends = [
            (ratio, _cell(each))
            for each in cells
            for ratio in (1 + each["median_error"], 1 / (1 + each["median_error"]))
        ]
        if ends:
            traces.append(_dots(number, [ratio for ratio, _ in ends], [label for _, label in ends], "diamond-open"))
    if not traces:
        return None
    axis = {
        "title": {"text": "predicted ÷ measured, times"},
        "type": "log",
        "tickvals": [0.25, 0.33, 0.5, 0.67, 0.8, 1, 1.25, 1.5, 2, 3, 4],
        "range": _range([x for trace in traces for x in trace["x"]]),
    }
    line = {"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1, "line": {"color": GREY, "width": 1.5}}
    return {"data": traces, "layout": {**_layout(axis, len(findings)), "shapes": [line]}}


def _range(ratios: Sequence[float]) -> list[float]:
    from math import log10

    far = max(abs(log10(ratio)) for ratio in ratios)
    return [-max(far * 1.1, 0.15), max(far * 1.1, 0.15)]


def _dots(number: int, xs: Sequence[float], labels: Sequence[str], symbol: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": list(xs),
        "y": [_LETTERS[number]] * len(xs),
        "text": list(labels),
        "marker": {"color": _COLOURS[number], "size": 10, "symbol": symbol, "opacity": 0.8, "line": {"width": 1.5}},
        "hovertemplate": "%{text}: %{x:.3g} times<extra></extra>",
    }


def _rows(document: Mapping[str, Any]) -> list[tuple[float, str]]:
    """(predicted over measured, what it is) of an answer's single rows, as its document lists them."""
    found = []
    for block in document["blocks"]:
        for each in block["blocks"] if block["kind"] == "details" else [block]:
            if each["kind"] == "table" and each.get("title") == _SINGLE_ROWS:
                found += [_row(row) for row in each["rows"]]
    return found


def _row(row: Sequence[Any]) -> tuple[float, str]:
    label, metric, predicted, measured, _ = (str(cell) for cell in row)
    ratio = float(predicted.replace(",", "")) / float(measured.replace(",", ""))
    return ratio, f"{metric} {measured} measured, {label}"


def _cell(cell: Mapping[str, Any]) -> str:
    return f"median of {cell['rows']:,} rows, {cell['model']} on {cell['device']}, {cell['metric']}"


def _layout(axis: Mapping[str, Any], num_columns: int) -> dict[str, Any]:
    return {
        "height": 96 + _ROW * max(num_columns, 1),
        "xaxis": axis,
        "yaxis": {"title": {"text": "deployment"}, "type": "category", "autorange": "reversed"},
        "showlegend": False,
        "margin": {"l": 56, "r": 16, "t": 10, "b": 48},
    }
