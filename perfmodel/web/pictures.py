"""Pictures of data: a command's JSON as plotly's data and layout. Pure; colours of theme and paper are the page's."""

__all__ = ["memory_bar"]

from typing import Any

from perfmodel.report.drawing.colours import BLUE, GREEN, GREY, ORANGE, SKY

_LABELLED = 0.06  # share of the bar below which a part has no name in it; hovering names all


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
    parts.append(("not used", max(visible - sum(size for _, size, _ in parts), 0), "rgba(128,128,128,0.18)"))
    bars = [_bar(name, size, colour, visible) for name, size, colour in parts if size > 0]
    axis = {"title": {"text": "GB on one device"}, "range": [0, visible / 1e9]}
    layout = {"barmode": "stack", "height": 170, "xaxis": axis, "yaxis": {"visible": False}, "bargap": 0.1}
    return {"data": bars, "layout": {**layout, "legend": {"traceorder": "normal"}}}


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
        "marker": {"color": colour},
        "hovertemplate": f"{name}: %{{x:.2f}} GB<extra></extra>",
    }
