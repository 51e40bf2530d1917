"""Colours and the plotly template: one meaning, one colour, in every figure.

The palette is Okabe and Ito's (2008), made to be told apart with any colour vision.
"""

__all__ = [
    "BLUE",
    "BOUND_COLOURS",
    "GREEN",
    "GREY",
    "GRID",
    "INK",
    "METRIC_COLOURS",
    "ORANGE",
    "PINK",
    "SKY",
    "VERMILION",
    "styled",
]

from typing import Any

import plotly.graph_objects as go

BLUE, ORANGE, GREEN, VERMILION, PINK, SKY, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#8A8F98",
)
INK = "#1F2933"
GRID = "#E6E9ED"

BOUND_COLOURS = {"compute": BLUE, "memory": GREEN, "communication": ORANGE, "overhead": GREY}
METRIC_COLOURS = {"ttft": BLUE, "tpot": GREEN, "itl": SKY, "e2el": PINK}

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
