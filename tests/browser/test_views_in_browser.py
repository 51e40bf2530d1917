"""Each view in a browser: without an error, for everybody, on every width, and the same again from its address."""

import pytest

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")

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
    assert tab.page.evaluate(CHECKED) == [], "1280 pixels, light"
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
