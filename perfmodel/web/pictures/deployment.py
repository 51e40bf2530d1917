"""Pictures of data: a command's JSON as plotly's data and layout. Pure; colours of theme and paper are the page's."""

__all__ = ["memory_bar", "step_curve"]

from typing import Any

from perfmodel.report.drawing.svg import BLUE, GREEN, GREY, INK, ORANGE, SKY

_LABELLED = 0.06  # share of the bar below which a part has no name in it; hovering names all
_FREE = "rgba(128,128,128,0.18)"
_LABELS = {"minsize": 10, "mode": "hide"}  # none is set smaller


def memory_bar(data: Any) -> dict[str, Any]:
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
    bars = [_bar(name, size, colour, visible) for name, size, colour in parts if size > 0]
    axis = {"title": {"text": f"GB of the {visible / 1e9:.1f} that a process sees"}, "range": [0, visible / 1e9]}
    layout = {
        "barmode": "stack",
        "height": 170,
        "xaxis": axis,
        "yaxis": {"visible": False},
        "bargap": 0.1,
        "uniformtext": _LABELS,
    }
    return {"data": bars, "layout": {**layout, "legend": {"traceorder": "normal"}}}


def step_curve(data: Any, path: str) -> dict[str, Any]:
    """The time of a step along its batch (`step.batch`) or its context (`step.context`), and where it is now.

    data: what `perfmodel whatif --vary PATH=... --metric step_ms --json` prints
    """
    points = [point for point in data["points"] if point["set"].startswith(f"{path}=")]
    xs, ys = [float(point["set"].partition("=")[2]) for point in points], [_step_ms(point) for point in points]
    now = data["step"][path.partition(".")[2]]
    label = {"step.batch": "sequences in the batch", "step.context": "tokens in each one's KV cache"}[path]
    hover = f"{label}: %{{x:,.0f}}<br>%{{y:,.2f}} ms<extra></extra>"
    line: dict[str, Any] = {
        "x": xs,
        "y": ys,
        "mode": "lines+markers",
        "line": {"color": BLUE, "width": 2.5},
        "hovertemplate": hover,
    }
    here: dict[str, Any] = {"x": [now], "y": [_step_ms(data["base"])], "mode": "markers", "hovertemplate": hover}
    here["marker"] = {"size": 13, "color": ORANGE}
    axis = {"title": {"text": label}, "type": "log", "dtick": 1}
    y_axis = {"title": {"text": "step time, ms"}, "rangemode": "tozero"}
    layout = {"height": 300, "showlegend": False, "xaxis": axis, "yaxis": y_axis}
    return {"data": [{"type": "scatter", **line}, {"type": "scatter", **here}], "layout": layout}


def _step_ms(point: Any) -> float | None:
    value: float | None = point["values"]["step_ms"]
    return value


def _bar(name: str, size: float, colour: str, visible: float) -> dict[str, Any]:
    text = f"{name}<br>{size / 1e9:.1f} GB" if size > _LABELLED * visible else ""
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "x": [size / 1e9],
        "y": [""],
        "text": [text],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        **({"textfont": {"color": INK}} if colour == _FREE else {}),
        "marker": {"color": colour},
        "hovertemplate": f"{name}: %{{x:.2f}} GB<extra></extra>",
    }
