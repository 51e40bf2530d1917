"""Pictures of what helps to choose: of a what-if a tornado, where bounds change, an alternative's lines; of a plan what
each device comes to, cost against latency. Pure functions of what the commands print with `--json`."""

__all__ = ["against_lines", "bounds_plot", "devices_bars", "front_plot", "tornado"]

from collections.abc import Mapping, Sequence
from typing import Any

from perfmodel.planning.metrics import Metric, study_metric
from perfmodel.report.drawing.figures import (
    BLUE,
    BOUND_COLOURS,
    GREEN,
    GREY,
    ORANGE,
    SKY,
    Figure,
    Trace,
    across,
    axis,
    bars,
    figure,
    line,
    upright,
)
from perfmodel.report.views.whatif.sentences import path_label

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
