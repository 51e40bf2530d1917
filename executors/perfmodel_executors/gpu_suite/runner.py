"""Which task comes next, when to stop, and the folder of what came of them. Parts share the budget, within a part the
most informative come first. Every finished task is on disk before the next one begins, and is not run again."""

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfmodel.errors import SpecError
from perfmodel_executors.gpu_suite.processes import BudgetSpentError, Record, StartError, TaskError, sentence_of
from perfmodel_executors.gpu_suite.task import Task

# Of the budget after the smoke: kernels compile and tune, so they take most of it; the others load whole models.
SHARES: Mapping[str, float] = {"kernels": 0.4, "steps": 0.25, "serving": 0.2, "pairs": 0.15}
FIRST = ("smoke", 90.0)  # a part that the others wait for, and for how many seconds of it

_SWITCH_S = 20.0  # by which a part is ahead of its share before another takes over: it has a model loaded
_STARTS = "starting a process"
_MAX_ALIKE = 3  # failures of a group in a row, with one sentence, after which its other tasks are not begun
_DIGITS = 7  # significant: more than any measurement is good for

Progress = Callable[[str, "TaskOutcome", float], None]
Execute = Callable[[Task], Record]
IsOpen = Callable[[str], bool]


class Results:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError(f"--out {folder}: {error.strerror}; name a folder that can be written.") from None
        self._records: dict[str, dict[str, Any]] = {}

    def part(self, part: str) -> dict[str, Any]:
        if part not in self._records:
            path = self.folder / f"{part}.json"
            try:
                self._records[part] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            except (OSError, ValueError) as error:
                raise SpecError(f"{path}: cannot be read ({error}); move it away to begin anew.") from None
        return self._records[part]

    def put(self, part: str, key: str, record: Mapping[str, Any]) -> None:
        self.part(part)[key] = _compact(dict(record))
        self.write(f"{part}.json", self._records[part])

    def write(self, name: str, data: Any) -> None:
        """A file as a whole: an interrupted run leaves the old one."""
        path = self.folder / name
        temporary = path.with_suffix(".part")
        text = json.dumps(data, separators=(",", ":")).replace('},"', '},\n"')
        temporary.write_text(text + "\n", encoding="utf-8", newline="\n")
        temporary.replace(path)


def _compact(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _compact(part) for key, part in value.items()}
    return [_compact(part) for part in value] if isinstance(value, list | tuple) else value


@dataclass
class TaskOutcome:
    """What a run did, by part: tasks measured, those without a record, seconds. left_out: keys that the budget did not
    reach; failures: sentences by key, those of earlier runs included until the task succeeds."""

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
    execute: Execute = lambda task: task.run(),
    is_open: IsOpen = lambda part: True,
    switch_s: float = _SWITCH_S,
    failed: Mapping[str, str] | None = None,
) -> TaskOutcome:
    """Runs what is not in `results` yet, until the next task would probably end after the budget; one that fails is
    noted. progress: called before each task with its key, what was done, and seconds; execute: measures a task;
    is_open: whether a part may begin (if none may, all do); switch_s: seconds that a part may run ahead of its share;
    failed: failures of earlier runs, whose tasks come last within their part."""
    outcome, begin = TaskOutcome(failures=dict(failed or {})), clock_s()
    tasks = list(tasks)
    queues: dict[str, deque[Task]] = {task.part: deque() for task in tasks}
    for task in sorted(tasks, key=lambda task: task.key in outcome.failures):
        if task.key not in results.part(task.part):
            queues[task.part].append(task)
    spent = outcome.spent_s = dict.fromkeys(queues, 0.0)
    alike: dict[str, tuple[str, int]] = {}
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


def _next_part(
    part: str, queues: Mapping[str, deque[Task]], spent: Mapping[str, float], is_open: IsOpen, switch_s: float
) -> str:
    """The part whose turn it is after `part`: the first one, while it may; else the one furthest behind its share."""
    first, most_s = FIRST
    if queues.get(first) and spent[first] < most_s:
        return first
    left = [name for name, queue in queues.items() if queue]
    waiting = [name for name in left if is_open(name)] or left
    furthest = min(waiting, key=lambda name: spent[name] / SHARES.get(name, 0.1))
    ahead = spent.get(part, 0.0) - spent[furthest] / SHARES.get(furthest, 0.1) * SHARES.get(part, 0.1)
    return furthest if part not in waiting or ahead > switch_s else part


def _run(
    task: Task, results: Results, execute: Execute, outcome: TaskOutcome, alike: dict[str, tuple[str, int]]
) -> None:
    """Measure and put down the record, or why there is none. alike: of each group, and of starting a process, which is
    every task's: the last failure, and how often in a row."""
    group = f"{task.part}: {task.group}"
    tried = [(name, *alike.get(name, ("", 0))) for name in (_STARTS, group)]
    reasons = [f"{n} failures alike of {name}: {last}" for name, last, n in tried if n >= _MAX_ALIKE]
    failure = f"not tried after {reasons[0]}" if reasons else None
    if failure is None:
        has_started = True
        try:
            results.put(task.part, task.key, execute(task))
        except BudgetSpentError:
            outcome.left_out.append(task.key)
            return
        except Exception as error:  # whatever it is: the other tasks go on
            has_started = not isinstance(error, StartError)
            failure = str(error) if isinstance(error, TaskError) else sentence_of(error)
        for name, last, count in tried:
            counts = task.group if name == group else not has_started
            alike[name] = (failure, count + 1 if failure == last else 1) if failure and counts else ("", 0)
    if failure is not None:
        outcome.failures[task.key] = failure
        outcome.num_failed[task.part] = outcome.num_failed.get(task.part, 0) + 1
    else:
        outcome.failures.pop(task.key, None)
        outcome.done[task.part] = outcome.done.get(task.part, 0) + 1
