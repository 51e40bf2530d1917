"""Figures of a run: latency distributions, load and throughput over time, KV usage, where the time went."""

__all__ = ["bound_figure", "kv_figure", "latency_figure", "load_figure", "throughput_figure"]

from collections.abc import Mapping
from math import log10

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from perfmodel.report.drawing.colours import BLUE, BOUND_COLOURS, GREEN, GREY, METRIC_COLOURS, ORANGE, VERMILION
from perfmodel.report.numbers import format_number
from perfmodel.report.plots.series import (
    Pools,
    TimeBins,
    blocks_in_use,
    engine_names,
    envelope,
    quantile_curve,
    rate,
    replicas_of,
    summed,
    time_bins,
)
from perfmodel.report.plots.style import styled
from perfmodel.sim.records.columns import RequestColumns, StepColumns
from perfmodel.specs.slo import SLO

Floats = NDArray[np.float64]

_MAX_REPLICA_LINES = 8
_BLUE_TINT, _ORANGE_TINT = "rgba(0,114,178,0.22)", "rgba(230,159,0,0.3)"
_LONG_TAIL = 12.0  # times the median


def latency_figure(requests: RequestColumns, slo: SLO) -> go.Figure:
    """Cumulative distributions of TTFT, TPOT and E2E over requests, with the SLO as a dashed line."""
    panels = (
        ("ttft", "TTFT", slo.limit_ms("ttft")),
        ("tpot", "TPOT", slo.limit_ms("tpot")),
        ("e2el", "E2E", slo.limit_ms("e2el")),
    )
    figure = make_subplots(
        rows=1, cols=3, shared_yaxes=True, subplot_titles=[name for _, name, _ in panels], horizontal_spacing=0.05
    )
    for column, (metric, name, limit_ms) in enumerate(panels, start=1):
        values_ms = getattr(requests, f"{metric}_s") * 1e3  # one at a time: there may be a million
        x, share = quantile_curve(values_ms)
        colour = METRIC_COLOURS[metric]
        figure.add_trace(
            go.Scatter(
                x=x,
                y=share * 100,
                name=name,
                mode="lines",
                line={"color": colour, "width": 2.5},
                hovertemplate=f"%{{y:.1f}} % of requests have {name} ≤ %{{x:.4g}} ms<extra></extra>",
            ),
            row=1,
            col=column,
        )
        right_ms = _right_edge(values_ms, limit_ms)
        _mark_percentiles(figure, column, values_ms, colour, right_ms)
        if limit_ms is not None:
            _mark_limit(figure, column, values_ms, limit_ms, right_ms)
        _scale_axis(figure, column, f"{name} (ms)", values_ms, right_ms)
    figure.update_yaxes(title_text="requests (%)", range=[0, 110], tickvals=[0, 25, 50, 75, 100], row=1, col=1)
    return styled(figure.update_layout(showlegend=False), 340)


def _has_long_tail(values_ms: Floats) -> bool:
    """Whether a linear axis up to the largest value would squeeze nearly all of the curve into its first pixels."""
    finite = values_ms[np.isfinite(values_ms)]
    if not len(finite) or finite.min() <= 0:
        return False
    return bool(finite.max() > _LONG_TAIL * np.median(finite))


def _scale_axis(figure: go.Figure, column: int, title: str, values_ms: Floats, right_ms: float) -> None:
    """A linear axis from 0 to the right edge, or where the tail is long a logarithmic one from the smallest value."""
    if _has_long_tail(values_ms):
        ends = [log10(0.9 * float(np.nanmin(values_ms))), log10(right_ms)]
        figure.update_xaxes(title_text=f"{title}, logarithmic", type="log", range=ends, row=1, col=column)
    else:
        figure.update_xaxes(title_text=title, range=[0, right_ms], row=1, col=column)


def _right_edge(values_ms: Floats, limit_ms: float | None) -> float:
    """Where the axis ends: past the largest value, and past the limit if that does not squeeze the curve."""
    largest = float(np.nanmax(values_ms)) if np.isfinite(values_ms).any() else 1.0
    if limit_ms is not None and largest < limit_ms <= 3 * largest:
        largest = limit_ms
    return largest * 1.1


def _mark_percentiles(figure: go.Figure, column: int, values_ms: Floats, colour: str, right_ms: float) -> None:
    finite = values_ms[np.isfinite(values_ms)]
    if not len(finite):
        return
    levels = (50, 99)
    points = np.percentile(finite, levels)
    figure.add_trace(
        go.Scatter(
            x=points,
            y=levels,
            mode="markers+text",
            marker={"color": colour, "size": 8, "line": {"color": "white", "width": 1.5}},
            text=[f"p{level}  {format_number(value, 1)}" for level, value in zip(levels, points, strict=True)],
            textposition=["bottom right" if _is_left(values_ms, points[0], right_ms) else "top left", "top left"],
            hoverinfo="skip",
            cliponaxis=False,
        ),
        row=1,
        col=column,
    )


def _mark_limit(figure: go.Figure, column: int, values_ms: Floats, limit_ms: float, right_ms: float) -> None:
    finite = values_ms[np.isfinite(values_ms)]
    within = float(np.mean(finite <= limit_ms)) * 100 if len(finite) else 0.0
    is_shown = limit_ms < right_ms
    if is_shown:
        figure.add_vline(x=limit_ms, line={"color": VERMILION, "dash": "dash", "width": 1.5}, row=1, col=column)
    at_ms = limit_ms if is_shown else right_ms
    figure.add_annotation(
        x=log10(at_ms) if _has_long_tail(values_ms) else at_ms,  # plotly takes annotations' places as logarithms
        y=0,
        xanchor="left" if is_shown and _is_left(values_ms, limit_ms, right_ms) else "right",
        yanchor="bottom",
        yshift=4,
        showarrow=False,
        text=f"SLO {limit_ms:g} ms{'' if is_shown else ', beyond the axis'}<br>met by {within:.1f} %",
        font={"color": VERMILION, "size": 12},
        align="right",
        bgcolor="rgba(255,255,255,0.85)",
        row=1,
        col=column,
    )


def _is_left(values_ms: Floats, at_ms: float, right_ms: float) -> bool:
    """Whether a place is in the left part of its axis, so that text to its right has room."""
    if _has_long_tail(values_ms):
        left_ms = 0.9 * float(np.nanmin(values_ms))
        return log10(at_ms / left_ms) < 0.5 * log10(right_ms / left_ms)
    return at_ms < 0.5 * right_ms


def throughput_figure(steps: StepColumns) -> go.Figure:
    """Tokens per second over time, prompt and generated apart, stacked."""
    bins = time_bins(steps)
    decoded = rate(steps, steps.num_decodes, bins)
    prompt = rate(steps, steps.num_tokens - steps.num_decodes, bins)
    figure = go.Figure()
    for name, values, colour in (("decode", decoded, GREEN), ("prefill", prompt, BLUE)):
        figure.add_trace(
            go.Scatter(
                x=bins.centres_s,
                y=values,
                name=f"{name} tokens",
                mode="lines",
                stackgroup="tokens",
                line={"color": colour, "width": 1},
                hovertemplate=f"%{{x:.4g}} s: %{{y:,.0f}} {name} tok/s<extra></extra>",
            )
        )
    figure.update_yaxes(title_text="tokens per second", rangemode="tozero")
    figure.update_xaxes(title_text="time (s)")
    return styled(figure, 320)


def _band(bins: TimeBins, ends: tuple[Floats, Floats], colour: str) -> go.Scatter:
    """A band from the minimum to the maximum of each bin, drawn below the line of means. ends: (minima, maxima)"""
    low, high = ends
    return go.Scatter(
        x=np.concatenate((bins.centres_s, bins.centres_s[::-1])),
        y=np.concatenate((high, low[::-1])),
        mode="lines",
        line={"width": 0},
        fill="toself",
        fillcolor=colour,
        showlegend=False,
        hoverinfo="skip",
    )


def load_figure(steps: StepColumns) -> go.Figure:
    """Requests running and waiting over time, all replicas together: means, with bands from minimum to maximum."""
    bins = time_bins(steps)
    figure = go.Figure()
    kinds = (("running", steps.num_running, BLUE, _BLUE_TINT), ("waiting", steps.num_waiting, ORANGE, _ORANGE_TINT))
    for name, counts, colour, tint in kinds:
        values = counts.astype(np.float64)
        figure.add_trace(_band(bins, envelope(steps, values, bins), tint))
        figure.add_trace(
            go.Scatter(
                x=bins.centres_s,
                y=summed(steps, values, bins),
                name=name,
                mode="lines",
                line={"color": colour, "width": 2},
                hovertemplate=f"%{{x:.4g}} s: %{{y:.1f}} {name}<extra></extra>",
            )
        )
    figure.update_yaxes(title_text="requests", rangemode="tozero")
    figure.update_xaxes(title_text="time (s)")
    return styled(figure, 320)


def kv_figure(steps: StepColumns, num_blocks: int, pools: Pools = ()) -> go.Figure:
    """KV cache usage over time, in percent of each replica's blocks; replicas are named by their `pools`. A single
    replica has a band from minimum to maximum."""
    names = engine_names(pools)
    bins = time_bins(steps)
    replicas = replicas_of(steps)
    figure = go.Figure()
    top = 0.0
    for replica in replicas[:_MAX_REPLICA_LINES]:
        share = 100 / max(num_blocks, 1)
        usage = blocks_in_use(steps, bins, replica) * share
        top = max(top, float(usage.max()))
        only = len(replicas) == 1
        if only:
            ends = envelope(steps, steps.used_blocks.astype(np.float64) * share, bins)
            top = float(ends[1].max())
            figure.add_trace(_band(bins, ends, _BLUE_TINT))
        figure.add_trace(
            go.Scatter(
                x=bins.centres_s,
                y=usage,
                name="KV blocks in use" if only else names.get(replica, f"replica {replica}"),
                mode="lines",
                line={"width": 2} | ({"color": BLUE} if only else {}),
                hovertemplate="%{x:.4g} s: %{y:.1f} %<extra></extra>",
            )
        )
    figure.add_hline(y=100, line={"color": GREY, "dash": "dot", "width": 1})
    figure.update_yaxes(title_text=f"of {num_blocks:,} KV blocks (%)", range=[0, min(max(1.4 * top, 5.0), 105.0)])
    figure.update_xaxes(title_text="time (s)")
    return styled(figure.update_layout(showlegend=len(replicas) > 1), 320)


def bound_figure(shares: Mapping[str, float]) -> go.Figure:
    """What bounded the time of the run, one bar of 100 %."""
    figure = go.Figure()
    for name, share in shares.items():
        figure.add_trace(
            go.Bar(
                x=[share * 100],
                y=[""],
                name=name,
                orientation="h",
                marker={"color": BOUND_COLOURS.get(name, GREY)},
                text=[f"{name} {share:.0%}"] if share >= 0.06 else None,
                textposition="inside",
                insidetextanchor="middle",
                textfont={"color": "white"},
                hovertemplate=f"{name}: %{{x:.1f}} %<extra></extra>",
            )
        )
    figure.update_layout(barmode="stack", margin={"t": 40, "b": 44})
    figure.update_xaxes(title_text="share of busy time (%)", range=[0, 100])
    return styled(figure, 178)
