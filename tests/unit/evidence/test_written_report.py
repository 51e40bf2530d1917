"""The written report says what the document says; breakdowns add up and their sentences are arithmetic."""

import json
from pathlib import Path

import numpy as np
import pytest

from perfmodel.cost.calibrations.provenance import FittedSource, Provenance
from perfmodel.errors import SpecError
from perfmodel.evidence.breakdown import TypicalSteps, kernel_breakdown, latency_breakdown, why
from perfmodel.evidence.report import (
    Comparison,
    Dimension,
    Rows,
    ValidationReport,
    by_dimension,
    joined,
    pooled,
    range_names,
    worst_of,
)
from perfmodel.report.pages import write_report
from perfmodel.report.views.validation import validation_view
from perfmodel.specs import load_scenario


def comparison() -> Comparison:
    """Six rows of two devices; the fourth was not measured."""
    predicted, measured = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 2.0, 3.0, np.nan, 10.0, 12.0]
    rows = Rows(predicted, measured, [f"row {i}" for i in range(6)], (0.9, 1.1))
    return Comparison.of("latency", rows, "s", {"device": Dimension.of(["a", "a", "a", "b", "b", "b"])})


def report() -> ValidationReport:
    compared = comparison()
    return ValidationReport(
        kind="operators",
        rows=7,
        covered=5,
        metrics=pooled([compared]),
        by=by_dimension([compared]),
        worst=worst_of([compared], 2, lambda each, i: kernel_breakdown(each.rows.predicted[i], 10.0, 3.0, 1.0)),
        notes=["not covered: row 7: it is odd"],
        comparisons=[compared],
        provenance=Provenance((FittedSource("x@vllm", "who measured", "2026-11-21"),)),
        about="What was compared.",
    )


def test_groups_follow_the_rows_that_are_left() -> None:
    groups = by_dimension([comparison()])
    assert groups["device a"]["latency"].mean_ape == 0
    assert (groups["device b"]["latency"].rows, groups["device b"]["latency"].mean_ape) == (2, 0.5)
    assert groups["device b"]["latency"].interval_coverage == 0


def test_ranges_and_joined_dimensions() -> None:
    found = range_names([1, 15, 16, 2000], (16, 128, 1024), "tokens")
    assert [found.names[code] for code in found.codes] == [
        "below 16 tokens",
        "below 16 tokens",
        "16 to 128 tokens",
        "from 1,024 tokens on",
    ]
    both = joined([Dimension.constant("-", 2), found])
    assert [both.names[code] for code in both.codes] == ["-", "-", *(found.names[code] for code in found.codes)]


def test_the_files_of_a_report(tmp_path: Path) -> None:
    document = validation_view(report(), "perfmodel validate operators ops")
    files = write_report(document, report().to_json(), tmp_path / "made" / "operators_x_202611.md")
    names = {file.name for file in files}
    assert {"operators_x_202611.md", "operators_x_202611.json", "operators_x_202611.errors.svg"} <= names
    answer = json.loads((tmp_path / "made" / "operators_x_202611.json").read_text())
    assert answer == json.loads(json.dumps(report().to_json()))
    text = files[0].read_text()
    for wanted in (
        "perfmodel validate operators ops",
        "5 of 7 rows",
        "who measured",
        "## By device",
        "row 7",
        "## All rows",
    ):
        assert wanted in text
    linked = {line.split("](")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")}
    assert linked == {name for name in names if name.endswith(".svg")}


def test_a_report_is_markdown_or_a_page(tmp_path: Path) -> None:
    document = validation_view(report())
    with pytest.raises(SpecError, match=r"expected a file ending in \.md or \.html"):
        write_report(document, {}, tmp_path / "x.pdf")
    page, _ = write_report(document, {}, tmp_path / "x.html")
    assert "By device" in page.read_text()
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="cannot be written"):
        write_report(document, {}, tmp_path / "file" / "x.md")


def test_a_sentence_closes_the_gap() -> None:
    """72 % of 1 s must grow to 0.72 x f = 1.48 - 0.28 s: f = 1.67. A part too small to close it is said to be."""
    assert why(1.0, 1.48, {"gemm": 0.72, "moe": 0.28}, "the step").endswith("is gemm; it would have to take 1.67x")
    assert "without it the prediction would still be 2.00x" in why(1.0, 0.2, {"gemm": 0.6, "moe": 0.4}, "the step")
    assert why(1.0, 1.01, {"gemm": 1.0}, "the step") == "measured 1.01x predicted"


def test_breakdowns_add_up() -> None:
    steps = TypicalSteps.of(load_scenario("llama-3.1-8b-a100"))
    assert sum(steps.shares.values()) == pytest.approx(1.0)
    for metric in ("ttft_mean", "itl_mean", "tpot_mean", "e2el_p99"):
        found = latency_breakdown(metric, 900.0, 1000.0, 300.0, steps)
        assert sum(found["parts"].values()) == pytest.approx(1.0), metric
    assert latency_breakdown("ttft", 1.0, 2.0, 1.0, steps)["parts"]["queue"] == pytest.approx(0.0)
