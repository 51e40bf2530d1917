"""Pictures of a plan's JSON as plotly's data and layout: what each device comes to, cost against latency."""

__all__ = ["devices_bars", "front_plot"]

from typing import Any

from perfmodel.report.drawing.svg import BLUE, GREEN, GREY

_ROW, _TOP = 46, 90  # pixels
_WIDE = 5  # times the lowest latency: then the highest needs a logarithmic axis beside it


def devices_bars(data: Any) -> dict[str, Any] | None:
    """What the best deployment of each device that was asked for costs; None for a single device.

    data: what `perfmodel plan --json` prints
    """
    able = [each for each in data["devices"] if each["label"]]
    if len(able) < 2:
        return None
    is_priced = all(each["usd_per_hour"] is not None for each in able)
    key, unit = ("usd_per_hour", "USD per hour") if is_priced else ("num_devices", "GPUs")
    able.sort(key=lambda each: -each[key])
    chosen = data["winner"] and data["winner"]["choices"].get("hardware")
    bar = {
        "type": "bar",
        "orientation": "h",
        "x": [each[key] for each in able],
        "y": [each["device"] for each in able],
        "text": [_text(each) for each in able],
        "textposition": "auto",
        "marker": {"color": [GREEN if each["device"] == chosen else GREY for each in able]},
        "customdata": [[each["label"], each["max_rate"]] for each in able],
        "hovertemplate": f"%{{customdata[0]}}: %{{x:.4g}} {unit}, up to %{{customdata[1]:.3g}} req/s<extra></extra>",
    }
    axis = {"title": {"text": f"{unit}, of each one's best deployment"}, "rangemode": "tozero"}
    layout = {"height": _TOP + _ROW * len(able), "xaxis": axis, "yaxis": {"automargin": True, "ticks": ""}}
    return {"data": [bar], "layout": {**layout, "showlegend": False}}


def _text(each: Any) -> str:
    price = "" if each["usd_per_hour"] is None else f"{each['usd_per_hour']:.2f} USD/h, "
    return f"{price}{each['num_devices']} GPUs"


def front_plot(data: Any) -> dict[str, Any] | None:
    """Cost against latency at the rate: deployments that none beats in both, joined, and the other finalists.

    data: what `perfmodel plan --json` prints
    """
    front, labels = data["front"], {each["label"] for each in data["front"]}
    others = [each for each in data["ranked"] if each["label"] not in labels and each["tightness"] is not None]
    if not front:
        return None
    is_priced = all(each["usd_per_hour"] is not None for each in (*front, *others))
    key, unit = ("usd_per_hour", "USD per hour") if is_priced else ("num_devices", "GPUs")
    other_key = "usd_per_hour" if is_priced else "gpus"
    points = [
        _points(
            "no other is better in both", [(each[key], each["tightness"], each["label"]) for each in front], BLUE, True
        ),
        _points(
            "other finalists", [(each[other_key], each["tightness"], each["label"]) for each in others], GREY, False
        ),
    ]
    winner = data["winner"]
    if winner is not None and winner["tightness"] is not None:
        points.append(
            _points("the choice", [(winner[other_key], winner["tightness"], winner["label"])], GREEN, False, 15)
        )
    heights = [each for trace in points for each in trace["y"]]
    kind = "log" if max(heights) > _WIDE * min(heights) > 0 else "linear"
    top = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1}
    layout = {
        "height": 380,
        "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "latency over its limit (1: just met)"}, "type": kind, "rangemode": "tozero"},
        "shapes": [{**top, "line": {"dash": "dot", "width": 1.5, "color": GREY}}],
    }
    return {"data": [each for each in points if each["x"]], "layout": layout}


def _points(
    name: str, points: list[tuple[float, float, str]], colour: str, is_joined: bool, size: int = 9
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if is_joined else "markers",
        "name": name,
        "x": [x for x, _, _ in points],
        "y": [y for _, y, _ in points],
        "text": [text for _, _, text in points],
        "line": {"shape": "hv", "color": colour},
        "marker": {"size": size, "color": colour},
        "hovertemplate": "%{text}<br>%{x:.4g}, %{y:.2f} of the limit<extra></extra>",
    }
