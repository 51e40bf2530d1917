"""Figures of a what-if and of a plan, from what `perfmodel whatif --json` and `perfmodel plan --json` print."""

from collections.abc import Mapping, Sequence
from math import log10
from typing import Any

from perfmodel.planning.metrics import Metric, study_metric
from perfmodel.report.drawing import figures as fig
from perfmodel.report.drawing.figures import BLUE, GREEN, GREY, ORANGE, SKY, Figure, Trace, axis, figure, line, upright
from perfmodel.report.numbers import MISSING, format_metric, format_short

_LABELS = {
    "peak_flops": "peak FLOPs",
    "bandwidth": "bandwidth",
    "capacity": "capacity",
    "power_cap_w": "power cap in W",
    "kernels": "kernel overheads",
    "host": "host time",
    "rate": "arrival rate",
    "concurrency": "concurrency",
}
_OF_NETWORKS = {"bandwidth_bytes_per_s": "network bandwidth", "latency_s": "network latency"}
_NAMES = {"hbm": "HBM", "nvlink": "NVLink", "pcie": "PCIe", "infinity_fabric": "Infinity Fabric", "ici": "ICI"}
_ROW, _TOP, _CELL, _WIDTH = 44, 120, 60, 826  # pixels
_BESIDE = 0.06  # of the span of bars, for the word beside a short one
_LONGEST_NAME = 36  # of an alternative, in characters
_WIDE = 5  # times the lowest latency: then the highest needs a logarithmic axis beside it
_DARK = 0.45  # of a cell whose text is white


def path_label(path: str) -> str:
    """`HBM bandwidth` for hardware.hbm.bandwidth; other paths stay as they are."""
    parts = path.split(".")
    if parts[:2] == ["cluster", "network"] and parts[-1] in _OF_NETWORKS:
        return _OF_NETWORKS[parts[-1]]
    if parts[:2] == ["cluster", "pools"] and "hardware" in parts:
        return f"{path_label('.'.join(parts[3:]))} of pool {parts[2]}"
    if path == "cluster.kv_transfer.bandwidth_bytes_per_s":
        return "KV link bandwidth"
    if path == "hardware":
        return "device"
    label = _LABELS.get(parts[-1])
    if label is None or parts[0] not in ("hardware", "overheads", "traffic"):
        return path
    owner = _NAMES.get(parts[-2], "")
    return f"{owner} {label}" if owner else label if len(parts) == 2 or parts[0] == "traffic" else path


def tornado(data: Any, metric: str) -> Figure | None:
    """Two bars per varied value around the current metric, widest on top; None if nothing moves it."""

    def swing(row: Mapping[str, Any]) -> float:
        ends = [end for side in ("low", "base", "high") if (end := row[side]["metric"]) is not None]
        return max(ends) - min(ends) if len(ends) > 1 else 0.0

    rows = [row for row in data["sensitivities"] if row["metric"] == metric and swing(row) > 0]
    if not rows:
        return None
    rows.sort(key=swing)
    shown = study_metric(metric)
    base, names = data["base"]["values"][metric] * shown.scale, [path_label(row["path"]) for row in rows]
    hover = f"%{{y}} at %{{customdata[0]}}: %{{customdata[1]:.4g}} {shown.unit}<extra></extra>"
    sides = []
    # Of two bars on one side of the base one lies above the other: else one would hide the other.
    for side, name, colour, offset in (("low", "less of it", ORANGE, 0.0), ("high", "more of it", BLUE, -0.35)):
        ends = [row[side]["metric"] for row in rows]
        values = [None if end is None else end * shown.scale for end in ends]
        asked = [row[side]["value"] for row in rows]
        lengths = [None if value is None else value - base for value in values]
        pairs = [list(pair) for pair in zip(asked, values, strict=True)]
        words = {"text": asked, "textposition": "auto", "textangle": 0, "insidetextanchor": "end"}
        look = {"name": name, "base": base, "customdata": pairs, "width": 0.35, "offset": offset}
        sides.append(fig.bars(lengths, names, colour, hover, **look, **words))
    ends = [base, *(value for side in sides for _, value in side["customdata"] if value is not None)]
    room = _BESIDE * (max(ends) - min(ends) or 1.0)  # for words beside short bars at either end
    span = {"range": [min(ends) - room, max(ends) + room], "zeroline": False}
    x, rule = axis(f"{shown.label} ({shown.unit})", **span), upright(base, GREY, width=1.5)
    y = {"automargin": True, "ticks": ""}
    return figure(sides, _TOP + _ROW * len(rows), x, y, barmode="overlay", shapes=[rule])


def along_figure(data: Any, path: str, metric: str) -> Figure | None:
    """Metric over the value at `path`, with and without the alternative if there is one, and its break-even; None
    without a value."""
    shown, other = study_metric(metric), data["against"]
    own, theirs = ([p for p in of["points"] if p["set"].startswith(f"{path}=")] for of in (data, other or data))
    sides = [("as it is", own, GREY if other else BLUE)]
    if other is not None:
        name = " ".join(other["set"])
        sides.append((name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}...", theirs, BLUE))
    lines = [_metric_along(label, points, shown, colour) for label, points, colour in sides]
    if not any(trace["x"] for trace in lines):
        return None
    shapes: list[Trace] = []
    for turn in data["crossovers"]:  # where it begins or ends to pay, and the span over draws of the traffic
        if turn["metric"] == metric and turn["path"] == path:
            span = {"x0": turn["low"], "x1": turn["high"], "yref": "y domain", "y0": 0, "y1": 1}
            look = {"fillcolor": SKY, "opacity": 0.2, "line": {"width": 0}}
            shapes += [{"type": "rect", **span, **look}, upright(turn["at"], SKY, width=1.5, dash="dash")]
    values = [_value(point["set"]) for point in own]
    xs, words = zip(*((x, text) for x, text in values if x is not None), strict=True)
    title = f"{path_label(path)}, multiples of the present one" if words[0].endswith("x") else path_label(path)
    places, kind = (
        {"tickmode": "array", "tickvals": list(xs), "ticktext": list(words)},
        "log" if min(xs) > 0 else "linear",
    )
    y = axis(f"{shown.label} ({shown.unit})", rangemode="tozero")
    return figure(lines, 340, axis(title, type=kind, **places), y, shapes=shapes, showlegend=len(lines) > 1)


def _metric_along(name: str, points: Sequence[Any], metric: Metric, colour: str) -> Trace:
    pairs = [(_value(point["set"])[0], point["values"].get(metric.key)) for point in points]
    shown = [(x, value * metric.scale) for x, value in pairs if x is not None and value is not None]
    xs, ys = [x for x, _ in shown], [value for _, value in shown]
    drawn = line(xs, ys, name, colour, f"%{{x}}: %{{y:.4g}} {metric.unit}<extra></extra>", width=2.5)
    return drawn | {"mode": "lines+markers", "marker": {"size": 8, "color": colour}}


def _value(override: str) -> tuple[float | None, str]:
    """(number, as it is written) of `PATH=900 GB/s`; None for a name."""
    text = override.partition("=")[2]
    number, _, unit = text.removesuffix("x").partition(" ")
    try:
        value = float(number)
    except ValueError:
        return None, text
    return value, f"{format_short(value)}{'x' if text.endswith('x') else ''} {unit}".strip()


def grid_figure(data: Any, metric: str) -> Figure:
    """The metric in each cell of a grid, darker where it is larger."""
    shown, cells = study_metric(metric), {tuple(row["set"]): row["values"].get(metric) for row in data["grid"]}
    down, across = (list(dict.fromkeys(pair[side] for pair in cells)) for side in (0, 1))
    known = sorted(value for value in cells.values() if value is not None)
    is_log, xs, ys, colours, inks, texts = bool(known) and known[0] > 0, *([] for _ in range(5))
    for (row, column), value in cells.items():
        dark = 0.0
        if value is not None:
            least, most, at = (log10(x) if is_log else x for x in (known[0], known[-1], value))
            dark = 0.06 + 0.69 * (at - least) / (most - least or 1.0)
        xs.append(across.index(column))
        ys.append(-down.index(row))
        colours.append(fig.translucent(BLUE, dark))
        inks.append("#FFFFFF" if dark > _DARK else fig.INK)
        texts.append(MISSING if value is None else format_metric(shown, value))
    columns, rows = (len(names) + 0.2 for names in (across, down))
    cell = min(_CELL, _WIDTH / columns)
    marker = {"symbol": "square", "size": cell - 2, "color": colours}
    look = {"text": texts, "textposition": "middle center", "textfont": {"color": inks}, "mode": "markers+text"}
    axes = []
    for overrides, sign in ((across, 1), (down, -1)):
        at, words = [sign * place for place in range(len(overrides))], [_value(text)[1] for text in overrides]
        ends = {"range": [min(at) - 0.6, max(at) + 0.6], "tickvals": at, "ticktext": words}
        axes.append(axis(path_label(overrides[0].partition("=")[0]), **ends))
    margin = {"l": 150, "r": 24 + _WIDTH - cell * columns, "t": 48, "b": 48}
    return figure([fig.dots(xs, ys, marker, **look)], 96 + cell * rows, *axes, showlegend=False, margin=margin)


def front_plot(data: Any) -> Figure | None:
    """Cost against latency at the rate: deployments that none beats in both, joined and numbered, the other finalists,
    the choice."""
    front, labels = data["front"], {row["label"] for row in data["front"]}
    others = [row for row in data["ranked"] if row["label"] not in labels and row["tightness"] is not None]
    if not front:
        return None
    is_priced = all(row["usd_per_hour"] is not None for row in (*front, *others))
    key, unit = ("usd_per_hour", "USD per hour") if is_priced else ("num_devices", "GPUs")
    other_key = "usd_per_hour" if is_priced else "gpus"
    groups = [("no other is better in both", front, key, BLUE, 9), ("other finalists", others, other_key, GREY, 9)]
    winner = data["winner"]
    if winner is not None and winner["tightness"] is not None:
        groups.append(("the choice", [winner], other_key, GREEN, 15))
    traces, hover = [], "%{text}<br>%{x:.4g}, %{y:.2f} of the limit<extra></extra>"
    for name, rows, of_x, colour, size in groups:
        xs, ys = [row[of_x] for row in rows], [row["tightness"] for row in rows]
        look = {"text": [row["label"] for row in rows], "marker": {"size": size, "color": colour}}
        mode = "lines+markers" if rows is front else "markers"
        traces.append(line(xs, ys, name, colour, hover, shape="hv", **look) | {"mode": mode})
    heights = [height for trace in traces for height in trace["y"]]
    is_log = max(heights) > _WIDE * min(heights) > 0
    at = [(row[key], log10(row["tightness"]) if is_log else row["tightness"]) for row in front]
    notes = [fig.note(str(number), *place, xanchor="left", yanchor="bottom") for number, place in enumerate(at, 1)]
    y = axis("latency over its limit (1: just met)", type="log" if is_log else "linear", rangemode="tozero")
    met = fig.across(1, GREY, dash="dot", width=1.5)
    drawn = [trace for trace in traces if trace["x"]]
    return figure(drawn, 380, axis(unit, rangemode="tozero"), y, shapes=[met], annotations=notes)
