"""Plotly figures from commands' `--json` output, as pure functions; the page sets theme colours."""

from collections.abc import Sequence
from itertools import pairwise
from math import floor, log10
from types import SimpleNamespace
from typing import Any

from perfmodel.planning.metrics import metric_of, study_metric
from perfmodel.report.drawing import figures as fig
from perfmodel.report.drawing.figures import BLUE, GREEN, GREY, ORANGE, Figure, Trace, axis, figure, line, upright
from perfmodel.report.plots.step import memory_figure
from perfmodel.report.plots.whatif import along_figure
from perfmodel.web.compare import MeasuredPoint, published_points
from perfmodel.web.service import QueryState
from perfmodel.web.state import PageState
from perfmodel.web.views import in_flight, name_of

_TOP, _HEIGHT, _COLUMN = 120, 300, 46  # pixels
_LARGEST_BATCH = 8192
_LONGEST_NAME = 36  # of an alternative, in characters
_NAMES = {"automargin": True, "ticks": ""}  # an axis of names
_LATENCY_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E"}
_RATE = "requests/s"
_FULL_LABELS = 3  # decades of an axis up to which 1, 2 and 5 of each are written
_HEADROOM = 1.2  # above a limit, for its words
_LETTERS = "ABCD"
_COLUMN_COLOURS = (BLUE, ORANGE, GREEN, fig.PINK)


def devices_bars(data: Any) -> Figure | None:
    """Cost of the best deployment per device; None for one device. data: `perfmodel plan --json`"""
    able = [row for row in data["devices"] if row["label"]]
    if len(able) < 2:
        return None
    is_priced = all(row["usd_per_hour"] is not None for row in able)
    key, unit = ("usd_per_hour", "USD per hour") if is_priced else ("num_devices", "GPUs")
    able.sort(key=lambda row: -row[key])
    chosen = data["winner"] and data["winner"]["choices"].get("hardware")
    prices = ["" if row["usd_per_hour"] is None else f"{row['usd_per_hour']:.2f} USD/h, " for row in able]
    bar = fig.bars(
        [row[key] for row in able],
        [row["device"] for row in able],
        [GREEN if row["device"] == chosen else GREY for row in able],
        f"%{{customdata[0]}}: %{{x:.4g}} {unit}, up to %{{customdata[1]:.3g}} req/s<extra></extra>",
        text=[f"{price}{row['num_devices']} GPUs" for price, row in zip(prices, able, strict=True)],
        textposition="auto",
        customdata=[[row["label"], row["max_rate"]] for row in able],
    )
    x = axis(f"{unit}, of each one's best deployment", rangemode="tozero")
    return figure([bar], 90 + 46 * len(able), x, _NAMES, showlegend=False)


def bounds_plot(data: Any) -> Figure | None:
    """Operators' bounds over the batch as coloured bars; None if constant. data: `perfmodel whatif --json`"""
    turns: dict[str, list[Any]] = {}
    for change in data["bound_changes"]:
        if change["path"] == "step.batch" and change["at"] > 0:
            turns.setdefault(change["what"], []).append(change)
    if not turns:
        return None
    spans: dict[str, list[tuple[str, float, float]]] = {}  # bound -> (operator, from batch, to batch)
    for name, changes in turns.items():
        changes.sort(key=lambda change: float(change["at"]))
        edges = [1.0, *(float(change["at"]) for change in changes), float(_LARGEST_BATCH)]
        bounds = [changes[0]["before"], *(change["after"] for change in changes)]
        for bound, (low, high) in zip(bounds, pairwise(edges), strict=True):
            spans.setdefault(bound, []).append((name, low, high))
    traces = []
    for bound in ("memory", "compute", "communication", "overhead"):
        if bound in spans:
            names, lows, highs = zip(*spans[bound], strict=True)
            hover = f"%{{y}}: {bound}-bound from batch %{{customdata[0]:,.0f}} on<extra></extra>"
            lengths = [high - low for low, high in zip(lows, highs, strict=True)]
            ends = [list(pair) for pair in zip(lows, highs, strict=True)]
            look = {"name": f"{bound}-bound", "base": list(lows), "customdata": ends}
            traces.append(fig.bars(lengths, names, fig.BOUND_COLOURS[bound], hover, **look))
    ordered = sorted(turns, key=lambda name: -min(change["at"] for change in turns[name]))
    x = axis("sequences that decode in a step", type="log", range=[0, 3.92])
    y = {"categoryorder": "array", "categoryarray": ordered, **_NAMES}
    return figure(traces, _TOP + 26 * len(ordered), x, y, barmode="overlay", bargap=0.35)


def against_lines(data: Any, metric: str) -> Figure | None:
    """Metric over the first varied value, with and without the alternative. data: `perfmodel whatif --json`"""
    return along_figure(data, data["points"][0]["set"].partition("=")[0], metric)


def memory_bar(data: Any) -> Figure:
    """One device's memory as a bar. data: `perfmodel memory --json`"""
    return memory_figure(SimpleNamespace(**data))


def step_curve(data: Any, path: str) -> Figure:
    """Step time over batch (`step.batch`) or context (`step.context`), and the current point. data: `perfmodel whatif
    --vary PATH=... --metric step_ms --json`"""
    points = [point for point in data["points"] if point["set"].startswith(f"{path}=")]
    xs = [float(point["set"].partition("=")[2]) for point in points]
    ys, now = [point["values"]["step_ms"] for point in points], data["step"][path.partition(".")[2]]
    label = {"step.batch": "sequences in the batch", "step.context": "tokens in each one's KV cache"}[path]
    hover = f"{label}: %{{x:,.0f}}<br>%{{y:,.2f}} ms<extra></extra>"
    curve = line(xs, ys, "", BLUE, hover, width=2.5) | {"mode": "lines+markers"}
    here = fig.dots([now], [data["base"]["values"]["step_ms"]], {"size": 13, "color": ORANGE}, hovertemplate=hover)
    x, y = axis(label, type="log", dtick=1), axis("step time, ms", rangemode="tozero")
    return figure([curve, here], _HEIGHT, x, y, showlegend=False)


def latency_curve(data: Any, name: str, now: float | None = None, bands: Any = None) -> Figure:
    """Latency over rate in `data`: mean with its 80 % band, p99, limit. name: ttft, tpot or e2el; now: the requested
    rate; bands: intervals at some rates, default: those of `data`"""
    colour, rates, limit = fig.METRIC_COLOURS[name], data["load"]["rates"], data["load"]["limits_ms"].get(name)
    means, tails = (_values(data, f"{statistic}_{name}_ms") for statistic in ("mean", "p99"))
    lines = [_curve("mean", rates, means, colour, "ms"), _curve("p99", rates, tails, colour, "ms", dash="dash")]
    of = bands or data
    ends = [
        (rate, *interval)
        for rate, point in zip(of["load"]["rates"], of["points"], strict=True)
        if (interval := (point.get("interval") or {}).get(f"mean_{name}_ms"))
    ]
    if len(ends) > 1:
        xs, low, high = zip(*ends, strict=True)
        lines.insert(0, fig.band(xs, low, high, fig.translucent(colour, 0.24), name="80 % band"))
    shapes, notes = _marks(data["load"], now)
    if limit is not None:
        shapes.append(fig.across(limit, fig.VERMILION, width=1.6, dash="longdash"))
        places: Trace = {"xref": "paper", "xanchor": "left", "yanchor": "bottom"}
        notes.append(fig.note(f"limit {limit:,g} ms", 0, log10(limit), 11, **places))
    values = [value for trace in lines for value in trace["y"] if value] + ([limit * _HEADROOM] if limit else [])
    y = axis(f"{_LATENCY_NAMES[name]}, ms", **_log_axis(values))
    return _curves(lines, _rates_axis(rates, now), y, shapes, notes)


def goodput_curve(data: Any, now: float | None = None) -> Figure:
    """Completed and good requests per second over arrival rate."""
    rates = data["load"]["rates"]
    served, good = (_values(data, name) for name in ("request_throughput", "request_goodput"))
    ideal = {**_curve("all that arrive", rates, rates, GREY, _RATE, dash="dot"), "mode": "lines"}
    lines = [ideal, _curve("completed", rates, served, BLUE, _RATE)]
    if any(value is not None for value in good):
        lines.append(_curve("within the SLO", rates, good, GREEN, _RATE))
    y = axis("requests/s completed", **_log_axis([value for trace in lines for value in trace["y"] if value]))
    return _curves(lines, _rates_axis(rates, now), y, *_marks(data["load"], now))


def prompt_curve(data: Any) -> Figure:
    """TTFT over prompt tokens."""
    points = [(float(point["set"].rpartition("=")[2]), point["values"].get("mean_ttft_ms")) for point in data["points"]]
    xs, ys = [x for x, y in points if y is not None], [y for _, y in points if y is not None]
    curve = _curve("TTFT of an idle server", xs, ys, fig.METRIC_COLOURS["ttft"], "ms")
    curve["hovertemplate"] = "%{x:,.0f} tokens: %{y:,.4g} ms<extra></extra>"
    return _curves([curve], axis("tokens of the prompt", **_log_axis(xs)), axis("TTFT, ms", **_log_axis(ys)))


def _curves(lines: Sequence[Trace], x: Trace, y: Trace, shapes: Sequence[Trace] = (), notes: Any = ()) -> Figure:
    look = {"hovermode": "x unified", "margin": {"l": 64, "r": 16, "t": 44, "b": 48}}
    marks = {"shapes": list(shapes), "annotations": list(notes)}
    return figure(lines, _HEIGHT, x, y, **marks, showlegend=len(lines) > 1, **look)


def _values(data: Any, metric: str) -> list[float | None]:
    return [point["values"].get(metric) for point in data["points"]]


def _curve(name: str, xs: Sequence[float], ys: Sequence[Any], colour: str, unit: str, dash: str = "solid") -> Trace:
    """Line with markers. unit: in hover text; dash: plotly's name"""
    is_solid = dash == "solid"
    drawn = line(xs, ys, name, colour, f"%{{y:,.4g}} {unit}", width=2.5 if is_solid else 1.8, dash=dash)
    return drawn | {"mode": "lines+markers" if is_solid else "lines", "marker": {"size": 6}}


def _marks(load: Any, now: float | None) -> tuple[list[Trace], list[Trace]]:
    """Vertical lines at the requested rate, the knee and the largest rate within the SLO, with staggered labels, on the
    left for high rates."""
    within = load["within_slo"] or {}
    kept = None if within.get("is_all") else within.get("max_rate")  # the last rate shown is no limit
    marks = [
        (now or load["rate"], "now", ORANGE, "solid"),
        (load["knee"], "knee", GREY, "dot"),
        (kept, "SLO limit", GREEN, "solid"),
    ]
    marks = [mark for mark in marks if mark[0]]
    shapes = [upright(rate, colour, width=1.6, dash=dash, layer="below") for rate, _, colour, dash in marks]
    high, notes = (load["rates"][0] * load["rates"][-1] ** 2) ** (1 / 3), []
    for row, (rate, word, colour, _) in enumerate(sorted(marks)):
        rule = f'<b><span style="color:{colour}">|</span></b>'
        anchor, text = ("right", f"{word} {rule}") if rate > high else ("left", f"{rule} {word}")
        notes.append(fig.note(text, log10(rate), 1 - 0.075 * row, 11, yref="paper", xanchor=anchor, yanchor="top"))
    return shapes, notes


def _rates_axis(rates: Sequence[float], now: float | None) -> Trace:
    return axis(f"arriving, {_RATE}", **_log_axis([*rates, *([now] if now else [])]))


def _log_axis(values: Sequence[float]) -> Trace:
    """Log axis between bounds of 1, 2, 5, 10 ..., stable under small changes."""
    low, high = min(values, default=1.0), max(values, default=10.0)
    low = max(step for step in _steps(low) if step <= low * (1 + 1e-9))
    high = min(step for step in _steps(high) if step >= high * (1 - 1e-9))
    decades = range(floor(log10(low)) - 1, floor(log10(high)) + 2)
    steps = (1, 2, 5) if log10(high / low) <= _FULL_LABELS else (1,)
    ticks = [step * 10.0**power for power in decades for step in steps]
    ticks = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
    texts = [f"{tick:,g}" if tick < 1e6 else f"{tick:.0e}" for tick in ticks]
    return {"type": "log", "range": [log10(low), log10(high)], "tickvals": ticks, "ticktext": texts}


def _steps(value: float) -> list[float]:
    """1, 2, 5 and 10 times the power of ten below."""
    return [step * 10.0 ** floor(log10(value)) for step in (1, 2, 5, 10)]


def column_bars(findings: Sequence[QueryState], metric: str) -> Figure:
    """A bar per run with its 80 % interval; none for missing answers."""
    answered = [(number, finding.shown.data) for number, finding in enumerate(findings) if finding.shown is not None]
    answered = [(number, data) for number, data in answered if data.get(metric) is not None]
    shown, values = metric_of(metric), [data[metric] for _, data in answered]
    ends = [(data.get("interval") or {}).get(metric) or (data[metric], data[metric]) for _, data in answered]
    above = [high - value for (_, high), value in zip(ends, values, strict=True)]
    below = [value - low for (low, _), value in zip(ends, values, strict=True)]
    look = {"type": "data", "symmetric": False, "color": GREY, "thickness": 2}
    spread = {**look, "array": above, "arrayminus": below}
    names, colours = ([of[number] for number, _ in answered] for of in (_LETTERS, _COLUMN_COLOURS))
    hover = f"%{{y}}: %{{x:,.4g}} {shown.unit}<extra></extra>"
    trace = fig.bars(values, names, colours, hover, error_x=spread)
    return _columns([trace], axis(shown.title, rangemode="tozero"), len(answered))


def front(
    answers: Sequence[Any],
    metric: str,
    columns: Sequence[PageState],
    bands: Sequence[Any] = (),
    by_load: bool = False,
    speed: float | None = None,
    own: Sequence[MeasuredPoint] = (),
) -> Figure:
    """`metric` against tokens per second of a user, or against requests in flight (`by_load`), a curve for each of
    `columns`; a point opens the deployment under its load. answers: of `perfmodel whatif`, None where there is none;
    bands: the same with intervals, at some points; speed: marked; own: measured points, beside published ones."""
    lines: list[Trace] = []
    shown = study_metric(metric)
    for number, answer in enumerate(answers):
        if answer is None:
            continue
        counts = [point["set"].rpartition("=")[2] for point in answer.data["points"]]
        speeds = [1e3 / value if value else None for value in _values(answer.data, "mean_tpot_ms")]
        values = [None if value is None else value * shown.scale for value in _values(answer.data, metric)]
        colour, name = _COLUMN_COLOURS[number], f"{_LETTERS[number]} {name_of(columns[number])}"
        name = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
        opens = [in_flight(columns[number], count).query for count in counts]
        hover = f"%{{text}} in flight: %{{x:,.4g}}, %{{y:,.4g}} {shown.unit}<extra>{name}</extra>"
        curve = line([int(count) for count in counts] if by_load else speeds, values, name, colour, hover, width=2.5)
        lines.append(curve | {"mode": "lines+markers", "text": counts, "customdata": opens, "marker": {"size": 8}})
        if number < len(bands) and bands[number] is not None:
            lines.insert(0, _front_band(bands[number].data, metric, shown.scale, fig.translucent(colour, 0.2)))
    heights = [value for curve in lines for value in curve["y"] if value]
    is_first = metric == "output_throughput_per_gpu"
    marks = _measured_marks(answers, own) if is_first else []
    curves = [trace for trace in lines if "fill" not in trace]
    x = axis("tokens/s of a user", **_linear_axis(curves, marks, "x"))
    if by_load:
        x = axis("requests in flight", **_log_axis([count for curve in lines for count in curve["x"] if count]))
    y = axis(shown.title, **(_linear_axis(curves, marks, "y") if is_first else _log_axis(heights)))
    look = {"hovermode": "closest", "margin": {"l": 64, "r": 16, "t": 60 if is_first else 12, "b": 48}}
    shapes = [] if speed is None else [upright(speed, GREY, width=1.5, dash="dot", layer="below")]
    traces, height = [*marks, *lines], 420 if is_first else _HEIGHT
    return figure(traces, height, x, y, showlegend=is_first and len(traces) > 1, shapes=shapes, **look)


def _linear_axis(curves: Sequence[Trace], marks: Sequence[Trace], name: str) -> Trace:
    """Linear axis from 0, with marks at most twice as far as the curves."""
    high = max((value for trace in curves for value in trace[name] if value), default=1.0)
    most = max((value for trace in marks if trace["visible"] is True for value in trace[name]), default=0.0)
    return {"range": [0, 1.05 * max(high, min(most, 2 * high))]} if marks else {"rangemode": "tozero"}


def _measured_marks(answers: Sequence[Any], own: Sequence[MeasuredPoint]) -> list[Trace]:
    """Published points of each answer's model and device, of other setups only where the legend is asked for them; and
    the user's own."""
    groups: list[tuple[str, str, str, Sequence[MeasuredPoint]]] = []
    for letter, colour, answer in zip(_LETTERS, _COLUMN_COLOURS, answers, strict=False):
        if answer is not None and "provenance" in answer.data:
            published = published_points(answer.data["provenance"]["inputs"]["scenario"])
            for is_alike, words, symbol in (
                (True, "measured alike", "diamond"),
                (False, "other setups", "diamond-open"),
            ):
                points: Sequence[MeasuredPoint] = [point for point in published if point.is_alike == is_alike]
                groups.append((f"{letter} {words} ({len(points)})", colour, symbol, points))
    groups, traces = [*groups, ("measured, own file", fig.VERMILION, "star", own)], []
    for name, colour, symbol, points in (group for group in groups if group[-1]):
        marker = {"color": colour, "size": 13 if symbol == "star" else 8, "opacity": 0.75, "symbol": symbol}
        hover = "measured: %{x:,.4g} tokens/s of a user, %{y:,.4g} of a device<br>%{text}<extra></extra>"
        xs, ys, _, texts = zip(*points, strict=True)
        shown = "legendonly" if symbol == "diamond-open" else True
        traces.append(fig.dots(xs, ys, marker, name=name, hovertemplate=hover, text=texts, visible=shown))
    return traces


def _front_band(data: Any, metric: str, scale: float, fill: str) -> Trace:
    """Between a curve whose steps are as slow as they may be, and one with the fastest. With a fixed number in flight
    throughput goes with one over the time of a request (Little 1961)."""
    points = [(point["values"], point["interval"]) for point in data["points"] if point.get("interval")]
    xs = [[1e3 / interval["mean_tpot_ms"][end] for _, interval in points] for end in (1, 0)]
    ys = [[scale * v[metric] * v["mean_e2el_ms"] / ends["mean_e2el_ms"][end] for v, ends in points] for end in (1, 0)]
    outline = {"x": [*xs[0], *xs[1][::-1]], "y": [*ys[0], *ys[1][::-1]], "line": {"width": 0}}
    style = {"fill": "toself", "fillcolor": fill, "hoverinfo": "skip", "showlegend": False}
    return {"type": "scatter", "mode": "lines", **outline, **style}


def measured_dots(findings: Sequence[QueryState]) -> Figure | None:
    """Predicted over measured for nearby measurements and medians by kind; None if there are none. Medians have no
    sign, so each is drawn on both sides of 1."""
    traces: list[Trace] = []
    for number, finding in enumerate(findings):
        if finding.shown is None:
            continue
        single = [
            (row["predicted"] / row["measured"], f"{row['metric']} {row['measured']:,.4g} measured, {row['label']}")
            for row in finding.shown.measured
        ]
        medians = [
            (ratio, f"median of {cell['rows']:,} rows, {cell['model']} on {cell['device']}, {cell['metric']}")
            for cell in finding.shown.data.get("trust", {}).get("nearest", [])
            for ratio in (1 + cell["median_error"], 1 / (1 + cell["median_error"]))
        ]
        for pairs, symbol in ((single, "circle"), (medians, "diamond-open")):
            if pairs:
                look = {"color": _COLUMN_COLOURS[number], "size": 10, "opacity": 0.8, "line": {"width": 1.5}}
                ratios, texts = [ratio for ratio, _ in pairs], [text for _, text in pairs]
                words = {"text": texts, "hovertemplate": "%{text}: %{x:.3g} times<extra></extra>"}
                traces.append(fig.dots(ratios, [_LETTERS[number]] * len(pairs), {**look, "symbol": symbol}, **words))
    if not traces:
        return None
    far = max(0.15, 1.1 * max(abs(log10(ratio)) for trace in traces for ratio in trace["x"]))
    ticks = [0.25, 0.33, 0.5, 0.67, 0.8, 1, 1.25, 1.5, 2, 3, 4]
    x = axis("predicted ÷ measured, times", type="log", tickvals=ticks, range=[-far, far])
    return _columns(traces, x, len(findings), shapes=[upright(1, GREY, width=1.5)])


def _columns(traces: Sequence[Trace], x: Trace, count: int, **more: Any) -> Figure:
    y = axis("deployment", type="category", autorange="reversed")
    margin = {"l": 56, "r": 16, "t": 10, "b": 48}
    return figure(traces, 96 + _COLUMN * max(count, 1), x, y, showlegend=False, margin=margin, **more)
