"""Numbers as text: fixed digits, SI prefixes, three significant digits, factors, durations; a dash for no value."""

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from perfmodel.planning.metrics import Metric

MISSING = "–"
_FEWEST_K = 9_995  # from which on thousands are written as k


def format_number(value: float | None, digits: int = 2) -> str:
    """A number with thousands separators and a fixed number of digits; a dash for None, nan and infinity."""
    return f"{value:,.{digits}f}" if is_number(value) else MISSING


def format_optional(value: float | None, form: str) -> str:
    """`value` by a format specification; a dash for None."""
    return MISSING if value is None else format(value, form)


def format_si(value: float | None, unit: str, digits: int = 3) -> str:
    """`value` with an SI prefix and `digits` significant digits: 2.04 TB/s, 15.3 us, 104 GFLOP."""
    if not is_number(value):
        return MISSING
    if value == 0:
        return f"0 {unit}".strip()
    exponent = min(max(3 * math.floor(math.log10(abs(value)) / 3 + 1e-12), -9), 18)
    prefix = {-9: "n", -6: "µ", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}[exponent]
    scaled = value / 10.0**exponent
    decimals = max(digits - 1 - math.floor(math.log10(abs(scaled)) + 1e-12), 0)
    return f"{scaled:.{decimals}f} {prefix}{unit}".strip()


def format_short(value: float | None) -> str:
    """Three significant digits, thousands as k, millions as M, up to E: 0.125, 3.5, 120, 4.1k, 128k, 4T."""
    if value is None:
        return MISSING
    size = abs(value)
    for factor, suffix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if size >= 0.9995 * factor:
            return f"{value / factor:.3g}{suffix}"
    return f"{value / 1e3:.3g}k" if size >= _FEWEST_K else f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


def format_factor(factor: float) -> str:
    """A factor as people say it: 0.0023x, 0.36x, 1.52x, 24x, 3,100x."""
    if factor >= 99.5:
        return f"{factor:,.0f}x"
    return f"{factor:.3g}x" if factor >= 10 else f"{factor:.2f}x" if factor >= 0.0995 else f"{factor:.2g}x"


def format_duration(seconds: float) -> str:
    """`45 s`, `12.5 min`, `3.2 h`"""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def format_metric(metric: Metric, value: float | None) -> str:
    """A metric's value to three significant digits, in the unit that `metric` is shown in."""
    return format_short(None if value is None else value * metric.scale)


def format_in(summary: Mapping[str, Any], metric: Metric) -> str:
    """A metric of a run's summary with its digits, and its 80 % interval where there is one; without its unit."""
    value, ends = summary.get(metric.key), (summary.get("interval") or {}).get(metric.key)
    text = format_number(value * metric.scale if is_number(value) else None, metric.digits)
    if not ends:
        return text
    return f"{text} ({' to '.join(format_number(end * metric.scale, metric.digits) for end in ends)})"


def is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is finite and a number, not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
