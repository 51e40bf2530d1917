"""Each view in a browser: without an error, for everybody, on every width, and the same again from its address."""

import pytest

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")

from perfmodel.web.pages import export_page
from perfmodel.web.views import VIEWS

QUERY = "?model=llama-3.1-8b&hardware=h100-sxm-80gb&rate=4"
CHECKED = """async () => (await axe.run(document, { resultTypes: ["violations"] })).violations
  .filter(each => ["serious", "critical"].includes(each.impact))
  .map(each => each.id + ": " + each.nodes.map(node => node.target.join(" ")).slice(0, 4).join(" | ")
    + " " + (each.nodes[0].any[0]?.message ?? ""))"""
FITS = "() => document.scrollingElement.scrollWidth <= innerWidth"


@pytest.mark.release
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_a_view_is_whole(view, tab, axe):
    """One load for all that can be seen of a view, since loads are what takes time."""
    response = tab.open(f"/{view.name}{QUERY}")
    assert response.status == 200
    assert view.title in tab.page.title()
    _plots_are_drawn(tab)
    tab.page.evaluate(axe)  # past the policy, as a debugger is
    for width in (1024, 1440):
        tab.page.set_viewport_size({"width": width, "height": 900})
        tab.page.wait_for_function(FITS)
        assert tab.page.evaluate(CHECKED) == [], f"{width} pixels, light"
    figures = tab.figures()

    tab.page.click("#theme")
    assert tab.page.evaluate("document.documentElement.dataset.theme") == "dark"
    tab.page.set_viewport_size({"width": 390, "height": 844})
    tab.page.wait_for_function(FITS)  # as when a window is made small
    tab.page.reload()
    tab.finalize()
    assert tab.figures() == figures
    assert tab.page.evaluate("document.documentElement.dataset.theme") == "dark"  # it stays as it was chosen
    _plots_are_drawn(tab)
    tab.page.wait_for_function(FITS)
    tab.page.evaluate(axe)
    assert tab.page.evaluate(CHECKED) == [], "390 pixels, dark"
    tab.check()


def _plots_are_drawn(tab):
    """Those that have come into sight."""
    tab.page.wait_for_function(
        """() => [...document.querySelectorAll(".plot")].filter(each => each.checkVisibility()
          && each.getBoundingClientRect().top < innerHeight).every(each => each.querySelector(".main-svg"))"""
    )


@pytest.mark.release
def test_an_address_that_is_refused_is_answered_on_a_page(tab):
    response = tab.page.goto(f"{tab.server.address}/step?rate=1&rate=2")
    assert response.status == 422
    assert "rate comes twice" in tab.page.inner_text(".refusal")
    tab.page.click("text=Begin with a deployment")
    tab.finalize()
    assert tab.figures()


@pytest.mark.release
def test_an_unknown_key_of_an_address_is_named_and_the_rest_is_shown(tab):
    response = tab.page.goto(f"{tab.server.address}/step?model=llama-3.1-70b&nothing=1")
    assert response.status == 200
    assert "unknown key 'nothing'" in tab.page.inner_text("#main .refusal")
    assert tab.page.input_value("[name=model]") == "llama-3.1-70b"


@pytest.mark.release
def test_a_device_is_laid_over_by_a_click_and_a_point_opens_under_its_load(tab):
    """From the page as it opens: which of two devices gives a user more tokens, in two clicks."""
    tab.open("/deployment?model=llama-3.1-8b&hardware=h100-sxm-80gb&traffic.num_requests=30")
    tab.page.click("nav.views >> text=Pareto")
    tab.page.wait_for_selector("h2 >> text=Throughput against interactivity")
    tab.finalize()
    with tab.page.expect_event("load"):
        tab.page.click("a[data-open] >> text=H200")
    tab.finalize()
    plot = tab.page.wait_for_selector("#part-fronts .plot.drawn")
    names = plot.evaluate("element => element.data.map(trace => trace.name).filter(Boolean)")
    assert [name.split(" ")[-1] for name in names] == ["h100-sxm-80gb", "h200-sxm"]
    load = plot.evaluate("element => element.data.at(-1).customdata[3]")
    with tab.page.expect_event("load"):
        plot.evaluate(
            "element => element.emit('plotly_click', { points: [{ customdata: element.data.at(-1).customdata[3] }] })"
        )
    tab.finalize()
    assert tab.address.endswith("/traffic?" + load)
    assert "concurrency%3A+8" in load
    tab.check()


@pytest.mark.release
def test_an_exported_page_draws_its_plots_without_a_server(tab, tmp_path):
    export_page("pareto?model=llama-3.1-8b&hardware=h100&traffic.num_requests=20", tmp_path)
    tab.page.goto((tmp_path / "index.html").as_uri())
    tab.page.wait_for_function("() => document.querySelectorAll('.plot.drawn').length >= 1")
    assert tab.page.query_selector("a:visible[data-open], button:visible:not([data-plot])") is None
    assert not tab.errors
    assert not tab.crashes
    assert all(url.startswith(("file:", "blob:", "data:")) for url in tab.addresses)
