"""Pictures of deployments and runs: their memory, their steps, latencies and goodput against the rate of requests,
several side by side. Pure functions of what commands print with `--json`; colours of theme and paper are the page's."""

__all__ = [
    "column_bars",
    "goodput_curve",
    "latency_curve",
    "measured_dots",
    "memory_bar",
    "prompt_curve",
    "step_curve",
]

from collections.abc import Iterable, Mapping, Sequence
from math import floor, log10
from typing import Any

from perfmodel.planning.metrics import metric_of
from perfmodel.report.drawing.figures import (
    BLUE,
    GREEN,
    GREY,
    INK,
    METRIC_COLOURS,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    Figure,
    Trace,
    across,
    axis,
    band,
    bars,
    dots,
    figure,
    line,
    note,
    translucent,
    upright,
)
from perfmodel.web.desk import Finding

_LABELLED = 0.06  # share of the bar below which a part has no name in it; hovering names all
_FREE = "rgba(128,128,128,0.18)"
_LABELS = {"minsize": 10, "mode": "hide"}  # none is set smaller
_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E"}
_RATE = "requests/s"
_FULL_LABELS = 3  # decades of an axis up to which 1, 2 and 5 of each are written
_HEIGHT = 300
_ROOM = 1.2  # above a limit, for its words
_LETTERS = "ABCD"
_COLUMN_COLOURS = (BLUE, ORANGE, GREEN, PINK)
_SINGLE_ROWS = "Single rows near this setup"  # a table of every answer with trust
_COLUMN = 46  # of height for a column


def memory_bar(data: Any) -> Figure:
    """One device's memory as a bar: what the engine takes of what a process sees.

    data: what `perfmodel memory --json` prints
    """
    parts = [
        ("weights", data["weight_bytes"], BLUE),
        ("activations", data["activation_bytes"], GREEN),
        ("CUDA graphs", data["graph_bytes"], SKY),
        ("reserve", data["reserve_bytes"] + data["rotary_table_bytes"], GREY),
        ("recurrent states", data["state_bytes"], SKY),
        ("KV blocks", data["kv_bytes"], ORANGE),
    ]
    visible = data["visible_bytes"]
    parts.append(("not used", max(visible - sum(size for _, size, _ in parts), 0), _FREE))
    inside = {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
    traces = []
    for name, size, colour in parts:
        if size > 0:
            label = f"{name}<br>{size / 1e9:.1f} GB" if size > _LABELLED * visible else ""
            ink = {"textfont": {"color": INK}} if colour == _FREE else {}
            hover = f"{name}: %{{x:.2f}} GB<extra></extra>"
            traces.append(bars([size / 1e9], [""], colour, hover, name=name, text=[label], **inside, **ink))
    x = axis(f"GB of the {visible / 1e9:.1f} that a process sees", range=[0, visible / 1e9])
    look = {"barmode": "stack", "bargap": 0.1, "uniformtext": _LABELS, "legend": {"traceorder": "normal"}}
    return figure(traces, 170, x, {"visible": False}, **look)


def step_curve(data: Any, path: str) -> Figure:
    """The time of a step along its batch (`step.batch`) or its context (`step.context`), and where it is now.

    data: what `perfmodel whatif --vary PATH=... --metric step_ms --json` prints
    """
    points = [point for point in data["points"] if point["set"].startswith(f"{path}=")]
    xs = [float(point["set"].partition("=")[2]) for point in points]
    ys, now = [point["values"]["step_ms"] for point in points], data["step"][path.partition(".")[2]]
    label = {"step.batch": "sequences in the batch", "step.context": "tokens in each one's KV cache"}[path]
    hover = f"{label}: %{{x:,.0f}}<br>%{{y:,.2f}} ms<extra></extra>"
    curve = line(xs, ys, "", BLUE, hover, width=2.5) | {"mode": "lines+markers"}
    here = dots([now], [data["base"]["values"]["step_ms"]], {"size": 13, "color": ORANGE}, hovertemplate=hover)
    x, y = axis(label, type="log", dtick=1), axis("step time, ms", rangemode="tozero")
    return figure([curve, here], 300, x, y, showlegend=False)


def latency_curve(data: Any, name: str, now: float | None = None, bands: Any = None) -> Figure:
    """A latency against the rate: its mean with the 80 % band of the mean, its 99th percentile, the limit on it.

    name:  ttft, tpot or e2el
    now:   the rate that is asked for
    bands: the same at some of the rates with intervals; None: those of `data`, if it has any
    """
    colour, label = METRIC_COLOURS[name], _NAMES[name]
    rates = data["load"]["rates"]
    means, tails = (_values(data, f"{statistic}_{name}_ms") for statistic in ("mean", "p99"))
    limit = data["load"]["limits_ms"].get(name)
    traces = [
        *_band(bands or data, f"mean_{name}_ms", colour),
        _line("mean", rates, means, colour, "ms"),
        _line("p99", rates, tails, colour, "ms", dash="dash"),
    ]
    marks = shapes, notes = _marks(data, now)
    if limit is not None:
        shapes.append(across(limit, VERMILION, width=1.6, dash="longdash"))
        places: Trace = {"xref": "paper", "xanchor": "left", "yanchor": "bottom"}
        notes.append(note(f"limit {limit:,g} ms", 0, log10(limit), 11, **places))
    ends = [value for trace in traces for value in trace["y"] if value] + ([limit * _ROOM] if limit else [])
    return _picture(traces, marks, f"{label}, ms", _rates_axis(rates, now), _log_axis(ends))


def goodput_curve(data: Any, now: float | None = None) -> Figure:
    """Requests completed in a second, and those of them that meet the SLO, against those that arrive."""
    rates = data["load"]["rates"]
    served, good = (_values(data, name) for name in ("request_throughput", "request_goodput"))
    traces = [_line("completed", rates, served, BLUE, _RATE)]
    if any(value is not None for value in good):
        traces.append(_line("within the SLO", rates, good, GREEN, _RATE))
    ideal = {**_line("all that arrive", rates, rates, GREY, _RATE, dash="dot"), "mode": "lines"}
    ends = [value for trace in (*traces, ideal) for value in trace["y"] if value]
    return _picture(
        [ideal, *traces], _marks(data, now), "requests/s completed", _rates_axis(rates, now), _log_axis(ends)
    )


def prompt_curve(data: Any) -> Figure:
    """Time to first token against the tokens of a prompt."""
    points = [(float(at["set"].rpartition("=")[2]), at["values"].get("mean_ttft_ms")) for at in data["points"]]
    known = [(x, y) for x, y in points if y is not None]
    xs, ys = [x for x, _ in known], [y for _, y in known]
    hover = "%{x:,.0f} tokens: %{y:,.4g} ms<extra></extra>"
    curve = _line("TTFT of an idle server", xs, ys, METRIC_COLOURS["ttft"], "ms") | {"hovertemplate": hover}
    x_axis = {**axis("tokens of the prompt"), **_log_axis(xs)}
    return _picture([curve], ([], []), "TTFT, ms", x_axis, _log_axis(ys))


def _picture(traces: Sequence[Trace], marks: tuple[list[Trace], list[Trace]], label: str, x: Trace, y: Trace) -> Figure:
    """marks: lines across the picture, and their words; label: of the y axis"""
    look = {"hovermode": "x unified", "margin": {"l": 64, "r": 16, "t": 44, "b": 48}}
    shapes, notes = marks
    y = {**axis(label), **y}
    return figure(traces, _HEIGHT, x, y, shapes=shapes, annotations=notes, showlegend=len(traces) > 1, **look)


def _values(data: Any, metric: str) -> list[float | None]:
    return [point["values"].get(metric) for point in data["points"]]


def _line(
    name: str, xs: Sequence[float], ys: Sequence[float | None], colour: str, unit: str, dash: str = "solid"
) -> Trace:
    """A line with its points. unit: of what it shows, for the words beside a pointer; dash: as plotly names it"""
    is_solid = dash == "solid"
    drawn = line(xs, ys, name, colour, f"%{{y:,.4g}} {unit}", width=2.5 if is_solid else 1.8, dash=dash)
    return drawn | {"mode": "lines+markers" if is_solid else "lines", "marker": {"size": 6}}


def _band(data: Any, metric: str, colour: str) -> list[Trace]:
    """The 80 % interval of a mean, of the points that have one."""
    known = [
        (rate, *ends)
        for rate, point in zip(data["load"]["rates"], data["points"], strict=True)
        if (ends := (point.get("interval") or {}).get(metric))
    ]
    if len(known) < 2:
        return []
    rates, low, high = zip(*known, strict=True)
    return [band(rates, low, high, translucent(colour, 0.24), name="80 % band")]


def _marks(data: Any, now: float | None) -> tuple[list[Trace], list[Trace]]:
    """The rate that is asked for, the knee, the largest rate within the SLO: upright lines with words above them."""
    load = data["load"]
    within = load["within_slo"] or {}
    kept = None if within.get("is_all") else within.get("max_rate")  # the last rate shown is no limit
    marks = [
        (now or load["rate"], "now", ORANGE, "solid"),
        (load["knee"], "knee", GREY, "dot"),
        (kept, "SLO limit", GREEN, "solid"),
    ]
    known = [(rate, word, colour, dash) for rate, word, colour, dash in marks if rate]
    shapes = [upright(rate, colour, width=1.6, dash=dash, layer="below") for rate, _, colour, dash in known]
    return shapes, list(_words(known, (load["rates"][0] * load["rates"][-1] ** 2) ** (1 / 3)))


def _words(marks: Iterable[tuple[float, str, str, str]], late: float) -> Iterable[Trace]:
    """The words of upright lines, one below another; beyond `late` on their left."""
    for row, (rate, word, colour, _) in enumerate(sorted(marks)):
        anchor = "right" if rate > late else "left"
        text = f'<b><span style="color:{colour}">|</span></b>'
        text = f"{word} {text}" if anchor == "right" else f"{text} {word}"
        yield note(text, log10(rate), 1 - 0.075 * row, 11, yref="paper", xanchor=anchor, yanchor="top")


def _rates_axis(rates: Sequence[float], now: float | None) -> Trace:
    return {**axis(f"arriving, {_RATE}"), **_log_axis([*rates, *([now] if now else [])])}


def _log_axis(values: Sequence[float]) -> Trace:
    """A logarithmic axis between two of 1, 2, 5, 10 ..., so that it stays where it is while values move a little."""
    low, high = _step(min(values, default=1.0), -1), _step(max(values, default=10.0), 1)
    decades = range(floor(log10(low)) - 1, floor(log10(high)) + 2)
    steps = (1, 2, 5) if log10(high / low) <= _FULL_LABELS else (1,)
    ticks = [step * 10.0**power for power in decades for step in steps]
    ticks = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
    texts = [f"{tick:,g}" if tick < 1e6 else f"{tick:.0e}" for tick in ticks]
    return {"type": "log", "range": [log10(low), log10(high)], "tickvals": ticks, "ticktext": texts}


def _step(value: float, way: int) -> float:
    """The next of 1, 2, 5, 10 ... that is not above (way -1) or not below (1)."""
    scale = 10.0 ** floor(log10(value))
    steps = [step * scale for step in (1, 2, 5, 10)]
    if way < 0:
        return max(step for step in steps if step <= value * (1 + 1e-9))
    return min(step for step in steps if step >= value * (1 - 1e-9))


def column_bars(findings: Sequence[Finding], metric: str) -> Figure:
    """A metric of each run as a bar with its 80 % interval; columns without an answer have none."""
    known = [(number, each.shown.data) for number, each in enumerate(findings) if each.shown is not None]
    known = [(number, data) for number, data in known if data.get(metric) is not None]
    asked, values = metric_of(metric), [data[metric] for _, data in known]
    ends = [
        (data.get("interval") or {}).get(metric) or (value, value)
        for (_, data), value in zip(known, values, strict=True)
    ]
    spread = {
        "type": "data",
        "symmetric": False,
        "array": [high - value for (_, high), value in zip(ends, values, strict=True)],
        "arrayminus": [value - low for (low, _), value in zip(ends, values, strict=True)],
        "color": GREY,
        "thickness": 2,
    }
    names, colours = ([of[number] for number, _ in known] for of in (_LETTERS, _COLUMN_COLOURS))
    hover = f"%{{y}}: %{{x:,.4g}} {asked.unit}<extra></extra>"
    x = axis(asked.title, rangemode="tozero")
    return _columns([bars(values, names, colours, hover, error_x=spread)], x, len(known))


def measured_dots(findings: Sequence[Finding]) -> Figure | None:
    """Predicted over measured of the single measurements near each, and of each kind's median; None where there are
    none. Signs of medians are not known: each is drawn on both sides of 1."""
    traces: list[Trace] = []
    for number, finding in enumerate(findings):
        near = [] if finding.shown is None else _rows(finding.shown.document)
        if near:
            traces.append(_dots(number, near, "circle"))
        cells = [] if finding.shown is None else finding.shown.data.get("trust", {}).get("nearest", [])
        ends = [
            (ratio, _cell(cell))
            for cell in cells
            for ratio in (1 + cell["median_error"], 1 / (1 + cell["median_error"]))
        ]
        if ends:
            traces.append(_dots(number, ends, "diamond-open"))
    if not traces:
        return None
    far = max(abs(log10(ratio)) for trace in traces for ratio in trace["x"]) * 1.1
    far = max(far, 0.15)
    ticks = [0.25, 0.33, 0.5, 0.67, 0.8, 1, 1.25, 1.5, 2, 3, 4]
    x = axis("predicted ÷ measured, times", type="log", tickvals=ticks, range=[-far, far])
    return _columns(traces, x, len(findings), shapes=[upright(1, GREY, width=1.5)])


def _dots(number: int, pairs: Sequence[tuple[float, str]], symbol: str) -> Trace:
    """pairs: ratios with what they are of"""
    marker = {"color": _COLUMN_COLOURS[number], "size": 10, "symbol": symbol, "opacity": 0.8, "line": {"width": 1.5}}
    ratios, labels = [ratio for ratio, _ in pairs], [label for _, label in pairs]
    hover = "%{text}: %{x:.3g} times<extra></extra>"
    return dots(ratios, [_LETTERS[number]] * len(pairs), marker, text=labels, hovertemplate=hover)


def _rows(document: Mapping[str, Any]) -> list[tuple[float, str]]:
    """(predicted over measured, what it is) of an answer's single rows, as its document lists them."""
    rows = []
    for block in document["blocks"]:
        for each in block["blocks"] if block["kind"] == "details" else [block]:
            if each["kind"] == "table" and each.get("title") == _SINGLE_ROWS:
                rows += [_row(row) for row in each["rows"]]
    return rows


def _row(row: Sequence[Any]) -> tuple[float, str]:
    label, metric, predicted, measured, _ = (str(cell) for cell in row)
    ratio = float(predicted.replace(",", "")) / float(measured.replace(",", ""))
    return ratio, f"{metric} {measured} measured, {label}"


def _cell(cell: Mapping[str, Any]) -> str:
    return f"median of {cell['rows']:,} rows, {cell['model']} on {cell['device']}, {cell['metric']}"


def _columns(traces: Sequence[Trace], x: Trace, count: int, **more: Any) -> Figure:
    """A row for each deployment. count: of deployments"""
    y = axis("deployment", type="category", autorange="reversed")
    margin = {"l": 56, "r": 16, "t": 10, "b": 48}
    return figure(traces, 96 + _COLUMN * max(count, 1), x, y, showlegend=False, margin=margin, **more)
