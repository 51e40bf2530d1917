"""Pictures of a what-if's JSON as plotly's data and layout: a tornado, where bounds change, an alternative's lines."""

__all__ = ["against_lines", "bounds_plot", "tornado"]

from collections.abc import Mapping, Sequence
from typing import Any

from perfmodel.planning.metrics import Metric, study_metric
from perfmodel.report.drawing.svg import BLUE, GREEN, GREY, ORANGE, SKY
from perfmodel.report.views.whatif.sentences import path_label

_ROW, _TOP = 44, 120  # pixels
_BOUNDS = {"memory": GREEN, "compute": BLUE, "communication": ORANGE, "overhead": GREY}
_LARGEST_BATCH = 8192
_LONGEST_NAME = 36  # of an alternative, in characters


def tornado(data: Any, metric: str) -> dict[str, Any] | None:
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
    bars = [_side(rows, names, side, known, base) for side in ("low", "high")]
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": base, "x1": base, "line": {"width": 1.5}}
    layout = {
        "barmode": "overlay",
        "height": _TOP + _ROW * len(rows),
        "xaxis": {"title": {"text": f"{known.label} ({known.unit})"}, "zeroline": False},
        "yaxis": {"automargin": True, "ticks": ""},
        "shapes": [{**line, "line": {"width": 1.5, "color": GREY}}],
        "bargap": 0.3,
    }
    return {"data": bars, "layout": layout}


def _side(rows: Sequence[Any], names: list[str], side: str, metric: Metric, base: float) -> dict[str, Any]:
    """The bars of all low, or all high values."""
    ends = [each[side]["metric"] for each in rows]
    values = [None if end is None else end * metric.scale for end in ends]
    asked = [each[side]["value"] for each in rows]
    return {
        "type": "bar",
        "orientation": "h",
        "name": "less of it" if side == "low" else "more of it",
        "base": base,
        "x": [None if value is None else value - base for value in values],
        "y": names,
        "customdata": [list(pair) for pair in zip(asked, values, strict=True)],
        "text": asked,
        "textposition": "auto",
        "textangle": 0,
        "insidetextanchor": "end",
        "marker": {"color": ORANGE if side == "low" else BLUE},
        "hovertemplate": f"%{{y}} at %{{customdata[0]}}: %{{customdata[1]:.4g}} {metric.unit}<extra></extra>",
    }


def _swing(each: Mapping[str, Any]) -> float:
    ends = [each[side]["metric"] for side in ("low", "base", "high")]
    known = [end for end in ends if end is not None]
    return max(known) - min(known) if len(known) > 1 else 0.0


def bounds_plot(data: Any) -> dict[str, Any] | None:
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
    bars = [_bound_bars(bound, [span for span in spans if span[1] == bound]) for bound in _BOUNDS]
    layout = {
        "barmode": "overlay",
        "height": _TOP + 26 * len(names),
        "xaxis": {"title": {"text": "sequences that decode in a step"}, "type": "log", "range": [0, 3.92]},
        "yaxis": {"categoryorder": "array", "categoryarray": names, "automargin": True, "ticks": ""},
        "bargap": 0.35,
    }
    return {"data": [each for each in bars if each["y"]], "layout": layout}


def _spans(name: str, turns: Sequence[Any]) -> list[tuple[str, str, float, float]]:
    """(operator, bound, from batch, to batch)"""
    turns = sorted(turns, key=lambda each: float(each["at"]))
    starts = [1.0, *(float(each["at"]) for each in turns)]
    bounds = [turns[0]["before"], *(each["after"] for each in turns)]
    return list(zip([name] * len(bounds), bounds, starts, [*starts[1:], float(_LARGEST_BATCH)], strict=True))


def _bound_bars(bound: str, spans: Sequence[tuple[str, str, float, float]]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": f"{bound}-bound",
        "y": [name for name, *_ in spans],
        "base": [low for *_, low, _ in spans],
        "x": [high - low for *_, low, high in spans],
        "customdata": [[low, high] for *_, low, high in spans],
        "marker": {"color": _BOUNDS[bound]},
        "hovertemplate": f"%{{y}}: {bound}-bound from batch %{{customdata[0]:,.0f}} on<extra></extra>",
    }


def against_lines(data: Any, metric: str) -> dict[str, Any] | None:
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
    layout = {
        "height": 340,
        "xaxis": {"title": {"text": title}, "type": "log", **_ticks(data["points"])},
        "yaxis": {"title": {"text": f"{known.label} ({known.unit})"}, "rangemode": "tozero"},
        "shapes": [shape for each in turns for shape in _turn(each)],
    }
    return {"data": lines, "layout": layout}


def _line(name: str, points: Sequence[Any], metric: Metric, colour: str) -> dict[str, Any]:
    places = [(_number(each["set"]), each["values"].get(metric.key)) for each in points]
    shown = [(x, value * metric.scale) for x, value in places if x is not None and value is not None]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [x for x, _ in shown],
        "y": [value for _, value in shown],
        "line": {"color": colour, "width": 2.5},
        "marker": {"size": 8},
        "hovertemplate": f"%{{x}}: %{{y:.4g}} {metric.unit}<extra></extra>",
    }


def _ticks(points: Sequence[Any]) -> dict[str, Any]:
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


def _turn(each: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A line where the alternative begins or ends to pay, and the span over draws of the traffic."""
    whole = {"yref": "paper", "y0": 0, "y1": 1}
    span = {"x0": each["low"], "x1": each["high"], "fillcolor": SKY, "opacity": 0.2, "line": {"width": 0}}
    place = {"x0": each["at"], "x1": each["at"], "line": {"color": SKY, "width": 1.5, "dash": "dash"}}
    return [{**whole, **span, "type": "rect"}, {**whole, **place, "type": "line"}]
