"""What goes wrong on a device that nobody has tried before: each failure is a sentence, and the others are measured."""

import os
import subprocess
import threading
import time

import compiler_jobs
import pytest
import suite_tasks

torch = pytest.importorskip("torch", reason="the executor needs torch")

from perfmodel.errors import SpecError  # noqa: E402
from perfmodel_executors.gpu_suite import processes  # noqa: E402
from perfmodel_executors.gpu_suite.processes import BudgetSpentError, ChildPool, TuningRetries, Worker  # noqa: E402
from perfmodel_executors.gpu_suite.readings import FIELDS, DeviceReader  # noqa: E402
from perfmodel_executors.gpu_suite.runner import FIRST, Results, run_tasks  # noqa: E402
from perfmodel_executors.gpu_suite.session import SuiteRequest, measure  # noqa: E402
from perfmodel_executors.gpu_suite.task import Task  # noqa: E402


class Asked:
    """Tasks that say what was asked of them."""

    def __init__(self):
        self.keys = []

    def task(self, key, error=None, part="kernels", group=""):
        def run():
            self.keys.append(key)
            if error is not None:
                raise error
            return {"seconds": 1.0}

        return Task(part, key, run, group=group)


@pytest.mark.release
def test_an_unusable_device_gets_a_fresh_process_and_a_full_one_does_not(tmp_path):
    worker = Worker(suite_tasks.poisoning)
    try:
        outcome = run_tasks(suite_tasks.poisoning(), Results(tmp_path), 100.0, execute=lambda t: worker.run(t, 60.0))
    finally:
        worker.end()
    kept = Results(tmp_path).part("kernels")
    assert kept["a"]["pid"] != kept["d"]["pid"]
    assert worker.num_begun == 2
    assert outcome.failures["b"].startswith("RuntimeError: CUDA error: device-side assert triggered")
    assert outcome.failures["c"].startswith("did not fit the device's memory")


@pytest.mark.release
def test_what_tuning_breaks_is_measured_with_the_first_tiles(tmp_path):
    """Twice a candidate ends the process; the third task of the operator is not tuned in the first place."""
    worker = Worker(suite_tasks.broken_by_tuning)
    retries = TuningRetries(lambda task, is_tuned: worker.run(task, 60.0, is_tuned=is_tuned))
    try:
        outcome = run_tasks(suite_tasks.broken_by_tuning(), Results(tmp_path), 1000.0, execute=retries.execute)
    finally:
        worker.end()
    assert set(Results(tmp_path).part("kernels")) == {"linear 0", "linear 1", "linear 2"}
    assert retries.untuned == {f"linear {i}": "it ended its process (status 3)" for i in range(3)}
    assert outcome.failures == {"norm": "it ended its process (status 4)"}
    assert worker.num_begun == 1 + 2 + 1  # the first, one each for the two that were lost, one for the norm's retry


@pytest.mark.release
def test_a_process_that_cannot_start_is_tried_three_times(tmp_path):
    worker, asked = Worker(suite_tasks.unstartable), Asked()
    tasks = [asked.task(f"k{i}") for i in range(50)]
    outcome = run_tasks(tasks, Results(tmp_path), 1000.0, execute=lambda task: worker.run(task, 60.0))
    assert worker.num_begun == 3
    assert len(outcome.failures) == 50
    expected = "the measuring process did not start: RuntimeError: no CUDA-capable device is detected"
    assert outcome.failures["k0"].startswith(expected)
    assert outcome.failures["k49"].startswith("not tried after 3 failures alike of starting a process: ")


def test_a_group_that_fails_alike_three_times_is_left(tmp_path):
    """Each task of a model that does not fit would load it again; another sentence, or success, counts from one."""
    asked, full = Asked(), torch.OutOfMemoryError("CUDA out of memory.")
    errors = [full, full, ValueError("x"), full, full, full, full, full]
    tasks = [asked.task(f"big{i}", error, group="big") for i, error in enumerate(errors)]
    tasks += [asked.task("small", group="small")]
    outcome = run_tasks(tasks, Results(tmp_path), 1000.0)
    assert asked.keys == [*(f"big{i}" for i in range(6)), "small"]
    expected = "not tried after 3 failures alike of kernels: big: did not fit the device's memory"
    assert outcome.failures["big7"].startswith(expected)


def test_what_the_end_of_the_budget_cuts_off_has_not_failed(tmp_path):
    asked = Asked()
    outcome = run_tasks([asked.task("long", BudgetSpentError("it took longer than 9 s"))], Results(tmp_path), 100.0)
    assert (outcome.left_out, outcome.failures) == (["long"], {})


def test_what_failed_before_comes_last_and_is_forgotten_once_it_succeeds(tmp_path):
    asked = Asked()
    tasks = [asked.task(key, error) for key, error in (("a", None), ("b", SpecError("x.")), ("c", None))]
    failed = {"a": "it took longer than 150 s", "b": "it ended its process (SIGSEGV)", "z": "of another part"}
    outcome = run_tasks(tasks, Results(tmp_path), 100.0, failed=failed)
    assert asked.keys == ["c", "a", "b"]
    assert outcome.failures == {"b": "SpecError: x.", "z": "of another part"}


def test_the_smoke_comes_first_but_not_for_ever(tmp_path):
    now, order = [0.0], []

    def task(part, key, takes):
        def run():
            now[0] += takes
            order.append(part)
            return {"seconds": 1.0}

        return Task(part, key, run, seconds=1.0)

    tasks = [task(part, f"{part}{i}", 30.0) for part in ("kernels", "smoke") for i in range(6)]
    run_tasks(tasks, Results(tmp_path), 1e6, clock_s=lambda: now[0], switch_s=0.0)
    assert order[: int(FIRST[1] / 30.0)] == ["smoke"] * 3
    assert order[3] == "kernels"


def test_a_compiler_that_aborts_or_hangs_takes_nothing_else_along(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_JOB_LIMIT_S", 3.0)
    deeds = ["", "abort", "", "hang", "", ""]
    pool = ChildPool(2, compiler_jobs.prepare, ("ready",), compiler_jobs.compile_one)
    pool.add([(tmp_path / f"k{i}", deed) for i, deed in enumerate(deeds)])
    pool.join(60.0)
    pool.end()
    assert pool.num_left == 0
    assert (pool.num_done, pool.num_failed) == (6, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"k0", "k2", "k4", "k5"}
    assert (tmp_path / "k5").read_text() == "ready"


def test_compiling_ends_at_once_when_it_is_asked_to(tmp_path):
    pool = ChildPool(1, compiler_jobs.prepare, ("ready",), compiler_jobs.compile_one)
    pool.add([(tmp_path / "slow", "hang"), (tmp_path / "next", "")])
    time.sleep(0.2)
    start = time.monotonic()
    pool.end()
    pool.join(10.0)
    assert time.monotonic() - start < 5.0
    assert not list(tmp_path.iterdir())


def test_readings_name_what_the_device_does_not_say():
    answers = dict.fromkeys(FIELDS.values(), "1980\n") | {"power.draw": "[N/A]\n"}
    seen = threading.Event()

    def query(asked):
        if asked == "temperature.gpu":
            raise subprocess.CalledProcessError(2, "nvidia-smi", 'Field "temperature.gpu" is not a valid field\n')
        if "," in asked:
            seen.set()
        return ", ".join(answers[name] for name in asked.split(","))

    reader = DeviceReader(True, {"at_s": [5.0], "sm_clock_mhz": [345.0]}, query, every_s=0.01)
    assert seen.wait(10.0)
    time.sleep(0.05)
    reader.close()
    found = reader.as_json()
    assert found["sm_clock_mhz"][:2] == [345.0, 1980.0]
    assert found["at_s"][1] >= 5.0
    assert "power_w" not in found
    assert found["absent"] == {
        "power_w": "nvidia-smi says '[N/A]'",
        "temperature_c": 'nvidia-smi says nothing: Field "temperature.gpu" is not a valid field',
    }


def test_a_machine_without_nvidia_smi_is_measured_without_readings(monkeypatch):
    monkeypatch.setenv("PATH", os.devnull)
    reader = DeviceReader(True)
    reader.close()
    assert reader.as_json() == {"absent": dict.fromkeys(FIELDS, "nvidia-smi says nothing: there is no nvidia-smi here")}


@pytest.mark.parametrize(("field", "value"), [("device", "h200-sxm"), ("kernels", "triton")])
def test_results_of_another_device_are_not_gone_on_with(tmp_path, field, value):
    Results(tmp_path).write("suite.json", {field: value})
    with pytest.raises(SpecError, match=f"{field} {value}, and this is"):
        measure(SuiteRequest(tmp_path, 10.0, time.monotonic(), device="cpu"))
