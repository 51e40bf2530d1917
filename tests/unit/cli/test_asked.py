"""Scenarios without a file: what the flags stand for, what is said of the rest, and what is refused."""

import json

import pytest

from perfmodel.specs import load_scenario

FLAGS = ("--model", "tiny-llama", "--hardware", "h100")
LIMITS = ("--rate", "300 req/min", "--ttft", "1s", "--tpot", "40 ms", "--e2e", "20000", "--traffic", "code")
FEW = ("--set", "traffic.num_requests=40")
SPACE = (
    *("--set", "plan.seeds=1", "--set", "plan.num_requests=60"),
    *("--set", "plan.space.max_num_seqs=[16]", "--set", "plan.space.max_num_batched_tokens=[2048]"),
)


@pytest.fixture
def as_file(run, tmp_path):
    """The file that flags stand for, as `scenarios new` prints it."""

    def write(*flags):
        made = run("scenarios", "new", *flags)
        assert made.exit_code == 0, made.stderr
        path = tmp_path / "made.yaml"
        path.write_text(made.stdout)
        return path

    return write


@pytest.mark.release
@pytest.mark.parametrize(
    ("command", "flags", "more"),
    [
        ("simulate", (*FLAGS, *LIMITS), FEW),
        ("simulate", FLAGS, FEW),
        ("memory", FLAGS, ()),
        ("explain", FLAGS, ()),
        ("explain", FLAGS, ("--run", *FEW)),
        ("roofline", (*FLAGS, "--rate", "3"), ()),
        ("whatif", (*FLAGS, *LIMITS), (*FEW, "--vary", "engine.max_num_seqs=8,16")),
        ("plan", (*FLAGS, *LIMITS), (*FEW, *SPACE)),
        ("plan", ("--model", "tiny-llama", "--hardware", "h100,a100", *LIMITS), (*FEW, *SPACE)),
    ],
)
def test_flags_and_their_file_give_the_same_answer(run, as_file, command, flags, more):
    by_flags, by_file = run(command, *flags, *more, "--json"), run(command, as_file(*flags), *more, "--json")
    assert by_flags.exit_code == by_file.exit_code == 0, by_flags.stderr + by_file.stderr
    mine, its = json.loads(by_flags.stdout), json.loads(by_file.stdout)
    assumed, *notes = mine.pop("notes")
    assert assumed.startswith("Assumed: ")
    assert notes == its.pop("notes")
    assert mine == its


def test_flags_mean_what_they_say(as_file):
    scenario = load_scenario(as_file(*FLAGS, *LIMITS))
    assert scenario.traffic.arrivals.rate == 5
    assert (scenario.slo.ttft_ms, scenario.slo.tpot_ms, scenario.slo.e2el_ms) == (1000, 40, 20_000)
    assert (scenario.hardware.name, scenario.traffic.name) == ("h100-sxm-80gb", "azure-code")
    assert scenario.traffic.input_tokens == load_scenario("llama-3.1-8b-a100", ["traffic=code"]).traffic.input_tokens


def test_what_is_assumed_is_said(run):
    said = json.loads(run("simulate", *FLAGS, *FEW, "--json").stdout)["notes"][0]
    for assumed in ("traffic azure-conversation", "5.5 requests/s", "no limits", "vllm 0.", "tensor_parallel_size 1"):
        assert assumed in said
    said = json.loads(run("simulate", *FLAGS, *LIMITS, *FEW, "--json").stdout)["notes"][0]
    for given in ("traffic", "requests/s", "no limits"):
        assert given not in said


def test_what_is_given_by_set_is_not_assumed(run):
    changes = ("traffic.arrivals.rate=3", "engine.version=0.30", "engine.tensor_parallel_size=2")
    asked = [part for change in changes for part in ("--set", change)]
    said = json.loads(run("simulate", *FLAGS, *FEW, *asked, "--json").stdout)["notes"][0]
    assert said.startswith("Assumed: traffic azure-conversation")
    for given in ("requests/s", "vllm", "tensor_parallel_size"):
        assert given not in said


def test_what_is_assumed_stands_in_every_form_of_an_answer(run, tmp_path):
    """On the terminal, in the page and the result of `--out`, in Markdown, HTML and JSON of a report."""
    assumed = "Assumed: traffic azure-conversation"
    assert assumed in run("simulate", *FLAGS, *FEW, "--out", "run").stdout
    assert run("plan", *FLAGS, "--ttft", "1s", *FEW, *SPACE, "--report", "p.md").exit_code == 0
    asked = ("whatif", *FLAGS, *FEW, "--vary", "engine.max_num_seqs=8,16", "--metric", "duration")
    assert run(*asked, "--report", "w.html").exit_code == 0
    for name in ("run/report.html", "run/result.json", "p.md", "p.json", "w.html", "w.json"):
        assert assumed in (tmp_path / name).read_text(), name


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (("simulate", "llama-3.1-8b-a100", *FLAGS), "llama-3.1-8b-a100 beside --model tiny-llama"),
        (("simulate", "llama-3.1-8b-a100", "--rate", 3), "llama-3.1-8b-a100 beside --rate 3"),
        (("simulate",), "no scenario: give a scenario"),
        (("plan", "--rate", 3), "--rate without --model"),
        (("memory", "--model", "tiny-llama"), "--model without --hardware"),
        (("simulate", "--model", "tiny-llama", "--hardware", "h100,h200"), "got 2 devices; expected 1"),
        (("simulate", "--model", "tiny-llama", "--hardware", "h1000"), "--hardware h1000: unknown hardware 'h1000'"),
        (("simulate", "--model", "tinny-llama", "--hardware", "h100"), "--model tinny-llama: model: unknown model"),
        (("simulate", *FLAGS, "--traffic", "chatt"), "--traffic chatt: unknown traffic 'chatt'"),
        (
            ("simulate", *FLAGS, "--rate", "20 kg"),
            "--rate 20 kg: traffic.arrivals.rate: '20 kg' is not a quantity in requests/s",
        ),
        (("simulate", *FLAGS, "--rate", "-1"), "--rate -1: traffic.arrivals.rate: got -1; expected a number above 0"),
        (("simulate", *FLAGS, "--ttft", "soon"), "--ttft soon: slo.ttft_ms: 'soon' is not a quantity in ms"),
        (("simulate", *FLAGS, "--ttft", "0.5"), "--ttft 0.5: got a number without a unit; write 0.5s or 0.5ms"),
        (("plan", *FLAGS, "--e2e", "4"), "--e2e 4: got a number without a unit; write 4s or 4ms"),
        (("scenarios", "new"), "no model"),
        (("plan", *FLAGS), "a plan needs limits to meet: give --ttft 500ms"),
        (("whatif", *FLAGS, "--tpot", "-3"), "--tpot -3: slo.tpot_ms: got -3"),
        (("explain", *FLAGS, "--traffic", "chatt", "--rate", "2"), "--traffic chatt: unknown traffic"),
    ],
)
def test_bad_flags_are_one_sentence(run, args, wanted):
    result = run(*args)
    assert result.exit_code == 2
    last = [line for line in result.stderr.splitlines() if not line.startswith("Assumed:")]
    assert len(last) == 1
    assert last[0].startswith("error: ")
    assert wanted in last[0]


def test_traffic_without_a_rate_takes_none(run, tmp_path):
    (tmp_path / "closed.yaml").write_text(
        "arrivals: {process: closed_loop, concurrency: 4}\nnum_requests: 9\n"
        "input_tokens: {distribution: fixed, value: 9}\noutput_tokens: {distribution: fixed, value: 9}\n"
    )
    assert run("simulate", *FLAGS, "--traffic", "closed.yaml", "--json").exit_code == 0
    refused = run("simulate", *FLAGS, "--traffic", "closed.yaml", "--rate", 3)
    assert refused.exit_code == 2
    assert "arrivals of process closed_loop, which have no rate" in refused.stderr


def test_scenarios_are_listed_with_what_they_are(run):
    listed = run("scenarios", "list")
    assert "llama-3.1-8b-a100" in listed.stdout
    assert "Llama-3.1-8B on one A100 under chat traffic" in listed.stdout
    found = json.loads(run("scenarios", "list", "--all", "--json").stdout)
    assert all(each["purpose"] for each in found["traffic"])
    for each in found["scenarios"][::25]:
        assert load_scenario(each["name"]).name


def test_short_words_name_traffic(run):
    found = json.loads(run("scenarios", "list", "--json").stdout)["traffic"]
    words = {alias for each in found for alias in each["aliases"]}
    assert {"chat", "code", "summaries"} <= words


def test_a_scenario_is_shown_as_its_file(run, tmp_path):
    copy = tmp_path / "copy.yaml"
    copy.write_text(run("scenarios", "show", "llama-3.1-8b-a100").stdout)
    assert load_scenario(copy) == load_scenario("llama-3.1-8b-a100")
    shown = json.loads(run("scenarios", "show", "llama-3.1-8b-a100", "--json").stdout)
    assert shown["hardware"]["name"] == "a100-sxm-80gb"


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_an_end_to_end_limit_is_screened_without_a_word_of_numpy(run):
    """Answers of one token, at rates that no candidate sustains: nothing times for ever is nothing."""
    limits = ("--rate", "5", "--e2e", "20s", "--traffic", "code")
    done = run("plan", "--model", "tiny-llama", "--hardware", "h100", *limits, *SPACE, "--json")
    assert done.exit_code == 0, done.stderr


def test_a_server_of_several_devices_is_named_by_their_number(run, as_file):
    """`2xh100`: the model is split over both, and a plan has no more; a file says the two things apart."""
    for name in ("2xh100", "2 x H100"):
        scenario = load_scenario(as_file("--model", "llama-3.1-70b", "--hardware", name))
        assert (scenario.hardware.name, scenario.engine.tensor_parallel_size) == ("h100-sxm-80gb", 2)
        assert scenario.plan is not None
        assert scenario.plan.max_gpus == 2
    several = load_scenario(as_file("--model", "llama-3.1-70b", "--hardware", "4xh100,8xh200"))
    assert several.plan is not None
    assert several.plan.max_gpus == 8
    refused = run("simulate", "llama-3.1-8b-a100", "--set", "hardware=2xh100")
    assert refused.exit_code == 2
    assert "write h100, and engine.tensor_parallel_size=2" in refused.stderr
    assert run("memory", "--model", "llama-3.1-8b", "--hardware", "0xh100").exit_code == 2


def test_a_plan_assumes_no_value_of_what_it_searches(run, tmp_path):
    # A folder is no store: the plan is refused after its assumptions are printed.
    stderr = run("plan", *FLAGS, "--ttft", "1s", "--store", tmp_path).stderr
    assert "Assumed: traffic" in stderr
    assert "tensor_parallel_size" not in stderr
