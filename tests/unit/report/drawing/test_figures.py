"""Figures of plotly's drawn without its script: read back from the picture, as an eye would, they are their data."""

import re
from xml.etree import ElementTree

import numpy as np
import plotly.graph_objects as go
import pytest

from perfmodel.report.document import Plot
from perfmodel.report.drawing.figures import figure_svg, hover_text
from perfmodel.report.plots.style import styled
from perfmodel.report.render.html import render_page
from perfmodel.report.views.run import run_view
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario

MOST_BYTES = 1_000_000
FACTORS = {"k": 1e3, "M": 1e6, "": 1.0}


@pytest.fixture(scope="module")
def demo():
    return simulate(load_scenario("llama-3.1-8b-a100"))


@pytest.fixture(scope="module")
def pictures(demo):
    plots = [block for block in run_view(demo).flat if isinstance(block, Plot)]
    return {plot.title: drawn(plot.draw(), plot.title) for plot in plots}


def drawn(figure, title=""):
    return ElementTree.fromstring(figure_svg(figure.to_plotly_json(), title))


def heights_of(picture):
    """From pixels to values of the y axis: a line through two ticks, whose labels stand left of the axis."""
    labels = [each for each in picture.iter("text") if each.get("text-anchor") == "end"]
    ticks = []
    for each in labels:
        found = re.fullmatch(r"([\d.,]+)([kM]?)", each.text)
        if found:
            ticks.append((float(each.get("y")) - 4, float(found[1].replace(",", "")) * FACTORS[found[2]]))
    (y0, v0), (y1, v1) = ticks[0], ticks[-1]
    return lambda pixel: v0 + (pixel - y0) * (v1 - v0) / (y1 - y0)


def drawn_values(picture, kind="polyline"):
    """The heights of each line, or area, as values."""
    value = heights_of(picture)
    return [[value(float(pair.split(",")[1])) for pair in line.get("points").split()] for line in picture.iter(kind)]


def test_the_report_of_the_demo_is_small_and_has_no_script(demo):
    page = render_page(run_view(demo))
    assert len(page.encode()) < MOST_BYTES
    assert "<script" not in page
    assert page.count("<svg") == sum(isinstance(block, Plot) for block in run_view(demo).flat)


def test_bands_of_requests_reach_the_fewest_and_the_most_of_the_run(demo, pictures):
    running, waiting = drawn_values(pictures["Requests in the system"], "polygon")
    assert max(running) == pytest.approx(demo.steps.num_running.max(), abs=0.1)
    assert max(waiting) == pytest.approx(demo.steps.num_waiting.max(), abs=0.1)
    assert min(waiting) == pytest.approx(0, abs=0.1)


def test_the_band_of_kv_blocks_reaches_the_peak_of_the_summary(demo, pictures):
    (band,) = drawn_values(pictures["KV cache in use"], "polygon")
    assert max(band) == pytest.approx(100 * demo.steps.used_blocks.max() / demo.num_blocks, rel=0.01)
    assert max(band) == pytest.approx(100 * demo.summary["kv_cache_usage_peak"], rel=0.01)


def test_lines_have_all_their_points_the_highest_included(demo, pictures):
    plots = {block.title: block for block in run_view(demo).flat if isinstance(block, Plot)}
    figure = plots["Tokens per second"].draw()
    decode, total = drawn_values(pictures["Tokens per second"])
    assert len(decode) == len(figure.data[0].x)
    assert max(decode) == pytest.approx(max(figure.data[0].y), rel=0.02)
    assert max(total) == pytest.approx(max(np.add(figure.data[0].y, figure.data[1].y)), rel=0.01)  # stacked


def test_distributions_end_at_the_slowest_request(demo, pictures):
    told = " ".join(each.text or "" for each in pictures["Latency distributions"].iter("title"))
    assert f"100.0 % of requests have TTFT ≤ {1e3 * demo.requests.ttft_s.max():.4g} ms" in told
    assert f"100.0 % of requests have E2E ≤ {1e3 * demo.requests.e2el_s.max():.4g} ms" in told


def test_a_logarithmic_axis_has_equal_steps_for_equal_factors():
    figure = styled(go.Figure([go.Scatter(x=[1, 10, 1000], y=[1, 2, 3], mode="lines")]), 300)
    figure.update_xaxes(type="log", range=[0, 3])
    (line,) = drawn(figure).iter("polyline")
    a, b, c = (float(pair.split(",")[0]) for pair in line.get("points").split())
    assert c - b == pytest.approx(2 * (b - a), abs=0.2)


def test_stacked_bars_lie_end_to_end_and_the_first_name_is_on_top_where_the_axis_is_reversed():
    bars = [go.Bar(x=[2, 1], y=["a", "b"], orientation="h"), go.Bar(x=[3, 0], y=["a", "b"], orientation="h")]
    figure = styled(go.Figure(bars, {"barmode": "stack", "yaxis": {"autorange": "reversed"}}), 200)
    one, other, two, none = drawn(figure).iter("rect")
    assert float(one.get("x")) + float(one.get("width")) == pytest.approx(float(two.get("x")), abs=0.2)
    assert float(two.get("width")) == pytest.approx(1.5 * float(one.get("width")), abs=0.3)
    assert float(one.get("y")) < float(other.get("y"))
    assert float(none.get("width")) == 0


def test_a_rule_beyond_the_axis_is_not_drawn_at_its_end():
    figure = styled(go.Figure([go.Scatter(x=[0, 1], y=[0, 1])]), 300)
    figure.update_yaxes(range=[0, 2])
    plain = len(list(drawn(figure).iter("path")))
    figure.add_hline(y=100, line={"color": "#8A8F98"})
    assert len(list(drawn(figure).iter("path"))) == plain


@pytest.mark.parametrize("below", [False, True])
def test_a_long_legend_takes_several_lines_and_none_lies_on_the_plot(below):
    names = [f"disaggregated decode {number}" for number in range(12)]
    figure = styled(go.Figure([go.Scatter(x=[0, 1], y=[0, 1], name=name) for name in names]), 300)
    if below:
        figure.update_layout(legend={"y": -0.2})
    picture = drawn(figure)
    _, _, width, height = map(float, picture.get("viewBox").split())
    places = {each.text: (float(each.get("x")), float(each.get("y"))) for each in picture.iter("text")}
    assert len({places[name] for name in names}) == len(names)
    assert max(x + 0.6 * 12 * len(name) for name, (x, _) in places.items() if name in names) <= width
    top, bottom = (pick(y for line in picture.iter("polyline") for y in ys_of(line)) for pick in (min, max))
    for name in names:
        assert bottom < places[name][1] < height if below else 0 < places[name][1] < top


def ys_of(line):
    return [float(pair.split(",")[1]) for pair in line.get("points").split()]


def test_a_pointer_reaches_the_words_of_markers_and_of_lines():
    """What is drawn last lies on top: strips of lines below markers, and nothing without words takes the pointer."""
    line = go.Scatter(x=[0, 1, 2], y=[0, 1, 2], mode="lines", hovertemplate="line %{x}")
    told = go.Scatter(x=[1], y=[1], mode="markers", hovertemplate="an operator")
    mute = go.Scatter(x=[2], y=[2], mode="markers", hoverinfo="skip")
    order = list(drawn(styled(go.Figure([line, told, mute]), 300)).iter())
    strips = [place for place, each in enumerate(order) if each.get("class") == "hover"]
    (curve,) = [each for each in order if each.tag == "polyline"]
    marker, silent = [place for place, each in enumerate(order) if each.tag == "circle"]
    assert max(strips) < marker
    assert order[marker].find("title").text == "an operator"
    assert curve.get("pointer-events") == order[silent].get("pointer-events") == "none"


def test_words_in_a_bar_stay_within_it_or_are_left_out():
    bars = [
        go.Bar(x=[width], y=["a"], orientation="h", text=["communication 12%"], textposition="inside")
        for width in (50, 11, 1, 38)
    ]
    figure = styled(go.Figure(bars, {"barmode": "stack"}), 200)
    figure.update_xaxes(range=[0, 100])
    picture = drawn(figure)
    texts = [each for each in picture.iter("text") if each.text == "communication 12%"]
    widths = [float(each.get("width")) for each in picture.iter("rect")]
    assert len(texts) == 3
    for text, width in zip(texts, (widths[0], widths[1], widths[3]), strict=True):
        assert 0.6 * float(text.get("font-size", 13)) * len(text.text) <= width


def test_what_a_name_says_is_text():
    figure = styled(go.Figure([go.Scatter(x=[0], y=[0], name="<b>x"), go.Scatter(x=[0], y=[0], name="&")]), 300)
    assert {"<b>x", "&"} <= {each.text for each in drawn(figure).iter("text")}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("%{x:.4g} s: %{y:,.0f} tok/s<extra></extra>", "2.5 s: 12,346 tok/s"),
        ("<b>%{customdata[0]}</b><br>%{y:.3s}FLOP/s", "gemm\n12.3 kFLOP/s"),
        ("", ""),
    ],
)
def test_words_beside_a_pointer_are_the_template_filled_in(template, text):
    assert hover_text({"x": [2.5], "y": [12345.6], "customdata": [["gemm"]], "hovertemplate": template}, 0) == text
