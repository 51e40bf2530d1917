"""Names beside the markers of a roofline: none over another."""

from perfmodel.planning.sweeps.step_report import estimate_choice
from perfmodel.report.plots.step import roofline_figure
from perfmodel.specs import load_scenario


def test_operators_of_like_intensity_have_their_names_on_different_sides() -> None:
    """Mixtral decoding 27 sequences: the experts and the attention are half a decade apart, their names are longer."""
    scenario = load_scenario("mixtral-8x7b-a100-tp2")
    figure = roofline_figure(scenario.hardware, estimate_choice(scenario, batch=27).estimate.rows)
    places = {
        text: place
        for trace in figure.data
        if trace.text is not None
        for text, place in zip(trace.text, trace.textposition, strict=True)
    }
    (attention,) = (place for text, place in places.items() if text.startswith("attention_decode"))
    (experts,) = (place for text, place in places.items() if text.startswith("experts"))
    assert experts == "bottom center"
    assert attention != experts
