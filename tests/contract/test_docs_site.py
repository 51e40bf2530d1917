"""The documentation's site: it builds strictly, no link is dead, nothing comes from elsewhere, and its search works."""

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

pytest.importorskip("material", reason="the site is built with the extra `docs`")

from docs_site import generated
from docs_site.site_checks import findings, read_page

pytestmark = pytest.mark.release

ROOT = Path(__file__).parents[2]
WIDE_PAGES = ("index", "how-right", "reference/scenario", "reference/forms", "techniques/index", "notebooks/simulate")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, with notebooks as they are committed: `tests/contract/test_notebooks.py` runs them."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "DOCS_NOTEBOOKS": "0", "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    return folder


@pytest.mark.xdist_group("docs site")
def test_no_link_or_anchor_is_dead_and_nothing_comes_from_elsewhere(site):
    assert findings(site) == []
    assert len(list(site.rglob("*.html"))) > 100


@pytest.mark.xdist_group("docs site")
def test_every_page_of_docs_is_on_the_site_and_in_its_menu(site):
    entries = set(re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    for path in sorted((ROOT / "docs").rglob("*.md")):
        uri = path.relative_to(ROOT / "docs").as_posix()
        assert (site / uri.replace("README.md", "index.md").replace(".md", ".html")).is_file(), uri
        assert uri in entries or uri.startswith("techniques/"), f"{uri} is in no menu of mkdocs.yml"


@pytest.mark.xdist_group("docs site")
def test_search_finds_words_of_every_kind_of_page_without_a_server(site):
    """The index is a script, which pages opened from the file system may load."""
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = ")
    for uri in generated.pages():
        page = uri.replace("README.md", "index.md").replace(".md", ".html")
        assert f'"{page}' in index, uri
    assert any("iframe-worker" in address for address in read_page(site / "index.html").loaded)


@pytest.mark.xdist_group("docs site")
def test_marks_for_tests_are_not_shown(site):
    mark = re.compile("<!-- (figures|output|written)")
    assert not [path for path in site.rglob("*.html") if mark.search(path.read_text(encoding="utf-8"))]


BROKEN = {
    "a.html": '<a id="here"></a><a href="b.html#there">b</a><a href="c.html">c</a><a href="#here">a</a>',
    "b.html": '<p id="other"></p><script src="https://elsewhere.example/x.js"></script><a href="https://fine.example">x</a>',
    "s.css": "@import url(//elsewhere.example/f.css);",
}


def test_what_is_wrong_with_a_site_is_found(tmp_path):
    for name, text in BROKEN.items():
        (tmp_path / name).write_text(text)
    assert findings(tmp_path) == [
        "a.html links to b.html#there, which has no such anchor",
        "a.html links to c.html, which is not there",
        "b.html loads https://elsewhere.example/x.js",
        "s.css loads //elsewhere.example/f.css",
    ]


@pytest.fixture(scope="module")
def served(site):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="browsers are driven by playwright")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.xdist_group("docs site")
@pytest.mark.parametrize("way", ["server", "file system"])
def test_search_works_and_nothing_is_asked_of_anyone_else(browser, site, served, way):
    page, errors, asked = browser.new_page(), [], []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    start = served if way == "server" else site.as_uri()
    page.goto(f"{start}/index.html")
    page.click(".md-search__input")
    page.keyboard.type("goodput")
    page.wait_for_selector(".md-search-result__item")
    assert not errors
    assert not [url for url in asked if not url.startswith((start, "data:", "blob:"))]
    page.close()


@pytest.mark.xdist_group("docs site")
def test_no_page_is_wider_than_a_telephone(browser, served):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    for name in WIDE_PAGES:
        page.goto(f"{served}/{name}.html")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
    page.close()
