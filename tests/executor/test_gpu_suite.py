"""The measuring programme: budget, order, resumption, failures; and a whole run on this machine's CPU."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import suite_tasks

torch = pytest.importorskip("torch", reason="the executor needs torch")

from perfmodel.errors import PerfmodelError, SpecError  # noqa: E402
from perfmodel.evidence.sources.measured import SmokeCheck, read_measurements  # noqa: E402
from perfmodel.specs import load_hardware  # noqa: E402
from perfmodel_executors.gpu_suite.kernels import difference, tensors_of  # noqa: E402
from perfmodel_executors.gpu_suite.processes import Worker  # noqa: E402
from perfmodel_executors.gpu_suite.runner import SHARES, Results, run_tasks  # noqa: E402
from perfmodel_executors.gpu_suite.session import TASKS  # noqa: E402
from perfmodel_executors.gpu_suite.smoke import (  # noqa: E402
    SERVED,
    check_parity,
    check_problem,
    check_tokens,
    dtypes_of,
    smoke_tasks,
)
from perfmodel_executors.gpu_suite.task import Bench, Task  # noqa: E402
from perfmodel_executors.kernels.dispatch import KERNELS, load_kernels  # noqa: E402
from perfmodel_executors.kernels.launch import KernelError  # noqa: E402
from perfmodel_executors.kernels.problem import Inputs, problems_of  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CPU = Bench(torch.device("cpu"), load_hardware("cpu"), "torch")


class Clock:
    """Time that passes only in tasks."""

    def __init__(self):
        self.now = 0.0
        self.order = []

    def __call__(self):
        return self.now

    def task(self, part, key, takes, guess=None, error=None):
        def run():
            self.now += takes
            self.order.append(key)
            if error is not None:
                raise error
            return {"seconds": takes}

        return Task(part, key, run, seconds=takes if guess is None else guess)


def test_no_task_begins_that_would_end_after_the_budget(tmp_path):
    clock = Clock()
    tasks = [clock.task("kernels", f"k{i}", 3.0) for i in range(10)]
    outcome = run_tasks(tasks, Results(tmp_path), 10.0, clock_s=clock)
    assert clock.order == ["k0", "k1", "k2"]
    assert outcome.left_out == [f"k{i}" for i in range(3, 10)]
    assert outcome.elapsed_s <= 10.0


def test_a_second_run_measures_only_what_is_missing(tmp_path):
    clock = Clock()
    tasks = [clock.task("kernels", f"k{i}", 3.0) for i in range(5)]
    run_tasks(tasks, Results(tmp_path), 7.0, clock_s=clock)
    outcome = run_tasks(tasks, Results(tmp_path), 100.0, clock_s=clock)
    assert clock.order == [f"k{i}" for i in range(5)]
    assert not outcome.left_out
    assert set(json.loads((tmp_path / "kernels.json").read_text())) == {f"k{i}" for i in range(5)}


def test_parts_share_the_time_as_told(tmp_path):
    clock = Clock()
    tasks = [clock.task(part, f"{part}{i}", 1.0) for part in SHARES for i in range(100)]
    run_tasks(tasks, Results(tmp_path), 100.0, clock_s=clock, switch_s=0.0)
    for part, share in SHARES.items():
        assert sum(key.startswith(part) for key in clock.order) == pytest.approx(100 * share, abs=2)


def test_a_failure_is_a_sentence_and_the_rest_goes_on(tmp_path):
    clock = Clock()
    tasks = [clock.task("kernels", "bad", 1.0, error=PerfmodelError("no such tile.")), clock.task("kernels", "k", 1.0)]
    outcome = run_tasks(tasks, Results(tmp_path), 10.0, clock_s=clock)
    assert outcome.failures == {"bad": "PerfmodelError: no such tile."}
    assert outcome.done == {"kernels": 1}


def test_a_part_that_has_loaded_a_model_goes_on_for_a_while(tmp_path):
    clock = Clock()
    tasks = [clock.task(part, f"{part}{i}", 1.0) for part in ("steps", "serving") for i in range(50)]
    run_tasks(tasks, Results(tmp_path), 60.0, clock_s=clock, switch_s=5.0)
    switches = sum(first[:2] != second[:2] for first, second in pairwise(clock.order))
    assert 2 <= switches <= 12


def test_a_part_that_is_not_open_waits_but_nothing_waits_for_nothing(tmp_path):
    clock = Clock()
    tasks = [clock.task(part, part, 1.0) for part in ("steps", "kernels")]
    run_tasks(tasks, Results(tmp_path), 10.0, clock_s=clock, is_open=lambda part: part == "kernels")
    assert clock.order == ["kernels", "steps"]


@pytest.mark.release
def test_a_task_that_ends_its_process_is_noted_and_the_next_one_gets_another(tmp_path):
    """Killed, gone on too long, and failing with an exception that nobody foresaw: each is a sentence."""
    worker = Worker(suite_tasks.deadly)
    try:
        tasks = list(suite_tasks.deadly())
        limits = {"slow": 2.0}
        outcome = run_tasks(
            tasks, Results(tmp_path), 100.0, execute=lambda task: worker.run(task, limits.get(task.key, 60.0))
        )
    finally:
        worker.end()
    assert set(json.loads((tmp_path / "kernels.json").read_text())) == {"first", "between", "last"}
    assert outcome.failures["kills"] == "it ended its process (SIGKILL)"
    assert outcome.failures["exits"] == "it ended its process (status 3)"
    assert outcome.failures["slow"] == "it took longer than 2 s"
    assert outcome.failures["raises"].startswith("ZeroDivisionError")


def test_a_result_that_is_not_a_number_is_no_small_difference():
    """max(0.0, nan) is 0.0."""
    good = torch.tensor([1.0, -4.0])
    assert difference(good + 1.0, good) == 0.25
    assert math.isnan(difference(torch.tensor([float("nan"), 1.0]), good))
    assert math.isinf(difference(torch.tensor([float("inf"), 1.0]), good))
    assert difference(torch.tensor([7, 8, 9, 9]), torch.tensor([7, 8, 9, 1])) == 0.25


def test_what_a_quantised_weight_takes_counts_as_input():
    """Else inputs are copied as if they were small, and fill the memory."""
    for operator in ("linear_w8a16", "linear_w4a16", "linear_fp8"):
        problem = problems_of(operator)[0]
        sizes = problem.sizes
        num_bytes = sum(t.nbytes for t in tensors_of(problem.make(Inputs("meta"))))
        assert num_bytes >= sizes["n"] * sizes["k"] / 2


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "kernels.json").write_text("{")
    with pytest.raises(SpecError, match=r"kernels\.json"):
        Results(tmp_path).part("kernels")


# What a machine with torch may not have: named so, importing them fails in every process that starts from here.
ABSENT = ("typer", "rich", "click", "plotly", "gguf", "tokenizers", "pytest", "hypothesis", "pyarrow")


@pytest.fixture
def bare_python(tmp_path):
    """An environment whose interpreters find torch, NumPy, SciPy, YAML and the wheels to copy, and none of `ABSENT`."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n")
    path = os.pathsep.join(map(str, (folder, ROOT, ROOT / "executors")))
    return {**os.environ, "PYTHONPATH": path, "PERFMODEL_COMMIT": "0123abc"}


@pytest.mark.release
def test_the_command_is_ended_goes_on_and_measures_this_machine(tmp_path, bare_python):
    """As it is called: processes are begun anew from the command's own module, and do without what is not there."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "perfmodel_executors.gpu_suite", "--device", "cpu", "--part", "kernels"]
    command += ["--budget-s", "60", "--out", str(out)]
    longer = [*command, "--part", "steps"]  # a minute's work, so that it is ended in the middle
    first = subprocess.Popen(longer, env=bare_python, stderr=subprocess.PIPE, text=True)
    for line in first.stderr:
        if "rms_norm" in line:
            break
    first.terminate()
    first.communicate(timeout=60)
    assert first.returncode == 128 + signal.SIGTERM
    begun = json.loads((out / "kernels.json").read_text())
    subprocess.run(command, env=bare_python, check=True, timeout=180)
    found = read_measurements(out)
    assert len(found.kernels) >= len(begun) > 0
    assert {key: json.loads((out / "kernels.json").read_text())[key] for key in begun} == begun
    assert not found.info.failures
    assert found.info.ceilings.bandwidth
    assert found.info.commit == "0123abc"
    assert [call.commit for call in found.info.calls] == ["0123abc", "0123abc"]
    assert found.info.readings.absent


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.xdist_group("timing")  # one at a time: two minutes of one core
def test_a_dry_run_gives_results_of_every_part_and_the_report(tmp_path):
    """The whole programme on this CPU, in one call, or where others take its cores in up to four, each of which goes on
    where the last one ended; the report is made from what it wrote."""
    out, report = tmp_path / "out", tmp_path / "report.md"
    programme = ["-m", "perfmodel_executors.gpu_suite", "--device", "cpu", "--budget-s", "150", "--out", str(out)]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "executors")))
    validate = ["-m", "perfmodel", "validate", "executor", "--measured", str(out), "--report", str(report)]
    for _ in range(4):
        environment = {**os.environ, "PYTHONPATH": path}
        subprocess.run([sys.executable, *programme], env=environment, check=True, timeout=270)
        subprocess.run([sys.executable, *validate], check=True, timeout=240, cwd=ROOT)
        results, text = read_measurements(out), report.read_text(encoding="utf-8")
        counts = results.info.parts_done
        shown = (f"of {counts['kernels']} kernels", f"of {counts['steps']} steps", "mean TPOT", "| speedup |")
        missing = [part for part in TASKS if part != "vllm" and not counts[part]]
        missing += [words for words in shown if words not in text]
        if not missing:
            break
    assert not missing
    assert not results.info.failures
    assert all(call.elapsed_s <= 150 + 15 for call in results.info.calls)
    assert f"{counts['smoke']} of {counts['smoke']} checks are right" in text


@pytest.mark.parametrize("operator", KERNELS)
def test_the_smoke_finds_every_kernel_right_here(operator):
    """Problems of odd sizes in all formats against the reference in fp32."""
    for dtype in dtypes_of(CPU).values():
        for problem in problems_of(operator, "tiny", dtype):
            found = SmokeCheck(**check_problem(problem, CPU))
            assert found.is_right, f"{problem}: {found.error}"


def test_the_smoke_finds_what_is_wrong(monkeypatch):
    problem = problems_of("rms_norm", "tiny", torch.bfloat16)[0]
    kernels = load_kernels()
    monkeypatch.setattr(
        "perfmodel_executors.gpu_suite.smoke.load_kernels",
        lambda name: (
            SimpleNamespace(rms_norm=(lambda *args: 1.05 * kernels.rms_norm(*args))) if name == "wrong" else kernels
        ),
    )
    wrong = check_problem(problem, replace(CPU, backend="wrong"))
    assert not SmokeCheck(**wrong).is_right
    monkeypatch.setattr(kernels, "rms_norm", lambda *args: args[0] * float("nan"))
    with pytest.raises(KernelError, match="not finite"):
        check_problem(problem, CPU)


@pytest.mark.release
def test_captured_decodes_give_the_tokens_of_plain_ones():
    for model, overrides in SERVED[:3]:
        assert SmokeCheck(**check_tokens(model, overrides, CPU)).is_right


def test_the_smoke_compares_with_transformers_where_it_is():
    pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    found = SmokeCheck(**check_parity("llama-llama3", CPU))
    assert found.is_right
    assert found.error > 0.0
    assert "parity llama-llama3" in {task.key for task in smoke_tasks(CPU)}
