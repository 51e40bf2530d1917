"""The plots are well-formed documents whose marks lie where the values say."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import plotly.graph_objects as go
import pytest

from perfmodel.evidence.report import Rows
from perfmodel.report.drawing.charts import (
    Bar,
    Dot,
    Ladder,
    Series,
    bars_figure,
    ecdf_figure,
    pareto_figure,
    scatter_figure,
    waterfall_figure,
)
from perfmodel.report.drawing.figure_svg import figure_svg
from perfmodel.report.drawing.figures import Figure, Scale

SVG = "{http://www.w3.org/2000/svg}"


def drawn(figure: Figure, title: str = "t") -> ET.Element:
    """As the file that a code host shows; plotly takes the figure, too."""
    go.Figure(figure)
    return ET.fromstring(figure_svg(figure, title, is_file=True))


def series(name: str, ratio: float, count: int = 50) -> Series:
    measured = np.geomspace(1e-5, 1e-1, count)
    return name, Rows(measured * ratio, measured, [""] * count)


def test_perfect_predictions_lie_on_the_diagonal() -> None:
    root = drawn(scatter_figure([series("exact <1>", 1.0)], "s"), "a & b")
    title = root.find(f"{SVG}title")
    assert title is not None
    assert title.text == "a & b"
    dots = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{SVG}circle")]
    assert len(dots) == 50
    assert len(list(root.iter(f"{SVG}polyline"))) == 3  # the diagonal, and a factor of 1.25 either way
    slopes = {round((b[1] - a[1]) / (b[0] - a[0]), 1) for a, b in zip(dots[:-1:7], dots[7::7], strict=False)}
    assert len(slopes) == 1


def test_too_optimistic_predictions_lie_below_it() -> None:
    """SVG's y grows downwards."""

    def heights(ratio: float) -> list[float]:
        both = [series("anchor", 1.0), series("judged", ratio)]
        groups = [group for group in drawn(scatter_figure(both, "s")).iter(f"{SVG}g") if "fill-opacity" in group.attrib]
        return [float(circle.attrib["cy"]) for circle in groups[1]]

    assert all(low > high for low, high in zip(heights(0.5), heights(0.9), strict=True))


def test_many_rows_are_sampled_and_many_series_pooled() -> None:
    many = [series(f"kernel {i}", 1.1, 2000 + i) for i in range(12)]
    root = drawn(scatter_figure(many, "s"))
    assert 2000 < len(list(root.iter(f"{SVG}circle"))) <= 3010
    assert any("7 others" in (text.text or "") for text in root.iter(f"{SVG}text"))


@pytest.mark.parametrize("ratio", [0.7, 1.0, 1.4])
def test_a_distribution_ends_at_all_rows(ratio: float) -> None:
    root = drawn(ecdf_figure([series("x", ratio)]))
    (line,) = root.iter(f"{SVG}polyline")
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert heights == sorted(heights, reverse=True)
    assert heights[-1] == 48.0  # the top of the axes: all rows lie within 200 %


@pytest.mark.parametrize(("low", "high"), [(24, 38), (1700, 2190), (0.9, 1.1), (1, 2), (3, 300), (1e-3, 1e9)])
def test_a_logarithmic_axis_has_three_ticks_at_least(low: float, high: float) -> None:
    """Two are the fewest that tell a scale; within a factor of two there is often one of 1, 2, 3, 5 times ten."""
    scale = Scale(low / 1.15, high * 1.15, 0, 100, is_log=True)
    assert 3 <= len(scale.ticks) <= 8
    assert all(scale.low <= tick <= scale.high for tick in scale.ticks)


def test_names_of_dots_are_not_struck_out_by_the_front() -> None:
    """They have a white rim over the line, and stand above it and the markers."""
    dots = [Dot("one", 1, 3, "#000000", True), Dot("two", 2, 2, "#000000", True), Dot("three", 3, 1, "#000000", True)]
    root = drawn(pareto_figure({"": dots}, "x", "y"))
    marks = [element for element in root.iter() if element.tag in (f"{SVG}polyline", f"{SVG}text", f"{SVG}circle")]
    names = [place for place, element in enumerate(marks) if element.text in ("one", "two", "three")]
    front = next(place for place, element in enumerate(marks) if element.tag == f"{SVG}polyline")
    circles = [place for place, element in enumerate(marks) if element.tag == f"{SVG}circle"]
    assert front < min(circles) <= max(circles) < min(names)
    assert {marks[place].attrib["paint-order"] for place in names} == {"stroke"}


def test_rungs_of_a_ladder_begin_where_the_one_above_ends_and_equal_gains_are_equally_long() -> None:
    root = drawn(waterfall_figure(["a", "b", "c"], [Ladder("here", [1.0, 3.0, 3.0])], "times"))
    _, first, *rungs = root.iter(f"{SVG}rect")  # behind the background
    spans = [(float(bar.attrib["x"]), float(bar.attrib["width"])) for bar in rungs]
    assert float(first.attrib["width"]) == 0
    (start, width), (second, same), (whole, all_of_it) = spans
    assert second == pytest.approx(start + width, abs=0.1)
    assert same == pytest.approx(width, abs=0.1)
    assert (whole, all_of_it) == pytest.approx((start, 2 * width), abs=0.1)


def test_a_bar_has_its_value_and_its_interval_at_its_end() -> None:
    root = drawn(bars_figure([Bar("one", 2.0, "#000000", "2 [1..4]", (1.0, 4.0)), Bar("two", None, "#000000")], "x"))
    _, bar, none = root.iter(f"{SVG}rect")
    ends = re.match(
        r"M([\d.]+),[\d.]+H([\d.]+)", next(p for p in root.iter(f"{SVG}path") if "v8" in p.get("d")).get("d")
    )
    left, width = float(bar.attrib["x"]), float(bar.attrib["width"])
    assert [(float(end) - left) / width for end in ends.groups()] == pytest.approx([0.5, 2.0], abs=0.01)
    assert float(none.attrib["width"]) == 0
    assert {"one", "two", "2 [1..4]", "none"} <= {text.text for text in root.iter(f"{SVG}text")}
