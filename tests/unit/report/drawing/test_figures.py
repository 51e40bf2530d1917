"""Figures drawn as static SVG: values read back from the picture equal the data; plotly takes them, too."""

import re
from xml.etree import ElementTree

import numpy as np
import plotly.graph_objects as go
import pytest

from perfmodel.report.document import Plot
from perfmodel.report.drawing.figure_svg import figure_svg, hover_text
from perfmodel.report.pages import render_page
from perfmodel.report.views.run import run_view
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario

MAX_BYTES = 1_000_000
FACTORS = {"k": 1e3, "M": 1e6, "": 1.0}


@pytest.fixture(scope="module")
def demo():
    return simulate(load_scenario("llama-3.1-8b-a100"))


@pytest.fixture(scope="module")
def pictures(demo):
    plots = [block for block in run_view(demo).flat if isinstance(block, Plot)]
    figures = {plot.title: plot.draw() for plot in plots}
    for figure in figures.values():
        go.Figure(figure)  # which refuses what plotly does not know
    return {title: drawn(figure, title) for title, figure in figures.items()}


def drawn(figure, title=""):
    return ElementTree.fromstring(
        figure_svg(figure.to_plotly_json() if isinstance(figure, go.Figure) else figure, title)
    )


def styled(figure, height):
    return figure.update_layout(template=go.layout.Template(), height=height)


def heights_of(picture):
    """Maps pixels to values of the y axis: the line through two ticks, whose labels are left of the axis."""
    labels = [label for label in picture.iter("text") if label.get("text-anchor") == "end"]
    ticks = []
    for label in labels:
        number = re.fullmatch(r"([\d.,]+)([kM]?)", label.text)
        if number:
            ticks.append((float(label.get("y")) - 4, float(number[1].replace(",", "")) * FACTORS[number[2]]))
    (y0, v0), (y1, v1) = ticks[0], ticks[-1]
    return lambda pixel: v0 + (pixel - y0) * (v1 - v0) / (y1 - y0)


def drawn_values(picture, kind="polyline"):
    """The heights of every line or area, as values."""
    value = heights_of(picture)
    return [[value(float(pair.split(",")[1])) for pair in line.get("points").split()] for line in picture.iter(kind)]


def test_the_demo_report_is_small_and_has_no_script(demo):
    page = render_page(run_view(demo))
    assert len(page.encode()) < MAX_BYTES
    assert "<script" not in page
    assert page.count("<svg") == sum(isinstance(block, Plot) for block in run_view(demo).flat)


def test_bands_of_requests_reach_the_minimum_and_maximum_of_the_run(demo, pictures):
    running, waiting = drawn_values(pictures["Requests in the system"], "polygon")
    assert max(running) == pytest.approx(demo.steps.num_running.max(), abs=0.1)
    assert max(waiting) == pytest.approx(demo.steps.num_waiting.max(), abs=0.1)
    assert min(waiting) == pytest.approx(0, abs=0.1)


def test_the_band_of_kv_blocks_reaches_the_peak_of_the_summary(demo, pictures):
    (band,) = drawn_values(pictures["KV cache in use"], "polygon")
    assert max(band) == pytest.approx(100 * demo.steps.used_blocks.max() / demo.num_blocks, rel=0.01)
    assert max(band) == pytest.approx(100 * demo.summary["kv_cache_usage_peak"], rel=0.01)


def test_lines_have_all_points_including_the_maximum(demo, pictures):
    plots = {block.title: block for block in run_view(demo).flat if isinstance(block, Plot)}
    figure = plots["Tokens per second"].draw()
    decode, total = drawn_values(pictures["Tokens per second"])
    assert len(decode) == len(figure["data"][0]["x"])
    assert max(decode) == pytest.approx(max(figure["data"][0]["y"]), rel=0.02)
    assert max(total) == pytest.approx(max(np.add(figure["data"][0]["y"], figure["data"][1]["y"])), rel=0.01)  # stacked


def test_distributions_end_at_the_slowest_request(demo, pictures):
    titles = " ".join(element.text or "" for element in pictures["Latency distributions"].iter("title"))
    assert f"100.0 % of requests have TTFT ≤ {1e3 * demo.requests.ttft_s.max():.4g} ms" in titles
    assert f"100.0 % of requests have E2E ≤ {1e3 * demo.requests.e2el_s.max():.4g} ms" in titles


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


def test_a_line_outside_the_axis_range_is_not_drawn():
    figure = styled(go.Figure([go.Scatter(x=[0, 1], y=[0, 1])]), 300)
    figure.update_yaxes(range=[0, 2])
    plain = len(list(drawn(figure).iter("path")))
    figure.add_hline(y=100, line={"color": "#8A8F98"})
    assert len(list(drawn(figure).iter("path"))) == plain


@pytest.mark.parametrize("below", [False, True])
def test_a_long_legend_wraps_and_does_not_overlap_the_plot(below):
    names = [f"disaggregated decode {number}" for number in range(12)]
    figure = styled(go.Figure([go.Scatter(x=[0, 1], y=[0, 1], name=name) for name in names]), 300)
    if below:
        figure.update_layout(legend={"y": -0.2})
    picture = drawn(figure)
    _, _, width, height = map(float, picture.get("viewBox").split())
    places = {text.text: (float(text.get("x")), float(text.get("y"))) for text in picture.iter("text")}
    assert len({places[name] for name in names}) == len(names)
    assert max(x + 0.6 * 12 * len(name) for name, (x, _) in places.items() if name in names) <= width
    top, bottom = (pick(y for line in picture.iter("polyline") for y in ys_of(line)) for pick in (min, max))
    for name in names:
        assert bottom < places[name][1] < height if below else 0 < places[name][1] < top


def ys_of(line):
    return [float(pair.split(",")[1]) for pair in line.get("points").split()]


def test_markers_and_lines_have_hover_text():
    """The last element drawn is on top: hover strips of lines lie below markers; elements without text ignore the
    pointer."""
    line = go.Scatter(x=[0, 1, 2], y=[0, 1, 2], mode="lines", hovertemplate="line %{x}")
    labelled = go.Scatter(x=[1], y=[1], mode="markers", hovertemplate="an operator")
    silent_trace = go.Scatter(x=[2], y=[2], mode="markers", hoverinfo="skip")
    order = list(drawn(styled(go.Figure([line, labelled, silent_trace]), 300)).iter())
    strips = [place for place, element in enumerate(order) if element.get("class") == "hover"]
    (curve,) = [element for element in order if element.tag == "polyline"]
    marker, silent = [place for place, element in enumerate(order) if element.tag == "circle"]
    silent -= 1  # the group that it is in
    assert max(strips) < marker
    assert order[marker].find("title").text == "an operator"
    assert curve.get("pointer-events") == order[silent].get("pointer-events") == "none"


def test_text_in_a_bar_fits_or_is_omitted():
    bars = [
        go.Bar(x=[width], y=["a"], orientation="h", text=["communication 12%"], textposition="inside")
        for width in (50, 11, 1, 38)
    ]
    figure = styled(go.Figure(bars, {"barmode": "stack"}), 200)
    figure.update_xaxes(range=[0, 100])
    picture = drawn(figure)
    texts = [element for element in picture.iter("text") if element.text == "communication 12%"]
    widths = [float(element.get("width")) for element in picture.iter("rect")]
    assert len(texts) == 3
    for text, width in zip(texts, (widths[0], widths[1], widths[3]), strict=True):
        assert 0.6 * float(text.get("font-size", 13)) * len(text.text) <= width


def test_names_are_escaped():
    figure = styled(go.Figure([go.Scatter(x=[0], y=[0], name="<b>x"), go.Scatter(x=[0], y=[0], name="&")]), 300)
    assert {"<b>x", "&"} <= {element.text for element in drawn(figure).iter("text")}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("%{x:.4g} s: %{y:,.0f} tok/s<extra></extra>", "2.5 s: 12,346 tok/s"),
        ("<b>%{customdata[0]}</b><br>%{y:.3s}FLOP/s", "gemm\n12.3 kFLOP/s"),
        ("", ""),
    ],
)
def test_hover_text_fills_in_the_template(template, text):
    assert hover_text({"x": [2.5], "y": [12345.6], "customdata": [["gemm"]], "hovertemplate": template}, 0) == text
