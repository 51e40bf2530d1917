"""Pictures of load: latencies and goodput against the rate of requests. Pure functions of what `perfmodel whatif`
prints with `--json`; colours of theme and paper are the page's."""

__all__ = ["goodput_curve", "latency_curve", "prompt_curve"]

from collections.abc import Iterable, Mapping, Sequence
from math import floor, log10
from typing import Any

from perfmodel.report.drawing.svg import BLUE, GREEN, GREY, METRIC_COLOURS, ORANGE, VERMILION

_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E"}
_RATE = "requests/s"
_FULL_LABELS = 3  # decades of an axis up to which 1, 2 and 5 of each are written
_HEIGHT = 300
_ROOM = 1.2  # above a limit, for its words


def latency_curve(data: Any, name: str, now: float | None = None, bands: Any = None) -> dict[str, Any]:
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
    shapes, notes = _marks(data, now)
    if limit is not None:
        shapes.append(_across(limit))
        notes.append(_note(f"limit {limit:,g} ms", x=0, y=log10(limit), xref="paper", xanchor="left", yanchor="bottom"))
    ends = [value for trace in traces for value in trace["y"] if value] + ([limit * _ROOM] if limit else [])
    return _picture(traces, shapes, notes, f"{label}, ms", _rates_axis(rates, now), _log_axis(ends))


def goodput_curve(data: Any, now: float | None = None) -> dict[str, Any]:
    """Requests completed in a second, and those of them that meet the SLO, against those that arrive."""
    rates = data["load"]["rates"]
    served, good = (_values(data, name) for name in ("request_throughput", "request_goodput"))
    traces = [_line("completed", rates, served, BLUE, _RATE)]
    if any(value is not None for value in good):
        traces.append(_line("within the SLO", rates, good, GREEN, _RATE))
    ideal = {**_line("all that arrive", rates, rates, GREY, _RATE, dash="dot"), "mode": "lines"}
    shapes, notes = _marks(data, now)
    ends = [value for trace in (*traces, ideal) for value in trace["y"] if value]
    return _picture([ideal, *traces], shapes, notes, "requests/s completed", _rates_axis(rates, now), _log_axis(ends))


def prompt_curve(data: Any) -> dict[str, Any]:
    """Time to first token against the tokens of a prompt."""
    points = [(float(each["set"].rpartition("=")[2]), each["values"].get("mean_ttft_ms")) for each in data["points"]]
    known = [(x, y) for x, y in points if y is not None]
    xs, ys = [x for x, _ in known], [y for _, y in known]
    hover = "%{x:,.0f} tokens: %{y:,.4g} ms<extra></extra>"
    line = _line("TTFT of an idle server", xs, ys, METRIC_COLOURS["ttft"], "ms") | {"hovertemplate": hover}
    x_axis = {"title": {"text": "tokens of the prompt"}, **_log_axis(xs)}
    return _picture([line], [], [], "TTFT, ms", x_axis, _log_axis(ys))


def _picture(
    traces: Sequence[Mapping[str, Any]],
    shapes: Sequence[Mapping[str, Any]],
    notes: Sequence[Mapping[str, Any]],
    label: str,
    x_axis: Mapping[str, Any],
    y_axis: Mapping[str, Any],
) -> dict[str, Any]:
    layout = {
        "height": _HEIGHT,
        "xaxis": x_axis,
        "yaxis": {"title": {"text": label}, **y_axis},
        "shapes": list(shapes),
        "annotations": list(notes),
        "hovermode": "x unified",
        "margin": {"l": 64, "r": 16, "t": 44, "b": 48},
        "showlegend": len(traces) > 1,
    }
    return {"data": list(traces), "layout": layout}


def _values(data: Any, metric: str) -> list[float | None]:
    return [point["values"].get(metric) for point in data["points"]]


def _line(
    name: str, xs: Sequence[float], ys: Sequence[float | None], colour: str, unit: str, dash: str = "solid"
) -> dict[str, Any]:
    """A line with its points. unit: of what it shows, for the words beside a pointer; dash: as plotly names it"""
    line = {"color": colour, "width": 2.5 if dash == "solid" else 1.8, "dash": dash}
    return {
        "type": "scatter",
        "mode": "lines+markers" if dash == "solid" else "lines",
        "name": name,
        "x": list(xs),
        "y": list(ys),
        "line": line,
        "marker": {"size": 6},
        "hovertemplate": f"%{{y:,.4g}} {unit}",
    }


def _band(data: Any, metric: str, colour: str) -> list[dict[str, Any]]:
    """The 80 % interval of a mean as a filled outline, of the points that have one."""
    known = [
        (rate, *ends)
        for rate, point in zip(data["load"]["rates"], data["points"], strict=True)
        if (ends := (point.get("interval") or {}).get(metric))
    ]
    if len(known) < 2:
        return []
    xs = [rate for rate, _, _ in known]
    ys = [high for _, _, high in known] + [low for _, low, _ in reversed(known)]
    fill = f"rgba({', '.join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))}, 0.24)"
    band = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "fill": "toself", "fillcolor": fill}
    return [{**band, "name": "80 % band", "x": xs + xs[::-1], "y": ys, "hoverinfo": "skip"}]


def _marks(data: Any, now: float | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rate that is asked for, the knee, the largest rate within the SLO: upright lines with words above them."""
    load = data["load"]
    within = load["within_slo"] or {}
    kept = None if within.get("is_all") else within.get("max_rate")  # the last rate shown is no limit
    found = [
        (now or load["rate"], "now", ORANGE, "solid"),
        (load["knee"], "knee", GREY, "dot"),
        (kept, "SLO limit", GREEN, "solid"),
    ]
    known = [(rate, word, colour, dash) for rate, word, colour, dash in found if rate]
    shapes = [
        {
            "type": "line",
            "xref": "x",
            "x0": rate,
            "x1": rate,
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "line": {"color": colour, "width": 1.6, "dash": dash},
            "layer": "below",
        }
        for rate, _, colour, dash in known
    ]
    return shapes, list(_words(known, (load["rates"][0] * load["rates"][-1] ** 2) ** (1 / 3)))


def _words(marks: Iterable[tuple[float, str, str, str]], late: float) -> Iterable[dict[str, Any]]:
    """The words of upright lines, one below another; beyond `late` on their left."""
    for row, (rate, word, colour, _) in enumerate(sorted(marks)):
        anchor = "right" if rate > late else "left"
        text = f'<b><span style="color:{colour}">|</span></b>'
        text = f"{word} {text}" if anchor == "right" else f"{text} {word}"
        yield _note(text, log10(rate), 1 - 0.075 * row, yref="paper", xanchor=anchor, yanchor="top")


def _note(text: str, x: float, y: float, **places: Any) -> dict[str, Any]:
    return {"text": text, "x": x, "y": y, "showarrow": False, "font": {"size": 11}, **places}


def _across(limit: float) -> dict[str, Any]:
    line = {"color": VERMILION, "width": 1.6, "dash": "longdash"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": limit, "y1": limit, "line": line}


def _rates_axis(rates: Sequence[float], now: float | None) -> dict[str, Any]:
    return {"title": {"text": f"arriving, {_RATE}"}, **_log_axis([*rates, *([now] if now else [])])}


def _log_axis(values: Sequence[float]) -> dict[str, Any]:
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
