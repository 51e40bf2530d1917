"""A few hundred random inputs end in a result or a one-sentence error (`benchmarks/fuzz.py` runs 20,000)."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fuzz_cases import FuzzCase, fuzz_cases
from fuzz_runs import run_case
from hypothesis import HealthCheck, Phase, given, settings

FINDS = Path(__file__).parents[1] / "data/fuzz_finds.jsonl"


def max_examples(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def check(case: FuzzCase) -> None:
    outcome = run_case(case)
    assert not outcome.wrong, (outcome, case)


@pytest.mark.release
@max_examples(200)
@given(fuzz_cases("inputs"))
def test_files_of_a_scenario(case: FuzzCase) -> None:
    check(case)


@pytest.mark.release
@max_examples(35)
@given(fuzz_cases("questions"))
def test_questions_about_many_scenarios_or_measurements(case: FuzzCase) -> None:
    check(case)


@pytest.mark.release
@max_examples(80)
@given(fuzz_cases("ways-in"))
def test_results_of_load_tests_command_lines_conversations_and_checkpoints(case: FuzzCase) -> None:
    check(case)


@max_examples(120)
@given(fuzz_cases("requests"))
def test_requests_to_the_page_and_the_emulator(case: FuzzCase) -> None:
    check(case)


@pytest.mark.parametrize("line", FINDS.read_text(encoding="utf-8").splitlines())
def test_past_failures(line: str) -> None:
    """Failures recorded by `benchmarks/fuzz.py`: kind, args, files as Latin-1."""
    row = json.loads(line)
    files = {name: text.encode("latin-1") for name, text in row["files"].items()}
    check(FuzzCase(row["kind"], tuple(row["args"]), files))


@pytest.mark.release
@max_examples(12)
@given(fuzz_cases("inputs") | fuzz_cases("questions") | fuzz_cases("ways-in"))
def test_cases_in_a_separate_process(tmp_path_factory: pytest.TempPathFactory, case: FuzzCase) -> None:
    folder = tmp_path_factory.mktemp("case")
    for name, content in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    args = [arg.encode("utf-8", "surrogatepass") for arg in case.args]
    begun = time.monotonic()
    found = subprocess.run(
        [sys.executable, "-m", "perfmodel", *args], capture_output=True, cwd=folder, timeout=60, check=False
    )
    assert found.returncode in ((0, 1, 2) if case.args[0] == "plan" else (0, 2)), (case, found.stderr)
    assert b"Traceback" not in found.stderr
    assert time.monotonic() - begun < 60
