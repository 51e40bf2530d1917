"""Names beside the markers of a roofline: none over another."""

from xml.etree import ElementTree

import pytest

from perfmodel.planning.typical_step import estimate_choice
from perfmodel.report.drawing.figure_svg import figure_svg
from perfmodel.report.drawing.figures import text_width
from perfmodel.report.plots.step import roofline_figure
from perfmodel.specs import load_scenario


def test_operators_of_like_intensity_have_their_names_on_different_sides() -> None:
    """Mixtral decoding 27 sequences: the experts and the attention are half a decade apart, their names are longer."""
    scenario = load_scenario("mixtral-8x7b-a100-tp2")
    figure = roofline_figure(scenario.hardware, estimate_choice(scenario, batch=27).estimate.rows)
    places = {
        text: place
        for trace in figure["data"]
        if "text" in trace
        for text, place in zip(trace["text"], trace["textposition"], strict=True)
    }
    (attention,) = (place for text, place in places.items() if text.startswith("attention_decode"))
    (experts,) = (place for text, place in places.items() if text.startswith("experts"))
    assert experts == "bottom center"
    assert attention != experts


@pytest.mark.parametrize(("name", "batch"), [("llama-3.1-8b-h100-fleet", 6), ("mixtral-8x7b-a100-tp2", 27)])
def test_no_label_overlaps_a_marker(name: str, batch: int) -> None:
    """Read from the drawn SVG."""
    scenario = load_scenario(name)
    rows = estimate_choice(scenario, batch=batch, context=1203).estimate.rows
    picture = ElementTree.fromstring(figure_svg(roofline_figure(scenario.hardware, rows), name))
    markers = [tuple(float(circle.attrib[key]) for key in ("cx", "cy", "r")) for circle in picture.iter("circle")]
    names = [text for text in picture.iter("text") if text.attrib.get("font-size") == "11"]
    assert len(names) >= 2
    for text in names:
        x, y, size = float(text.attrib["x"]), float(text.attrib["y"]), text_width(text.text or "", 11)
        left = x - size * {"start": 0.0, "middle": 0.5, "end": 1.0}[text.attrib["text-anchor"]]
        is_free = [
            at + r < left or at - r > left + size or height + r < y - 8 or height - r > y for at, height, r in markers
        ]
        assert all(is_free), text.text
