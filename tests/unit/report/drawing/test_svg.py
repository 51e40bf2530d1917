"""The plots are well-formed documents whose marks lie where the values say."""

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from perfmodel.evidence.report import Rows
from perfmodel.report.drawing.charts import Dot, Series, ecdf_svg, pareto_svg, scatter_svg
from perfmodel.report.drawing.figures import scale_over

SVG = "{http://www.w3.org/2000/svg}"


def series(name: str, ratio: float, count: int = 50) -> Series:
    measured = np.geomspace(1e-5, 1e-1, count)
    return name, Rows(measured * ratio, measured, [""] * count)


def test_perfect_predictions_lie_on_the_diagonal() -> None:
    root = ET.fromstring(scatter_svg([series("exact <1>", 1.0)], "s", "a & b"))
    title = root.find(f"{SVG}title")
    assert title is not None
    assert title.text == "a & b"
    dots = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{SVG}circle")]
    assert len(dots) == 50
    diagonal = next(root.iter(f"{SVG}line"), None)
    assert diagonal is not None
    slopes = {round((b[1] - a[1]) / (b[0] - a[0]), 1) for a, b in zip(dots[:-1:7], dots[7::7], strict=False)}
    assert len(slopes) == 1


def test_too_optimistic_predictions_lie_below_it() -> None:
    """SVG's y grows downwards."""

    def heights(ratio: float) -> list[float]:
        both = [series("anchor", 1.0), series("judged", ratio)]
        groups = list(ET.fromstring(scatter_svg(both, "s", "t")).iter(f"{SVG}g"))
        return [float(circle.attrib["cy"]) for circle in groups[1]]

    assert all(low > high for low, high in zip(heights(0.5), heights(0.9), strict=True))


def test_many_rows_are_sampled_and_many_series_pooled() -> None:
    many = [series(f"kernel {i}", 1.1, 2000 + i) for i in range(12)]
    text = scatter_svg(many, "s", "t")
    root = ET.fromstring(text)
    assert 2000 < len(list(root.iter(f"{SVG}circle"))) <= 3010
    assert "7 others" in text


@pytest.mark.parametrize("ratio", [0.7, 1.0, 1.4])
def test_a_distribution_ends_at_all_rows(ratio: float) -> None:
    root = ET.fromstring(ecdf_svg([series("x", ratio)], "t"))
    (line,) = root.iter(f"{SVG}polyline")
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert heights == sorted(heights, reverse=True)
    assert heights[-1] == 24.0  # the top of the axes: all rows lie within 200 %


@pytest.mark.parametrize(("low", "high"), [(24, 38), (1700, 2190), (0.9, 1.1), (1, 2), (3, 300), (1e-3, 1e9)])
def test_a_logarithmic_axis_has_three_ticks_at_least(low: float, high: float) -> None:
    """Two are the fewest that tell a scale; within a factor of two there is often one of 1, 2, 3, 5 times ten."""
    scale = scale_over([low, high], 0, 100, is_log=True)
    assert 3 <= len(scale.ticks) <= 8
    assert all(scale.low <= tick <= scale.high for tick in scale.ticks)


def test_names_of_dots_are_not_struck_out_by_the_front() -> None:
    """They have a white rim over the line, and markers are above both."""
    dots = [Dot("one", 1, 3, "#000000", True), Dot("two", 2, 2, "#000000", True), Dot("three", 3, 1, "#000000", True)]
    root = ET.fromstring(pareto_svg({"": dots}, "title", "x", "y"))
    marks = [element for element in root.iter() if element.tag in (f"{SVG}polyline", f"{SVG}text", f"{SVG}circle")]
    names = [place for place, element in enumerate(marks) if element.text in ("one", "two", "three")]
    front = next(place for place, element in enumerate(marks) if element.tag == f"{SVG}polyline")
    circles = [place for place, element in enumerate(marks) if element.tag == f"{SVG}circle"]
    assert front < min(names) <= max(names) < min(circles)
    assert {marks[place].attrib["paint-order"] for place in names} == {"stroke"}
