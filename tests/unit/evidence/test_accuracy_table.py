"""The table of docs/how-right.md is what its command gives: quick sets whole, slow ones by a sample of their rows."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from published_figures import IN_ONE_WORKER, published_report

pytestmark = pytest.mark.release

ROOT = Path(__file__).resolve().parents[3]
_spec = importlib.util.spec_from_file_location("accuracy_table", ROOT / "benchmarks/accuracy_table.py")
assert _spec is not None
assert _spec.loader is not None
accuracy = importlib.util.module_from_spec(_spec)
sys.modules["accuracy_table"] = accuracy
_spec.loader.exec_module(accuracy)

PAGE = (ROOT / "docs/how-right.md").read_text(encoding="utf-8")
COMMITTED = [each for each in accuracy.SETS if not each.is_cited]
PUBLISHED_FIGURES = "published figures"
QUICK = [
    pytest.param(each, id=each.name, marks=IN_ONE_WORKER if each.name == PUBLISHED_FIGURES else ())
    for each in COMMITTED
    if not each.is_slow
]
SLOW = [each for each in COMMITTED if each.is_slow]
EVERY = {
    "servers at a fixed concurrency": 80,
    "separate prefill and decode workers": 40,
    "TensorRT-LLM offline": 50,
    "MLPerf Inference, by device": 20,
    "servers on other devices, by device": 20,
}
WRITE = "; `make validate WRITE=1` predicts all again and writes what docs/how-right.md says"


def test_the_table_has_all_lines_and_no_others() -> None:
    assert list(accuracy.page_lines(PAGE)) == [key for each in accuracy.SETS for key in accuracy.expected_keys(each)]


def test_a_line_that_worsened_by_over_a_tenth_is_a_loss_and_noise_is_none() -> None:
    before = {"| a | TPOT |": ("9", "5.0%", "40%", "20.0%", "", "", ""), "| b | TTFT |": ("9", "1.0%", "", "2.0%")}
    now = {
        "| a | TPOT |": ("9", "5.4%", "1%", "22.2%"),
        "| b | TTFT |": ("9", "1.4%", "", "1.0%"),
        "| c | E2E |": ("9", "7%"),
    }
    assert accuracy.losses(before, now) == [("a, TPOT, nine in ten", "20 %", "22.2 %")]
    assert accuracy.losses(now, before) == [("b, TTFT, nine in ten", "1 %", "2 %")]


def test_a_sample_replaces_its_rows_and_leaves_the_others() -> None:
    def rows(labels, predicted):
        count = len(labels)
        ends = (np.full(count, 0.9) - predicted / 100, np.full(count, 1.1))
        return accuracy.Predictions(accuracy.Rows(predicted, np.ones(count), list(labels), ends, np.ones(count)))

    both = accuracy.mixed(rows("abc", np.array([1.0, 2.0, 3.0])), rows("cz", np.array([30.0, 40.0])))
    assert list(both.rows.predicted) == [1.0, 2.0, 30.0]
    assert list(both.rows.interval[0]) == pytest.approx([0.89, 0.88, 0.6])
    assert list(both.rows.measured) == [1.0, 1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("measured", QUICK)
def test_lines_of_quick_sets_are_those_of_their_measurements(measured) -> None:
    is_published = measured.name == PUBLISHED_FIGURES
    report = published_report() if is_published else accuracy.report_of(measured, ROOT / measured.path)
    found = accuracy.lines_of(measured, report)
    said = accuracy.page_lines(PAGE)
    assert found
    assert found == {key: said[key] for key in found}, WRITE


@pytest.mark.parametrize("measured", SLOW, ids=lambda each: each.name)
def test_lines_of_slow_sets_follow_from_the_rows_that_are_kept(measured) -> None:
    found = accuracy.lines_of_rows(measured, accuracy.stored()[measured.name])
    said = accuracy.page_lines(PAGE)
    assert list(found) == accuracy.expected_keys(measured)
    assert found == {key: said[key] for key in found}, WRITE


@pytest.mark.slow
@pytest.mark.parametrize("measured", SLOW, ids=lambda each: each.name)
def test_a_sample_of_the_rows_that_are_kept_is_predicted_so_again(measured) -> None:
    """Predictions, ends of intervals, and that what was measured is what is committed."""
    path = ROOT / measured.path
    report = accuracy.report_of(measured, path, EVERY[measured.name])
    kept = accuracy.stored()[measured.name]
    found = accuracy.predictions_of(measured, report)
    assert found
    for metric, each in found.items():
        place = {key: number for number, key in enumerate(keys_of(kept[metric].rows))}
        same = [place[key] for key in keys_of(each.rows)]
        np.testing.assert_allclose(
            each.rows.predicted, kept[metric].rows.predicted[same], rtol=1e-4, err_msg=f"{metric}{WRITE}"
        )
        for end, expected in zip(each.rows.interval, kept[metric].rows.interval, strict=True):
            np.testing.assert_allclose(end, expected[same], rtol=1e-4, err_msg=f"{metric}{WRITE}")


def keys_of(rows) -> list[tuple[str, str]]:
    """Rows by label and measured value: versions of an engine that ran the same share a label."""
    return [(label, f"{value:.6g}") for label, value in zip(rows.labels, rows.measured, strict=True)]


def test_what_may_not_be_committed_is_marked_and_never_measured_here() -> None:
    cited = [each for each in accuracy.SETS if each.is_cited]
    assert cited
    for each in cited:
        assert not (ROOT / each.path).exists()
        assert accuracy.table_of({}).count(f"| {each.name} ¹ |") == len(each.shown)
    assert accuracy.table_of({}).count(accuracy.NEEDS_SOURCE) >= sum(len(each.shown) for each in cited)
