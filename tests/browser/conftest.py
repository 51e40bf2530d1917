"""A browser for the page: Chromium as the system has it, driven by Playwright, and one server for all tests.

What is missing is said by who skips. All of these tests run in one worker, one after another; a browser lives as long
as a module's tests, since no loop of asyncio runs beside its driver's.
"""

import shutil
from pathlib import Path

import pytest
from browser_tab import Tab, WebServer

HERE = Path(__file__).parent
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run", "--disable-dev-shm-usage"),
    "--host-resolver-rules=MAP evil.example 127.0.0.1",  # a name that its owner has bound to this machine
)


def pytest_collection_modifyitems(items):
    """One worker: each would start a browser and a server of its own."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.xdist_group("browser"))


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("starlette", reason="the page needs starlette, of the extra web")
    found = WebServer()
    yield found
    found.close()


@pytest.fixture(scope="module")
def browser():
    reason = "tests of the page need playwright, of the extra test"
    driver = pytest.importorskip("playwright.sync_api", reason=reason)
    path = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("tests of the page need Chromium: .ci/browser installs Debian's")
    with driver.sync_playwright() as playwright:
        try:
            found = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        except driver.Error as error:
            pytest.skip(f"Chromium does not start here: {str(error).splitlines()[0]}")
        yield found
        found.close()


@pytest.fixture
def tab(browser, server):
    """A tab in a profile of its own; what went wrong on it fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    context.set_default_timeout(120_000)
    found = Tab(context, server)
    yield found
    context.close()


@pytest.fixture(scope="session")
def axe():
    """axe-core's script."""
    path = Path(__file__).parents[2] / "build" / "axe" / "package" / "axe.min.js"
    if not path.is_file():
        pytest.skip("what a screen reader meets is checked by axe-core: .ci/browser fetches it into build/axe")
    return path.read_text(encoding="utf-8")
