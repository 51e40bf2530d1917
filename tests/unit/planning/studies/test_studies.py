"""Study files: those that are there run in their reduced form, and mistakes in one are a sentence with its line."""

import itertools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.files.catalog import list_names
from perfmodel.planning.findings import crossings
from perfmodel.planning.points import Point, Record, evaluate
from perfmodel.planning.study import StudyPart, StudyResult, executed_points, load_study, quick, simulated_points
from perfmodel.planning.sweep import sweep
from perfmodel.report.pages import pictures_of
from perfmodel.report.views.study import answer_sentences, study_view
from perfmodel.specs.overrides import as_overrides

SMALL = """
study: small
question: Does a smaller batch take longer?
base: tiny-llama-cpu
set: {traffic.num_requests: 6, traffic.arrivals: {process: burst}}
variants:
  one: {engine.max_num_seqs: 1}
  eight: {engine.max_num_seqs: 8}
axes:
  shortest answer: {field: traffic.output_tokens.low, values: [8, 32], unit: tokens}
metrics: [output_throughput, mean_e2el_ms]
plots: [{kind: lines, log: x}]
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    return path


@pytest.mark.release
@pytest.mark.parametrize("name", list_names("studies"))
def test_every_study_answers_in_its_reduced_form(name: str) -> None:
    """Every variant gives another answer than the baseline somewhere: a switch that does nothing is no variant."""
    file = load_study(name)
    points = quick(simulated_points(file))
    points.check()
    answers = points.answered(sweep(list(points.points.values()), workers=1))
    assert answer_sentences(answers)
    reference = file.study.reference
    for variant in answers.variants:
        if variant != reference:
            assert any(
                answers.value(variant, at, metric) != answers.value(reference, at, metric)
                for at in answers.places()
                for metric in points.metrics
            ), variant


@pytest.mark.parametrize("name", list_names("studies"))
def test_every_executed_part_names_what_there_is(name: str) -> None:
    file = load_study(name)
    if file.study.executed is not None:
        assert executed_points(file).check().hardware.kind == "cpu"


def test_equal_points_are_equal_records_in_any_number_of_processes(small: Path) -> None:
    points = list(simulated_points(load_study(small)).points.values())
    assert sweep(points, workers=1) == sweep(points, workers=2) == [evaluate(point) for point in points]


def test_a_point_that_does_not_fit_is_a_record_with_the_reason() -> None:
    record = evaluate(Point("llama-3.1-8b-a100", ("max_tokens",), ("model=llama-3.1-70b",)))
    assert "Smallest that fits" in record.problem
    assert not record.values


def test_the_command_writes_a_document_with_its_pictures(small: Path, tmp_path: Path) -> None:
    report = tmp_path / "out.md"
    result = CliRunner().invoke(app, ["study", str(small), "--json", "--report", str(report)])
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert [point["variant"] for point in document["parts"][0]["points"]] == ["one", "one", "eight", "eight"]
    assert document["parts"][0]["answer"][0].startswith("Output token throughput: eight best")
    assert "out.1-lines.svg" in report.read_text(encoding="utf-8")
    assert (tmp_path / "out.1-lines.svg").read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("max_num_seqs: 8", "max_num_seq: 8", 8, "Did you mean 'max_num_seqs'"),
        ("values: [8, 32]", "values: [8, -4]", 10, "expected a number above 0"),
        ("base: tiny-llama-cpu", "base: tiny-lama-cpu", 4, "tiny-llama-cpu"),
        ("kind: lines", "kind: line", 12, "expected 'lines'"),
        ("mean_e2el_ms]", "mean_e2e_ms]", None, "mean_e2el_ms"),
        ("num_requests: 6", "num_request: 6", 5, "Did you mean 'num_requests'"),
        ("metrics: [output_throughput, mean_e2el_ms]", "metrics: 0.5", None, "metrics: got 0.5; expected a list"),
    ],
)
def test_a_mistake_is_a_sentence_with_its_line(small: Path, old: str, new: str, line: int | None, says: str) -> None:
    small.write_text(SMALL.replace(old, new), encoding="utf-8")
    result = CliRunner().invoke(app, ["study", str(small)])
    assert result.exit_code == 2
    assert says in result.stderr
    assert f"small.yaml:{line}:" in result.stderr if line is not None else "small.yaml" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_study_without_an_executed_part_says_so(small: Path) -> None:
    result = CliRunner().invoke(app, ["study", str(small), "--execute"])
    assert result.exit_code == 2
    assert "leave --execute out" in result.stderr


def test_where_the_baseline_was_not_asked_the_first_variant_stands_for_it(small: Path) -> None:
    """And lines that end at the same height are both labelled."""
    answers = simulated_points(load_study(small))
    records = sweep(list(answers.points.values()), workers=1)
    eight = [record for (variant, _), record in zip(answers.points, records, strict=True) if variant == "eight"]
    without = answers.answered([Record(problem="left out")] * 2 + eight)
    assert without.reference == "eight"
    equal = answers.answered(eight * 2)
    part = StudyPart(answers.check(), {"simulated": equal})
    assert "one" in pictures_of(study_view(StudyResult(equal.study, [part])))["1-lines"]


def test_speculation_stops_paying_at_a_batch_that_lies_between_the_ends() -> None:
    """One sequence waits for weights, which verify several tokens for one; hundreds are bound by compute."""
    points = quick(simulated_points(load_study("speculation")))
    answers = points.answered(sweep(list(points.points.values()), workers=1))
    xs = [float(label) for label in answers.axes["concurrent sequences"].labels]
    without = answers.line("without", "output_throughput", "concurrent sequences", {})
    for variant in ("draft of 0.6 billion", "EAGLE head", "n-gram lookup"):
        (crossing,) = crossings(xs, answers.line(variant, "output_throughput", "concurrent sequences", {}), without)
        assert xs[0] < crossing < xs[-1], variant
    assert any("a tie at about" in line for line in answer_sentences(answers))


def test_every_measured_perplexity_is_that_of_its_format() -> None:
    """The file keeps what was set; fewer bits never gain quality, within what 1,536 tokens tell apart."""
    file = load_study("quantization")
    quality = file.study.quality
    assert quality is not None
    found = json.loads((file.path.parent / quality.file).read_text(encoding="utf-8"))
    for variant, key in quality.keys.items():
        assert found[key]["set"] == list(as_overrides(quality.variants.get(variant, file.study.variants[variant])))
    assert "q4_1 to begin with" in found["measured"]["note"]
    perplexities = [found[key]["perplexity"] for key in ("fp32", "bf16", "w8a16", "w8a8_int8", "w4a16")]
    assert all(more <= fewer * 1.005 for more, fewer in itertools.pairwise(perplexities))


def test_measuring_quality_needs_a_study_that_names_one(small: Path) -> None:
    result = CliRunner().invoke(app, ["study", str(small), "--quality", "model.gguf"])
    assert result.exit_code == 2
    assert "leave --quality out" in result.stderr
