"""The waterfall of a ladder as SVG: a floating bar for each rung, ladders of different machines side by side.

The axis is logarithmic, so that equal gains are equally long.
"""

__all__ = ["Ladder", "waterfall_svg"]

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from perfmodel.report.drawing.chart_axes import Scale, scale_over
from perfmodel.report.drawing.charts import document, text_width
from perfmodel.report.drawing.colours import BLUE, GREY, GRID, VERMILION
from perfmodel.report.numbers import format_short

_ROW, _TOP, _BETWEEN = 24, 72, 56


@dataclass(frozen=True)
class Ladder:
    """gains: how many times better each rung is than the one below, the first being 1; None where one is missing"""

    title: str
    gains: Sequence[float | None]
    colour: str = BLUE


def waterfall_svg(names: Sequence[str], ladders: Sequence[Ladder], title: str, x_title: str) -> str:
    """One panel for each of `ladders`; rungs from top to bottom, each from where the one above ends.

    names: of the rungs; title, x_title: of the whole and of the axis
    """
    left = 24 + max(map(text_width, names))
    width = max(240.0, (960 - left - 30 - _BETWEEN * (len(ladders) - 1)) / len(ladders))
    bottom = _TOP + _ROW * (len(names) + 1)
    parts = [
        f'<text x="{left - 10:.0f}" y="{_TOP + _ROW * row + 15}" text-anchor="end">{escape(name)}</text>'
        for row, name in enumerate([*names, "together"])
    ]
    for number, ladder in enumerate(ladders):
        start = left + number * (width + _BETWEEN)
        reached = _reached(ladder.gains)
        x = scale_over([1.0, *reached], start, start + width - 40, is_log=True)
        parts += _axis(x, bottom, ladder.title, x_title)
        parts += _rungs(ladder, reached, x)
    return document(parts, title, left + len(ladders) * (width + _BETWEEN) - _BETWEEN + 20, bottom + 48)


def _reached(gains: Sequence[float | None]) -> list[float]:
    """How far above the first rung each rung is; a missing one is where the last one was."""
    found, so_far = [], 1.0
    for gain in gains:
        so_far *= 1.0 if gain is None else gain
        found.append(so_far)
    return found


def _axis(x: Scale, bottom: float, title: str, x_title: str) -> Iterator[str]:
    for line, text in enumerate(title.split(", ", 1)):
        yield f'<text x="{x.start:.1f}" y="{_TOP - 26 + 15 * line}" font-weight="600">{escape(text)}</text>'
    for tick in x.ticks:
        yield f'<line x1="{x(tick):.1f}" y1="{_TOP}" x2="{x(tick):.1f}" y2="{bottom}" stroke="{GRID}"/>'
        yield f'<text x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{format_short(tick)}</text>'
    middle = (x.start + x.end) / 2
    yield f'<text x="{middle:.1f}" y="{bottom + 36}" text-anchor="middle" fill="{GREY}">{escape(x_title)}</text>'


def _rungs(ladder: Ladder, reached: Sequence[float], x: Scale) -> Iterator[str]:
    below = 1.0
    for row, (gain, above) in enumerate(zip(ladder.gains, reached, strict=True)):
        at = _TOP + _ROW * row
        low, high = sorted((x(below), x(above)))
        colour = ladder.colour if above >= below else VERMILION
        label = "not run" if gain is None else "start" if row == 0 else f"x{_times(gain)}"
        yield f'<rect x="{low:.1f}" y="{at + 3}" width="{max(high - low, 2):.1f}" height="16" fill="{colour}"/>'
        yield f'<text x="{high + 6:.1f}" y="{at + 15}" fill="{GREY if gain is None else colour}">{label}</text>'
        below = above
    at = _TOP + _ROW * len(ladder.gains)
    start = x(1.0)
    yield f'<rect x="{start:.1f}" y="{at + 3}" width="{max(x(below) - start, 2):.1f}" height="16" fill="{GREY}"/>'
    yield f'<text x="{x(below) + 6:.1f}" y="{at + 15}" font-weight="600">{_times(below)}x</text>'


def _times(factor: float) -> str:
    return f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}" if factor >= 10 else f"{factor:.2f}"
