"""Which task comes next, and when to stop: parts share the budget, within a part what tells most comes first."""

__all__ = ["SHARES", "Outcome", "run_tasks"]

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from perfmodel.errors import PerfmodelError
from perfmodel_executors.gpu_suite.results import Results
from perfmodel_executors.gpu_suite.task import Task

# Of the budget: kernels compile and tune, so they take most of it; steps and servings load whole models.
SHARES: Mapping[str, float] = {"kernels": 0.45, "steps": 0.3, "serving": 0.25}

Progress = Callable[[str, float, float], None]


@dataclass
class Outcome:
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
) -> Outcome:
    """Runs what is not in `results` yet, until the next task would probably end after the budget.

    A task that fails is noted and the others go on; what an earlier run measured is kept and not run again.
    """
    outcome, begin = Outcome(), clock_s()
    queues: dict[str, deque[Task]] = {}
    for task in tasks:
        queue = queues.setdefault(task.part, deque())
        if not results.has(task.part, task.key):
            queue.append(task)
    used = dict.fromkeys(queues, 0.0)
    while any(queues.values()):
        part = min((p for p in queues if queues[p]), key=lambda p: used[p] / SHARES.get(p, 0.1))
        task = queues[part].popleft()
        start = clock_s()
        if start - begin + task.seconds > budget_s:
            outcome.left_out.append(task.key)
            continue
        if progress is not None:
            progress(task.key, start - begin, budget_s)
        failure = _run(task, results)
        used[part] += clock_s() - start
        if failure is not None:
            outcome.failures[task.key] = failure
        else:
            outcome.done[part] = outcome.done.get(part, 0) + 1
    outcome.elapsed_s = clock_s() - begin
    return outcome


def _run(task: Task, results: Results) -> str | None:
    """Measure and keep the record; the failure's sentence if there was one."""
    try:
        record = task.run()
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "did not fit the device's memory"
    except (PerfmodelError, RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    results.put(task.part, task.key, record)
    return None
