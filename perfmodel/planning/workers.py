"""A function over many items, in processes of this machine or of a Ray cluster, answered in the items' order.

A process that is lost on the way (the kernel's out-of-memory killer, a crash in native code) costs only the item that
it had: the others go on, in processes that stand in for it. That item is tried once more at the end, when nothing else
takes memory; lost again, its answer is what the caller has for it. (`concurrent.futures` gives up all that is under way
when one of its processes ends, and cannot say which item did it.)

Where each step needs the answer of the one before it (a bisection), the function is `Stepwise`: only its steps travel;
what they add up to stays here, and so do files that are written meanwhile.
"""

import hashlib
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Generic, TypeVar

from perfmodel.cores import collect_rarely, num_processes
from perfmodel.errors import MissingExtraError, PerfmodelError, SpecError, did_you_mean
from perfmodel.files.catalog import Kind, data_dir
from perfmodel.files.reach import within_reach
from perfmodel.version import RELEASE

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


_CLUSTER_PATIENCE_S = 10.0  # for a cluster to answer


def run_on_ray(
    function: Callable[[Any], Any],
    items: list[tuple[int, Any]],
    on_answer: Callable[[int, Any], list[tuple[int, Any]]],
    workers: int | None,
    address: str | None,
) -> list[tuple[int, str]]:
    """See `RunItems` of `perfmodel.planning.workers`.

    Raises MissingExtraError without Ray, PerfmodelError where no cluster answers at `address` or its nodes have another
    perfmodel, and what the function raises.
    """
    if not items:
        return []
    with redirect_stdout(sys.stderr):  # where Ray reports problems of its nodes
        ray = _connected(address, workers)
        return _over(ray, function, items, on_answer, workers)


def _over(
    ray: Any,
    function: Callable[[Any], Any],
    items: list[tuple[int, Any]],
    on_answer: Callable[[int, Any], list[tuple[int, Any]]],
    workers: int | None,
) -> list[tuple[int, str]]:
    task = ray.remote(max_retries=0, num_cpus=1)(_attempt)
    version, todo = installed_version(), deque(items)
    # Twice as many as can run, so that none waits for this process; not all, which a scheduler would have to hold.
    most = 2 * (workers or max(int(ray.cluster_resources().get("CPU", 1)), 1))
    running: dict[Any, int] = {}
    lost: list[tuple[int, str]] = []
    try:
        while todo or running:
            while todo and len(running) < most:
                index, item = todo.popleft()
                running[task.remote(function, item, version)] = index
            for done in ray.wait(list(running))[0]:
                index = running.pop(done)
                try:
                    answer, error = ray.get(done)
                except ray.exceptions.RayTaskError as failure:  # the function's own errors are answers
                    reason = str(failure).strip().splitlines()[-1]
                    raise PerfmodelError(
                        f"--engine ray: a worker could not start ({reason}); its nodes need this perfmodel installed."
                    ) from None
                except ray.exceptions.RayError as failure:
                    lost.append((index, f"its Ray worker was lost ({type(failure).__name__})"))
                    continue
                if error is not None:
                    raise error
                todo.extendleft(on_answer(index, answer))
    finally:
        for left in running:
            ray.cancel(left, force=True)
    return lost


def _connected(address: str | None, workers: int | None) -> Any:
    """The module `ray`, connected: to what it is connected to, to `address`, or to a cluster of this machine's own."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # else it prints some of its messages after the answer
    try:
        import ray
    except ImportError:
        raise MissingExtraError(
            "--engine ray needs Ray, which is missing: pip install '.[ray]' in the checkout, or use --engine local."
        ) from None
    if ray.is_initialized():
        return ray
    try:
        _knock(address)
    except (OSError, ValueError) as error:
        raise PerfmodelError(
            f"--engine ray: no Ray cluster answers at {address} ({_first_line(error)}); start one with `ray start "
            f"--head`, or use --engine local."
        ) from None
    size = {"num_cpus": workers} if address is None and workers is not None else {}
    try:
        ray.init(address or "local", log_to_driver=False, include_dashboard=None, logging_level="ERROR", **size)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise PerfmodelError(f"--engine ray: {_trouble(address)} ({_first_line(error)}); {_way_in(address)}.") from None
    return ray


def _knock(address: str | None) -> None:
    """Raise OSError or ValueError where no server listens at `HOST:PORT`: Ray itself would wait for minutes."""
    if address is None or ":" not in address:  # this machine's own, or `auto`
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    socket.create_connection((host, int(port)), timeout=_CLUSTER_PATIENCE_S).close()


def _trouble(address: str | None) -> str:
    if address is None:
        return "Ray does not start on this machine"
    return "no usable Ray cluster here" if address == "auto" else f"the cluster at {address} refuses connections"


def _way_in(address: str | None) -> str:
    """What may be wrong where a server listens, but Ray cannot connect."""
    if address is None:
        return "use --engine local"
    if address == "auto":
        return "start one with `ray start --head`, or use --engine ray"
    if "RAY_AUTH_MODE" not in os.environ:  # a head started where there is a token asks for it, drivers do not send it
        return "if it asks for tokens, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as it has them"
    return "it must have the same versions of Ray and Python, and, with RAY_AUTH_MODE=token, the same token"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _attempt(function: Callable[[Any], Any], item: Any, version: str) -> tuple[Any, Exception | None]:
    """(answer, None) or (None, error): an error is the caller's to raise as it is, not Ray's to wrap."""
    here = installed_version()
    if here != version:
        return None, PerfmodelError(
            f"--engine ray: node {socket.gethostname()} has another perfmodel ({here}) than this machine ({version}), "
            f"whose answers would differ; install the same on all."
        )
    collect_rarely()
    try:
        return function(item), None
    except Exception as error:
        return None, error


# What answers come from; the rest of the program may change and leave them as they are.
_SOURCES = (
    *("files", "models", "specs", "ops", "cost", "engine", "sim"),
    *(f"planning/{name}.py" for name in ("metrics", "points", "typical_step")),
)


_DATA: tuple[Kind, ...] = ("hardware", "models", "traffic", "scenarios")


_NAMED: tuple[Kind, ...] = ("engines", "networks")  # which a resolved scenario still has by name


@lru_cache(maxsize=1)
def program_version() -> str:
    """The version, and a hash of the sources that answers come from, descriptions of engines among them."""
    root = Path(__file__).resolve().parents[1]
    rooms = [root / name for name in _SOURCES]
    files = [file for room in rooms for file in ([room] if room.suffix else sorted(room.rglob("*.py")))]
    for kind in _NAMED:
        files += sorted(data_dir(kind).glob("*.yaml"))
    return f"{RELEASE}+{_hash_of(files)}"


@lru_cache(maxsize=1)
def installed_version() -> str:
    """`program_version`, and a hash of the hardware, calibrations, models and scenarios that are installed with it."""
    files = [file for kind in _DATA for file in sorted(data_dir(kind).rglob("*.yaml"))]
    return f"{program_version()}+{_hash_of(files)}"


def _hash_of(files: Sequence[Path]) -> str:
    found = hashlib.sha256()
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()[:16]
