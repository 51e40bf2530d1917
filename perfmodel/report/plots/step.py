"""Figures of one step: its operators on the roofline, their times, and what lies in device memory."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from perfmodel.cost.kernel_models.device import peak_flops_per_s
from perfmodel.cost.steps.explain import OperatorEstimate
from perfmodel.report.drawing import figures as fig
from perfmodel.report.drawing.figures import BLUE, BOUND_COLOURS, GREY, INK, SKY, Figure, Trace, axis, bars, figure
from perfmodel.report.numbers import format_si
from perfmodel.specs.hardware import HardwareSpec

_MAX_OPERATORS = 14
_PLOT_PIXELS, _DECADE_PIXELS = 800, 55  # about: the axes' width, a decade's height
_MIN_NAMED = 0.06  # share of a bar below which a part has no name in it; hovering names all
_FREE = "rgba(128,128,128,0.18)"
_MIN_LABELLED = 0.02  # share of the step below which a marker has no name beside it; hovering names all


def roofline_figure(hardware: HardwareSpec, rows: Sequence[OperatorEstimate]) -> Figure:
    """Log-log: achieved FLOP/s over intensity, with a roof for each dtype that the operators use. Marker area follows
    the operator's share of the step. Operators without FLOPs or bytes (collectives, launches) have no place on a
    roofline and are left out; `operators_figure` shows their time."""
    drawable = [row for row in rows if row.flops > 0 and row.hbm_bytes > 0 and row.duration_s > 0]  # on a log-log plot
    roofs = _roofs(hardware, drawable)
    bandwidth = hardware.memory_bandwidth
    intensities = [point.intensity for point in drawable] + [peak / bandwidth for peak in roofs]
    low, high = min(intensities) / 4, max(intensities) * 16
    floor = min((point.flops / point.duration_s for point in drawable), default=low * bandwidth) / 3
    top = max(roofs) * 3
    decades = [10.0**power for power in range(math.floor(math.log10(floor)), math.ceil(math.log10(top)) + 1)]
    log: Trace = {"type": "log", "minor": {"dtick": "D1", "showgrid": True, "gridcolor": "#F3F5F7"}}
    ticks: Trace = {"tickvals": decades, "ticktext": [format_si(decade, "", 1) for decade in decades]}
    x = axis("arithmetic intensity (FLOP/byte)", range=[math.log10(low), math.log10(high)], dtick=1, **log)
    y = axis("FLOP/s", range=[math.log10(floor), math.log10(top)], **log, **ticks)
    places: Trace = {"xanchor": "right", "yanchor": "bottom"}
    ridges = [
        fig.note(f"{rate}: ridge at {peak / bandwidth:.0f} FLOP/byte", math.log10(high), math.log10(peak), **places)
        for peak, rate in roofs.items()
    ]
    traces: list[Trace] = []
    for peak, rate in roofs.items():
        at = np.sort(np.append(np.geomspace(low, high, 120), peak / bandwidth))
        name = f"{rate}: {format_si(peak, 'FLOP/s')}, {format_si(bandwidth, 'B/s')}"
        hover = f"{rate} roof: %{{y:.3s}}FLOP/s at %{{x:.3g}} FLOP/byte<extra></extra>"
        colour, width = (GREY, 1.5) if traces else (INK, 2.5)
        traces.append(fig.line(at, np.minimum(peak, bandwidth * at), name, colour, hover, width=width))
    traces += _markers(drawable, math.log10(high / low))
    return figure(traces, 520, x, y, annotations=ridges, legend={"yanchor": "top", "y": -0.16}, margin={"b": 96})


def _roofs(hardware: HardwareSpec, rows: Sequence[OperatorEstimate]) -> dict[float, str]:
    """Peak FLOP/s -> the formats that run at it, for the formats of `rows`, the busiest first."""
    busy: dict[str, float] = {}
    for point in rows:
        busy[point.work.rate] = busy.get(point.work.rate, 0.0) + point.duration_s
    rates = sorted(busy, key=lambda rate: -busy[rate]) or list(hardware.declared.peak_flops_per_s)[:1]
    roofs: dict[float, str] = {}
    for rate in rates:
        peak = peak_flops_per_s(hardware, rate)
        roofs[peak] = f"{roofs[peak]}, {rate}" if peak in roofs else rate
    return roofs


def _markers(rows: Sequence[OperatorEstimate], decades: float) -> Iterator[Trace]:
    """Operators, those of each bound in a trace. decades: of the x axis"""
    total = sum(point.duration_s for point in rows) or 1.0
    labels = _labels(rows, total)
    pixels = {point.name: 9 + 34 * math.sqrt(point.duration_s / total) for point in rows}  # a marker's diameter
    ordered = sorted(rows, key=lambda point: -point.duration_s)
    heights = [-math.log10(point.flops / point.duration_s) * _DECADE_PIXELS for point in ordered]
    lefts = [math.log10(point.intensity) * _PLOT_PIXELS / decades for point in ordered]
    markers = [(x, y, pixels[point.name] / 2) for x, y, point in zip(lefts, heights, ordered, strict=True)]
    text_places = fig.text_places(markers, [labels.get(point.name, "") for point in ordered])
    places = dict(zip((point.name for point in ordered), text_places, strict=True))
    for bound, colour in BOUND_COLOURS.items():
        group = [point for point in rows if point.bound == bound]
        if not group:
            continue
        sizes = [pixels[point.name] for point in group]
        yield fig.dots(
            [point.intensity for point in group],
            [point.flops / point.duration_s for point in group],
            {"color": colour, "opacity": 0.85, "size": sizes, "line": {"color": "white", "width": 1}},
            name=_bound_name(bound),
            text=[labels.get(point.name, "") for point in group],
            textposition=[places[point.name] for point in group],
            textfont={"size": 11},
            customdata=[
                [p.name, format_si(p.duration_s, "s"), p.duration_s / total * 100, format_si(p.hbm_bytes, "B")]
                for p in group
            ],
            hovertemplate="<b>%{customdata[0]}</b><br>%{x:.3g} FLOP/byte, %{y:.3s}FLOP/s<br>"
            "%{customdata[1]} (%{customdata[2]:.1f} %), %{customdata[3]}<extra></extra>",
        ) | {"mode": "markers+text"}


def _bound_name(bound: str) -> str:
    return bound if bound in ("overhead", "others") else f"{bound}-bound"


def _labels(rows: Sequence[OperatorEstimate], total_s: float) -> dict[str, str]:
    """Names to write beside markers: one for each cluster of markers that would overlap, with how many it speaks for.
    Products of one batch with different weights have nearly the same intensity, so they lie on top of each other.
    total_s: of all rows"""
    leaders: dict[str, tuple[float, float, int]] = {}
    for point in sorted(rows, key=lambda p: -p.duration_s):
        x, y = math.log10(point.intensity), math.log10(point.flops / point.duration_s)
        near = next((n for n, (a, b, _) in leaders.items() if abs(a - x) < 0.35 and abs(b - y) < 0.2), None)
        if near is None:
            leaders[point.name] = (x, y, 0)
        else:
            a, b, others = leaders[near]
            leaders[near] = (a, b, others + 1)
    shares = {point.name: point.duration_s / total_s for point in rows}
    shown = {name: others for name, (_, _, others) in leaders.items() if shares[name] >= _MIN_LABELLED}
    return {name: f"{name} +{others}" if others else name for name, others in shown.items()}


def operators_figure(rows: Sequence[OperatorEstimate]) -> Figure:
    """Time of each operator in the step, longest first; what does not fit is one bar called `others`."""
    ordered = sorted((p for p in rows if p.duration_s > 0), key=lambda p: -p.duration_s)
    spans = [(p.name, p.duration_s, p.bound) for p in ordered[:_MAX_OPERATORS]]
    if rest := ordered[_MAX_OPERATORS:]:
        spans.append((f"{len(rest)} others", sum(p.duration_s for p in rest), "others"))
    total = sum(p.duration_s for p in ordered) or 1.0
    traces = []
    for bound, colour in {**BOUND_COLOURS, "others": "#C9CED6"}.items():
        group = [(name, seconds) for name, seconds, of in spans if of == bound]
        if group:
            texts = {"text": [f"{seconds / total:.1%}" for _, seconds in group], "textposition": "outside"}
            times, hover = [seconds * 1e6 for _, seconds in group], "%{y}: %{x:,.1f} µs<extra></extra>"
            trace = bars(times, [name for name, _ in group], colour, hover, name=_bound_name(bound), **texts)
            traces.append({**trace, "cliponaxis": False})
    y = {"categoryorder": "array", "categoryarray": [name for name, _, _ in reversed(spans)]}
    return figure(traces, 130 + 26 * len(spans), axis("time in the step (µs)"), y, barmode="stack", margin={"r": 64})


def memory_figure(plan: Any) -> Figure:
    """One device's memory as a bar: what the engine takes of what a process sees. plan: a MemoryPlan, or what has its
    sizes as attributes"""
    parts = [
        ("weights", plan.weight_bytes, BLUE),
        ("activations", plan.activation_bytes, fig.GREEN),
        ("CUDA graphs", plan.graph_bytes, SKY),
        ("reserve", plan.reserve_bytes + plan.rotary_table_bytes, GREY),
        ("recurrent states", plan.state_bytes, SKY),
        ("KV blocks", plan.kv_bytes, fig.ORANGE),
    ]
    visible = plan.visible_bytes
    parts.append(("not used", max(visible - sum(size for _, size, _ in parts), 0), _FREE))
    inside = {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
    traces = []
    for name, size, colour in parts:
        if size > 0:
            label = f"{name}<br>{size / 1e9:.1f} GB" if size > _MIN_NAMED * visible else ""
            ink = {"textfont": {"color": INK}} if colour == _FREE else {}
            hover = f"{name}: %{{x:.2f}} GB<extra></extra>"
            traces.append(bars([size / 1e9], [""], colour, hover, name=name, text=[label], **inside, **ink))
    x = axis(f"GB of the {visible / 1e9:.1f} that a process sees", range=[0, visible / 1e9])
    labels = {"minsize": 10, "mode": "hide"}  # none is set smaller
    look = {"barmode": "stack", "bargap": 0.1, "uniformtext": labels, "legend": {"traceorder": "normal"}}
    return figure(traces, 170, x, {"visible": False}, **look)
