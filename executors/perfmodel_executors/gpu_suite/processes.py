"""Processes that answer one message at a time, each on a pipe of its own: what breaks or hangs one stops no other. A
pool of the standard library is broken as a whole by a process that aborts. Tasks are measured in such a process, too:
an illegal memory access or a failed graph capture leaves a CUDA context that nothing can be measured in."""

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from perfmodel.errors import PerfmodelError

_END_LIMIT_S = 5.0  # a process within the driver may not be killed at once: it is left behind
_START_LIMIT_S = 120.0  # of a process, many of which load torch at once
_JOB_LIMIT_S = 120.0  # of one kernel


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
                process.receive(_START_LIMIT_S)
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
