"""The page on a telephone and on paper: nothing jumps while it loads, the tab of the view is in sight, and what is
printed can be read."""

import re
import zlib

import pytest

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")

from perfmodel.web.views import VIEWS

QUERY = "?model=llama-3.1-8b&hardware=h100-sxm-80gb&rate=4&ttft=1s&tpot=50ms&traffic.num_requests=60"
PHONE = {"width": 390, "height": 844}
# Layout Instability (WICG): the sum of the shifts that no input has brought about.
WATCH_SHIFTS = """(() => { window.shifts = [];
  new PerformanceObserver(list => { for (const each of list.getEntries()) if (!each.hadRecentInput) window.shifts.push(
    [each.value, each.sources.map(one => one.node?.id || one.node?.className || one.node?.nodeName)]);
  }).observe({ type: "layout-shift", buffered: true }); })()"""
IS_IN_SIGHT = """() => { const tab = document.querySelector("nav.views [aria-current]").getBoundingClientRect();
  const tabs = document.querySelector("nav.views").getBoundingClientRect();
  return tab.left >= tabs.left - 1 && tab.right <= tabs.right + 1; }"""


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_nothing_jumps_on_a_phone_and_the_tab_is_in_sight(view, tab):
    tab.page.set_viewport_size(PHONE)
    tab.page.add_init_script(WATCH_SHIFTS)
    tab.page.goto(f"{tab.server.address}/{view.name}{QUERY}")
    tab.settle(120)
    tab.page.wait_for_timeout(500)
    shifts = tab.page.evaluate("window.shifts")
    assert sum(value for value, _ in shifts) < 0.05, shifts
    assert tab.page.evaluate(IS_IN_SIGHT)
    assert not tab.page.is_visible("form#state")
    tab.page.click("details.form > summary")
    assert tab.page.is_visible("form#state")
    tab.check()


def test_the_tab_of_a_view_that_is_opened_comes_into_sight(tab):
    tab.page.set_viewport_size(PHONE)
    tab.open(f"/deployment{QUERY}")
    tab.page.evaluate("document.querySelector('nav.views a[data-view=techniques]').click()")
    tab.page.wait_for_selector("h1 >> text=Techniques")
    assert tab.page.evaluate(IS_IN_SIGHT)


def ink(pdf):
    """(Colour of the text, red in 0 to 1) of each run of text in a PDF."""
    reds = []
    for stream in re.findall(rb"stream\r?\n(.*?)endstream", pdf, re.DOTALL):
        try:
            text = zlib.decompress(stream.strip(b"\r\n"))
        except zlib.error:
            continue
        red = 0.0
        for operator in re.finditer(rb"([\d.]+) [\d.]+ [\d.]+ rg|\bT[jJ]\b", text):
            if operator[1] is None:
                reds.append(red)
            else:
                red = float(operator[1])
    return reds


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_that_is_printed_can_be_read_on_white_paper(scheme, tab):
    """Printers leave backgrounds out: the dark theme's light text would be lost, and was."""
    tab.page.emulate_media(color_scheme=scheme)
    tab.open(f"/traffic{QUERY}")
    tab.page.wait_for_function("() => window.Plotly")
    reds = ink(tab.page.pdf())
    assert len(reds) > 100
    assert sum(red > 0.75 for red in reds) < 0.02 * len(reds)
    theme = tab.page.evaluate("document.documentElement.dataset.theme")
    assert theme == scheme  # the screen is as it was
    tab.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    plots = "[...document.querySelectorAll('#answers .plot')].map(each => each.querySelector('.main-svg')?.clientWidth)"
    widths = tab.page.evaluate(plots)
    assert len(widths) >= 4
    assert set(widths) == {700}, "plots out of sight are on paper, too, and none is wider than it"
    tab.page.evaluate("dispatchEvent(new Event('afterprint'))")
    tab.check()


def test_the_techniques_are_a_page_of_sentences_that_open(tab):
    """Ninety techniques were 14,500 pixels of figures; closed, each family is a sentence."""
    tab.open(f"/techniques{QUERY}")
    height = "document.scrollingElement.scrollHeight"
    assert tab.page.evaluate(height) < 1500
    families = tab.page.locator(".family")
    assert families.count() == 8
    assert all(sentence.inner_text().strip().endswith(".") for sentence in families.locator("> summary .what").all())
    tab.page.click(".family > summary >> text=KV size")
    tab.page.click(".technique > summary >> text=FP8 KV")
    use = tab.page.locator(".technique[open] >> text=Use it")
    use.click()
    tab.page.wait_for_url("**kv_cache_dtype=fp8**")
    tab.settle()
    assert tab.page.is_visible(".technique[open] >> text=In use: take it out")  # what was open stays so
    tab.page.fill("[data-filter]", "medusa")
    assert tab.page.locator(".technique:visible").count() == 1
    assert "1 of " in tab.page.inner_text("#found")
    tab.page.fill("[data-filter]", "nothing is called so")
    assert tab.page.is_visible("#none-found")
    tab.check()
