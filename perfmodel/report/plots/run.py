"""Figures of a run: latency distributions, load and throughput over time, KV usage, where the time went; and of a
fleet: replicas and failures over time, the load and the costs of each pool, classes of requests.

Records become curves small enough to draw: quantile curves and time-weighted means in equal bins. A step record states
what held from its start to its end, possibly for many equal steps; means over a bin weigh each record by its time in
the bin, so a record that spans several bins is spread over them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import log10
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.report.drawing import figures as fig
from perfmodel.report.drawing.figures import BLUE, GREEN, GREY, ORANGE, VERMILION, Figure, Trace, axis, figure, line
from perfmodel.report.numbers import format_number
from perfmodel.sim.records.columns import RequestColumns, StepColumns
from perfmodel.specs.slo import SLO

Floats = NDArray[np.float64]
Pools = Sequence[Mapping[str, Any]]  # rows of a summary

MAX_POINTS = 500  # of a distribution
MAX_BINS = 240  # of a curve over time
MAX_ATTAINMENT_BINS = 60  # of shares of requests, which scatter in shorter ones


@dataclass(frozen=True)
class TimeBins:
    """Equal bins from 0 to the end of the last step; `edges_s` has one more entry than there are bins."""

    edges_s: Floats

    @property
    def centres_s(self) -> Floats:
        return (self.edges_s[:-1] + self.edges_s[1:]) / 2

    @property
    def width_s(self) -> float:
        return float(self.edges_s[1] - self.edges_s[0])


def time_bins(steps: StepColumns) -> TimeBins:
    """At most MAX_BINS bins, and no more than there are records (10 at least, so that short runs have a shape)."""
    num_bins = int(np.clip(len(steps) // 2, 10, MAX_BINS))
    end_s = float(steps.end_s.max()) if len(steps) else 1.0
    return TimeBins(np.linspace(0.0, max(end_s, 1e-9), num_bins + 1))


def replicas_of(steps: StepColumns) -> list[int]:
    """The replicas that ran any step, ascending."""
    return [int(replica) for replica in np.unique(steps.replica)]


def binned_mean(steps: StepColumns, values: Floats, bins: TimeBins, replica: int) -> Floats:
    """Mean over time of a value that holds during each record of `replica` and is 0 between records. steps: all
    records, with `values` of each; bins: of time, each of which gets a mean"""
    rows = np.flatnonzero(steps.replica == replica)
    rows = rows[np.argsort(steps.start_s[rows], kind="stable")]
    if not len(rows):
        return np.zeros(len(bins.edges_s) - 1)
    start, end = steps.start_s[rows], steps.end_s[rows]
    area = np.cumsum(values[rows] * (end - start))
    times = np.maximum.accumulate(np.column_stack((start, end)).ravel())
    areas = np.column_stack((area - values[rows] * (end - start), area)).ravel()
    return np.diff(np.interp(bins.edges_s, times, areas)) / bins.width_s


def summed(steps: StepColumns, values: Floats, bins: TimeBins) -> Floats:
    """`binned_mean` added up over the replicas."""
    total = np.zeros(len(bins.edges_s) - 1)
    for replica in replicas_of(steps):
        total += binned_mean(steps, values, bins, replica)
    return total


def envelope(steps: StepColumns, values: Floats, bins: TimeBins) -> tuple[Floats, Floats]:
    """Minimum and maximum per bin of the quantity that `summed` averages. They include the run's own extremes."""
    times, at = np.unique(np.concatenate((steps.start_s, steps.end_s)), return_inverse=True)
    changes = np.bincount(at, np.concatenate((values, -values)), len(times))
    levels = np.concatenate(([0.0], np.cumsum(changes)))  # before the first time, then after every time
    first = np.searchsorted(times, bins.edges_s[:-1], "right")
    last = np.searchsorted(times, bins.edges_s[1:], "left")
    spans = np.column_stack((first, np.maximum(last, first) + 1)).ravel()
    padded = np.append(levels, levels[-1])  # `reduceat` needs an index past the last level
    return np.minimum.reduceat(padded, spans)[::2], np.maximum.reduceat(padded, spans)[::2]


def rate(steps: StepColumns, counts: NDArray[np.int64], bins: TimeBins) -> Floats:
    """Things per second, from how many each step of a record handles, over all replicas."""
    duration = np.maximum(steps.end_s - steps.start_s, 1e-12)
    return summed(steps, counts * steps.num_steps / duration, bins)


def quantile_curve(values: Floats) -> tuple[Floats, Floats]:
    """(value, share of requests at or below it), at most MAX_POINTS of them, the extremes always included."""
    ordered = values[np.isfinite(values)]
    ordered.sort()
    if len(ordered) == 0:
        return ordered, ordered
    ranks = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), MAX_POINTS)).round().astype(np.int64))
    return ordered[ranks], (ranks + 1) / len(ordered)


def pool_names(pools: Pools) -> list[str]:
    """What each pool is called: its own name, else its deployment and role, with a number where two are alike."""
    names: list[str] = []
    for number, pool in enumerate(pools):
        place = " ".join(str(pool[key]) for key in ("deployment", "role") if pool.get(key))
        name = str(pool.get("name") or place or number) + (" (shadow)" if pool.get("shadow") else "")
        names.append(f"{name} {number}" if name in names else name)
    return names


def engine_names(pools: Pools) -> dict[int, str]:
    """Engine -> what a legend calls it: its pool, with a number where that has several."""
    names: dict[int, str] = {}
    for pool, name in zip(pools, pool_names(pools), strict=True):
        first, count = pool["engines"]
        names |= {first + k: f"{name} {k}" if count > 1 else name for k in range(count)}
    return names


_MAX_REPLICA_LINES = 8
_LONG_TAIL = 12.0  # times the median
_FEW_WAITING = 1.0  # requests, the most on average in an interval: below, nothing is to be seen
_FEW_REPLICAS = 12  # up to which each has a tick of its own
_HEIGHT = 320  # pixels
_LEVELS = (50, 99)  # percentiles that are named
_POOL_COLOURS = (BLUE, ORANGE, GREEN, fig.PINK, fig.SKY, GREY)
_TIME = axis("time (s)")


class _Distribution:
    """The latencies of requests and the axis that they are drawn on: linear from 0, or where a linear one would squeeze
    nearly all of the curve into its first pixels, logarithmic."""

    def __init__(self, values_ms: Floats, limit_ms: float | None) -> None:
        self.finite = finite = values_ms[np.isfinite(values_ms)]
        self.is_log = bool(len(finite) and finite.min() > 0 and finite.max() > _LONG_TAIL * np.median(finite))
        largest = float(finite.max()) if len(finite) else 1.0
        if limit_ms is not None and largest < limit_ms <= 3 * largest:  # a limit further away would squeeze the curve
            largest = limit_ms
        self.right_ms = largest * 1.1
        self.left_ms = 0.9 * float(finite.min()) if self.is_log else 0.0

    def axis(self, title: str) -> Trace:
        if self.is_log:
            return axis(f"{title}, logarithmic", type="log", range=[log10(self.left_ms), log10(self.right_ms)])
        return axis(title, range=[0, self.right_ms])

    def is_left(self, at_ms: float) -> bool:
        """Whether a place is in the left part of its axis, so that text to its right has room."""
        if self.is_log:
            return log10(at_ms / self.left_ms) < 0.5 * log10(self.right_ms / self.left_ms)
        return at_ms < 0.5 * self.right_ms


def latency_figure(requests: RequestColumns, slo: SLO) -> Figure:
    """Cumulative distributions of TTFT, TPOT and E2E over requests, with the SLO as a dashed line."""
    traces: list[Trace] = []
    notes: list[Trace] = []
    rules: list[Trace] = []
    axes: dict[str, Trace] = {}
    for number, (metric, name) in enumerate((("ttft", "TTFT"), ("tpot", "TPOT"), ("e2el", "E2E"))):
        values_ms = getattr(requests, f"{metric}_s") * 1e3  # one at a time: there may be a million
        limit_ms, colour, of = slo.limit_ms(metric), fig.METRIC_COLOURS[metric], str(number + 1) if number else ""
        drawn = _Distribution(values_ms, limit_ms)
        x, share = quantile_curve(values_ms)
        hover = f"%{{y:.1f}} % of requests have {name} ≤ %{{x:.4g}} ms<extra></extra>"
        panel = {"xaxis": f"x{of}", "yaxis": f"y{of}"}
        traces += [line(x, share * 100, name, colour, hover, width=2.5, **panel)]
        traces += [{**marks, **panel} for marks in _percentiles(drawn, colour)]
        start = 0.35 * number
        places = {"xref": "paper", "yref": "paper", "xanchor": "center", "yanchor": "bottom"}
        notes.append(fig.note(name, start + 0.15, 1, 16, **places))
        if limit_ms is not None:
            if limit_ms < drawn.right_ms:
                place = {"xref": f"x{of}", "yref": f"y{of} domain"}
                rules.append(fig.upright(limit_ms, VERMILION, dash="dash", width=1.5, **place))
            notes.append(_limit_note(drawn, limit_ms, of))
        axes[f"xaxis{of}"] = {"anchor": f"y{of}", "domain": [start, start + 0.3], **drawn.axis(f"{name} (ms)")}
        axes[f"yaxis{of}"] = {"anchor": f"x{of}", "matches": "y", "showticklabels": False}
    axes["yaxis"] = axis("requests (%)", anchor="x", range=[0, 110], tickvals=[0, 25, 50, 75, 100])
    layout = {"height": 340, **axes, "shapes": rules, "annotations": notes, "showlegend": False}
    return {"data": traces, "layout": layout}


def _percentiles(drawn: _Distribution, colour: str) -> Iterator[Trace]:
    if len(drawn.finite):
        points = np.percentile(drawn.finite, _LEVELS)
        marker = {"color": colour, "size": 8, "line": {"color": "white", "width": 1.5}}
        texts = [f"p{level}  {format_number(value, 1)}" for level, value in zip(_LEVELS, points, strict=True)]
        places = ["bottom right" if drawn.is_left(points[0]) else "top left", "top left"]
        more = {"text": texts, "textposition": places, "hoverinfo": "skip", "cliponaxis": False}
        yield fig.dots(points, _LEVELS, marker, **more | {"mode": "markers+text"})


def _limit_note(drawn: _Distribution, limit_ms: float, of: str) -> Trace:
    """The limit in words. of: the number of its panel"""
    within = float(np.mean(drawn.finite <= limit_ms)) * 100 if len(drawn.finite) else 0.0
    is_shown = limit_ms < drawn.right_ms
    at_ms = limit_ms if is_shown else drawn.right_ms
    words = f"SLO {limit_ms:g} ms{'' if is_shown else ', beyond the axis'}<br>met by {within:.1f} %"
    side = "left" if is_shown and drawn.is_left(limit_ms) else "right"
    places: Trace = {"xref": f"x{of}", "yref": f"y{of}", "xanchor": side, "yanchor": "bottom"}
    places |= {"yshift": 4, "align": "right"}
    look = {"font": {"color": VERMILION, "size": 12}, "bgcolor": "rgba(255,255,255,0.85)"}
    return fig.note(words, log10(at_ms) if drawn.is_log else at_ms, 0, **places) | look


def throughput_figure(steps: StepColumns) -> Figure:
    """Tokens per second over time, prompt and generated apart, stacked."""
    bins = time_bins(steps)
    decoded = rate(steps, steps.num_decodes, bins)
    prompt = rate(steps, steps.num_tokens - steps.num_decodes, bins)
    traces = [
        line(bins.centres_s, values, f"{name} tokens", colour, hover, width=1, stackgroup="tokens")
        for name, values, colour in (("decode", decoded, GREEN), ("prefill", prompt, BLUE))
        if (hover := f"%{{x:.4g}} s: %{{y:,.0f}} {name} tok/s<extra></extra>")
    ]
    return figure(traces, _HEIGHT, _TIME, axis("tokens per second", rangemode="tozero"))


def load_figure(steps: StepColumns) -> Figure:
    """Requests running and waiting over time, all replicas together: means, with bands from minimum to maximum."""
    bins, traces = time_bins(steps), []
    kinds = (("running", steps.num_running, BLUE, 0.22), ("waiting", steps.num_waiting, ORANGE, 0.3))
    for name, counts, colour, opacity in kinds:
        values = counts.astype(np.float64)
        ends = envelope(steps, values, bins)
        traces.append(fig.band(bins.centres_s, *ends, fig.translucent(colour, opacity), showlegend=False))
        hover = f"%{{x:.4g}} s: %{{y:.1f}} {name}<extra></extra>"
        traces.append(line(bins.centres_s, summed(steps, values, bins), name, colour, hover, width=2))
    return figure(traces, _HEIGHT, _TIME, axis("requests", rangemode="tozero"))


def kv_figure(steps: StepColumns, num_blocks: int, pools: Pools = ()) -> Figure:
    """KV cache usage over time, in percent of each replica's blocks; replicas are named by their `pools`. A single
    replica has a band from minimum to maximum."""
    names, bins, replicas = engine_names(pools), time_bins(steps), replicas_of(steps)
    used = steps.used_blocks.astype(np.float64)  # by running requests
    share = 100 / max(num_blocks, 1)
    traces, top, is_single = [], 0.0, len(replicas) == 1
    for replica in replicas[:_MAX_REPLICA_LINES]:
        usage = binned_mean(steps, used, bins, replica) * share
        top = max(top, float(usage.max()))
        if is_single:
            ends = envelope(steps, used * share, bins)
            top = float(ends[1].max())
            traces.append(fig.band(bins.centres_s, *ends, fig.translucent(BLUE, 0.22), showlegend=False))
        name = "KV blocks in use" if is_single else names.get(replica, f"replica {replica}")
        hover = "%{x:.4g} s: %{y:.1f} %<extra></extra>"
        traces.append(line(bins.centres_s, usage, name, BLUE if is_single else None, hover, width=2))
    title, ends_percent = f"of {num_blocks:,} KV blocks (%)", [0, min(max(1.4 * top, 5.0), 105.0)]
    full = fig.across(100, GREY, dash="dot", width=1)
    return figure(traces, _HEIGHT, _TIME, axis(title, range=ends_percent), shapes=[full], showlegend=len(replicas) > 1)


def bound_figure(shares: Mapping[str, float]) -> Figure:
    """What bounded the time of the run, one bar of 100 %."""
    inside = {"textposition": "inside", "insidetextanchor": "middle", "textfont": {"color": "white"}}
    traces = [
        fig.bars(
            [share * 100], [""], fig.BOUND_COLOURS.get(name, GREY), f"{name}: %{{x:.1f}} %<extra></extra>", name=name
        )
        | {"text": [f"{name} {share:.0%}"] if share >= 0.06 else None, **inside}
        for name, share in shares.items()
    ]
    x = axis("share of busy time (%)", range=[0, 100])
    return figure(traces, 178, x, {}, barmode="stack", margin={"t": 40, "b": 44})


def replicas_figure(pools: Pools, end_s: float) -> Figure:
    """Replicas of each pool that serve, in steps (dotted: with those that start), and failures. end_s: of the run"""
    traces: list[Trace] = []
    fixed = sum(not pool.get("replicas_over_time") for pool in pools)
    for pool, name, colour in zip(pools, pool_names(pools), cycle(_POOL_COLOURS), strict=False):
        width = 2.0
        if not pool.get("replicas_over_time"):  # lines that may lie on each other: the first ones are wider
            fixed, width = fixed - 1, 2.0 * fixed
        counts = pool.get("replicas_over_time") or [[0.0, pool["replicas"], pool["replicas"]]]
        at = [row[0] for row in counts] + [end_s]
        serving, started = ([row[column] for row in counts] for column in (1, 2))
        kinds = [(serving, name, "solid", width)]
        if started != serving:
            kinds.insert(0, (started, f"{name}, with those that start", "dot", 1))
        for values, label, dash, pixels in kinds:
            hover = f"%{{x:.4g}} s: %{{y}} replicas of {label}<extra></extra>"
            traces.append(line(at, [*values, values[-1]], label, colour, hover, dash=dash, width=pixels, shape="hv"))
        traces += _failures(name, counts, pool.get("failed_at_s") or [])
    largest = max((pool.get("replicas_peak") or pool["replicas"] for pool in pools), default=0)
    unit = {"dtick": 1} if largest <= _FEW_REPLICAS else {}
    y = axis("replicas", rangemode="tozero", **unit)
    return figure(traces, _HEIGHT, {**_TIME, "range": [0, end_s]}, y, showlegend=True)


def attainment_figure(arrival_s: Floats, is_good: NDArray[np.bool_], end_s: float) -> Figure:
    """Share of the requests that arrive in each of equal intervals until `end_s` that are answered within the SLO."""
    edges = np.linspace(0.0, max(end_s, 1e-9), MAX_ATTAINMENT_BINS + 1)
    sent, within = (np.histogram(times, edges)[0] for times in (arrival_s, arrival_s[is_good]))
    has_any = sent > 0
    centres, share = ((edges[:-1] + edges[1:]) / 2)[has_any], 100.0 * within[has_any] / sent[has_any]
    hover = "%{x:.4g} s: %{y:.1f} % within the SLO<extra></extra>"
    trace = line(centres, share, "within the SLO", GREEN, hover, width=2)
    return figure([trace], _HEIGHT, {**_TIME, "range": [0, end_s]}, axis("requests within the SLO (%)", range=[0, 105]))


def _failures(name: str, counts: Sequence[Sequence[float]], failed_at: Sequence[float]) -> Iterator[Trace]:
    if failed_at:
        times = np.array([row[0] for row in counts])
        serving = [counts[max(int(np.searchsorted(times, at, "right")) - 1, 0)][1] for at in failed_at]
        cross = {"symbol": "x", "size": 11, "color": VERMILION, "line": {"color": "white", "width": 1}}
        hover = f"a replica of {name} fails at %{{x:.4g}} s<extra></extra>"
        yield fig.dots(failed_at, serving, cross, name=f"failures of {name}", hovertemplate=hover)


def pool_load_figure(steps: StepColumns, pools: Pools) -> Figure:
    """Requests that run (solid) and wait (dotted) in the engines of each pool, over time."""
    bins, traces = time_bins(steps), []
    for pool, name, colour in zip(pools, pool_names(pools), cycle(_POOL_COLOURS), strict=False):
        first, count = pool["engines"]
        for counts, what, dash in ((steps.num_running, "running", "solid"), (steps.num_waiting, "waiting", "dot")):
            held = counts.astype(np.float64)
            values = sum(
                (binned_mean(steps, held, bins, engine) for engine in range(first, first + count)),
                np.zeros(len(bins.centres_s)),
            )
            if what == "running" or values.max() >= _FEW_WAITING:
                label = f"{name}, {what}"
                hover = f"%{{x:.4g}} s: %{{y:.1f}} in {label}<extra></extra>"
                traces.append(line(bins.centres_s, values, label, colour, hover, dash=dash, width=2))
    return figure(traces, _HEIGHT, _TIME, axis("requests", rangemode="tozero"), showlegend=True)


def pool_costs_figure(pools: Pools) -> Figure:
    """USD of each pool over the run, a bar each."""
    traces = []
    for pool, name, colour in zip(pools, pool_names(pools), cycle(_POOL_COLOURS), strict=False):
        usd, hours = pool["usd_total"], pool.get("gpu_hours")
        words = f"{usd:.2f} USD" + ("" if hours is None else f", {hours:.2f} device hours")
        hover = f"{name}: {words}<extra></extra>"
        traces.append(fig.bars([usd], [name], colour, hover, text=[words], textposition="auto"))
    x, y = axis("USD over the run", rangemode="tozero"), {"autorange": "reversed"}
    return figure(traces, 110 + 44 * len(pools), x, y, showlegend=False)


def utilisation_figure(summary: Mapping[str, Any]) -> Figure:
    """USD per hour by the share of hours in use: rented for these hours or kept (dotted), owned, from an API."""
    rent, own, idle, api = (summary.get(f"{way}_usd_per_hour") for way in ("rent", "own", "own_idle", "api"))
    ends = (
        ("rented when in use", 0.0, rent, "solid"),
        ("rented at all hours", rent, rent, "dot"),
        *(("owned", idle, own, "solid"), ("API", 0.0, api, "solid")),
    )
    traces = []
    for (name, none, full, dash), colour in zip(ends, cycle(_POOL_COLOURS), strict=False):
        if none is not None and full is not None:
            hover = f"%{{x:.3g}} % of hours: %{{y:.4g}} USD per hour {name}<extra></extra>"
            traces.append(line([0.0, 100.0], [none, full], name, colour, hover, dash=dash, width=2))
    x, y = axis("share of hours in use (%)", range=[0, 100]), axis("USD per hour", rangemode="tozero")
    return figure(traces, _HEIGHT, x, y, showlegend=True)


def classes_figure(ttft_ms: Mapping[str, Floats], limits_ms: Mapping[str, float | None]) -> Figure:
    """The distribution of TTFT over the requests of each class, on a logarithmic axis, with the limits of classes."""
    traces = []
    for (name, values), colour in zip(ttft_ms.items(), cycle(_POOL_COLOURS), strict=False):
        x, share = quantile_curve(values)
        hover = f"%{{y:.1f}} % of {name} have TTFT ≤ %{{x:.4g}} ms<extra></extra>"
        traces.append(line(x, share * 100, name, colour, hover, width=2.5))
        limit = limits_ms.get(name)
        if limit is not None:
            label = f"limit of {name}, {limit:g} ms"
            traces.append(line([limit, limit], [0, 100], label, colour, "", dash="dash", width=1.5))
    x_axis, y_axis = axis("TTFT (ms)", type="log"), axis("requests (%)", range=[0, 105])
    return figure(traces, _HEIGHT, x_axis, y_axis, showlegend=True)
