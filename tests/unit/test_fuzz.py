"""A few hundred inputs that nobody means: each ends in an answer or in a sentence (`benchmarks/fuzz.py`: 20,000)."""

import subprocess
import sys
import time

import pytest
from fuzz_cases import FuzzCase, fuzz_cases
from fuzz_runs import run_case
from hypothesis import HealthCheck, Phase, given, settings


@settings(
    max_examples=200, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(fuzz_cases("inputs"))
def test_no_input_ends_in_anything_else(case: FuzzCase) -> None:
    outcome = run_case(case)
    assert not outcome.wrong, (outcome, case)


@settings(
    max_examples=35, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(fuzz_cases("questions"))
def test_nor_does_a_question_asked_of_many_scenarios_or_of_measurements(case: FuzzCase) -> None:
    outcome = run_case(case)
    assert not outcome.wrong, (outcome, case)


@settings(
    max_examples=80, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(fuzz_cases("ways-in"))
def test_nor_does_what_people_come_with(case: FuzzCase) -> None:
    """Results of load tests, command lines, conversations and checkpoints."""
    outcome = run_case(case)
    assert not outcome.wrong, (outcome, case)


@settings(
    max_examples=12, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(fuzz_cases("all"))
def test_nor_does_it_in_a_process_of_its_own(tmp_path_factory: pytest.TempPathFactory, case: FuzzCase) -> None:
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
