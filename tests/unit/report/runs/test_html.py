"""The HTML report: complete, escaped, offline and the same every time."""

import re
from dataclasses import replace

import pytest

from perfmodel.report.runs.html import render_report, render_step
from perfmodel.report.runs.step_view import OperatorPoint, StepView, ridge_points

STEP = StepView(
    "Decode of 32 sequences",
    (
        OperatorPoint("gate_up_proj", "bf16", 240e9, 7.5e9, 4.2e-3, "memory"),
        OperatorPoint("flash_prefill", "bf16", 180e9, 0.2e9, 1.0e-3, "compute"),
        OperatorPoint("all_reduce", "bf16", 0.0, 0.0, 0.2e-3, "communication"),
    ),
    (("weights", 16.1e9), ("KV cache", 53.7e9)),
)


@pytest.fixture
def page(result):
    return render_report(result, STEP)


def without_script(page):
    """The page less plotly's own code, which names addresses that it never visits for these plots."""
    first = page.index("<script>")
    return page[:first] + page[page.index("</head>") :]


def test_has_every_section(page):
    titles = re.findall(r"<h2>(.*?)</h2>", without_script(page))
    assert titles == [
        "What was run",
        "Latency (ms)",
        "Summary",
        "Latency distributions",
        "Tokens per second",
        "Requests in the system",
        "KV cache in use",
        "What bounded the time",
        "Roofline of one step",
        "Operators of that step",
        "Device memory",
        "Where the numbers come from",
    ]


def test_needs_no_network(page):
    body = without_script(page)
    assert not re.search(r"""(?:src|href)\s*=\s*["']|@import|url\(""", body)
    assert "http://" not in body
    assert "https://" not in body


def test_carries_the_plot_library_once(page):
    assert page.count("plotly.js v") == 1
    assert 4e6 < len(page) < 8e6


def test_names_are_escaped(page):
    assert "by-hand &lt;&amp;&gt;" in page
    assert "<title>by-hand <" not in page


def test_says_what_was_thinned_and_where_numbers_come_from(page):
    assert "Drawn through 500 of them" in page
    assert "datasheet alone" in page
    assert "Not confirmed in a vendor" in page
    assert "do no counted FLOPs or move no bytes: all_reduce" in page


def test_equal_results_give_equal_bytes(result, page):
    assert render_report(result, STEP) == page


def test_a_run_without_records_still_has_a_report(result):
    page = render_report(replace(result, requests=None, steps=None))
    assert "Latency distributions" not in page
    assert "mean TTFT" in page


def test_step_page_lists_the_ridge_points(scenario):
    page = render_step(scenario, STEP)
    assert ridge_points(scenario.hardware)["bf16"] == pytest.approx(153.0, abs=0.1)  # 312e12 / 2039e9
    assert "<td>bf16</td><td>312 TFLOP/s</td><td>153.0</td>" in page
