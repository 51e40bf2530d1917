"""A function over many items, in processes of this machine or of a Ray cluster, answered in the items' order.

A process that is lost on the way (the kernel's out-of-memory killer, a crash in native code) costs only the item that
it had: the others go on, in processes that stand in for it. That item is tried once more at the end, when nothing else
takes memory; lost again, its answer is what the caller has for it. (`concurrent.futures` gives up all that is under way
when one of its processes ends, and cannot say which item did it.)

Where each step needs the answer of the one before it (a bisection), the function is `Stepwise`: only its steps travel;
what they add up to stays here, and so do files that are written meanwhile.
"""

__all__ = [
    "Engine",
    "Progress",
    "Stepwise",
    "engine_of",
    "num_workers",
    "run_in_processes",
    "spread",
]

import multiprocessing
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, TypeVar

from perfmodel.cores import collect_rarely, num_processes
from perfmodel.errors import PerfmodelError, SpecError, did_you_mean
from perfmodel.files.reach import within_reach

if sys.platform == "win32":
    from multiprocessing.connection import PipeConnection as Connection
else:
    from multiprocessing.connection import Connection

Progress = Callable[[int, int | None], None]
T = TypeVar("T")
R = TypeVar("R")

_FEWEST = 8  # items for which starting processes (a second) may pay
_ENGINES = ("local", "ray")


@dataclass(frozen=True, slots=True)
class Engine:
    """Where items are worked on. address: of a Ray cluster, where it is not this machine's own."""

    name: str
    address: str | None = None


def engine_of(text: str) -> Engine:
    """`local`, `ray`, `ray:HOST:PORT`, `ray:auto` (a cluster that runs here) or `ray://HOST:PORT` (Ray Client).

    Raises SpecError for anything else.
    """
    name, colon, address = text.partition(":")
    if name == "ray" and address.startswith("//"):
        address = text
    if name not in _ENGINES or (name == "local" and colon) or (colon and not address):
        near = did_you_mean(name, _ENGINES)
        raise SpecError(f"--engine {text}: allowed local, ray or ray:ADDRESS (as in ray:auto).{near}")
    return Engine(name, address or None)


def num_workers(num_items: int) -> int:
    """Processes worth starting for so many items."""
    return num_processes(num_items) if num_items >= _FEWEST else 1


# Steps of which each is known only when the one before it has its answer: yielded, and sent the answer.
Chain = Generator[Any, Any, R]


@dataclass(frozen=True)
class Stepwise(Generic[T, R]):
    """A function of an item that is a chain of steps.

    begin: the chain of an item, in the calling process
    step:  the answer of a step, in any process
    """

    begin: Callable[[T], Chain[R]]
    step: Callable[[Any], Any]

    def __call__(self, item: T) -> R:
        chain, answer = self.begin(item), None
        while True:
            try:
                step = chain.send(answer)
            except StopIteration as end:
                result: R = end.value
                return result
            answer = self.step(step)


def spread(
    function: Callable[[T], R],
    items: Sequence[T],
    if_lost: Callable[[T, str], R],
    progress: Progress | None = None,
    workers: int | None = None,
    engine: str = "local",
) -> list[R]:
    """`function` of each item, in order; both must be picklable (a function of a module, not a lambda; of a `Stepwise`
    one only the steps).

    if_lost:  the answer for an item whose process was lost twice, from the item and the reason
    progress: called with (items done, items in all)
    workers:  processes; by default as many as this one may use cores (on Ray: as the cluster has), none for a few
              items. With 1, locally, everything runs in this process, and is lost with it.
    engine:   local | ray | ray:ADDRESS

    Raises what the function raises, and MissingExtraError where Ray is asked for and not installed.
    """
    where = engine_of(engine)
    if where.name == "ray":
        from perfmodel.planning.sweeps.on_ray import run_on_ray

        return _Spread(function, items, if_lost, progress).over(partial(run_on_ray, address=where.address), workers)
    count = num_workers(len(items)) if workers is None else min(workers, len(items))
    if count > 1:
        return _Spread(function, items, if_lost, progress).over(run_in_processes, count)
    results = []
    for item in items:
        results.append(function(item))
        if progress is not None:
            progress(len(results), len(items))
    return results


# Steps by the number of their item. RunItems works on some, on as many workers as its last argument says, hands each
# answer on, goes on with what is to be done next for the same item, if anything, and returns (number, reason) of those
# that were lost.
Numbered = list[tuple[int, Any]]
OnAnswer = Callable[[int, Any], Numbered]
RunItems = Callable[[Callable[[Any], Any], Numbered, OnAnswer, int | None], list[tuple[int, str]]]


class _Spread(Generic[T, R]):
    """Items under way elsewhere."""

    def __init__(
        self,
        function: Callable[[T], R],
        items: Sequence[T],
        if_lost: Callable[[T, str], R],
        progress: Progress | None,
    ) -> None:
        self._items, self._if_lost, self._progress = items, if_lost, progress
        begin, step = (function.begin, function.step) if isinstance(function, Stepwise) else (_one_step, function)
        self._step: Callable[[Any], Any] = within_reach(step)
        self._chains = [begin(item) for item in items]
        self._unanswered: dict[int, Numbered] = {}
        self._results: dict[int, R] = {}

    def over(self, run: RunItems, workers: int | None) -> list[R]:
        """All results, by `run`. A chain whose worker was lost goes on alone, and may lose one at several steps."""
        steps = [step for number in range(len(self._items)) for step in self._resume(number)]
        for number, reason in sorted(run(self._step, steps, self._resume, workers)):
            retried: Numbered = []
            while step := self._unanswered.get(number):
                if step is retried:
                    self._finish(number, self._if_lost(self._items[number], f"{reason}, twice"))
                    break
                retried = step
                lost = run(self._step, step, self._resume, 1)
                reason = lost[0][1] if lost else reason
        return [self._results[number] for number in range(len(self._items))]

    def _resume(self, number: int, answer: Any = None) -> Numbered:
        """The next step of an item after the answer to its last one; none where that was the last."""
        self._unanswered.pop(number, None)
        try:
            self._unanswered[number] = [(number, self._chains[number].send(answer))]
        except StopIteration as end:
            self._finish(number, end.value)
            return []
        return self._unanswered[number]

    def _finish(self, number: int, result: R) -> None:
        self._results[number] = result
        if self._progress is not None:
            self._progress(len(self._results), len(self._items))


def _one_step(item: Any) -> Chain[Any]:
    return (yield item)


# Spawned, not forked: the parent may have threads (BLAS, torch) that a fork would leave in the middle of something.
_CONTEXT: SpawnContext = multiprocessing.get_context("spawn")
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
    count: int | None,
) -> list[tuple[int, str]]:
    """See `RunItems`: in processes of this machine, each with a pipe of its own.

    Raises what the function raises; the processes are then stopped.
    """
    todo = deque(items)
    lost: list[tuple[int, str]] = []
    workers = [_started(function) for _ in range(min(count or len(items), len(items)))]
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
    collect_rarely()
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
