"""What-ifs from question to answer: one at a time, in a grid, against an alternative; the command writes it all."""

import json
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.errors import SpecError
from perfmodel.planning.points import evaluate
from perfmodel.planning.typical_step import estimate_choice
from perfmodel.planning.whatif import ask_whatif, payoffs
from perfmodel.report.pages import pictures_of
from perfmodel.report.terminal import render_text
from perfmodel.report.views.whatif import whatif_brief, whatif_sentences, whatif_view
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario

NAME = "llama-3.1-8b-a100"
FEW = ("traffic.num_requests=60",)


def test_speeding_everything_up_with_the_load_takes_that_much_off_every_latency():
    """Nothing in a run has a time of its own: with peaks, bandwidths, overheads' inverses and arrivals all k times as
    much, latencies are 1/k. So elasticities add up to -1, queueing and scheduling included."""
    paths = ("hardware.peak_flops", "hardware.hbm.bandwidth", "traffic.arrivals.rate")
    slow = ("overheads.kernels", "overheads.host")
    vary = [f"{path}=0.9x,1.1x" for path in (*paths, *slow)]
    found = ask_whatif(NAME, vary, ("traffic.num_requests=150",), ("mean_tpot_ms", "mean_e2el_ms"), workers=1)
    for metric in ("mean_tpot_ms", "mean_e2el_ms"):
        by_path = {each.axis.path: each.elasticity or 0.0 for each in found.answers.of_metric(metric)}
        assert sum(by_path[path] for path in paths) - sum(by_path[path] for path in slow) == pytest.approx(-1, abs=0.06)


def test_without_anything_asked_the_resources_are_varied():
    found = ask_whatif(NAME, overrides=FEW, metrics=("mean_tpot_ms",), workers=1)
    assert {each.axis.path for each in found.answers.sensitivities} >= {"hardware.hbm.bandwidth", "overheads.host"}
    sentences = whatif_sentences(found)
    assert "HBM bandwidth" in sentences[0]
    assert "tornado-mean_tpot_ms" in pictures_of(whatif_view(found))


def test_the_two_sides_of_a_crossover_differ_in_who_is_better():
    """Half the peaks but twice the bandwidth: better for small batches of decodes, worse for large ones. A step has no
    draw, so all seeds agree."""
    against = ("hardware.peak_flops=0.5x", "hardware.hbm.bandwidth=2x")
    overrides = ("engine.profile=datasheet", "step.batch=8", "step.context=64")
    vary = ["step.batch=8..2048:3"]
    found = ask_whatif(NAME, vary, overrides, ("step_ms",), against=against, workers=1)
    (turn,) = found.payoffs
    assert (turn.low, turn.high, turn.begins) == (turn.at, turn.at, False)
    question = found.answers.question

    def is_better(batch: float) -> bool:
        text = f"step.batch={batch:.0f}"
        ours, theirs = (evaluate(question.point(text, alternative=which)) for which in (False, True))
        return (theirs.values["step_ms"] or 0) < (ours.values["step_ms"] or 0)

    assert is_better(turn.at * 0.97)
    assert not is_better(turn.at * 1.03)


def test_what_only_large_changes_move_is_told_so():
    """A limit of 64 is never reached at 4 req/s, one of 4 is: the elasticity is zero and the answer is not. (Where
    steps with prompts are captured, as in vLLM, the limit also says up to which size, and matters a little.)"""
    decodes_only = (*FEW, "engine.profile=sglang")
    found = ask_whatif(NAME, ["engine.max_num_seqs=4..128:3"], decodes_only, ("mean_ttft_ms",), workers=1)
    (sensitivity,) = found.answers.sensitivities
    assert sensitivity.elasticity == 0
    assert "no small change of what was varied moves it" in whatif_sentences(found)[0]
    assert "from 4 to 128, engine.max_num_seqs takes it from" in whatif_sentences(found)[0]


def test_the_overrides_of_an_axis_stand_above_the_alternatives():
    against = ("traffic.arrivals.rate=1",)
    found = ask_whatif(NAME, ["traffic.arrivals.rate=2,4"], FEW, ("mean_tpot_ms",), against=against, workers=1)
    answers = found.answers
    assert answers.by_axis == answers.others
    assert answers.other is not None
    assert answers.other != answers.base
    assert payoffs(answers, ["mean_tpot_ms"], workers=1) == []


def test_the_search_for_crossovers_counts_what_it_looks_for():
    """One crossing for each of two metrics, under five seeds each: ten to look for, known before the first is found."""
    stages = {}

    @contextmanager
    def watch(stage):
        stages[stage] = []
        yield lambda done, total: stages[stage].append((done, total))

    against = ("hardware.peak_flops=0.5x", "hardware.hbm.bandwidth=2x")
    overrides = ("engine.profile=datasheet", "step.batch=8", "step.context=64")
    metrics = ("step_ms", "tokens_per_s")
    found = ask_whatif(NAME, ["step.batch=8..2048:3"], overrides, metrics, against=against, workers=1, watch=watch)
    assert {turn.metric for turn in found.payoffs} == set(metrics)
    assert stages["looking for crossovers"] == [(number, 10) for number in range(1, 11)]


def test_a_grid_has_all_combinations():
    vary = ["engine.max_num_seqs=8,16", "traffic.arrivals.rate=2,3.1748,8"]
    found = ask_whatif(NAME, vary, FEW, ("mean_tpot_ms",), grid=True, workers=1)
    assert len(found.answers.grid) == 6
    drawn = pictures_of(whatif_view(found))["grid-mean_tpot_ms"]
    assert ">3.17<" in drawn
    with pytest.raises(SpecError, match="a grid has two"):
        ask_whatif(NAME, vary[:1], FEW, ("mean_tpot_ms",), grid=True)


def test_what_does_not_fit_is_told_and_the_rest_answered():
    vary = ["hardware.hbm.capacity=0.1x..1x:2"]
    found = ask_whatif(NAME, vary, FEW, ("mean_tpot_ms",), workers=1)
    assert any("need" in problem for problem in found.answers.problems)
    (each,) = found.answers.sensitivities
    assert each.low is None
    assert each.high is not None


def test_intervals_are_those_of_a_run_and_leave_the_values_as_they_are():
    """A point is a simulation: its interval is that of `perfmodel simulate` of the same scenario, about its mean."""
    few = ["--set", "traffic.num_requests=40"]
    asked = ["whatif", "llama-3.1-8b-a100", *few, "--vary", "traffic.arrivals.rate=1,4", "--json"]
    asked += ["--metric", "mean_ttft_ms", "--metric", "p99_ttft_ms"]
    plain, found = (json.loads(CliRunner().invoke(app, [*asked, *more]).stdout) for more in ((), ("--intervals",)))
    assert "interval" not in plain["base"]
    assert [each["values"] for each in plain["points"]] == [each["values"] for each in found["points"]]
    for point in found["points"]:
        run = CliRunner().invoke(app, ["simulate", "llama-3.1-8b-a100", *few, "--set", point["set"], "--json"])
        assert point["interval"] == {"mean_ttft_ms": json.loads(run.stdout)["interval"]["mean_ttft_ms"]}
        low, high = point["interval"]["mean_ttft_ms"]
        assert low < point["values"]["mean_ttft_ms"] < high


@pytest.mark.release
def test_the_command_writes_one_document_and_a_report(tmp_path):
    arguments = ["whatif", NAME, "--set", FEW[0], "--vary", "hardware.hbm.bandwidth=0.5x..2x:3"]
    arguments += ["--vary", "engine.quantization=fp8,awq", "--metric", "mean_tpot_ms", "--json"]
    for name in ("out.md", "out.html"):
        done = CliRunner().invoke(app, [*arguments, "--report", str(tmp_path / name)])
        assert done.exit_code == 0, done.output
        document = json.loads(done.stdout)
        assert document["metrics"] == ["mean_tpot_ms"]
        assert document["sensitivities"][0]["elasticity"] < 0
        assert len(document["points"]) == 5
        assert (tmp_path / name).read_text(encoding="utf-8")
    shown = CliRunner().invoke(app, arguments[:-1])
    assert "elasticity" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--metric", "mean_tpott_ms"], "Did you mean 'mean_tpot_ms'"),
        (["--vary", "engine.max_num_sequences=1..2"], "unknown key 'max_num_sequences'"),
        (["--against", "engine.max_num_sequences=1"], "unknown key 'max_num_sequences'"),
        (["--grid"], "give --vary twice"),
        (["--against", "'"], "No closing quotation; quote it as in"),
        (["--engine", "lokal"], "Did you mean 'local'"),
    ],
)
def test_mistakes_are_one_sentence(arguments, says):
    done = CliRunner().invoke(app, ["whatif", NAME, *arguments])
    assert done.exit_code == 2
    assert says in done.stderr


def test_what_bounds_a_step_of_vectors_is_said_of_its_prompts():
    """As many prompts as `explain` has, whatever a single decode would be bound by."""
    found = ask_whatif("arctic-embed-m-h200", ["overheads.host=0.5x,2x"], FEW, ("mean_ttft_ms",), workers=1)
    own = estimate_choice(load_scenario("arctic-embed-m-h200", FEW))
    assert (found.step.prefill, found.step.prompts, found.step.batch) == (512, 16, 0)
    assert found.step_bound == own.estimate.bound
    assert found.largest_batch == 0


SHORT_BEAMS = ("traffic.num_requests=20", "traffic.output_tokens.value=32")


@pytest.mark.parametrize(("name", "overrides"), [("llama-3-8b-h100-beams", SHORT_BEAMS), ("arctic-embed-m-h200", FEW)])
def test_answers_that_come_whole_are_varied_by_metrics_that_they_have(name, overrides):
    """No TPOT and, of vectors, no output tokens: columns of them would be empty."""
    vary = ["overheads.host=0.5x,2x", f"hardware={load_scenario(name).hardware.name},b200-sxm"]
    found = ask_whatif(name, vary, overrides, workers=1)
    assert len(found.answers.base.values) >= 3
    assert None not in found.answers.base.values.values()


def test_the_typical_step_of_beams_is_as_large_as_a_runs():
    """Requests are one for an answer's first token and four for each later one; a run's steps share them out."""
    scenario = load_scenario("llama-3-8b-h100-beams", SHORT_BEAMS)
    choice = estimate_choice(scenario)
    per_step = 20 * (1 + 4 * 31) / simulate(scenario).summary["num_steps"]
    assert len(choice.shape.prefills) == pytest.approx(per_step, rel=0.25)
    assert choice.shape.prefills[0] == (8, 256 + 16 - 8)  # half a block of a prompt and half an answer
    slow = estimate_choice(load_scenario("llama-3-8b-h100-beams", (*SHORT_BEAMS, "overheads.host=8")))
    assert len(slow.shape.prefills) < len(choice.shape.prefills)


def test_beams_of_few_answers_are_few_a_step():
    """Four beams of one answer: the first has a step of its own, so two steps of two on average."""
    one = estimate_choice(load_scenario("llama-3-8b-h100-beams", (*SHORT_BEAMS[1:], "traffic.num_requests=1")))
    assert len(one.shape.prefills) == 2


def test_beams_are_not_sent_on_to_plans():
    """`plan` refuses them."""
    found = ask_whatif("llama-3-8b-h100-beams", ["overheads.host=0.5x,2x"], SHORT_BEAMS, workers=1)
    assert "`plan`" not in render_text(whatif_brief(found))
