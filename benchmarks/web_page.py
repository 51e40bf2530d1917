"""How quick the page is in a browser: first paint, layout shift, weight, a slider's round trip, a simulated curve.

    python benchmarks/web_page.py [--moves 100] [--report FILE]

Needs playwright and a Chromium; nothing is asked of anybody else. What is printed is measured here, and depends on the
machine and on what else it does. --report writes it as .md and .json.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import sync_playwright

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage")
QUERY = "?model=llama-3.1-8b&hardware=h100-sxm-80gb&rate=4"
PAINT = 'performance.getEntriesByName("first-contentful-paint")[0].startTime'
WEIGHT = """performance.getEntriesByType("resource").concat(performance.getEntriesByType("navigation"))
  .map(each => [new URL(each.name).pathname, each.transferSize])"""
WATCH_SHIFTS = """window.shift = 0; new PerformanceObserver(list => { for (const entry of list.getEntries())
  if (!entry.hadRecentInput) window.shift += entry.value; }).observe({ type: "layout-shift", buffered: true })"""
MOVE = """share => new Promise(done => {
  const range = document.querySelector('input[type=range][data-for="c-batch"]'), start = performance.now();
  const swapped = event => { if (event.detail.target.id !== "answers") return;
    document.removeEventListener("htmx:afterSwap", swapped); done(performance.now() - start); };
  document.addEventListener("htmx:afterSwap", swapped);
  const before = location.href;
  range.value = share;
  range.dispatchEvent(new Event("input", { bubbles: true }));
  setTimeout(() => { if (location.href !== before) return;  // a value that is shown already
    document.removeEventListener("htmx:afterSwap", swapped); done(null); }, 200);
})"""


@contextmanager
def served():
    """The address of a server in a process of its own."""
    command = [sys.executable, "-m", "perfmodel", "web", "--port", "0", "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8")
    try:
        match = re.search(r"http://\S+", process.stdout.readline())
        yield match[0].rstrip("/")
    finally:
        process.terminate()
        process.wait(10)


def measured(page, root, moves):
    """Seconds and bytes, by what they are of."""
    paints, shifts, weights = [], [], {}
    page.add_init_script(WATCH_SHIFTS)
    page.goto(f"{root}/deployment{QUERY}")  # the server's first answer loads what it knows of models
    page.wait_for_selector(".main-svg")
    weights |= dict(page.evaluate(WEIGHT))
    for _ in range(5):
        page.goto(f"{root}/deployment{QUERY}")
        page.wait_for_selector(".main-svg")
        paints.append(page.evaluate(PAINT) / 1000)
        page.wait_for_timeout(300)
        shifts.append(page.evaluate("window.shift"))
    page.goto(f"{root}/step{QUERY}")
    took = [page.evaluate(MOVE, 350 + (-1) ** number * (30 + 3 * number)) for number in range(moves)]
    trips = [item / 1000 for item in took if item is not None]
    page.goto(f"{root}/traffic{QUERY.replace('rate=4', 'rate=4.5')}")
    page.wait_for_selector("#part-curve .card")
    curve = page.evaluate("performance.now()") / 1000
    return {
        "first_paint_s": {"median": statistics.median(paints), "largest": max(paints)},
        "layout_shift": max(shifts),
        "weight_bytes": weights,
        "script_bytes": sum(size for path, size in weights.items() if path.endswith(".js")),
        "slider_s": {
            "median": statistics.median(trips),
            "p95": statistics.quantiles(trips, n=20)[-1],
            "moves": len(trips),
        },
        "curve_s": curve,
    }


def as_text(found):
    """The report as Markdown."""
    rows = [
        ("first paint of a page (median of 5)", f"{found['first_paint_s']['median']:.2f} s"),
        ("layout shift while it loads (largest of 5)", f"{found['layout_shift']:.3f}"),
        ("a slider's answer, median", f"{1000 * found['slider_s']['median']:.0f} ms"),
        (f"a slider's answer, 95 % of {found['slider_s']['moves']}", f"{1000 * found['slider_s']['p95']:.0f} ms"),
        ("a page with a simulated curve, from its address on", f"{found['curve_s']:.2f} s"),
        *((f"bytes of {path}", f"{size:,}") for path, size in sorted(found["weight_bytes"].items())),
        ("bytes of scripts", f"{found['script_bytes']:,}"),
        ("bytes in all", f"{sum(found['weight_bytes'].values()):,}"),
    ]
    lines = ["# The page in a browser", "", "Written by `benchmarks/web_page.py`.", "", "| | |", "|---|---:|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows)]) + "\n"


def main():
    """Measure, print, and write the report if it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=100)
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("google-chrome"))
    parser.add_argument("--report", type=Path)
    given = parser.parse_args()
    with served() as root, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=given.browser, args=list(FLAGS))
        result = measured(browser.new_page(viewport={"width": 1280, "height": 900}), root, given.moves)
        browser.close()
    print(as_text(result))
    if given.report:
        given.report.with_suffix(".md").write_text(as_text(result), encoding="utf-8", newline="\n")
        text = json.dumps(result, indent=2) + "\n"
        given.report.with_suffix(".json").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
