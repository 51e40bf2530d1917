"""The measuring programme: budget, order, resumption, failures; and a whole run on this machine's CPU."""

import json

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from perfmodel.errors import PerfmodelError, SpecError  # noqa: E402
from perfmodel_executors.gpu_suite.results import Results  # noqa: E402
from perfmodel_executors.gpu_suite.runner import SHARES, run_tasks  # noqa: E402
from perfmodel_executors.gpu_suite.task import Task  # noqa: E402


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
    run_tasks(tasks, Results(tmp_path), 100.0, clock_s=clock)
    for part, share in SHARES.items():
        assert sum(key.startswith(part) for key in clock.order) == pytest.approx(100 * share, abs=2)


def test_a_failure_is_a_sentence_and_the_rest_goes_on(tmp_path):
    clock = Clock()
    tasks = [clock.task("kernels", "bad", 1.0, error=PerfmodelError("no such tile.")), clock.task("kernels", "k", 1.0)]
    outcome = run_tasks(tasks, Results(tmp_path), 10.0, clock_s=clock)
    assert outcome.failures == {"bad": "PerfmodelError: no such tile."}
    assert outcome.done == {"kernels": 1}


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "kernels.json").write_text("{")
    with pytest.raises(SpecError, match=r"kernels\.json"):
        Results(tmp_path).has("kernels", "k")
