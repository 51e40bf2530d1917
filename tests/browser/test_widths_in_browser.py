"""The page on a phone and on paper: no layout shifts while it loads, the tab of the view is visible, and a printed page
is readable."""

import re
import zlib

import pytest

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")

from perfmodel.web.views import VIEWS

QUERY = "?model=llama-3.1-8b&hardware=h100-sxm-80gb&rate=4&ttft=1s&tpot=50ms&traffic.num_requests=60"
PHONE = {"width": 390, "height": 844}
# Layout Instability (WICG): the sum of shifts without recent input.
WATCH_SHIFTS = """(() => { window.shifts = []; new PerformanceObserver(list => { for (const entry of list.getEntries())
if (!entry.hadRecentInput) window.shifts.push( [entry.value, entry.sources.map(({node}) => node?.id || node?.className
|| node?.nodeName)]); }).observe({ type: "layout-shift", buffered: true }); })()"""
IS_VISIBLE = """() => { const tab = document.querySelector("nav.views [aria-current]").getBoundingClientRect();
  const tabs = document.querySelector("nav.views").getBoundingClientRect();
  return tab.left >= tabs.left - 1 && tab.right <= tabs.right + 1; }"""


@pytest.mark.release
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_no_layout_shifts_on_a_phone_and_the_tab_is_visible(view, tab):
    tab.page.set_viewport_size(PHONE)
    tab.page.add_init_script(WATCH_SHIFTS)
    tab.page.goto(f"{tab.server.address}/{view.name}{QUERY}")
    tab.finalize(120)
    tab.page.wait_for_timeout(500)
    shifts = tab.page.evaluate("window.shifts")
    assert sum(value for value, _ in shifts) < 0.05, shifts
    assert tab.page.evaluate(IS_VISIBLE)
    assert not tab.page.is_visible("form#state")
    tab.page.click("details.form > summary")
    assert tab.page.is_visible("form#state")
    tab.check()


@pytest.mark.release
def test_the_tab_of_an_opened_view_scrolls_into_sight(tab):
    tab.page.set_viewport_size(PHONE)
    tab.open(f"/deployment{QUERY}")
    tab.page.evaluate("document.querySelector('nav.views a[data-view=techniques]').click()")
    tab.page.wait_for_selector("h1 >> text=Techniques")
    assert tab.page.evaluate(IS_VISIBLE)


def text_reds(pdf):
    """The red component (0 to 1) of the text colour, one value per text operator of a PDF."""
    reds = []
    for stream in re.findall(rb"stream\r?\n(.*?)endstream", pdf, re.DOTALL):
        try:
            text = zlib.decompressobj().decompress(stream)  # whose last byte may be that of a line end
        except zlib.error:
            continue
        red = 0.0
        for operator in re.finditer(rb"([\d.]+) [\d.]+ [\d.]+ rg|\bT[jJ]\b", text):
            if operator[1] is None:
                reds.append(red)
            else:
                red = float(operator[1])
    return reds


@pytest.mark.release
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_printed_page_is_dark_text_on_white_paper(scheme, tab):
    """Printers omit backgrounds, so light text of the dark theme would be invisible."""
    tab.page.emulate_media(color_scheme=scheme)
    tab.open(f"/traffic{QUERY}")
    tab.page.wait_for_function("() => window.Plotly")
    reds = text_reds(tab.page.pdf())
    assert len(reds) > 100
    assert sum(red > 0.75 for red in reds) < 0.02 * len(reds)
    theme = tab.page.evaluate("document.documentElement.dataset.theme")
    assert theme == scheme  # the screen is unchanged
    tab.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    plots = "[...document.querySelectorAll('#answers .plot')].map(plot => plot.querySelector('.main-svg')?.clientWidth)"
    widths = tab.page.evaluate(plots)
    assert len(widths) >= 4
    assert set(widths) == {700}, "plots out of sight are on paper, too, and none is wider than it"
    tab.page.evaluate("dispatchEvent(new Event('afterprint'))")
    tab.check()


@pytest.mark.release
def test_techniques_are_collapsed_to_one_sentence_per_family(tab):
    """Ninety expanded techniques took 14,500 pixels."""
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
    tab.finalize()
    assert tab.page.is_visible(".technique[open] >> text=In use: take it out")  # open details stay open
    tab.page.fill("[data-filter]", "medusa")
    assert tab.page.locator(".technique:visible").count() == 1
    assert "1 of " in tab.page.inner_text("#found")
    tab.page.fill("[data-filter]", "nothing is called so")
    assert tab.page.is_visible("#none-found")
    tab.check()
