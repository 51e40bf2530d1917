"""Ten tasks of a planner on the page, each within a number of clicks; and what its first load weighs."""

import csv
import io
import json
from itertools import pairwise
from math import exp, log
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
from browser_tab import Tab

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")

from perfmodel.specs import load_scenario

BENCH = Path(__file__).parents[1] / "data" / "bench"
CHAT = "model=llama-3.1-8b&hardware=h100-sxm-80gb&traffic.num_requests=60"
MAX_SCRIPT_BYTES, MAX_PAINT_S, MAX_SHIFT = 400_000, 1.0, 0.05
SCRIPTS = """performance.getEntriesByType("resource").filter(entry => entry.name.endsWith(".js"))
  .reduce((sum, entry) => sum + entry.transferSize, 0)"""
PAINT = 'performance.getEntriesByName("first-contentful-paint")[0].startTime / 1000'
WATCH_SHIFTS = """window.shift = 0; new PerformanceObserver(list => { for (const entry of list.getEntries())
  if (!entry.hadRecentInput) window.shift += entry.value; }).observe({ type: "layout-shift", buffered: true })"""
CHECKED = """async () => (await axe.run(document, { resultTypes: ["violations"] })).violations
  .filter(violation => ["serious", "critical"].includes(violation.impact)).map(violation => violation.id)"""
FITS = "() => document.scrollingElement.scrollWidth <= innerWidth"
FOCUSED = "(document.activeElement.textContent || document.activeElement.name || '').trim()"


class User:
    """Clicks and types, and counts both."""

    def __init__(self, tab):
        self.tab, self.page, self.clicks = tab, tab.page, 0

    def click(self, selector):
        self.clicks += 1
        self.page.locator(f"{selector} >> visible=true").first.click()

    def go(self, selector):
        """A click that opens another page."""
        with self.page.expect_event("load"):
            self.click(selector)
        self.tab.finalize()

    def view(self, name):
        self.click(f"nav.views a >> text={name}")
        self.page.wait_for_selector(f"h1 >> text={name}")
        self.tab.finalize()

    def set(self, key, value):
        self.click(f"[name='{key}']")
        self.page.keyboard.type(value)
        self.page.keyboard.press("Enter")
        self.page.wait_for_function("key => new URLSearchParams(location.search).has(key)", arg=key)
        self.tab.finalize()

    def save(self, selector):
        """(name, bytes) of the file that a click saves."""
        with self.page.expect_download() as begun:
            self.click(selector)
        return begun.value.suggested_filename, Path(begun.value.path()).read_bytes()

    def data(self, part):
        """The JSON of a part's commands, of the address that is shown."""
        view = self.page.evaluate("document.body.dataset.view")
        query = self.page.evaluate("location.search")
        return self.page.request.get(f"{self.tab.server.address}/data/{view}/{part}{query}").json()


@pytest.fixture
def user(tab):
    yield User(tab)
    tab.check()


def cost_at(points, speed):
    """USD per million output tokens where a user gets `speed`: on the line between two points, by cost's logarithm."""
    rows = [
        (1e3 / point["values"]["mean_tpot_ms"], log(point["values"]["usd_per_million_output_tokens"]))
        for point in points
    ]
    for (fast, cheap), (slow, dear) in reversed(list(pairwise(rows))):
        if fast >= speed >= slow:
            return exp(cheap + (fast - speed) / (fast - slow) * (dear - cheap))
    return exp(rows[-1][1])


@pytest.mark.release
def test_which_of_two_devices_is_cheaper_at_a_speed(user):
    user.tab.open(f"/deployment?{CHAT}")
    user.view("Pareto")
    user.go("a[data-open] >> text=H200")
    user.go("a[data-open] >> text=B200")
    user.set("speed", "120")
    assert user.clicks <= 6
    costs = [cost_at(answer["points"], 120) for answer in user.data("fronts")]
    cheapest = min(range(3), key=costs.__getitem__)
    answer = user.page.inner_text("p.answer")
    assert f"≈ {costs[cheapest]:,.3g} USD" in answer
    assert f"{'ABC'[cheapest]} llama-3.1-8b on" in answer
    assert "At 120 tokens/s" in answer


@pytest.mark.release
def test_open_a_preset_change_the_rate_and_read_the_time_to_first_token(user):
    user.tab.open("/")
    user.go("a.chip >> text=gpt-oss-120b-h100")
    user.view("Traffic")
    before = user.data("now")
    user.set("rate", "9")
    assert user.clicks <= 3
    now = user.data("now")
    assert now["provenance"]["inputs"]["scenario"]["traffic"]["arrivals"]["rate"] == 9
    assert now["mean_ttft_ms"] != before["mean_ttft_ms"]
    (shown,) = (value for path, value, _ in user.tab.figures() if path == "mean_ttft_ms")
    assert float(shown) == now["mean_ttft_ms"]


@pytest.mark.release
def test_a_shared_link_opens_the_same_answer_in_another_browser(user, browser):
    long = "&".join(f"traffic.output_tokens.{key}=null" for key in ("mean", "p99"))
    long = f"{CHAT}&{long}&traffic.output_tokens.distribution=fixed&traffic.output_tokens.value=7"
    columns = "".join(f"&with=model%3Dllama-3.1-8b%26hardware%3D{name}" for name in ("h200-sxm", "b200-sxm", "mi300x"))
    arguments = "&engine.max_num_seqs=64&engine.max_num_batched_tokens=4096&engine.gpu_memory_utilization=0.9"
    user.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    user.tab.open(f"/compare?{long}{arguments}&engine.enforce_eager=true&engine.enable_prefix_caching=false{columns}")
    user.click("text=Copy link")
    user.page.wait_for_selector("#status >> text=Link copied.")
    assert user.clicks == 1
    link = user.page.evaluate("navigator.clipboard.readText()")
    assert "/compare?z=" in link
    assert len(link) < 0.8 * len(user.tab.address)
    context = browser.new_context()
    other = Tab(context, user.tab.server)
    other.open(link.removeprefix(user.tab.server.address))
    assert other.figures() == user.tab.figures()
    assert len(other.figures()) > 20
    assert sorted(parse_qsl(urlsplit(other.address).query)) == sorted(parse_qsl(urlsplit(user.tab.address).query))
    other.check()
    context.close()


@pytest.mark.release
def test_a_curve_is_saved_as_a_table_and_as_pictures(user):
    user.tab.open(f"/pareto?{CHAT}")
    user.page.wait_for_selector("#part-fronts .plot.drawn")
    name, content = user.save("[data-plot=csv]")
    assert user.clicks == 1
    assert name.endswith(".csv")
    rows = list(csv.DictReader(io.StringIO(content.decode())))
    points = {row["note"]: row for row in rows if row["series"].startswith("A llama")}
    for point in user.data("fronts")["points"]:
        row = points[point["set"].rpartition("=")[2]]
        assert float(row["tokens/s of a user"]) == pytest.approx(1e3 / point["values"]["mean_tpot_ms"], rel=1e-12)
        (y,) = (value for title, value in row.items() if "per device" in title)
        assert float(y) == point["values"]["output_throughput_per_gpu"]
    assert user.save("[data-plot=png]")[1].startswith(b"\x89PNG")
    name, content = user.save("[data-plot=svg]")
    assert name.endswith(".svg")
    assert b"tokens/s of a user" in content


@pytest.mark.release
def test_what_if_weights_were_in_fp8(user):
    user.tab.open(f"/deployment?{CHAT}")
    user.view("What if")
    user.click("button.chip >> text=FP8 weights")
    user.page.wait_for_selector("h2 >> text=Against engine.quantization=fp8")
    user.tab.finalize()
    assert user.clicks <= 2
    ratio = user.data("against")["against"]["ratio"]["mean_tpot_ms"]
    (shown,) = (text for path, _, text in user.tab.figures() if path == "against.ratio.mean_tpot_ms")
    assert shown == f"{ratio:.2f}x"
    assert ratio < 1


@pytest.mark.release
def test_find_a_plan_and_open_it(user):
    small = "plan.seeds=1&plan.num_requests=60&plan.finalists=1&plan.space.max_num_seqs=[64]&rate=4&ttft=1s&tpot=50ms"
    user.tab.open(f"/deployment?model=llama-3.1-8b&{small}&plan.space.max_num_batched_tokens=[8192]")
    user.view("Plan")
    user.click("label.chip >> text=l40s")
    user.page.wait_for_function("() => location.search.includes('devices=l40s')")
    user.tab.finalize()
    user.click("text=Find the deployment")
    user.page.wait_for_selector(".answer", timeout=240_000)
    user.tab.finalize()
    winner = user.data("choice")["winner"]
    user.go("text=Open this deployment")
    assert user.clicks <= 4
    assert user.page.input_value("[name=hardware]") == "l40s"
    assert user.page.evaluate("document.body.dataset.view") == "deployment"
    tensor = winner["choices"].get("engine.tensor_parallel_size", 1)
    assert user.page.inner_text("#part-glance h2").startswith(f"llama-3.1-8b on {tensor} x l40s")


@pytest.mark.release
def test_a_telephone_is_wide_enough(user):
    user.page.set_viewport_size({"width": 390, "height": 844})
    user.tab.open("/")
    user.go("a.chip >> text=conversations-8b-h100")
    user.click("details.form > summary")
    user.click("#state [name='engine.tensor_parallel_size']")
    user.page.select_option("#state [name='engine.tensor_parallel_size']", "2")
    user.page.wait_for_url("**tensor_parallel_size=2**")
    user.tab.finalize()
    user.click("details.form > summary")
    assert user.clicks <= 4
    user.page.wait_for_function(FITS)
    assert user.page.inner_text("#part-glance h2").startswith("llama-3.1-8b on 2 x h100")
    bottom = "document.querySelector('#part-glance h2').getBoundingClientRect().bottom"
    user.page.evaluate("scrollTo(0, 0)")
    assert user.page.evaluate(bottom) < 844, "the answer begins on the first screen"


@pytest.mark.release
def test_the_keyboard_alone_is_enough(user):
    """A view, a value and a file: no more than sixty keys, each of which moves the focus to what can be seen."""
    user.tab.open(f"/deployment?{CHAT}")
    keys = 0

    def reach(text, key="Tab"):
        nonlocal keys
        for _ in range(60):
            if user.page.evaluate(FOCUSED) == text:
                return
            user.page.keyboard.press(key)
            keys += 1
        raise AssertionError(text)

    reach("Memory")
    user.page.keyboard.press("Enter")
    user.page.wait_for_selector("h1 >> text=Memory")
    user.tab.finalize()
    before = user.tab.figures()
    reach("hardware", "Shift+Tab")  # the form is before the answer, which has the focus
    user.page.keyboard.press("Control+A")
    user.page.keyboard.type("h200-sxm")
    user.page.keyboard.press("Enter")
    user.page.wait_for_url("**hardware=h200-sxm**")
    user.tab.finalize()
    assert user.tab.figures() != before
    reach("CSV")
    with user.page.expect_download() as begun:
        user.page.keyboard.press("Enter")
    assert "KV blocks" in Path(begun.value.path()).read_text(encoding="utf-8")
    assert keys <= 60
    assert user.clicks == 0


@pytest.mark.release
def test_when_does_owning_pay(user, axe):
    """Prices are given by keys alone, and what is missing is answered in its field; names and descriptions of fields
    are there for screen readers, on both widths."""
    user.tab.open(f"/traffic?{CHAT}&rate=4")
    focused = "(at => [at.name, at.closest('details').querySelector('summary').innerText])(document.activeElement)"
    group = "summary >> text=Rent, own or API"
    user.page.focus(group)
    user.page.keyboard.press("Enter")
    given = {
        "price.owned.purchase_usd": "30000",
        "price.owned.years": "4",
        "site.usd_per_kwh": "0.12",
        "price.api.usd_per_million_input_tokens": "0.05",
        "price.api.usd_per_million_output_tokens": "0.2",
    }
    for _ in range(12):
        user.page.keyboard.press("Tab")
        name, of_group = user.page.evaluate(focused)
        assert of_group == "Rent, own or API"
        if name in given:
            user.page.keyboard.type(given[name])
            user.page.keyboard.press("Enter")
            user.page.wait_for_function("key => new URLSearchParams(location.search).has(key)", arg=name)
            user.tab.finalize()
        if name == "price.owned.purchase_usd":  # alone it is half of an answer
            said = user.page.inner_text('.field[data-key="price.owned.years"] .wrong')
            assert "years" in said
        if name == list(given)[-1]:
            break
    table = user.page.locator("#part-now table", has_text="USD an hour")
    assert [cell.inner_text() for cell in table.locator("tbody td:first-child").all()] == ["rented", "owned", "API"]
    data = user.data("now")
    assert f"more than {data['own_rent_break_even_share']:.0%} of all" in user.page.inner_text("#part-now")
    user.page.focus("#state summary:text-is('Site')")
    user.page.keyboard.press("Enter")
    user.page.keyboard.press("Tab")
    user.page.keyboard.type("DE")
    user.page.keyboard.press("Enter")
    user.page.wait_for_url("**site.region=DE**")
    user.tab.finalize()
    assert user.page.locator("#part-now [data-path='gco2_per_million_tokens']").count() == 1
    user.page.evaluate(axe)
    for width in (1280, 390):
        user.page.set_viewport_size({"width": width, "height": 900})
        user.page.wait_for_function(FITS)
        assert user.page.evaluate(CHECKED) == [], width
    for key in (*given, "site.region", "site.pue"):
        field = user.page.locator(f"#state [name='{key}']")
        described = field.get_attribute("aria-describedby")
        assert user.page.locator(f"label[for='{field.get_attribute('id')}']").count() == 1
        assert len(user.page.locator(f"#{described}").text_content()) > 20


@pytest.mark.release
def test_own_measurements_are_marked_beside_the_curve(user):
    user.tab.open(f"/pareto?{CHAT}")
    with user.page.expect_event("load"):
        user.page.set_input_files("#file", BENCH / "vllm.json")
    user.tab.finalize()
    plot = user.page.wait_for_selector("#part-fronts .plot.drawn")
    (own,) = plot.evaluate("element => element.data.filter(trace => trace.name === 'measured, own file')")
    result = json.loads((BENCH / "vllm.json").read_text(encoding="utf-8"))
    assert own["x"] == [pytest.approx(1e3 / result["mean_tpot_ms"])]
    assert own["y"] == [pytest.approx(result["output_throughput"])]
    assert "4 in flight" in own["text"][0]
    user.go("p >> text=Own results: vllm.json >> a")
    assert user.clicks == 1
    assert "results=" not in user.tab.address


@pytest.mark.release
def test_the_deployment_leaves_as_a_scenario_file(user, tmp_path):
    user.tab.open(f"/traffic?{CHAT}&rate=3")
    name, content = user.save("text=Scenario as YAML")
    assert user.clicks == 1
    (tmp_path / name).write_bytes(content)
    scenario = load_scenario(tmp_path / name)
    run = user.data("now")["provenance"]["inputs"]["scenario"]
    assert (scenario.model.name, scenario.hardware.name) == (run["model"]["name"], run["hardware"]["name"])
    assert scenario.traffic.arrivals.rate == 3
    assert scenario.traffic.num_requests == 60


@pytest.mark.release
@pytest.mark.parametrize("width", [390, 1440])
def test_the_first_load_is_light_quick_and_still(width, tab):
    tab.page.set_viewport_size({"width": width, "height": 900})
    tab.page.add_init_script(WATCH_SHIFTS)
    paints = []
    for number in range(4):  # the first meets a server that has read no model yet
        tab.page.goto(tab.server.address + "/")
        tab.finalize()
        tab.page.wait_for_function("() => window.Plotly && document.querySelector('.main-svg')")
        tab.page.wait_for_timeout(300)
        paints.append(tab.page.evaluate(PAINT))
        assert tab.page.evaluate("window.shift") < MAX_SHIFT
        if number == 0:
            assert 300_000 < tab.page.evaluate(SCRIPTS) < MAX_SCRIPT_BYTES  # plotly's is among them
    assert min(paints[1:]) < MAX_PAINT_S
    tab.check()
