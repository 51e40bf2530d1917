"""Figures as bare data and layout: whoever draws one, `drawing/figures.py` or the page, has a style of its own."""

__all__ = ["plot_of", "styled"]

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

_NONE = go.layout.Template()  # plotly would add one of its own to each figure


def styled(figure: go.Figure, height: int) -> go.Figure:
    """`figure` with a height in pixels; the width follows the page."""
    figure.update_layout(template=_NONE, height=height)
    return figure


def plot_of(traces: Sequence[Any], layout: Mapping[str, Any], height: int) -> go.Figure:
    """What `styled` makes of a figure, made at once: plotly checks a figure again with every change to it."""
    return go.Figure(traces, {**layout, "template": _NONE, "height": height})
