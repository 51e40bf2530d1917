"""The plotly template: one style for all plots."""

__all__ = ["plot_of", "styled"]

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from perfmodel.report.drawing.colours import BLUE, GREEN, GREY, GRID, INK, ORANGE, PINK, SKY, VERMILION

_AXIS: dict[str, Any] = {
    "gridcolor": GRID,
    "zerolinecolor": GRID,
    "linecolor": "#C3C9D1",
    "ticks": "outside",
    "tickcolor": "#C3C9D1",
    "ticklen": 4,
    "title": {"standoff": 8},
    "automargin": True,
}
_TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": INK},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "colorway": [BLUE, ORANGE, GREEN, VERMILION, PINK, SKY, GREY],
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "margin": {"l": 64, "r": 24, "t": 48, "b": 48},
        "legend": {
            "orientation": "h",
            "yanchor": "bottom",
            "y": 1.02,
            "xanchor": "left",
            "x": 0.0,
            "traceorder": "normal",
        },
        "hoverlabel": {"bgcolor": "white", "font": {"color": INK}},
        "bargap": 0.35,
    }
)


def styled(figure: go.Figure, height: int) -> go.Figure:
    """`figure` with the house template and a height in pixels; the width follows the page."""
    figure.update_layout(template=_TEMPLATE, height=height)
    return figure


def plot_of(traces: Sequence[Any], layout: Mapping[str, Any], height: int) -> go.Figure:
    """What `styled` makes of a figure, made at once: plotly checks a figure again with every change to it."""
    return go.Figure(traces, {**layout, "template": _TEMPLATE, "height": height})
