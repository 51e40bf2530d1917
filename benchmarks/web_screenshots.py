"""Pictures of every view of `perfmodel web` for docs/images, as a browser shows them.

    python benchmarks/web_screenshots.py [--out docs/images] [--browser /usr/bin/chromium] [--views memory,step]

Needs playwright and a Chromium. What takes work is waited for; a plan is begun.
"""

import argparse
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from playwright.sync_api import sync_playwright
from web_page import FLAGS, served

from perfmodel.web.views import VIEWS

ASKED = {"ttft": "1s", "tpot": "50ms", "rate": "4"}
DEPLOYMENT = urlencode(
    {"model": "llama-3.1-70b", "hardware": "h100-sxm-80gb", "engine.tensor_parallel_size": "4", **ASKED}
)
OTHER = urlencode({"model": "llama-3.1-70b", "hardware": "h200-sxm", "engine.tensor_parallel_size": "2", **ASKED})
QUERIES = {
    "step": f"{DEPLOYMENT}&batch=64&context=4096",
    "compare": f"{DEPLOYMENT}&{urlencode({'with': OTHER})}",
    "pareto": f"{DEPLOYMENT}&{urlencode({'with': OTHER})}",
    "plan": urlencode(
        {"model": "llama-3.1-70b", "hardware": "h100-sxm-80gb", **ASKED, "devices": "h100-sxm-80gb,h200-sxm"}
    ),
}
LONGEST_MS = 300_000


def finalize(page: Any) -> None:
    """Wait until no part is worked on and all plots in sight are drawn."""
    page.wait_for_function(
        "() => !document.querySelector('.waiting, .later[hx-get], .later[hx-post]')", timeout=LONGEST_MS
    )
    page.wait_for_timeout(1200)


def take(browser: Any, address: str, out: Path, width: int, height: int, scheme: str) -> None:
    """One picture."""
    page = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme).new_page()
    page.goto(address)
    finalize(page)
    begin = page.locator(".begin button.primary")
    if "/plan" in address and begin.count():
        begin.first.click()
        page.wait_for_selector(".waiting", timeout=5000)
        finalize(page)
    page.screenshot(path=str(out))
    page.context.close()
    print(f"Written to {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--browser", default="/usr/bin/chromium")
    parser.add_argument("--views", default=",".join(view.name for view in VIEWS))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with served() as root, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=given.browser, args=list(FLAGS))
        for name in given.views.split(","):
            address = f"{root}/{name}?{QUERIES.get(name, DEPLOYMENT)}"
            take(browser, address, given.out / f"web-{name}.png", 1280, 960, "light")
        first = f"{root}/traffic?{DEPLOYMENT}" if "traffic" in given.views else f"{root}/memory?{DEPLOYMENT}"
        take(browser, first, given.out / "web-dark.png", 1280, 960, "dark")
        take(browser, first, given.out / "web-narrow.png", 390, 844, "light")
        browser.close()


if __name__ == "__main__":
    main()
