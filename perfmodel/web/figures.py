"""Numbers as a page shows them: in the unit that people use, to the digits that their interval allows, each with its
place in the JSON of the command that gives it.

A figure is a `data` element: its text is for eyes; `value` is the number and `data-path` its place in that JSON, so
that a test, or a reader with the command, finds it there.
"""

__all__ = ["FORMS", "figure", "shown_number", "value_at"]

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from perfmodel.planning.metrics import metric_of
from perfmodel.report.numbers import MISSING, format_metric, format_number, format_short, format_si, is_number

_KEPT = 10  # steps of the last digit in an interval, at least


def figure(data: Any, path: str, form: str = "") -> Markup:
    """The element of the number at `path` of a command's JSON.

    form: one of FORMS; else the metric that the path's last part names, with the interval that the JSON has of it
    """
    value = value_at(data, path)
    text = FORMS[form](value) if form else _metric(data, path, value)
    raw = "" if value is None else repr(value) if isinstance(value, float) else str(value)
    return Markup('<data class="figure" value="{}" data-path="{}" data-form="{}">{}</data>').format(
        raw, path, form, text
    )


def value_at(data: Any, path: str) -> Any:
    """What is at `a.b.0` of JSON; None where nothing is."""
    for part in path.split(".") if path else ():
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, Sequence) and not isinstance(data, str) and part.isdigit() and int(part) < len(data):
            data = data[int(part)]
        else:
            return None
    return data


def shown_number(value: float | None, interval: Sequence[float] | None, most_digits: int) -> str:
    """A number with as many digits after the point as its interval makes sense of, and at most `most_digits`; of one
    whose interval is wider still, zeros stand for the last digits before the point.

    interval: low and high; None: nothing is known of it
    """
    if not is_number(value):
        return MISSING
    if interval is None or not all(is_number(each) for each in interval) or interval[1] <= interval[0]:
        return format_number(value, most_digits)
    digits = -math.floor(math.log10((interval[1] - interval[0]) / _KEPT) + 1e-9)
    return format_number(round(value, digits), min(max(digits, 0), most_digits))


def _metric(data: Any, path: str, value: Any) -> str:
    key = path.rpartition(".")[2]
    metric, interval = metric_of(key), value_at(data, f"interval.{key}")
    if not is_number(value):
        return MISSING
    if interval is None:
        return f"{format_metric(metric, value)} {metric.unit}".strip()
    scaled = [each * metric.scale for each in interval]
    return f"{shown_number(value * metric.scale, scaled, metric.digits)} {metric.unit}".strip()


def _in(unit: str, scale: float = 1.0, digits: int = 1) -> Callable[[Any], str]:
    return lambda value: f"{format_number(value * scale, digits)} {unit}" if is_number(value) else MISSING


FORMS: Mapping[str, Callable[[Any], str]] = {
    "bytes": lambda value: format_si(value, "B"),
    "bandwidth": lambda value: format_si(value, "B/s"),
    "flops": lambda value: format_si(value, "FLOP"),
    "flop_rate": lambda value: format_si(value, "FLOP/s"),
    "count": lambda value: format_number(value, 0),
    "short": format_short,
    "seconds": lambda value: format_si(value, "s"),
    "ms": _in("ms"),
    "latency_ms": lambda value: format_si(value / 1e3, "s") if is_number(value) else MISSING,
    "tok_s": lambda value: f"{format_short(value)} tok/s" if is_number(value) else MISSING,
    "percent": _in("%", 100),
    "usd": lambda value: f"${format_number(value, 2)}" if is_number(value) else MISSING,
    "rate": _in("req/s", 1, 2),
    "req_s": lambda value: f"{format_short(value)} req/s" if is_number(value) else MISSING,
    "watts": _in("W", 1, 0),
    "joules": _in("J", 1, 2),
    "factor": lambda value: f"{value:.2f}x" if is_number(value) else MISSING,
    "text": lambda value: MISSING if value is None else str(value),
}
