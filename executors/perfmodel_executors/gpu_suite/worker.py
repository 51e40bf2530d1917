"""Tasks in a process of their own, which is begun anew when one of them breaks it.

An illegal memory access leaves a CUDA context of which every later call fails, a failed graph capture leaves the random
numbers of the device behind, a crash leaves nothing: what follows needs a fresh process. The process that schedules
and writes results never touches the device's memory.
"""

__all__ = ["Reply", "TaskError", "Worker", "sentence_of"]

import gc
import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from perfmodel.errors import PerfmodelError
from perfmodel_executors.gpu_suite.task import Task
from perfmodel_executors.kernels.tiles import choices

_START_LIMIT_S = 120.0
_HOME = str(Path(__file__).resolve().parents[1])

Record = Mapping[str, Any]


class TaskError(PerfmodelError):
    """A task that gave no record; says why in a sentence."""


@dataclass(frozen=True)
class Reply:
    """What a task gave: its record, or why there is none; whether the process can go on; what was tuned so far."""

    record: Record | None
    failure: str = ""
    is_usable: bool = True
    tiles: dict[str, str] = field(default_factory=dict)


class Worker:
    """Runs the tasks that `make(*args)` lists (a module's function), by part and key."""

    def __init__(self, make: Callable[..., Iterable[Task]], *args: Any) -> None:
        self._make = make
        self._args = args
        self._process: Any = None
        self._connection: Connection[Any, Any] | None = None
        self._is_ready = False
        self.tiles: dict[str, str] = {}

    def begin(self) -> None:
        """Start the process, without waiting until it is ready."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, self._make, self._args), daemon=True)
        self._process.start()
        theirs.close()
        self._is_ready = False

    def run(self, task: Task, limit_s: float) -> Record:
        """The task's record.

        Raises TaskError for a task that fails, ends the process or takes longer than `limit_s`.
        """
        if self._process is None:
            self.begin()
        if not self._is_ready:
            self._receive(_START_LIMIT_S, "the measuring process did not start: it")
            self._is_ready = True
        assert self._connection is not None
        self._connection.send((task.part, task.key))
        reply: Reply = self._receive(limit_s, "it")
        self.tiles |= reply.tiles
        if not reply.is_usable:
            self.end()
        if reply.record is None:
            raise TaskError(reply.failure)
        return reply.record

    def end(self) -> None:
        """Kill the process; the next task begins another one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def _receive(self, limit_s: float, who: str) -> Any:
        assert self._connection is not None
        begin = time.monotonic()
        try:
            if not self._connection.poll(max(0.0, limit_s)):
                self.end()
                raise TaskError(f"{who} took longer than {time.monotonic() - begin:.0f} s")
            return self._connection.recv()
        except (EOFError, OSError):
            self._process.join(5.0)
            code = self._process.exitcode
            self.end()
            how = signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"
            raise TaskError(f"{who} ended its process ({how})") from None


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
    tasks = {(task.part, task.key): task for task in make(*args)}
    # Each capture of a graph collects garbage: not among the objects of the libraries, which stay.
    gc.collect()
    gc.freeze()
    connection.send("ready")
    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        connection.send(_reply(tasks[name]))


def _reply(task: Task) -> Reply:
    record, failure = None, ""
    try:
        record = task.run()
    except Exception as error:  # whatever it is: the other tasks go on
        failure = sentence_of(error)
        print(f"--- {task.key}", file=sys.stderr)
        traceback.print_exc()
    return Reply(record, failure, _is_usable(has_failed=record is None), choices())


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
