"""Figures of a fleet: replicas and failures over time, the load of each pool, what each costs, classes of requests."""

__all__ = ["classes_figure", "pool_costs_figure", "pool_load_figure", "replicas_figure"]

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from perfmodel.report.drawing.colours import BLUE, GREEN, GREY, ORANGE, PINK, SKY, VERMILION
from perfmodel.report.plots.series import Pools, binned_mean, pool_names, quantile_curve, time_bins
from perfmodel.report.plots.style import styled
from perfmodel.sim.records.columns import StepColumns

Floats = NDArray[np.float64]

_FEW = 1.0  # requests, the most on average that wait in an interval: below, nothing is to be seen
_COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, GREY)


def replicas_figure(pools: Pools, end_s: float) -> go.Figure:
    """Replicas of each pool that serve, in steps (dotted: with those that start), and a cross for each failure.

    end_s: of the run
    """
    figure = go.Figure()
    fixed = sum(not pool.get("replicas_over_time") for pool in pools)
    for pool, name, colour in zip(pools, pool_names(pools), _cycled(len(pools)), strict=True):
        width = 2.0
        if not pool.get("replicas_over_time"):  # lines that may lie on each other: the first ones are wider
            fixed, width = fixed - 1, 2.0 * fixed
        counts = pool.get("replicas_over_time") or [[0.0, pool["replicas"], pool["replicas"]]]
        at = [row[0] for row in counts] + [end_s]
        for column, label, dash in ((2, f"{name}, with those that start", "dot"), (1, name, "solid")):
            values = [row[column] for row in counts]
            if column == 2 and values == [row[1] for row in counts]:
                continue
            line = {"color": colour, "dash": dash, "width": width if column == 1 else 1, "shape": "hv"}
            hover = f"%{{x:.4g}} s: %{{y}} replicas of {label}<extra></extra>"
            figure.add_trace(
                go.Scatter(x=at, y=[*values, values[-1]], name=label, mode="lines", line=line, hovertemplate=hover)
            )
        _mark_failures(figure, name, counts, pool.get("failed_at_s") or [])
    figure.update_yaxes(title_text="replicas", rangemode="tozero", dtick=_unit(pools))
    figure.update_xaxes(title_text="time (s)", range=[0, end_s])
    return styled(figure.update_layout(showlegend=True), 320)


def _mark_failures(figure: go.Figure, name: str, counts: Sequence[Sequence[float]], failed_at: Sequence[float]) -> None:
    if not failed_at:
        return
    times = np.array([row[0] for row in counts])
    serving = [counts[max(int(np.searchsorted(times, at, "right")) - 1, 0)][1] for at in failed_at]
    figure.add_trace(
        go.Scatter(
            x=list(failed_at),
            y=serving,
            name=f"failures of {name}",
            mode="markers",
            marker={"symbol": "x", "size": 11, "color": VERMILION, "line": {"color": "white", "width": 1}},
            hovertemplate=f"a replica of {name} fails at %{{x:.4g}} s<extra></extra>",
        )
    )


def pool_load_figure(steps: StepColumns, pools: Pools) -> go.Figure:
    """Requests that run (solid) and wait (dotted) in the engines of each pool, over time."""
    bins, figure = time_bins(steps), go.Figure()
    for pool, name, colour in zip(pools, pool_names(pools), _cycled(len(pools)), strict=True):
        first, count = pool["engines"]
        for counts, what, dash in ((steps.num_running, "running", "solid"), (steps.num_waiting, "waiting", "dot")):
            values = sum(
                (binned_mean(steps, counts.astype(np.float64), bins, engine) for engine in range(first, first + count)),
                np.zeros(len(bins.centres_s)),
            )
            if what == "waiting" and values.max() < _FEW:
                continue
            label = f"{name}, {what}"
            line = {"color": colour, "dash": dash, "width": 2}
            hover = f"%{{x:.4g}} s: %{{y:.1f}} in {label}<extra></extra>"
            figure.add_trace(
                go.Scatter(x=bins.centres_s, y=values, name=label, mode="lines", line=line, hovertemplate=hover)
            )
    figure.update_yaxes(title_text="requests", rangemode="tozero")
    figure.update_xaxes(title_text="time (s)")
    return styled(figure.update_layout(showlegend=True), 320)


def pool_costs_figure(pools: Pools) -> go.Figure:
    """USD of each pool over the run, a bar each."""
    figure, names = go.Figure(), pool_names(pools)
    for pool, name, colour in zip(pools, names, _cycled(len(pools)), strict=True):
        usd, hours = pool["usd_total"], pool.get("gpu_hours")
        text = f"{usd:.2f} USD" + ("" if hours is None else f", {hours:.2f} device hours")
        figure.add_trace(
            go.Bar(
                x=[usd],
                y=[name],
                orientation="h",
                marker={"color": colour},
                text=[text],
                textposition="auto",
                hovertemplate=f"{name}: {text}<extra></extra>",
            )
        )
    figure.update_xaxes(title_text="USD over the run", rangemode="tozero")
    figure.update_yaxes(autorange="reversed")
    return styled(figure.update_layout(showlegend=False), 110 + 44 * len(pools))


def classes_figure(ttft_ms: Mapping[str, Floats], limits_ms: Mapping[str, float | None]) -> go.Figure:
    """The distribution of TTFT over the requests of each class, on a logarithmic axis, with the limits of classes."""
    figure = go.Figure()
    for (name, values), colour in zip(ttft_ms.items(), _cycled(len(ttft_ms)), strict=True):
        x, share = quantile_curve(values)
        hover = f"%{{y:.1f}} % of {name} have TTFT ≤ %{{x:.4g}} ms<extra></extra>"
        line = {"color": colour, "width": 2.5}
        figure.add_trace(go.Scatter(x=x, y=share * 100, name=name, mode="lines", line=line, hovertemplate=hover))
        limit = limits_ms.get(name)
        if limit is not None:
            dashed = {"color": colour, "dash": "dash", "width": 1.5}
            label = f"limit of {name}, {limit:g} ms"
            figure.add_trace(go.Scatter(x=[limit, limit], y=[0, 100], name=label, mode="lines", line=dashed))
    figure.update_yaxes(title_text="requests (%)", range=[0, 105])
    figure.update_xaxes(title_text="TTFT (ms)", type="log")
    return styled(figure.update_layout(showlegend=True), 320)


def _cycled(count: int) -> list[str]:
    return [_COLOURS[number % len(_COLOURS)] for number in range(count)]


def _unit(pools: Pools) -> int | None:
    """One replica between ticks where there are few."""
    return 1 if max((pool.get("replicas_peak") or pool["replicas"] for pool in pools), default=0) <= 12 else None
