"""Two small plots as SVG text, for documents that a code host renders: no script, no font file, no dependency.

`scatter_svg`: predicted over measured on log axes. `ecdf_svg`: which share of the rows lies within which error.
"""

__all__ = ["Series", "ecdf_svg", "scatter_svg"]

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

import numpy as np
from numpy.typing import NDArray

from perfmodel.report.drawing.chart_axes import Scale
from perfmodel.report.drawing.charts import document
from perfmodel.report.drawing.colours import BLUE, GREEN, GREY, GRID, ORANGE, PINK, SKY, VERMILION

_COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PINK, SKY)
_WIDTH, _HEIGHT = 760, 470
_LEFT, _TOP, _RIGHT, _BOTTOM = 74, 24, 520, 400  # of the axes
_MOST_POINTS = 3000  # of all series together: beyond, a fixed sample is drawn
_MOST_SERIES = len(_COLOURS)
_ECDF_STEPS = 120
_ECDF_ERRORS = (0.005, 2.0)  # the ends of the error axis


@dataclass(frozen=True)
class Series:
    """Rows of one group: what was predicted and what was measured, in one unit."""

    name: str
    predicted: NDArray[np.float64]
    measured: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.measured)

    @property
    def ape(self) -> NDArray[np.float64]:
        """|predicted / measured - 1|"""
        return np.abs(self.predicted / self.measured - 1)


def scatter_svg(series: Sequence[Series], unit: str, title: str) -> str:
    """Predicted over measured, one colour per series; beside the diagonal, dashed, a factor of 1.25 either way."""
    shown = _largest(series)
    values = np.concatenate([np.concatenate((each.predicted, each.measured)) for each in shown])
    low, high = 10 ** floor(log10(values.min())), 10 ** ceil(log10(values.max()))
    if low == high:
        high = low * 10
    x, y = Scale(low, high, _LEFT, _RIGHT, True), Scale(low, high, _BOTTOM, _TOP, True)
    ticks = [10.0**e for e in range(round(log10(low)), round(log10(high)) + 1)]
    parts = [*_frame(x, y, ticks, ticks, _power, _power)]
    for factor, dash in ((1.0, ""), (1.25, ' stroke-dasharray="4 4"'), (0.8, ' stroke-dasharray="4 4"')):
        start, end = max(low, low / factor), min(high, high / factor)
        ends = f'x1="{x(start):.1f}" y1="{y(start * factor):.1f}" x2="{x(end):.1f}" y2="{y(end * factor):.1f}"'
        parts.append(f'<line {ends} stroke="{GREY}"{dash}/>')
    for each, colour in zip(shown, _COLOURS, strict=False):
        rows = _sample(len(each), _MOST_POINTS * len(each) / sum(map(len, shown)))
        dots = "".join(
            f'<circle cx="{x(m):.1f}" cy="{y(p):.1f}" r="2"/>'
            for p, m in zip(each.predicted[rows].tolist(), each.measured[rows].tolist(), strict=True)
        )
        parts.append(f'<g fill="{colour}" fill-opacity="0.45" stroke="none">{dots}</g>')
    parts += _legend(shown)
    return _document(parts, title, f"measured, {unit}", f"predicted, {unit}")


def ecdf_svg(series: Sequence[Series], title: str) -> str:
    """The share of each series' rows whose absolute error is at most that on the axis."""
    shown = _largest(series)
    low, high = _ECDF_ERRORS
    x = Scale(low, high, _LEFT, _RIGHT, True)
    y = Scale(0.0, 1.0, _BOTTOM, _TOP)
    errors = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0]
    shares = [0.0, 0.25, 0.5, 0.75, 0.9, 1.0]
    parts = [*_frame(x, y, errors, shares, _percent, _percent)]
    grid = np.geomspace(low, high, _ECDF_STEPS)
    for each, colour in zip(shown, _COLOURS, strict=False):
        within = np.searchsorted(np.sort(each.ape), grid, side="right") / len(each)
        path = " ".join(f"{x(e):.1f},{y(s):.1f}" for e, s in zip(grid.tolist(), within.tolist(), strict=True))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    parts += _legend(shown)
    return _document(parts, title, "absolute error, at most", "share of rows")


def _largest(series: Sequence[Series]) -> list[Series]:
    """As many series as there are colours, the ones with the most rows; the others together are the last."""
    filled = sorted((each for each in series if len(each)), key=lambda each: (-len(each), each.name))
    if len(filled) <= _MOST_SERIES:
        return filled
    kept, rest = filled[: _MOST_SERIES - 1], filled[_MOST_SERIES - 1 :]
    predicted, measured = (np.concatenate([getattr(each, of) for each in rest]) for of in ("predicted", "measured"))
    return [*kept, Series(f"{len(rest)} others", predicted, measured)]


def _sample(count: int, most: float) -> NDArray[np.int64]:
    """Rows to draw: all, or as many as asked for, evenly spaced over the table."""
    return np.unique(np.linspace(0, count - 1, max(1, min(count, round(most)))).astype(np.int64))


def _frame(
    x: Scale,
    y: Scale,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
) -> Iterator[str]:
    for tick in x_ticks:
        at = x(tick)
        yield f'<line x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{_BOTTOM}" stroke="{GRID}"/>'
        yield f'<text x="{at:.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{x_text(tick)}</text>'
    for tick in y_ticks:
        at = y(tick)
        yield f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{_RIGHT}" y2="{at:.1f}" stroke="{GRID}"/>'
        yield f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{y_text(tick)}</text>'


def _legend(series: Sequence[Series]) -> Iterator[str]:
    for number, (each, colour) in enumerate(zip(series, _COLOURS, strict=False)):
        at = _TOP + 10 + 22 * number
        yield f'<rect x="{_RIGHT + 18}" y="{at - 9}" width="11" height="11" fill="{colour}"/>'
        yield f'<text x="{_RIGHT + 36}" y="{at + 1}">{escape(each.name)} ({len(each):,})</text>'


def _document(parts: Sequence[str], title: str, x_title: str, y_title: str) -> str:
    middle = (_TOP + _BOTTOM) / 2
    titles = (
        f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_BOTTOM + 44}" text-anchor="middle">{escape(x_title)}</text>',
        f'<text transform="translate(18 {middle}) rotate(-90)" text-anchor="middle">{escape(y_title)}</text>',
    )
    return document([*parts, *titles], title, _WIDTH, _HEIGHT, has_heading=False)


def _power(value: float) -> str:
    """1, 10, 0.01; powers beyond as 1e-6."""
    exponent = round(log10(value))
    return f"1e{exponent}" if abs(exponent) > 3 else f"{value:g}"


def _percent(value: float) -> str:
    return f"{value * 100:g} %"
