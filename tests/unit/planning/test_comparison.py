"""Two results beside each other: what was asked, what answered, and which number got better, by hand-made documents."""

import json

import pytest
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.errors import SpecError
from perfmodel.planning.comparison import compare_results

NAME = "llama-3.1-8b-a100"


def document(scenario=None, calibrations=None, version="0.1.0", kind="run", **answer):
    inputs = {"scenario": {"seed": 0, "engine": {"max_num_seqs": 256}} | (scenario or {})}
    provenance = {
        "kind": kind,
        "perfmodel": version,
        "engines": [{"name": "vllm", "version": "0.30", "digest": "aa", "note": ""}],
        "calibrations": calibrations or {"a100@vllm": "11"},
        "inputs": inputs,
    }
    return {"scenario": "x", **answer, "notes": ["a note"], "provenance": provenance}


def test_equal_results_differ_in_nothing():
    found = compare_results(document(duration=2.0), document(duration=2.0), "a", "b")
    assert found.is_same
    assert found.inputs == found.versions == found.answers == found.texts == ()


def test_answers_by_metric_with_unit_difference_and_relative_change_best_first():
    """By hand: half the TTFT gains ln 2, a fifth more throughput ln 1.2, a fifth more preemptions lose ln 1.2; a count
    of tokens is neither better nor worse and comes last."""
    one = document(mean_ttft_ms=100.0, output_throughput=50.0, preemptions=10, total_input_tokens=7, mfu=0.2)
    two = document(mean_ttft_ms=50.0, output_throughput=60.0, preemptions=12, total_input_tokens=8, mfu=0.2)
    answers = compare_results(one, two, "a", "b").answers
    keys = [each.metric.key for each in answers]
    assert keys == ["mean_ttft_ms", "output_throughput", "preemptions", "total_input_tokens"]
    ttft = answers[0]
    assert (ttft.metric.label, ttft.metric.unit) == ("mean TTFT", "ms")
    assert (ttft.difference, ttft.relative) == (-50.0, -0.5)
    assert [each.verdict for each in answers] == ["better", "better", "worse", ""]


def test_inputs_are_told_field_by_field():
    two = document(scenario={"engine": {"max_num_seqs": 64}, "slo": {"ttft_ms": 500}})
    found = compare_results(document(), two, "a", "b")
    assert [(each.field, each.one, each.other) for each in found.inputs] == [
        ("scenario.engine.max_num_seqs", 256, 64),
        ("scenario.slo.ttft_ms", None, 500),
    ]
    assert not found.answers


def test_versions_engines_and_calibrations_are_told():
    two = document(calibrations={"a100@vllm": "22", "engine@vllm": "33"}, version="0.2.0")
    two["provenance"]["engines"][0]["version"] = "0.31"
    found = compare_results(document(), two, "a", "b").versions
    assert [(each.field, each.one, each.other) for each in found] == [
        ("perfmodel", "0.1.0", "0.2.0"),
        ("engines.vllm.version", "0.30", "0.31"),
        ("calibrations.a100@vllm", "11", "22"),
        ("calibrations.engine@vllm", None, "33"),
    ]


def test_rows_are_matched_by_their_names_not_their_places():
    """A plan's finalists in another order are the same answer."""
    rows = [{"label": "1 x h100", "max_rate": 10.0}, {"label": "2 x a100", "max_rate": 8.0}]
    one, two = document(kind="plan", ranked=rows), document(kind="plan", ranked=rows[::-1])
    assert compare_results(one, two, "a", "b").is_same
    two["ranked"] = [rows[0], {**rows[1], "max_rate": 9.0}]
    (changed,) = compare_results(one, two, "a", "b").answers
    assert (changed.place, changed.metric.key, changed.other) == ("ranked 2 x a100", "max_rate", 9.0)


def test_what_is_no_number_is_told_as_text():
    found = compare_results(document(origin="calibrated"), document(origin="datasheet"), "a", "b")
    assert [(each.field, each.one, each.other) for each in found.texts] == [("origin", "calibrated", "datasheet")]


def test_results_of_two_kinds_are_refused():
    with pytest.raises(SpecError, match="a is a result of kind 'run', b of kind 'plan'; compare two of one command"):
        compare_results(document(), document(kind="plan"), "a", "b")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()

    def simulated(name, *overrides):
        flags = [f"--set={text}" for text in ("traffic.num_requests=30", *overrides)]
        (tmp_path / name).write_text(runner.invoke(app, ["simulate", NAME, "--json", *flags]).stdout)

    simulated("a.json")
    simulated("b.json", "hardware.hbm.bandwidth=2x", "engine.max_num_seqs=64")
    return lambda *args: runner.invoke(app, ["compare", *args])


def test_the_command_says_what_differs(run):
    text = run("a.json", "b.json").stdout
    for wanted in ("engine.max_num_seqs", "256", "64", "Mean TPOT, ms", "better"):
        assert wanted in text
    found = json.loads(run("a.json", "b.json", "--json").stdout)
    tpot = next(row for row in found["answers"] if row["metric"] == "mean_tpot_ms")
    assert tpot["other"] < tpot["one"]
    assert tpot["relative"] == pytest.approx(tpot["other"] / tpot["one"] - 1)
    assert not found["versions"]
    assert "Nothing differs" in run("a.json", "a.json").stdout


def test_scenarios_are_compared_by_name(run):
    found = json.loads(run(NAME, f"{NAME}.json", "--json").stdout or "{}")
    assert not found  # no such file, and no such scenario
    both = json.loads(run("tiny-llama-cpu", "tiny-llama-cpu", "--json").stdout)
    assert both["is_same"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not json", "is not JSON"),
        ("[1, 2]", "is not a result of perfmodel"),
        ('{"duration": 2}', "is not a result of perfmodel"),
        ('{"provenance": {"kind": "run"}}', "is not a result of perfmodel"),
    ],
)
def test_what_is_no_result_is_one_sentence(run, tmp_path, text, says):
    (tmp_path / "odd.json").write_text(text)
    done = run("a.json", "odd.json")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: odd.json")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
