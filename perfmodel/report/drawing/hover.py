"""The hover text of one point, from plotly's `hovertemplate`."""

__all__ = ["hover_text"]

import re
from collections.abc import Mapping
from typing import Any

from perfmodel.report.numbers import format_si

_PLACE = re.compile(r"%\{(\w+)(?:\[(\d+)\])?(?::([^}]*))?\}")
_TAGS = re.compile(r"<extra>.*?</extra>|</?b>")


def hover_text(trace: Mapping[str, Any], number: int) -> str:
    """The hover text of point `number` of a trace, with line breaks; empty for a trace without a template."""

    def value(place: re.Match[str]) -> str:
        name, position, form = place.groups()
        item = trace[name][number]
        item = item if position is None else item[int(position)]
        return format_si(item, "", int(form[1:-1])) if (form or "").endswith("s") else format(item, form or "")

    return _PLACE.sub(value, _TAGS.sub("", trace.get("hovertemplate") or "").replace("<br>", "\n"))
