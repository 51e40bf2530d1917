"""Our scheduler decides as the engines' own did: recordings replayed. `test_wrong_rules.py` says what notices what."""

import json
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.errors import SpecError
from perfmodel.evidence.kinds.plans import PlansReport, RecordedCase, replay, validate_plans

RECORDINGS = sorted((Path(__file__).parents[3] / "measurements" / "plans").glob("*.json.gz"))
CITED = Path(__file__).parents[4] / "shared" / "truth" / "plans" / "vllm_0.30.0.json.gz"
SMALL = {
    "config": {"max_num_seqs": 2, "max_num_batched_tokens": 8, "block_size": 4, "max_model_len": 64, "num_blocks": 8},
    "requests": [{"arrival": 0, "prompt": 10, "output": 2}],
    "steps": [[0, [[0, 0, 8]], []], [1, [[0, 8, 2]], []], [2, [[0, 10, 1]], []]],
}


# Replayed by `make test`; the larger recordings at release.
QUICK = {
    *("vllm_0.32.0", "vllm_0.25.1", "vllm_0.30.0_async-speculation", "llama.cpp_11549"),
    *("vllm_0.30.0_images", "vllm_0.30.0_offload", "vllm_0.30.0_pooling", "vllm_0.30.0_shapes", "vllm_0.30.0_suffix"),
    "vllm_0.30.0_encode-pools",
}


@cache
def report_of(recording: Path) -> PlansReport:
    return validate_plans(str(recording))


@pytest.mark.xdist_group("recorded plans")
@pytest.mark.parametrize(
    "recording",
    [
        pytest.param(file, id=name, marks=() if name in QUICK else pytest.mark.release)
        for file in RECORDINGS
        for name in [file.name.removesuffix(".json.gz")]
    ],
)
def test_all_plans_of_all_recorded_workloads_are_equal(recording: Path) -> None:
    report = report_of(recording)
    assert report.rows == report.covered == report.equal > 100, report.worst[:1]


@pytest.mark.release
@pytest.mark.xdist_group("recorded plans")
def test_the_recording_of_the_newest_engine_exercises_all_rules() -> None:
    by = report_of(next(file for file in RECORDINGS if file.name == "vllm_0.30.0.json.gz")).by
    assert sum(group["rows"] for name, group in by.items() if name.startswith("vllm")) >= 2000
    for feature in ("async scheduling", "prefix caching", "priority", "preemption", "aborts", "pipeline stages"):
        assert by[feature]["rows"] >= 300, feature
    assert by["speculation"]["rows"] >= 300
    assert by["KV groups"]["rows"] >= 300


@pytest.mark.release
@pytest.mark.skipif(not CITED.exists(), reason="the cited recording is not beside this checkout")
def test_the_cited_recording_is_equal_too() -> None:
    report = validate_plans(str(CITED))
    assert report.equal == report.rows == 400


@pytest.mark.release
@pytest.mark.xdist_group("recorded plans")
def test_the_recording_of_sglang_exercises_its_rules() -> None:
    by = report_of(next(file for file in RECORDINGS if "sglang" in file.name)).by
    for feature in ("async scheduling", "prefix caching", "mixed chunks", "lpm", "dfs-weight", "lof", "priority"):
        assert by[feature]["rows"] >= 10, feature
    assert by["preemption"]["rows"] >= 10


def test_slots_for_drafts_end_with_the_longest_sequence() -> None:
    """60 + 4 tokens fill all four blocks of 16, to which max_model_len limits a sequence: drafts behind them, of which
    vLLM keeps slots for five, take no fifth block."""
    config = {**SMALL["config"], "max_num_batched_tokens": 64, "block_size": 16, "num_blocks": 4, "drafter": "eagle"}
    request = {"arrival": 0, "prompt": 60, "output": 4, "accepted": [0]}
    case = {**SMALL, "config": {**config, "num_speculative_tokens": 5}, "requests": [request]}
    steps = list(replay(RecordedCase.model_validate(case), "vllm", "0.30.0"))
    assert sum(tokens for _, grants, _ in steps for _, _, tokens in grants) >= 60 + 3
    assert [preempted for _, _, preempted in steps if preempted] == []


# ------------------------------------------------------------------ the command


def _written(folder: Path, *cases: object) -> Path:
    file = folder / "plans.json"
    file.write_text(json.dumps({"engine": "vllm", "version": "0.30.0", "cases": list(cases)}))
    return file


def test_a_recording_by_hand(tmp_path: Path) -> None:
    """8 tokens a step: a prompt of 10 takes two steps, its second token the third."""
    result = CliRunner().invoke(app, ["validate", "plans", str(_written(tmp_path, SMALL)), "--json"])
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["rows"], answer["covered"], answer["equal"]) == (0, 1, 1, 1)


def test_a_run_of_equal_steps_is_one_entry(tmp_path: Path) -> None:
    """An answer of 5: its last four tokens are computed behind 10, 11, 12 and 13."""
    steps = [[0, [[0, 0, 8]], []], [1, [[0, 8, 2]], []], [2, [[0, 10, 1]], [], 3]]
    case = {**SMALL, "requests": [{"arrival": 0, "prompt": 10, "output": 5}], "steps": steps}
    assert validate_plans(str(_written(tmp_path, case))).equal == 1


def test_a_difference_is_refused_in_words_and_ends_with_1(tmp_path: Path) -> None:
    other = {**SMALL, "steps": [*SMALL["steps"][:1], [1, [[0, 8, 1]], []]]}
    result = CliRunner().invoke(app, ["validate", "plans", str(_written(tmp_path, SMALL, other)), "--json"])
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["equal"]) == (1, 1)
    assert answer["by"]["vllm 0.30.0"] == {"rows": 2, "equal": 1}
    worst = answer["worst"][0]
    assert (worst["case"], worst["step"]) == (1, 1)
    assert (worst["recorded"], worst["ours"]) == ("1 tokens of request 0 behind 8", "2 tokens of request 0 behind 8")
    shown = CliRunner().invoke(app, ["validate", "plans", str(_written(tmp_path, SMALL, other))])
    assert "1 of 2 cases equal" in shown.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no JSON", "expected a recording"),
        ("[]", "no list of cases"),
        ('{"cases": [{"config": {}}]}', "case 0: requests"),
        ('{"cases": [{"config": {}, "requests": [{"arrival": -1}], "steps": []}]}', "arrival"),
        ('{"cases": [{"config": {}, "requests": [], "steps": [[1, 5, [], 2]]}]}', "expected .step, grants"),
        ('{"cases": [{"config": {}, "requests": [], "steps": [[1, [], [], null]]}]}', "expected .step, grants"),
        ('{"cases": [{"config": {}, "requests": [], "steps": 3}]}', "expected .step, grants"),
    ],
)
def test_what_is_no_recording_is_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    file.write_text(content)
    with pytest.raises(SpecError, match=message):
        validate_plans(str(file))


def test_an_argument_that_we_do_not_know_is_a_note(tmp_path: Path) -> None:
    case = {**SMALL, "config": {**SMALL["config"], "max_lorys": 2}}
    report = validate_plans(str(_written(tmp_path, case)))
    assert (report.rows, report.covered) == (1, 0)
    assert "max_lorys" in report.notes[0]


@pytest.mark.parametrize("given", [{"load": 4}, {"loaded": 4}, {"send_steps": 2}])
def test_transfers_beside_offloading_are_a_note(tmp_path: Path, given: dict[str, int]) -> None:
    """They were ignored, and plans without them compared."""
    config = {**SMALL["config"], "kv_offload": {"num_blocks": 8}}
    case = {**SMALL, "config": config, "requests": [{**SMALL["requests"][0], **given}]}
    report = validate_plans(str(_written(tmp_path, case)))
    assert (report.rows, report.covered) == (1, 0)
    assert f"request 0: got {min(given)} beside config.kv_offload" in report.notes[0]
