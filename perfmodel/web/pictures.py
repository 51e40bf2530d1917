"""Pictures of data: pure functions from what commands print with `--json` to figures; colours of theme and paper are
the page's."""

from collections.abc import Iterable, Mapping, Sequence
from math import floor, log10
from types import SimpleNamespace
from typing import Any

from perfmodel.planning.metrics import Metric, metric_of, study_metric
from perfmodel.report.drawing.figures import (
    BLUE,
    BOUND_COLOURS,
    GREEN,
    GREY,
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
from perfmodel.report.plots.step import memory_figure
from perfmodel.report.views.whatif import path_label
from perfmodel.web.service import QueryState

_ROW, _TOP = 44, 120  # pixels
_BOUNDS = ("memory", "compute", "communication", "overhead")
_LARGEST_BATCH = 8192
_LONGEST_NAME = 36  # of an alternative, in characters
_WIDE = 5  # times the lowest latency: then the highest needs a logarithmic axis beside it
_NAMES = {"automargin": True, "ticks": ""}  # an axis of names


def devices_bars(data: Any) -> Figure | None:
    """What the best deployment of each device that was asked for costs; None for a single device.

    data: what `perfmodel plan --json` prints
    """
    able = [row for row in data["devices"] if row["label"]]
    if len(able) < 2:
        return None
    is_priced = all(row["usd_per_hour"] is not None for row in able)
    key, unit = ("usd_per_hour", "USD per hour") if is_priced else ("num_devices", "GPUs")
    able.sort(key=lambda row: -row[key])
    chosen = data["winner"] and data["winner"]["choices"].get("hardware")
    hover = f"%{{customdata[0]}}: %{{x:.4g}} {unit}, up to %{{customdata[1]:.3g}} req/s<extra></extra>"
    colours = [GREEN if answer["device"] == chosen else GREY for answer in able]
    bar = bars([answer[key] for answer in able], [answer["device"] for answer in able], colours, hover)
    bar |= {"text": [_text(answer) for answer in able], "textposition": "auto"}
    bar["customdata"] = [[answer["label"], answer["max_rate"]] for answer in able]
    x = axis(f"{unit}, of each one's best deployment", rangemode="tozero")
    return figure([bar], 90 + 46 * len(able), x, _NAMES, showlegend=False)


def _text(row: Any) -> str:
    price = "" if row["usd_per_hour"] is None else f"{row['usd_per_hour']:.2f} USD/h, "
    return f"{price}{row['num_devices']} GPUs"


def front_plot(data: Any) -> Figure | None:
    """Cost against latency at the rate: deployments that none beats in both, joined, and the other finalists.

    data: what `perfmodel plan --json` prints
    """
    front, labels = data["front"], {row["label"] for row in data["front"]}
    others = [row for row in data["ranked"] if row["label"] not in labels and row["tightness"] is not None]
    if not front:
        return None
    is_priced = all(row["usd_per_hour"] is not None for row in (*front, *others))
    key, unit = ("usd_per_hour", "USD per hour") if is_priced else ("num_devices", "GPUs")
    other_key = "usd_per_hour" if is_priced else "gpus"
    joined = [(point[key], point["tightness"], point["label"]) for point in front]
    beside = [(point[other_key], point["tightness"], point["label"]) for point in others]
    points = [_points("no other is better in both", joined, BLUE, True), _points("other finalists", beside, GREY)]
    winner = data["winner"]
    if winner is not None and winner["tightness"] is not None:
        choice = (winner[other_key], winner["tightness"], winner["label"])
        points.append(_points("the choice", [choice], GREEN, size=15))
    heights = [height for trace in points for height in trace["y"]]
    kind = "log" if max(heights) > _WIDE * min(heights) > 0 else "linear"
    x = axis(unit, rangemode="tozero")
    y = axis("latency over its limit (1: just met)", type=kind, rangemode="tozero")
    met = across(1, GREY, dash="dot", width=1.5)
    return figure([trace for trace in points if trace["x"]], 380, x, y, shapes=[met])


def _points(
    name: str, points: Sequence[tuple[float, float, str]], colour: str, is_joined: bool = False, size: int = 9
) -> Trace:
    xs, ys, labels = ([point[place] for point in points] for place in range(3))
    hover = "%{text}<br>%{x:.4g}, %{y:.2f} of the limit<extra></extra>"
    trace = line(xs, ys, name, colour, hover, shape="hv", text=labels, marker={"size": size, "color": colour})
    return trace | {"mode": "lines+markers" if is_joined else "markers"}


def tornado(data: Any, metric: str) -> Figure | None:
    """Each varied value as two bars from the metric as it is, the widest on top; None where nothing moves it.

    data: what `perfmodel whatif --json` prints
    """
    known = study_metric(metric)
    rows = [each for each in data["sensitivities"] if each["metric"] == metric and _swing(each) > 0]
    if not rows:
        return None
    rows.sort(key=_swing)
    base = data["base"]["values"][metric] * known.scale
    names = [path_label(each["path"]) for each in rows]
    sides = [_side(rows, names, side, known, base) for side in ("low", "high")]
    x = axis(f"{known.label} ({known.unit})", zeroline=False)
    rule = upright(base, GREY, width=1.5)
    return figure(sides, _TOP + _ROW * len(rows), x, _NAMES, barmode="overlay", shapes=[rule], bargap=0.3)


def _side(rows: Sequence[Any], names: list[str], side: str, metric: Metric, base: float) -> Trace:
    """The bars of all low, or all high values."""
    ends = [each[side]["metric"] for each in rows]
    values = [None if end is None else end * metric.scale for end in ends]
    asked = [each[side]["value"] for each in rows]
    name, colour = ("less of it", ORANGE) if side == "low" else ("more of it", BLUE)
    hover = f"%{{y}} at %{{customdata[0]}}: %{{customdata[1]:.4g}} {metric.unit}<extra></extra>"
    lengths = [None if value is None else value - base for value in values]
    words = {"text": asked, "textposition": "auto", "textangle": 0, "insidetextanchor": "end"}
    pairs = [list(pair) for pair in zip(asked, values, strict=True)]
    return bars(lengths, names, colour, hover, name=name, base=base, customdata=pairs, **words)


def _swing(each: Mapping[str, Any]) -> float:
    ends = [each[side]["metric"] for side in ("low", "base", "high")]
    known = [end for end in ends if end is not None]
    return max(known) - min(known) if len(known) > 1 else 0.0


def bounds_plot(data: Any) -> Figure | None:
    """By what each operator is bound along the batch, in bars of colours; None where nothing changes.

    data: what `perfmodel whatif --json` prints
    """
    changes = [each for each in data["bound_changes"] if each["path"] == "step.batch" and each["at"] > 0]
    if not changes:
        return None
    by_name: dict[str, list[Any]] = {}
    for each in changes:
        by_name.setdefault(each["what"], []).append(each)
    spans = [span for name, turns in by_name.items() for span in _spans(name, turns)]
    names = sorted(by_name, key=lambda name: -min(each["at"] for each in by_name[name]))
    traces = [_bound_bars(bound, [span for span in spans if span[1] == bound]) for bound in _BOUNDS]
    x = axis("sequences that decode in a step", type="log", range=[0, 3.92])
    y = {"categoryorder": "array", "categoryarray": names, **_NAMES}
    drawn = [trace for trace in traces if trace["y"]]
    return figure(drawn, _TOP + 26 * len(names), x, y, barmode="overlay", bargap=0.35)


def _spans(name: str, turns: Sequence[Any]) -> list[tuple[str, str, float, float]]:
    """(operator, bound, from batch, to batch)"""
    turns = sorted(turns, key=lambda each: float(each["at"]))
    starts = [1.0, *(float(each["at"]) for each in turns)]
    bounds = [turns[0]["before"], *(each["after"] for each in turns)]
    return list(zip([name] * len(bounds), bounds, starts, [*starts[1:], float(_LARGEST_BATCH)], strict=True))


def _bound_bars(bound: str, spans: Sequence[tuple[str, str, float, float]]) -> Trace:
    hover = f"%{{y}}: {bound}-bound from batch %{{customdata[0]:,.0f}} on<extra></extra>"
    names, ends = [name for name, *_ in spans], [[low, high] for *_, low, high in spans]
    lengths, starts = [high - low for low, high in ends], [low for low, _ in ends]
    more = {"name": f"{bound}-bound", "base": starts, "customdata": ends}
    return bars(lengths, names, BOUND_COLOURS[bound], hover, **more)


def against_lines(data: Any, metric: str) -> Figure | None:
    """A metric along what was varied, as it is and with the alternative, and where that begins to pay.

    data: what `perfmodel whatif --against ... --json` prints
    """
    known, other = study_metric(metric), data["against"]
    path = data["points"][0]["set"].partition("=")[0]
    name = " ".join(other["set"])
    name = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
    sides = [("as it is", data["points"], GREY), (name, other["points"], BLUE)]
    lines = [_line(name, points, known, colour) for name, points, colour in sides]
    if not any(line["x"] for line in lines):
        return None
    turns = [each for each in data["crossovers"] if each["metric"] == metric and each["path"] == path]
    is_multiple = data["points"][0]["set"].endswith("x")
    title = f"{path_label(path)}, multiples of the present one" if is_multiple else path_label(path)
    x = axis(title, type="log", **_ticks(data["points"]))
    y = axis(f"{known.label} ({known.unit})", rangemode="tozero")
    return figure(lines, 340, x, y, shapes=[shape for turn in turns for shape in _turn(turn)])


def _line(name: str, points: Sequence[Any], metric: Metric, colour: str) -> Trace:
    places = [(_number(point["set"]), point["values"].get(metric.key)) for point in points]
    shown = [(x, value * metric.scale) for x, value in places if x is not None and value is not None]
    xs, ys = [x for x, _ in shown], [value for _, value in shown]
    drawn = line(xs, ys, name, colour, f"%{{x}}: %{{y:.4g}} {metric.unit}<extra></extra>", width=2.5)
    return drawn | {"mode": "lines+markers", "marker": {"size": 8}}


def _ticks(points: Sequence[Any]) -> Trace:
    """Ticks where values are, as they were written."""
    texts = [each["set"].partition("=")[2] for each in points]
    known = [(x, text) for each, text in zip(points, texts, strict=True) if (x := _number(each["set"])) is not None]
    return {"tickmode": "array", "tickvals": [x for x, _ in known], "ticktext": [text for _, text in known]}


def _number(text: str) -> float | None:
    """The number of `traffic.arrivals.rate=0.5x`."""
    try:
        return float(text.partition("=")[2].removesuffix("x"))
    except ValueError:
        return None


def _turn(each: Mapping[str, Any]) -> list[Trace]:
    """A line where the alternative begins or ends to pay, and the span over draws of the traffic."""
    span = {"x0": each["low"], "x1": each["high"], "yref": "y domain", "y0": 0, "y1": 1}
    look = {"fillcolor": SKY, "opacity": 0.2, "line": {"width": 0}}
    return [{"type": "rect", **span, **look}, upright(each["at"], SKY, width=1.5, dash="dash")]


_LATENCY_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E"}
_RATE = "requests/s"
_FULL_LABELS = 3  # decades of an axis up to which 1, 2 and 5 of each are written
_HEIGHT = 300
_ROOM = 1.2  # above a limit, for its words
_LETTERS = "ABCD"
_COLUMN_COLOURS = (BLUE, ORANGE, GREEN, PINK)
_SINGLE_ROWS = "Single rows near this setup"  # a table of every answer with trust
_COLUMN = 46  # of height for a column


def memory_bar(data: Any) -> Figure:
    """One device's memory as a bar. data: what `perfmodel memory --json` prints"""
    return memory_figure(SimpleNamespace(**data))


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
    colour, label = METRIC_COLOURS[name], _LATENCY_NAMES[name]
    rates = data["load"]["rates"]
    means, tails = (_values(data, f"{statistic}_{name}_ms") for statistic in ("mean", "p99"))
    limit = data["load"]["limits_ms"].get(name)
    traces = [
        *_band(bands or data, f"mean_{name}_ms", colour),
        _metric_line("mean", rates, means, colour, "ms"),
        _metric_line("p99", rates, tails, colour, "ms", dash="dash"),
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
    traces = [_metric_line("completed", rates, served, BLUE, _RATE)]
    if any(value is not None for value in good):
        traces.append(_metric_line("within the SLO", rates, good, GREEN, _RATE))
    ideal = {**_metric_line("all that arrive", rates, rates, GREY, _RATE, dash="dot"), "mode": "lines"}
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
    curve = _metric_line("TTFT of an idle server", xs, ys, METRIC_COLOURS["ttft"], "ms") | {"hovertemplate": hover}
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


def _metric_line(
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


def column_bars(findings: Sequence[QueryState], metric: str) -> Figure:
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


def measured_dots(findings: Sequence[QueryState]) -> Figure | None:
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
