"""Processes that answer one message at a time, each on a pipe of its own: what breaks or hangs one stops no other,
where a pool of the standard library is broken as a whole. Tasks are measured in such a process, too, begun anew when
one of them breaks it: an illegal memory access or a failed graph capture leaves a CUDA context of no use."""

import gc
import multiprocessing
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from perfmodel.errors import PerfmodelError
from perfmodel_executors.gpu_suite.task import Task
from perfmodel_executors.kernels.tiles import choices, untuned

_END_LIMIT_S = 5.0  # a process within the driver may not be killed at once: it is left behind
START_LIMIT_S = 120.0  # of a process, many of which load torch at once
_JOB_LIMIT_S = 120.0  # of one kernel
_MAX_BROKEN = 2  # processes that the tasks of a group may end before its kernels are tuned no more
_UNTUNED_PARTS = ("smoke",)  # whose kernels run with their first tiles in any case
_HOME = str(Path(__file__).resolve().parents[1])

Record = Mapping[str, Any]


class TaskError(PerfmodelError):
    """A task that gave no record; says why in a sentence."""


class TaskTimeoutError(TaskError):
    """A task that took longer than it may."""


class BrokenError(TaskError):
    """A task that ended its process, or left it a device that computes no more."""


class StartError(TaskError):
    """No process to measure in."""


class BudgetSpentError(TaskError):
    """The budget ended within a task, which may be fine."""


class ChildProcess:
    """A process that runs `serve(connection, *args)`; killed when this one ends."""

    def __init__(self, serve: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, message: Any) -> None:
        """Raises OSError where the process has ended."""
        self._connection.send(message)

    def receive(self, limit_s: float) -> Any:
        """Its next message; where there is none, the process is killed. Raises TaskTimeoutError after `limit_s`
        seconds, BrokenError where the process has ended."""
        begin = time.monotonic()
        try:
            if not self._connection.poll(max(0.0, limit_s)):
                self.kill()
                raise TaskTimeoutError(f"it took longer than {time.monotonic() - begin:.0f} s")
            return self._connection.recv()
        except (EOFError, OSError):
            self._process.join(_END_LIMIT_S)
            code = self._process.exitcode
            self.kill()
            how = signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"
            raise BrokenError(f"it ended its process ({how})") from None

    def kill(self) -> None:
        self._process.kill()
        self._process.join(_END_LIMIT_S)


class ChildPool:
    """Calls `call(job)` in processes that `prepare(*args)` has made ready, first jobs first. num_failed: jobs that
    ended their process or took too long."""

    def __init__(
        self, num_processes: int, prepare: Callable[..., None], args: tuple[Any, ...], call: Callable[[Any], Any]
    ) -> None:
        self._target = (prepare, args, call)
        self._threads = ThreadPoolExecutor(num_processes)  # each waits for one process
        self._jobs: list[Future[None]] = []
        self._idle: list[ChildProcess] = []
        self._processes: list[ChildProcess] = []
        self._ended = threading.Event()
        self.num_failed = 0

    def add(self, jobs: Iterable[Any]) -> None:
        with suppress(RuntimeError):  # it has ended meanwhile
            self._jobs += [self._threads.submit(self._run, job) for job in jobs]

    @property
    def num_done(self) -> int:
        return sum(job.done() for job in self._jobs)

    @property
    def num_left(self) -> int:
        return len(self._jobs) - self.num_done

    def join(self, timeout_s: float | None = None) -> None:
        wait(self._jobs, timeout_s)

    def end(self) -> None:
        self._ended.set()
        self._threads.shutdown(wait=False)
        for process in self._processes:
            process.kill()

    def _run(self, job: Any) -> None:
        if self._ended.is_set():
            return
        try:
            if self._idle:
                process = self._idle.pop()
            else:
                process = ChildProcess(_serve, *self._target)
                self._processes.append(process)
                if self._ended.is_set():
                    process.kill()
                process.receive(START_LIMIT_S)
            process.send(job)
            process.receive(_JOB_LIMIT_S)
            self._idle.append(process)
        except (TaskError, OSError):  # the next job gets another process
            self.num_failed += 1


def _serve(
    connection: "Connection[Any, Any]", prepare: Callable[..., None], args: tuple[Any, ...], call: Callable[[Any], Any]
) -> None:
    prepare(*args)
    connection.send(None)
    with suppress(EOFError, OSError):
        while True:
            connection.send(call(connection.recv()))


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

    def run(self, task: Task, limit_s: float, start_limit_s: float = START_LIMIT_S, is_tuned: bool = True) -> Record:
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
        if count < _MAX_BROKEN:
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
