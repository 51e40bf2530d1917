"""Tasks in a process of their own, which is begun anew when one of them breaks it, and they are tried once more.

An illegal memory access leaves a CUDA context of which every later call fails, a failed graph capture leaves the random
numbers of the device behind, a crash leaves nothing: what follows needs a fresh process. The process that schedules
and writes results never touches the device's memory.
"""

import gc
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from perfmodel.errors import PerfmodelError
from perfmodel_executors.gpu_suite.processes import BrokenError, ChildProcess, TaskError
from perfmodel_executors.gpu_suite.task import Task
from perfmodel_executors.kernels.tiles import choices, untuned

_START_LIMIT_S = 120.0
_MOST_BROKEN = 2  # processes that the tasks of a group may end before its kernels are tuned no more
_UNTUNED_PARTS = ("smoke",)  # whose kernels run with their first tiles in any case
_HOME = str(Path(__file__).resolve().parents[1])

Record = Mapping[str, Any]


class StartError(TaskError):
    """No process to measure in."""


class BudgetSpentError(TaskError):
    """The budget ended within a task, which may be fine."""


@dataclass(frozen=True)
class Reply:
    """What a task gave: its record, or why there is none; whether the process can go on; what was tuned so far.

    compile_s: seconds in which this process has compiled kernels so far, and how many
    """

    record: Record | None
    failure: str = ""
    is_usable: bool = True
    tiles: dict[str, str] = field(default_factory=dict)
    compile_s: float = 0.0
    num_compiled: int = 0


class Worker:
    """Runs the tasks that `make(*args)` lists (a module's function), by part and key."""

    def __init__(self, make: Callable[..., Iterable[Task]], *args: Any) -> None:
        self._target = (_work, make, args)
        self._process: ChildProcess | None = None
        self._is_ready = False
        self._compiled = (0.0, 0)  # of the processes before this one
        self._last: Reply | None = None
        self.num_begun = 0
        self.tiles: dict[str, str] = {}

    @property
    def compiled(self) -> tuple[float, int]:
        """Seconds in which the measuring processes compiled kernels, and how many."""
        last = self._last or Reply(None)
        return self._compiled[0] + last.compile_s, self._compiled[1] + last.num_compiled

    def begin(self) -> None:
        """Start the process, without waiting until it is ready."""
        self._process, self._is_ready = ChildProcess(*self._target), False
        self.num_begun += 1

    def run(self, task: Task, limit_s: float, start_limit_s: float = _START_LIMIT_S, is_tuned: bool = True) -> Record:
        """The task's record.

        limit_s:       seconds for the task
        start_limit_s: seconds for the process to start, where it has to
        is_tuned:      kernels choose their tiles; else the first ones are taken

        Raises TaskError for a task that fails, BrokenError for one that ends the process or leaves the device unusable,
        TaskTimeoutError for one that takes longer, StartError where there is no process to measure in.
        """
        if self._process is None:
            self.begin()
        assert self._process is not None
        if not self._is_ready:
            self._await_start(self._process, start_limit_s)
        try:
            self._process.send((task.part, task.key, is_tuned))
        except OSError:  # it ended between two tasks
            self.end()
            return self.run(task, limit_s, start_limit_s, is_tuned)
        try:
            reply: Reply = self._process.receive(limit_s)
        except TaskError:
            self.end()
            raise
        self.tiles |= reply.tiles
        self._last = reply
        if not reply.is_usable:
            self.end()
        if reply.record is None:
            raise TaskError(reply.failure) if reply.is_usable else BrokenError(reply.failure)
        return reply.record

    def _await_start(self, process: ChildProcess, limit_s: float) -> None:
        try:
            problem = process.receive(limit_s)
        except TaskError as error:
            problem = str(error)
        if problem:
            self.end()
            raise StartError(f"the measuring process did not start: {problem}")
        self._is_ready = True

    def end(self) -> None:
        """Kill the process; the next task begins another one."""
        if self._process is not None:
            self._process.kill()
            self._process = None
            self._compiled, self._last = self.compiled, None


class TuningRetries:
    """Executes tasks by `run(task, is_tuned)`; `untuned`: by key, why a task was measured with first tiles."""

    def __init__(self, run: Callable[[Task, bool], Record], untuned: Mapping[str, str] | None = None) -> None:
        self.untuned = dict(untuned or {})
        self._run = run
        self._broken: dict[tuple[str, str], tuple[int, str]] = {}  # by part and group

    def execute(self, task: Task) -> Record:
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


def sentence_of(error: Exception) -> str:
    """One sentence, with the place in this package that an unforeseen error came from."""
    lines = str(error).strip().splitlines()
    if isinstance(error, PerfmodelError) and lines:
        return f"{type(error).__name__}: {lines[0]}"
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(_HOME)]
    where = f" ({Path(ours[-1].filename).relative_to(_HOME)}:{ours[-1].lineno})" if ours else ""
    if isinstance(error, torch.OutOfMemoryError):
        return f"did not fit the device's memory{where}"
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}{where}"


def _work(connection: "Connection[Any, Any]", make: Callable[..., Iterable[Task]], args: tuple[Any, ...]) -> None:
    """The process: names of tasks in, replies out, until the other side is gone."""
    try:
        tasks = {(task.part, task.key): task for task in make(*args)}
    except Exception as error:  # whatever it is: the other side says so
        traceback.print_exc()
        connection.send(sentence_of(error))
        return
    # Each capture of a graph collects garbage: not among the objects of the libraries, which stay.
    gc.collect()
    gc.freeze()
    compiled = _Compiled()
    connection.send("")  # no problem
    while True:
        try:
            part, key, is_tuned = connection.recv()
        except EOFError:
            return
        with nullcontext() if is_tuned else untuned():
            reply = _reply(tasks[part, key], compiled)
        connection.send(reply)


class _Compiled:
    """Counts what Triton compiles in this process."""

    def __init__(self) -> None:
        self.seconds, self.count = 0.0, 0
        with suppress(ImportError, AttributeError):  # no Triton, or one that tells nobody
            from triton import knobs

            knobs.compilation.listener = self

    def __call__(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            self.seconds += times.total * 1e-6
            self.count += 1


def _reply(task: Task, compiled: _Compiled) -> Reply:
    record, failure = None, ""
    try:
        record = task.run()
    except Exception as error:  # whatever it is: the other tasks go on
        failure = sentence_of(error)
        print(f"--- {task.key}", file=sys.stderr)
        traceback.print_exc()
    is_usable = _is_usable(has_failed=record is None)
    return Reply(record, failure, is_usable, choices(), compiled.seconds, compiled.count)


def _is_usable(has_failed: bool) -> bool:
    """Whether the device still computes in this process; after a failure what it held is let go of."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    try:
        torch.cuda.synchronize()
        if has_failed:
            gc.collect()
            torch.cuda.empty_cache()
        return bool(torch.randn(8, device="cuda").isfinite().all())
    except Exception:
        return False
