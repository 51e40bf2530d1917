"""Which task comes next, and when to stop: parts share the budget, within a part the most informative come first."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from perfmodel_executors.gpu_suite.processes import TaskError
from perfmodel_executors.gpu_suite.results import Results
from perfmodel_executors.gpu_suite.task import Task
from perfmodel_executors.gpu_suite.worker import BudgetSpentError, StartError, sentence_of

# Of the budget after the smoke: kernels compile and tune, so they take most of it; the others load whole models.
SHARES: Mapping[str, float] = {"kernels": 0.4, "steps": 0.25, "serving": 0.2, "pairs": 0.15}
FIRST = ("smoke", 90.0)  # a part that the others wait for, and for how many seconds of it

_SWITCH_S = 20.0  # by which a part is ahead of its share before another takes over: it has a model loaded
_STARTS = "starting a process"
_MOST_ALIKE = 3  # failures of a group in a row, with one sentence, after which its other tasks are not begun

Progress = Callable[[str, "TaskOutcome", float], None]
Execute = Callable[[Task], Mapping[str, Any]]


def run_here(task: Task) -> Mapping[str, Any]:
    """The task's record, measured in this process."""
    return task.run()


@dataclass
class TaskOutcome:
    """What a run did.

    done:     tasks measured, by part
    left_out: keys that the budget did not reach
    failures: sentences by key, those of earlier runs included until the task succeeds
    num_failed: tasks of this run without a record, by part
    spent_s:  seconds by part, failures included
    """

    done: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    num_failed: dict[str, int] = field(default_factory=dict)
    spent_s: dict[str, float] = field(default_factory=dict)
    elapsed_s: float = 0.0


def run_tasks(
    tasks: Iterable[Task],
    results: Results,
    budget_s: float,
    progress: Progress | None = None,
    clock_s: Callable[[], float] = time.monotonic,
    execute: Execute = run_here,
    is_open: Callable[[str], bool] = lambda part: True,
    switch_s: float = _SWITCH_S,
    failed: Mapping[str, str] | None = None,
) -> TaskOutcome:
    """Runs what is not in `results` yet, until the next task would probably end after the budget.

    A task that fails is noted and the others go on; what an earlier run measured is kept and not run again.

    budget_s: seconds
    progress: called before each task with its key, what was done so far, and the seconds that have passed
    clock_s:  seconds, from any origin
    execute:  measures a task
    is_open:  whether a part may begin; if none may, all do
    switch_s: seconds that a part may run ahead of its share before another one takes over
    failed:   failures of earlier runs; those tasks come last
    """
    outcome, begin = TaskOutcome(failures=dict(failed or {})), clock_s()
    queues = _queues(tasks, results, outcome.failures)
    spent = outcome.spent_s = dict.fromkeys(queues, 0.0)
    alike = _Alike()
    part = ""
    while any(queues.values()):
        part = _next_part(part, queues, spent, is_open, switch_s)
        task = queues[part].popleft()
        start = clock_s()
        if start - begin + task.seconds > budget_s:
            outcome.left_out.append(task.key)
            continue
        if progress is not None:
            progress(task.key, outcome, start - begin)
        _run(task, results, execute, outcome, alike)
        spent[part] += clock_s() - start
    outcome.elapsed_s = clock_s() - begin
    return outcome


def _queues(tasks: Iterable[Task], results: Results, failed: Mapping[str, str]) -> dict[str, deque[Task]]:
    """What is missing, by part; within a part, what failed before comes last."""
    queues: dict[str, deque[Task]] = {}
    again: list[Task] = []
    for task in tasks:
        queue = queues.setdefault(task.part, deque())
        if not results.has(task.part, task.key):
            (again if task.key in failed else queue).append(task)
    for task in again:
        queues[task.part].append(task)
    return queues


def _next_part(
    part: str,
    queues: Mapping[str, deque[Task]],
    spent: Mapping[str, float],
    is_open: Callable[[str], bool],
    switch_s: float,
) -> str:
    """The part whose turn it is after `part`: the first one, while it may; else the one furthest behind its share."""
    first, most_s = FIRST
    if queues.get(first) and spent[first] < most_s:
        return first
    left = [each for each in queues if queues[each]]
    waiting = [each for each in left if is_open(each)] or left
    furthest = min(waiting, key=lambda each: spent[each] / SHARES.get(each, 0.1))
    ahead = spent.get(part, 0.0) - spent[furthest] / SHARES.get(furthest, 0.1) * SHARES.get(part, 0.1)
    return furthest if part not in waiting or ahead > switch_s else part


class _Alike:
    """Failures in a row: of each group, and of starting a process, which is every task's."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[str, int]] = {}

    def add(self, task: Task, error: Exception | None, sentence: str | None) -> None:
        """How a task ended; `sentence` says what `error` was."""
        self._count(_STARTS, sentence if isinstance(error, StartError) else None)
        if task.group:
            self._count(f"{task.part}: {task.group}", sentence)

    def reason(self, task: Task) -> str | None:
        """Why the task need not be tried."""
        for name in (_STARTS, f"{task.part}: {task.group}"):
            failure, count = self._rows.get(name, ("", 0))
            if count >= _MOST_ALIKE:
                return f"not tried after {count} failures alike of {name}: {failure}"
        return None

    def _count(self, name: str, failure: str | None) -> None:
        last, count = self._rows.get(name, ("", 0))
        self._rows[name] = ("", 0) if failure is None else (failure, count + 1 if failure == last else 1)


def _run(task: Task, results: Results, execute: Execute, outcome: TaskOutcome, alike: _Alike) -> None:
    """Measure and put down the record, or why there is none."""
    failure = alike.reason(task)
    if failure is None:
        problem: Exception | None = None
        try:
            results.put(task.part, task.key, execute(task))
        except BudgetSpentError:
            outcome.left_out.append(task.key)
            return
        except Exception as error:  # whatever it is: the other tasks go on
            problem, failure = error, str(error) if isinstance(error, TaskError) else sentence_of(error)
        alike.add(task, problem, failure)
    if failure is not None:
        outcome.failures[task.key] = failure
        outcome.num_failed[task.part] = outcome.num_failed.get(task.part, 0) + 1
        return
    outcome.failures.pop(task.key, None)
    outcome.done[task.part] = outcome.done.get(task.part, 0) + 1
