"""Speedups of techniques on both clocks: the arithmetic, with runs that are given."""

import json
import math

import pytest

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.executed.technique import Sides, TechniqueRun, executed_interval
from perfmodel.evidence.executed.techniques import Journal, validate_techniques
from perfmodel.files.catalog import data_dir
from perfmodel.report.pages import render_markdown
from perfmodel.report.views.validation import validation_view

FOLDER = data_dir("scenarios") / "techniques"


def run(simulated, executed):
    return TechniqueRun(Sides(*simulated), Sides(*executed), Sides(0.0, 0.0))


def judged(runs, file="low-rank.yaml"):
    return validate_techniques(FOLDER / file, len(runs), measure=lambda *_: runs)


def test_a_quotient_is_simulated_over_executed_speedup():
    """3 times simulated beside 2 times executed is 1.5, whatever the absolute times are."""
    report = judged([run((10.0, 30.0), (200.0, 400.0))])
    (row,) = report.techniques
    assert (row["simulated"], row["executed"], row["quotient"]) == (3.0, 2.0, 1.5)
    assert report.metrics["speedup"].median_ape == pytest.approx(0.5)
    assert report.kind == json.loads(json.dumps(report.to_json()))["kind"] == "techniques"


def test_a_common_error_of_both_sides_cancels():
    """A machine that is twice as slow as predicted, with the technique and without, has the predicted speedup."""
    assert judged([run((10.0, 15.0), (20.0, 30.0))]).techniques[0]["quotient"] == 1.0


def test_one_run_gone_astray_does_not_move_the_verdict():
    good, astray = run((10.0, 20.0), (10.0, 20.0)), run((10.0, 20.0), (10.0, 80.0))
    assert judged([good, astray, good]).techniques[0]["quotient"] == 1.0


@pytest.mark.parametrize(
    ("simulated", "executed", "wanted"),
    [
        (1.50, 1.40, "right"),
        (0.70, 0.75, "right"),  # a loss that is found to be one
        (1.50, 1.20, "missed"),  # a quarter off
        (1.07, 0.99, "proves nothing"),  # nothing is executed, nor much simulated
        (0.89, 1.05, "missed"),  # too far apart, the other way
        (1.00, 1.02, "proves nothing"),
        (1.00, 1.30, "missed"),  # a gain that nobody simulated
    ],
)
def test_a_pair_gets_a_verdict(simulated, executed, wanted):
    """Right is more than 5 % on the simulated side, and as simulated within 10 %."""
    runs = [run((1.0, simulated), (1.0, executed * factor)) for factor in (0.999, 1.0, 1.001)]
    (row,) = judged(runs).techniques
    assert row["verdict"] == wanted
    assert judged(runs[1:2]).techniques[0]["verdict"] == wanted


@pytest.mark.parametrize(
    ("simulated", "executed", "wanted"),
    [
        (1.20, (1.3, 0.8, 1.4), "proves nothing"),  # the runs differ by more than the gain
        (1.20, (1.10, 1.12, 1.11), "right"),
        (1.15, (1.30, 1.31, 1.30), "missed"),  # beyond the spread, and 12 % away
        (1.30, (1.05, 1.20, 1.15), "proves nothing"),  # within the interval, which has 1 in it
        (0.70, (1.15, 1.16, 1.15), "missed"),
    ],
)
def test_the_spread_of_paired_runs_decides_what_an_effect_is(simulated, executed, wanted):
    (row,) = judged([run((1.0, simulated), (1.0, speedup)) for speedup in executed]).techniques
    assert row["verdict"] == wanted
    low, high = row["executed_interval"]
    assert low < row["executed"] < high


def test_the_interval_is_students():
    """Logarithms 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, and 4.303 of its third root to either side."""
    reach = 4.302653 * 0.1 / math.sqrt(3)
    low, high = executed_interval([math.exp(number) for number in (0.1, 0.2, 0.3)])
    assert (math.log(low), math.log(high)) == pytest.approx((0.2 - reach, 0.2 + reach), rel=1e-5)


def test_throughput_counts_the_other_way_round():
    assert judged([run((30.0, 10.0), (30.0, 10.0))], "static-batching.yaml").techniques[0]["simulated"] == 3.0


def test_the_baseline_is_the_scenario_without_the_technique():
    seen = []

    def measure(scenario, baseline, metric, repeats):
        seen.append((scenario.name, baseline.name, metric, repeats))
        assert scenario.model != baseline.model
        return [run((1.0, 1.0), (1.0, 1.0))]

    validate_techniques(FOLDER / "low-rank.yaml", 3, measure=measure)
    assert seen == [("technique-low-rank", "technique-low-rank", "mean_e2el_ms", 3)]


def test_what_is_not_executed_is_listed_and_the_others_are_judged():
    def measure(scenario, baseline, metric, repeats):
        if "low-rank" in scenario.name:
            raise PerfmodelError("thin matrices are not executed yet.")
        return [run((1.0, 1.0), (1.0, 1.0))]

    report = validate_techniques(FOLDER, measure=measure)
    assert report.covered == report.rows - 1
    assert any("low-rank.yaml: thin matrices" in note for note in report.notes)
    text = render_markdown(validation_view(report))
    assert "## Techniques" in text
    assert "| layer pruning |" in text
    assert "layer pruning" in str(report)


def test_a_session_that_was_cut_off_goes_on_where_it_was(tmp_path):
    """Finished pairs are kept, unless they are asked for otherwise; half a line is none."""
    kept, path, asked = tmp_path / "report.json", tmp_path / "report.partial.jsonl", []

    def measure(scenario, baseline, metric, repeats):
        asked.append(scenario.name)
        if len(asked) == 3:
            path.write_text(path.read_text() + '{"file": "half a li')
            raise KeyboardInterrupt
        return [run((3.0, 6.0), (3.0, 4.0))] * repeats

    with pytest.raises(KeyboardInterrupt):
        validate_techniques(FOLDER, 2, measure=measure, journal=Journal(kept))
    first = asked[:2]
    journal = Journal(kept)
    report = validate_techniques(FOLDER, 2, measure=measure, journal=journal)
    assert sorted(asked[3:] + first) == sorted(set(asked))
    assert all(row["quotients"] in ([1.5] * 2, [1 / 1.5] * 2) for row in report.techniques)  # better is low, or high
    asked.clear()
    asked += [""] * 3
    validate_techniques(FOLDER, 1, measure=measure, journal=Journal(kept))
    assert set(first) <= set(asked)
    journal.remove()
    assert not path.exists()


def test_a_report_keeps_the_pairs_whose_files_have_not_changed(tmp_path):
    """With the date of their runs; a pair whose file has changed, or is to be run more often, is run again."""
    folder, asked = tmp_path / "pairs", []
    folder.mkdir()
    for name in ("low-rank", "bfloat16"):
        (folder / f"{name}.yaml").write_text((FOLDER / f"{name}.yaml").read_text())

    def measure(scenario, baseline, metric, repeats):
        asked.append(scenario.name)
        return [run((3.0, 6.0), (3.0, 4.0))] * repeats

    first = validate_techniques(folder, 2, measure=measure).to_json()
    for row in first["techniques"]:
        row["date"] = "2026-01-01"
    (tmp_path / "report.json").write_text(json.dumps(first))
    asked.clear()
    changed = folder / "low-rank.yaml"
    changed.write_text(changed.read_text() + "# another rank\n")
    again = validate_techniques(folder, 2, measure=measure, journal=Journal(tmp_path / "report.json"))
    assert asked == ["technique-low-rank"]
    dates = {row["file"]: row["date"] == "2026-01-01" for row in again.techniques}
    assert dates == {"low-rank.yaml": False, "bfloat16.yaml": True}
    assert any("2026-01-01" in note for note in again.notes)
    asked.clear()
    validate_techniques(folder, 1, measure=measure, journal=Journal(tmp_path / "report.json"))
    assert len(asked) == 2


def test_a_folder_without_pairs_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(SpecError, match="no such file"):
        validate_techniques(tmp_path / "nowhere")
    with pytest.raises(SpecError, match="with `technique`"):
        validate_techniques(tmp_path)
    with pytest.raises(SpecError, match="no `technique` block"):
        validate_techniques(data_dir("scenarios") / "tiny-llama-cpu.yaml")
