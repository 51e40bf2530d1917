"""Unstyled figures: data and layout only. The renderer, `drawing/figures.py` or the web page, adds its own style."""

__all__ = ["plot_of", "styled"]

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

_NO_TEMPLATE = go.layout.Template()  # otherwise plotly adds its default template


def styled(figure: go.Figure, height: int) -> go.Figure:
    """`figure` with a height in pixels; the width follows the page."""
    figure.update_layout(template=_NO_TEMPLATE, height=height)
    return figure


def plot_of(traces: Sequence[Any], layout: Mapping[str, Any], height: int) -> go.Figure:
    """What `styled` makes of a figure, made at once: plotly checks a figure again with every change to it."""
    return go.Figure(traces, {**layout, "template": _NO_TEMPLATE, "height": height})
