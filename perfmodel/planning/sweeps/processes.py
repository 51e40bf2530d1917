"""Items worked on in processes of this machine, each with a pipe of its own: who is lost, and with what, is known.

(`concurrent.futures` gives up all that is under way when one of its processes ends, and cannot say which item did it.)
"""

__all__ = ["QUIET_GC", "run_in_processes"]

import gc
import multiprocessing
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

from perfmodel.errors import PerfmodelError

if sys.platform == "win32":
    from multiprocessing.connection import PipeConnection as Connection
else:
    from multiprocessing.connection import Connection

# Spawned, not forked: the parent may have threads (BLAS, torch) that a fork would leave in the middle of something.
_CONTEXT: SpawnContext = multiprocessing.get_context("spawn")
QUIET_GC = (100_000, 20, 20)  # simulations make few cycles: see perfmodel.cli.main
_PATIENCE_S = 5.0  # for a process to end when asked to


@dataclass
class _Worker:
    """A process, its pipe, and the index of the item that it has: None before it is ready and between two."""

    process: SpawnProcess
    pipe: Connection
    index: int | None = None
    is_ready: bool = False


def run_in_processes(
    function: Callable[[Any], Any],
    items: list[tuple[int, Any]],
    on_answer: Callable[[int, Any], list[tuple[int, Any]]],
    count: int,
) -> list[tuple[int, str]]:
    """See `perfmodel.planning.sweeps.workers`: (index, reason) of the items whose process was lost.

    Raises what the function raises; the processes are then stopped.
    """
    todo = deque(items)
    lost: list[tuple[int, str]] = []
    workers = [_started(function) for _ in range(min(count, len(items)))]
    try:
        while workers:
            ready = wait([worker.pipe for worker in workers])
            for worker in [each for each in workers if each.pipe in ready]:
                try:
                    answer, error = worker.pipe.recv()
                except (EOFError, OSError):
                    workers.remove(worker)
                    lost += _mourned(worker)
                    if todo:
                        workers.append(_started(function))
                    continue
                if error is not None:
                    raise error
                if worker.index is not None:  # what follows goes to the same process, which has its tables
                    todo.extendleft(on_answer(worker.index, answer))
                worker.is_ready, worker.index = True, None
                if not _given_next(worker, todo):
                    workers.remove(worker)
                    _stop(worker)
    finally:
        for worker in workers:
            worker.process.kill()
            _stop(worker)
    return lost


def _started(function: Callable[[Any], Any]) -> _Worker:
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_serve, args=(theirs, function), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process is the end of the pipe
    return _Worker(process, ours)


def _given_next(worker: _Worker, todo: deque[tuple[int, Any]]) -> bool:
    """Whether there was an item for it. One that is lost before it can take it leaves its end to be read."""
    if not todo:
        return False
    worker.index, item = todo.popleft()
    try:
        worker.pipe.send(item)
    except OSError:
        todo.appendleft((worker.index, item))
        worker.index = None
    return True


def _mourned(worker: _Worker) -> list[tuple[int, str]]:
    """The item that the process had when it ended.

    Raises PerfmodelError where it had not even begun: another one would not either.
    """
    worker.process.join(_PATIENCE_S)
    code = worker.process.exitcode or 0
    _stop(worker)
    how = f"status {code}"
    if code < 0:
        name = signal.Signals(-code).name
        how = f"signal {name}"
        if name == "SIGKILL":
            how += ", as when memory runs out"
    if not worker.is_ready:
        raise PerfmodelError(
            f"a worker process ended at its start ({how}); a script needs `if __name__ == '__main__':` around what "
            f"starts workers, or workers=1."
        )
    return [] if worker.index is None else [(worker.index, f"its worker process was lost ({how})")]


def _stop(worker: _Worker) -> None:
    worker.pipe.close()
    worker.process.join(_PATIENCE_S)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()
    worker.process.close()


def _serve(pipe: Connection, function: Callable[[Any], Any]) -> None:
    """What a worker process does until its pipe ends: (answer, None), or (None, error), for each item."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which stops its workers
    gc.set_threshold(*QUIET_GC)
    try:
        pipe.send((None, None))  # ready
        while True:
            item = pipe.recv()
            try:
                answer = ForkingPickler.dumps((function(item), None))
            except Exception as error:  # the function's, or of an answer that cannot be sent
                error.add_note(traceback.format_exc())
                answer = ForkingPickler.dumps((None, error))
            pipe.send_bytes(answer)
    except (EOFError, BrokenPipeError):
        return
