"""SVG as text, for what a code host or a page without script shows: elements, scales with their ticks, colours.

One meaning has one colour in every picture. The palette is Okabe and Ito's (2008), made to be distinguished with any
colour vision.
"""

__all__ = [
    "BLUE",
    "BOUND_COLOURS",
    "COLOURS",
    "GREEN",
    "GREY",
    "GRID",
    "INK",
    "METRIC_COLOURS",
    "ORANGE",
    "PINK",
    "SKY",
    "VERMILION",
    "Scale",
    "document",
    "element",
    "points_of",
    "scale_over",
    "text",
    "text_width",
    "ticks_at",
]

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import Any

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PINK, SKY, GREY = "#CC79A7", "#56B4E9", "#8A8F98"
INK, GRID = "#1F2933", "#E6E9ED"
COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PINK, SKY, GREY)
BOUND_COLOURS = {"compute": BLUE, "memory": GREEN, "communication": ORANGE, "overhead": GREY}
METRIC_COLOURS = {"ttft": BLUE, "tpot": GREEN, "itl": SKY, "e2el": PINK}

_MOST_TICKS, _FEWEST_TICKS = 7, 3


def element(tag: str, content: str = "", /, **attributes: Any) -> str:
    """An element with its attributes, in whose names `_` stands for `-`; those that are None are left out.

    content: markup inside of it
    """
    pairs = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{value if isinstance(value, str) else format(round(value, 2), "g")}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{pairs}>{content}</{tag}>" if content else f"<{tag}{pairs}/>"


def text(x: float, y: float, words: str, anchor: str | None = None, **more: Any) -> str:
    """The text `words` at the place x, y in pixels. anchor: `middle` or `end`, if not their start"""
    return element("text", escape(words), x=x, y=y, text_anchor=anchor, **more)


def text_width(words: str, size: float = 12) -> float:
    """About how many pixels a text takes."""
    return len(words) * size * 0.6


def points_of(places: Iterable[tuple[float, float]]) -> str:
    """Places in pixels as the points of a line or an area."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def document(parts: Sequence[str], title: str, width: float, height: float, has_heading: bool = True) -> str:
    """The SVG file around its parts, with a title; width and height in pixels; has_heading: the title is drawn, too."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" font-family="system-ui, sans-serif" font-size="12" fill="{INK}">'
    )
    background = element("rect", width=width, height=height, fill="#FFFFFF")
    heading = [text(12, 20, title, font_size=14, font_weight="600")] if has_heading else []
    return "\n".join([head, f"<title>{escape(title)}</title>", background, *heading, *parts, "</svg>\n"])


@dataclass(frozen=True)
class Scale:
    """Map from values between `low` and `high` to pixels between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, at = log10(low), log10(high), log10(at)
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """A few round values on the axis."""
        return _log_ticks(self.low, self.high) if self.is_log else _linear_ticks(self.low, self.high)


def scale_over(values: Iterable[float], start: float, end: float, is_log: bool, from_zero: bool = False) -> Scale:
    """A scale on which all of `values` have their place, with a little room at the ends.

    start, end: pixels of the axis; is_log: logarithmic; from_zero: a linear one begins at 0 at the latest
    """
    shown = [value for value in values if not is_log or value > 0]
    low, high = (min(shown), max(shown)) if shown else (1.0, 10.0)
    if is_log:
        return Scale(low / 1.15, high * 1.15 if high > low else high * 2, start, end, True)
    low = min(0.0, low) if from_zero else low
    room = (high - low) * 0.06 or abs(high) * 0.5 or 1.0
    return Scale(low if from_zero and low == 0 else low - room, high + room, start, end)


def ticks_at(values: Sequence[float], scale: Scale, room: float) -> list[float]:
    """Ticks of an axis: those of `values` whose labels do not run into each other, at least `room` pixels apart."""
    kept: list[float] = []
    for value in values:
        if not kept or abs(scale(value) - scale(kept[-1])) >= room:
            kept.append(value)
    last = values[-1]
    if kept[-1] != last:
        if len(kept) > 1:
            kept.pop()
        kept.append(last)
    return kept


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    for steps in ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        ticks = [value for value in ticks if low <= value <= high]
        if len(ticks) <= _MOST_TICKS:
            break
    if len(ticks) < _FEWEST_TICKS:  # within a factor of two or three: few of 1, 2, 3 and 5 lie there
        ticks = [value for value in _linear_ticks(low, high) if value > 0]
    return ticks[:: ceil(len(ticks) / _MOST_TICKS)] if ticks else [low, high]


def _linear_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / (_MOST_TICKS - 1)
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return [round(index * step, 12) for index in range(ceil(low / step), floor(high / step) + 1)]
