"""Processes that compile kernels, one thread of this process to each; one that dies takes its own kernel along alone.

A compiler that aborts (an assertion of LLVM's, too little memory) would break a pool of the standard library as a
whole, and one that never ends could not be left behind.
"""

__all__ = ["CompilerPool"]

import threading
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

_LIMIT_S = 120.0  # of one kernel
_START_LIMIT_S = 120.0  # of a process, many of which load torch at once


class CompilerPool:
    """Calls `compile_one(job)` in `num_processes` processes that `prepare(*args)` has made ready, first jobs first.

    num_done, num_failed: jobs that came to an end, and those that ended their process or took too long
    """

    def __init__(
        self,
        num_processes: int,
        prepare: Callable[..., None],
        args: tuple[Any, ...],
        compile_one: Callable[[Any], Any],
    ) -> None:
        self._target = (prepare, args, compile_one)
        self._jobs: deque[Any] = deque()
        self._changed = threading.Condition()
        self._num_running = 0
        self._is_complete = self._is_ended = False
        self._processes: set[Any] = set()
        self.num_done = self.num_failed = 0
        self._threads = [threading.Thread(target=self._turn, daemon=True) for _ in range(num_processes)]
        for thread in self._threads:
            thread.start()

    def add(self, jobs: Iterable[Any], is_last: bool = False) -> None:
        """More jobs, behind the others. is_last: none come after these, so that processes end when all are done"""
        with self._changed:
            self._jobs += jobs
            self._is_complete = self._is_complete or is_last
            self._changed.notify_all()

    @property
    def num_left(self) -> int:
        """Jobs that are known and not done."""
        return len(self._jobs) + self._num_running

    @property
    def is_busy(self) -> bool:
        """Whether jobs are left, or may still come."""
        return not self._is_ended and (bool(self.num_left) or not self._is_complete)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until all jobs are done."""
        for thread in self._threads:
            thread.join(timeout_s)

    def end(self) -> None:
        """Leave what is not done; processes are killed."""
        with self._changed:
            self._is_ended = True
            self._jobs.clear()
            self._changed.notify_all()
            for process in self._processes:
                process.kill()

    def _next(self) -> Any:
        """The next job; None where there is none any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_complete or self._is_ended)
            if self._is_ended or not self._jobs:
                return None
            self._num_running += 1
            return self._jobs.popleft()

    def _turn(self) -> None:
        """One thread: gives jobs to its process, and begins another one where that is gone."""
        begun: _Begun | None = None
        while (job := self._next()) is not None:
            is_done = False
            try:
                begun = begun or self._begin()
                begun.connection.send(job)
                if begun.connection.poll(_LIMIT_S):
                    begun.connection.recv()
                    is_done = True
            except (EOFError, OSError):
                pass
            if not is_done and begun is not None:
                begun.process.kill()
                begun = None
            with self._changed:
                self._num_running -= 1
                self.num_done += 1
                self.num_failed += not is_done
        if begun is not None:
            begun.connection.close()

    def _begin(self) -> "_Begun":
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_compile, args=(theirs, *self._target), daemon=True)
        with self._changed:
            if self._is_ended:
                raise EOFError
            process.start()
            self._processes.add(process)
        theirs.close()
        if not ours.poll(_START_LIMIT_S):
            process.kill()
            raise EOFError
        ours.recv()
        return _Begun(process, ours)


class _Begun(NamedTuple):
    """A process, and this side of the pipe to it."""

    process: Any
    connection: "Connection[Any, Any]"


def _compile(
    connection: "Connection[Any, Any]", prepare: Callable[..., None], args: tuple[Any, ...], compile_one: Any
) -> None:
    """The process: jobs in, what `compile_one` made of them out, until the other side is gone."""
    prepare(*args)
    connection.send(None)
    while True:
        try:
            connection.send(compile_one(connection.recv()))
        except (EOFError, OSError):
            return
