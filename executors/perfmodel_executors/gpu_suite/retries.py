"""Once more without tuning: a candidate of the tuner may break the device, and the first tiles still measure it."""

__all__ = ["TuningRetries"]

from collections.abc import Callable, Mapping
from typing import Any

from perfmodel_executors.gpu_suite.task import Task
from perfmodel_executors.gpu_suite.worker import BrokenError

_MOST_BROKEN = 2  # processes that the tasks of a group may end before its kernels are tuned no more
_UNTUNED_PARTS = ("smoke",)  # whose kernels run with their first tiles in any case

Run = Callable[[Task, bool], Mapping[str, Any]]


class TuningRetries:
    """Executes tasks by `run(task, is_tuned)`; `untuned`: by key, why a task was measured with first tiles."""

    def __init__(self, run: Run, untuned: Mapping[str, str] | None = None) -> None:
        self.untuned = dict(untuned or {})
        self._run = run
        self._broken: dict[tuple[str, str], tuple[int, str]] = {}  # by part and group

    def execute(self, task: Task) -> Mapping[str, Any]:
        """The task's record. Raises what `run` raises, BrokenError only where the first tiles break the device, too."""
        group = (task.part, task.group or task.key)
        count, reason = self._broken.get(group, (0, ""))
        if task.part in _UNTUNED_PARTS:
            return self._run(task, False)
        if count < _MOST_BROKEN:
            try:
                return self._run(task, True)
            except BrokenError as error:
                reason = str(error)
                self._broken[group] = (count + 1, reason)
        record = self._run(task, False)
        self.untuned[task.key] = reason
        return record
