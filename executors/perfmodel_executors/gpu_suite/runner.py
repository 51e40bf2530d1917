"""Which task comes next, and when to stop: parts share the budget, within a part the most informative come first."""

__all__ = ["SHARES", "TaskOutcome", "run_here", "run_tasks"]

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from perfmodel_executors.gpu_suite.results import Results
from perfmodel_executors.gpu_suite.task import Task
from perfmodel_executors.gpu_suite.worker import TaskError, sentence_of

# Of the budget: kernels compile and tune, so they take most of it; steps and servings load whole models.
SHARES: Mapping[str, float] = {"kernels": 0.45, "steps": 0.3, "serving": 0.25}

_SWITCH_S = 20.0  # by which a part is ahead of its share before another takes over: it has a model loaded

Progress = Callable[[str, float, float], None]
Execute = Callable[[Task], Mapping[str, Any]]


def run_here(task: Task) -> Mapping[str, Any]:
    """The task's record, measured in this process."""
    return task.run()


@dataclass
class TaskOutcome:
    """What a run did: tasks measured by part, keys that the budget did not reach, failures by key in a sentence."""

    done: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
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
) -> TaskOutcome:
    """Runs what is not in `results` yet, until the next task would probably end after the budget.

    A task that fails is noted and the others go on; what an earlier run measured is kept and not run again.

    execute:  measures a task
    is_open:  whether a part may begin; if none may, all do
    switch_s: seconds that a part may run ahead of its share before another one takes over
    """
    outcome, begin = TaskOutcome(), clock_s()
    queues: dict[str, deque[Task]] = {}
    for task in tasks:
        queue = queues.setdefault(task.part, deque())
        if not results.has(task.part, task.key):
            queue.append(task)
    used = dict.fromkeys(queues, 0.0)
    part = ""
    while any(queues.values()):
        left = [p for p in queues if queues[p]]
        waiting = [p for p in left if is_open(p)] or left
        next_part = min(waiting, key=lambda p: used[p] / SHARES.get(p, 0.1))
        ahead = used.get(part, 0.0) - used[next_part] / SHARES.get(next_part, 0.1) * SHARES.get(part, 0.1)
        if part not in waiting or ahead > switch_s:
            part = next_part
        task = queues[part].popleft()
        start = clock_s()
        if start - begin + task.seconds > budget_s:
            outcome.left_out.append(task.key)
            continue
        if progress is not None:
            progress(task.key, start - begin, budget_s)
        failure = _run(task, results, execute)
        used[part] += clock_s() - start
        if failure is not None:
            outcome.failures[task.key] = failure
        else:
            outcome.done[part] = outcome.done.get(part, 0) + 1
    outcome.elapsed_s = clock_s() - begin
    return outcome


def _run(task: Task, results: Results, execute: Execute) -> str | None:
    """Measure and keep the record; the failure's sentence if there was one."""
    try:
        record = execute(task)
    except TaskError as error:
        return str(error)
    except Exception as error:  # whatever it is: the other tasks go on
        return sentence_of(error)
    results.put(task.part, task.key, record)
    return None
