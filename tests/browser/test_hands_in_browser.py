"""What hands do to the page: sliders, fields, keys, tabs, back and forward."""

import random

import pytest
from browser_tab import Tab

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")

from web_site import Page

SLIDERS = ("batch", "context", "prefill", "rate", "engine.max_num_seqs", "engine.gpu_memory_utilization")


def figures_of(tab):
    """Those that the server shows of the tab's address."""
    html = tab.page.request.get(tab.address).text()
    return [(path, value, text) for _, figures in Page(html).cards for path, _, value, text in figures]


@pytest.mark.release
def test_two_hundred_moves_end_at_the_answer_of_the_last(tab):
    tab.open("/step?model=llama-3.1-8b&hardware=h100")
    draw = random.Random(7)
    for number in range(200):
        tab.move(draw.choice(SLIDERS), draw.random())
        if number % 10 == 0:
            tab.page.wait_for_timeout(draw.choice([10, 60, 120]))
    tab.finalize()
    assert len(tab.figures()) > 10
    server = figures_of(tab)
    assert [each for each in tab.figures() if each in server] == server
    assert "batch=" in tab.address
    tab.check()


@pytest.mark.release
def test_two_tabs_have_a_state_each(tab, browser):
    other = Tab(tab.page.context, tab.server)
    tab.open("/memory?model=llama-3.1-8b")
    other.open("/memory?model=llama-3.1-70b&engine.tensor_parallel_size=4")
    for share in (0.2, 0.5, 0.8):
        tab.move("engine.max_num_seqs", share)
        other.move("engine.gpu_memory_utilization", share)
    for each in (tab, other):
        each.finalize()
        assert each.figures() == figures_of(each)
        each.check()
    assert tab.figures() != other.figures()
    assert "max_num_seqs" not in other.address


@pytest.mark.release
def test_back_and_forward_are_steps_of_what_was_shown(tab):
    tab.open("/memory?model=llama-3.1-8b")
    first = tab.figures()
    tab.page.fill('[name="hardware"]', "mi300x")
    tab.page.keyboard.press("Tab")
    tab.page.wait_for_url("**hardware=mi300x**")
    tab.finalize()
    second = tab.figures()
    assert second != first
    tab.page.click("nav.views >> text=Step")
    tab.page.wait_for_selector("h2 >> text=Decode")
    tab.finalize()
    assert "/step?" in tab.address
    with tab.page.expect_event("load"):
        tab.page.go_back()
    tab.finalize()
    assert tab.figures() == second
    assert tab.page.input_value('[name="hardware"]') == "mi300x"
    with tab.page.expect_event("load"):
        tab.page.go_back()
    tab.finalize()
    assert tab.figures() == first
    with tab.page.expect_event("load"):
        tab.page.go_forward()
    tab.finalize()
    assert tab.figures() == second
    tab.check()


@pytest.mark.release
def test_a_drag_is_one_step_of_the_history(tab):
    tab.open("/step?model=llama-3.1-8b&hardware=h100&batch=8&context=512")
    first = tab.figures()
    for share in (0.5, 0.55, 0.6):
        tab.move("batch", share)
        tab.page.wait_for_timeout(60)
    tab.finalize()
    assert tab.figures() != first
    with tab.page.expect_event("load"):
        tab.page.go_back()
    tab.finalize()
    assert tab.figures() == first
    assert "batch=8&" in tab.address
    tab.check()


@pytest.mark.release
def test_four_columns_come_by_clicks_and_stay_while_one_drags(tab):
    tab.open("/compare?model=llama-3.1-8b&hardware=h100-sxm-80gb&traffic.num_requests=20")
    for number, device in enumerate(("a100-sxm-80gb", "h200-sxm", "l40s"), 1):
        tab.page.click("[data-duplicate]")
        tab.page.wait_for_selector(f"#o{number}-hardware")
        tab.page.fill(f"#o{number}-hardware", device)
        tab.page.keyboard.press("Enter")
        tab.page.wait_for_url(f"**{device}**")
        tab.finalize()
    tab.move("engine.max_num_seqs", 0.3)
    tab.page.wait_for_url("**max_num_seqs**")
    tab.finalize()
    heads = tab.page.eval_on_selector_all("#part-served th[scope=col] .aside", "all => all.map(e => e.textContent)")
    assert heads == ["1 x h100-sxm-80gb", "1 x a100-sxm-80gb", "1 x h200-sxm", "1 x l40s"]
    tab.page.click("[data-remove='2']")
    tab.page.wait_for_selector("#o3-hardware", state="detached")
    tab.finalize()
    assert tab.address.count("with=") == 2
    assert "h200" not in tab.address
    tab.check()


@pytest.mark.release
def test_another_view_shows_nothing_of_the_one_before(tab):
    """Parts of two views are called `curve`."""
    tab.open("/traffic?model=llama-3.1-8b&hardware=h100&rate=4&traffic.num_requests=30")
    tab.move("rate", 0.8)
    tab.finalize()
    tab.page.click("nav.views >> text=Step")
    tab.page.wait_for_selector("#part-curve .waiting")
    assert tab.page.query_selector("#part-curve .stale") is None
    tab.finalize()
    assert tab.page.title() == "Step · perfmodel"
    tab.check()


@pytest.mark.release
def test_tables_come_when_they_are_opened_and_again_after_they_could_not(tab):
    tab.open("/step?model=llama-3.1-8b&hardware=h100&batch=4&context=512")
    tab.page.route("**/rest/**", lambda route: route.abort())
    tab.page.click("#part-decode .rest summary")
    tab.page.wait_for_selector("#status.seen >> text=The server does not answer")
    assert not tab.page.query_selector("#part-decode .rest table")
    assert tab.page.get_attribute("#part-decode .rest", "open") is None
    tab.page.unroute("**/rest/**")
    tab.page.click("#part-decode .rest summary")
    tab.page.wait_for_selector("#part-decode .rest td >> text=gate_up_proj")
    assert not tab.crashes


@pytest.mark.release
def test_keys_alone_lead_to_the_answer_and_change_it(tab):
    tab.open("/step?model=llama-3.1-8b&hardware=h100")
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.textContent") == "Skip to the answer"
    tab.page.keyboard.press("Enter")
    assert tab.page.evaluate("document.activeElement.id") == "main"
    before = tab.figures()
    for _ in range(5):
        tab.page.keyboard.press("Tab")
        if tab.page.evaluate("document.activeElement.type") == "range":
            break
    assert tab.page.evaluate("document.activeElement.type") == "range"
    for key in ("ArrowRight", "ArrowRight", "PageUp"):
        tab.page.keyboard.press(key)
    tab.page.wait_for_url("**batch=**")
    tab.finalize()
    assert tab.figures() != before
    outline = tab.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"  # where the focus is can be seen
    tab.check()


@pytest.mark.release
def test_what_cannot_be_is_answered_in_its_field(tab):
    tab.open("/memory?model=llama-3.1-8b&hardware=h100&engine.max_num_seqs=8")
    field = '[name="engine.max_num_seqs"]'
    tab.page.fill(field, "many")
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector(f"{field}[aria-invalid=true]")
    said = tab.page.inner_text('.field[data-key="engine.max_num_seqs"] .wrong')
    assert "many" in said
    assert "max_num_seqs" in said
    tab.page.fill(field, "16")
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector(f"{field}:not([aria-invalid])")
    tab.finalize()
    assert tab.figures() == figures_of(tab)
    tab.check()


@pytest.mark.release
def test_a_line_is_pasted(tab):
    tab.open("/memory?hardware=a100-sxm-80gb")
    tab.page.click("summary >> text=From a command line")
    tab.page.fill("#line", "vllm serve nothing --x")
    tab.page.click("#read-line")
    tab.page.wait_for_selector("#line-wrong:not([hidden])")
    tab.page.fill("#line", "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-num-seqs 77")
    tab.page.click("#read-line")
    tab.page.wait_for_url("**max_num_seqs=77**")
    tab.finalize()
    assert tab.page.input_value('[name="hardware"]') == "a100-sxm-80gb"
    assert tab.page.input_value('[name="engine.max_num_seqs"]') == "77"
    assert [error for error in tab.errors if "422" not in error] == []
