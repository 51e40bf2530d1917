"""Tasks in a process of their own, which is begun anew when one of them breaks it, and they are tried once more."""

import gc
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from perfmodel.errors import PerfmodelError
from perfmodel_executors.gpu_suite.processes import BrokenError, ChildProcess, StartError, TaskError
from perfmodel_executors.gpu_suite.task import Task
from perfmodel_executors.kernels.tiles import choices, untuned

_START_LIMIT_S = 120.0
_MOST_BROKEN = 2  # processes that the tasks of a group may end before its kernels are tuned no more
_UNTUNED_PARTS = ("smoke",)  # whose kernels run with their first tiles in any case
_HOME = str(Path(__file__).resolve().parents[1])

Record = Mapping[str, Any]


class Reply(NamedTuple):
    """A task's record, or why there is none; whether the process can go on; what was tuned; what it compiled so far."""

    record: Record | None
    failure: str
    is_usable: bool
    tiles: dict[str, str]
    compile_s: float
    num_compiled: int


class Worker:
    """Runs the tasks that `make(*args)` lists (a module's function), by part and key, in a process of their own.
    compiled: seconds in which the measuring processes compiled kernels, and how many."""

    def __init__(self, make: Callable[..., Iterable[Task]], *args: Any) -> None:
        self._target = (_work, make, args)
        self._process: ChildProcess | None = None
        self._is_ready = False
        self._compiled_before = (0.0, 0)  # by the processes before this one
        self.compiled = (0.0, 0)
        self.num_begun = 0
        self.tiles: dict[str, str] = {}

    def begin(self) -> ChildProcess:
        self._process, self._is_ready = ChildProcess(*self._target), False
        self._compiled_before = self.compiled
        self.num_begun += 1
        return self._process

    def run(self, task: Task, limit_s: float, start_limit_s: float = _START_LIMIT_S, is_tuned: bool = True) -> Record:
        """The task's record; is_tuned: kernels choose their tiles. Raises TaskError for a task that fails, BrokenError
        for one that ends the process or leaves the device unusable, TaskTimeoutError, StartError."""
        process = self._process or self.begin()
        if not self._is_ready:
            try:
                problem = process.receive(start_limit_s)
            except TaskError as error:
                problem = str(error)
            if problem:
                self.end()
                raise StartError(f"the measuring process did not start: {problem}")
            self._is_ready = True
        try:
            process.send((task.part, task.key, is_tuned))
        except OSError:  # it ended between two tasks
            self.end()
            return self.run(task, limit_s, start_limit_s, is_tuned)
        try:
            reply: Reply = process.receive(limit_s)
        except TaskError:
            self.end()
            raise
        self.tiles |= reply.tiles
        seconds, count = self._compiled_before
        self.compiled = (seconds + reply.compile_s, count + reply.num_compiled)
        if not reply.is_usable:
            self.end()
        if reply.record is None:
            raise TaskError(reply.failure) if reply.is_usable else BrokenError(reply.failure)
        return reply.record

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None


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


class _CompileListener:
    def __init__(self) -> None:
        self.seconds, self.count = 0.0, 0
        with suppress(ImportError, AttributeError):  # no Triton, or one that tells nobody
            from triton import knobs

            knobs.compilation.listener = self

    def __call__(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            self.seconds += times.total * 1e-6
            self.count += 1


def _work(connection: "Connection[Any, Any]", make: Callable[..., Iterable[Task]], args: tuple[Any, ...]) -> None:
    try:
        tasks = {(task.part, task.key): task for task in make(*args)}
    except Exception as error:  # whatever it is: the other side says so
        traceback.print_exc()
        connection.send(sentence_of(error))
        return
    # Each capture of a graph collects garbage: not among the objects of the libraries, which stay.
    gc.collect()
    gc.freeze()
    compiled = _CompileListener()
    connection.send("")  # no problem
    while True:
        try:
            part, key, is_tuned = connection.recv()
        except EOFError:
            return
        record, failure = None, ""
        try:
            with nullcontext() if is_tuned else untuned():
                record = tasks[part, key].run()
        except Exception as error:  # whatever it is: the other tasks go on
            failure = sentence_of(error)
            print(f"--- {key}", file=sys.stderr)
            traceback.print_exc()
        is_usable = _is_usable(has_failed=record is None)
        connection.send(Reply(record, failure, is_usable, choices(), compiled.seconds, compiled.count))


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
