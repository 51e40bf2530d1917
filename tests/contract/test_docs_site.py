"""The documentation's site: it builds strictly, no link in it is dead, and no page loads anything from elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("material", reason="the site is built with the extra `docs`")

from docs_site import generated
from docs_site.site_checks import findings, read_page

ROOT = Path(__file__).parents[2]


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
        assert f'"{uri.replace(".md", ".html")}' in index, uri
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
