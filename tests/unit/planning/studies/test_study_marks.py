"""What a study's file says is drawn and said: relative bars, values with units; a quick form is marked as one."""

import json
import re

import pytest
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.files.units import common_numbers
from perfmodel.planning.study import StudyPart, StudyResult, load_study, quick, simulated_points
from perfmodel.planning.sweep import sweep
from perfmodel.report.pages import pictures_of
from perfmodel.report.views.study import study_json, study_view

SMALL = """
study: bandwidths
question: What is more bandwidth worth?
base: llama-3.1-8b-a100
step: {batch: 1, context: 1024}
variants:
  bf16: {}
  int4: {engine.quantization: w4a16}
axes:
  bandwidth: {field: hardware.hbm.bandwidth, values: [500 GB/s, 1 TB/s, 4 TB/s]}
metrics: [step_ms]
plots:
  - {kind: lines, log: x}
  - {kind: bars, relative: true}
quick: {set: {step.context: 512}}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "bandwidths.yaml"
    path.write_text(SMALL, encoding="utf-8")
    return path


def answered(file, is_quick=False):
    loaded = load_study(str(file))
    points = quick(simulated_points(loaded)) if is_quick else simulated_points(loaded)
    answers = points.answered(sweep(list(points.points.values()), workers=1))
    return answers, StudyResult(loaded.study, [StudyPart(points.check(), {"simulated": answers})], (), is_quick)


def test_values_with_units_are_numbers_of_an_axis(file):
    answers, result = answered(file)
    assert answers.axes["bandwidth"].numbers == (0.5, 1.0, 4.0)
    assert answers.axes["bandwidth"].unit_label == "TB/s"
    picture = pictures_of(study_view(result))["1-lines"]
    assert "bandwidth, TB/s" in picture


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (("512 KiB", "1 MiB"), ((0.5, 1.0), "MiB")),
        (("1 ms", "2 s"), ((0.001, 2.0), "s")),
        (("0.5x", "2x"), ((0.5, 2.0), "x")),
        (("1 s", "2 GB"), None),
        (("fast", "slow"), None),
    ],
)
def test_quantities_of_one_dimension_have_a_common_unit(texts, found):
    assert common_numbers(texts) == (None if found is None else (pytest.approx(found[0]), found[1]))


def test_relative_bars_are_times_better_than_the_baseline(file):
    answers, result = answered(file)
    picture = pictures_of(study_view(result))["2-bars"]
    assert "times better than bf16" in picture
    for at in answers.places():
        gain = answers.value("bf16", at, "step_ms") / answers.value("int4", at, "step_ms")
        assert f"{gain:.3g}" in re.findall(r">([\d.]+)<", picture)
    assert "1" in re.findall(r">([\d.]+)<", picture)  # the baseline beside itself


def test_a_quick_form_says_that_it_is_one(file):
    whole, short = answered(file)[1], answered(file, is_quick=True)[1]
    assert str(short).index("Quick: fewer values of each axis and step.context=512") < str(short).index("Simulated, ")
    assert "Quick" not in str(whole)
    assert (study_json(whole)["quick"], study_json(short)["quick"]) == (False, True)
    ran = CliRunner().invoke(app, ["study", str(file), "--quick", "--json"])
    assert json.loads(ran.stdout)["parts"][0]["answer"][0].startswith("Quick: ")
