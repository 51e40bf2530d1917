"""Parallel map over local processes or a Ray cluster, in item order. A worker that dies (the kernel's out-of-memory
killer, a crash in native code) costs only its item, which is retried once at the end, when memory is free.
(`concurrent.futures` gives up all items in flight.)"""

import hashlib
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Generic, TypeVar

from perfmodel.cores import collect_rarely, num_processes
from perfmodel.errors import MissingExtraError, PerfmodelError, SpecError, did_you_mean
from perfmodel.files.catalog import Kind, data_dir
from perfmodel.files.sandbox import within_reach
from perfmodel.version import RELEASE

if sys.platform == "win32":
    from multiprocessing.connection import PipeConnection as Connection
else:
    from multiprocessing.connection import Connection

Progress = Callable[[int, int | None], None]
Watch = Callable[[str], AbstractContextManager[Progress | None]]  # stage name -> progress display
Pipe = Connection
T = TypeVar("T")
R = TypeVar("R")

_FEWEST = 8  # items for which starting processes (a second) may pay
_ENGINES = ("local", "ray")


def engine_of(text: str) -> tuple[str, str | None]:
    """Where items run: `local` or `ray`, and the address of a Ray cluster other than this machine's own, of `local`,
    `ray`, `ray:HOST:PORT`, `ray:auto` (a cluster running here) or `ray://HOST:PORT` (Ray Client). Raises SpecError for
    anything else."""
    name, colon, address = text.partition(":")
    if name == "ray" and address.startswith("//"):
        address = text
    if name not in _ENGINES or (name == "local" and colon) or (colon and not address):
        near = did_you_mean(name, _ENGINES)
        raise SpecError(f"--engine {text}: expected local, ray or ray:ADDRESS (as in ray:auto).{near}")
    return name, address or None


@dataclass(frozen=True)
class Stepwise(Generic[T, R]):
    """A function whose steps depend on the previous step's result (a bisection); only steps are sent to workers.

    begin: generator in the calling process: yields steps, is sent their answers, returns the result
    step:  computes a step's answer, in any process"""

    begin: Callable[[T], Generator[Any, Any, R]]
    step: Callable[[Any], Any]


def spread(
    function: Callable[[T], R] | Stepwise[T, R],
    items: Sequence[T],
    if_lost: Callable[[T, str], R],
    progress: Progress | None = None,
    workers: int | None = None,
    engine: str = "local",
) -> list[R]:
    """`function` of each item, in order. Both must be picklable (a module-level function); of a `Stepwise` its steps.

    if_lost:  (item, reason) -> answer for an item whose process died twice at one step
    progress: called with (items done, items in all)
    workers:  processes; default: the available cores (on Ray: the cluster's), none for a few items. 1, locally:
              everything runs in this process, and dies with it
    engine:   local | ray | ray:ADDRESS

    Raises the function's errors, and MissingExtraError for Ray if it is not installed."""
    where, address = engine_of(engine)
    if not items:
        return []
    begin, step = (function.begin, function.step) if isinstance(function, Stepwise) else (one_step, function)
    if where == "local":
        workers = min(workers or (num_processes(len(items)) if len(items) >= _FEWEST else 1), len(items))
    open_pool: Callable[[int | None], _Processes | _OnRay] = partial(_Processes, within_reach(step))
    if where == "ray":
        open_pool = partial(_OnRay, within_reach(step), address)
    chains: dict[int, Generator[Any, Any, R]] = {}
    steps: dict[int, tuple[int, Any]] = {}  # under way, or lost
    results: dict[int, R] = {}

    def resume(number: int, answer: Any = None) -> bool:
        """Advance the item with an answer; False once it is done."""
        steps.pop(number, None)
        try:
            steps[number] = number, chains[number].send(answer)
        except StopIteration as end:
            finish(number, end.value)
        return number in steps

    def finish(number: int, result: R) -> None:
        results[number] = result
        if progress is not None:
            progress(len(results), len(items))

    def run(numbers: Sequence[int], workers: int | None) -> list[tuple[int, str]]:
        todo, lost, pool = deque(numbers), [], open_pool(workers)
        try:
            while todo or pool.running:
                while todo and len(pool.running) < pool.most:
                    number = todo.popleft()
                    if number not in chains:
                        chains[number] = begin(items[number])
                        resume(number)
                    if number in steps:
                        pool.submit(*steps[number])
                for number, answer, reason in pool.wait() if pool.running else ():
                    if reason:
                        lost.append((number, reason))
                    elif resume(number, answer):
                        todo.appendleft(number)
        finally:
            pool.close()
        return sorted(lost)

    if where == "local" and workers == 1:
        for number, item in enumerate(items):
            chains[number] = begin(item)
            has_step = resume(number)
            while has_step:
                has_step = resume(number, step(steps[number][1]))
        return [results[number] for number in range(len(items))]
    for number, reason in run(range(len(items)), workers):
        retried = None
        while step_lost := steps.get(number):
            if step_lost is retried:
                del steps[number]
                finish(number, if_lost(items[number], f"{reason}, twice"))
                break
            retried = step_lost
            reason = next((why for _, why in run([number], 1)), reason)
    return [results[number] for number in range(len(items))]


def one_step(item: Any) -> Generator[Any, Any, Any]:
    """The `begin` of a single step: its answer is the result."""
    return (yield item)


# Spawned, not forked: the parent may have threads (BLAS, torch) that a fork would leave in the middle of something.
_CONTEXT: SpawnContext = multiprocessing.get_context("spawn")
_PATIENCE_S = 5.0  # for a process to end when asked to


class WorkerProcess:
    """A process that answers what comes over its pipe, one after the other; its first message, (None, None), says that
    it has started. answer: (item, its pipe) -> message; number: of the item that it works on"""

    def __init__(self, answer: Callable[[Any, Connection], Any]) -> None:
        self.pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_serve, args=(theirs, answer), daemon=True, name="perfmodel-worker")
        self.process.start()
        theirs.close()  # so that the pipe closes with the process
        self.number, self.is_ready = 0, False

    def stop(self) -> None:
        self.pipe.close()
        self.process.join(_PATIENCE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


def _serve(pipe: Connection, answer: Callable[[Any, Connection], Any]) -> None:
    """Worker loop until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which stops its workers
    collect_rarely()
    with suppress(EOFError, OSError):
        pipe.send((None, None))
        while True:
            message = answer(pipe.recv(), pipe)
            pipe.send_bytes(message) if isinstance(message, bytes | memoryview) else pipe.send(message)


def _computed(function: Callable[[Any], Any], item: Any, _: Connection) -> Any:
    """(answer, None) or (None, error) as bytes: what cannot be sent is an error, too."""
    try:
        return ForkingPickler.dumps((function(item), None))
    except Exception as error:
        error.add_note(traceback.format_exc())
        return ForkingPickler.dumps((None, error))


class _Processes:
    """At most `most` local processes, each with its own pipe. They compute steps, identified by item number."""

    def __init__(self, function: Callable[[Any], Any], most: int | None) -> None:
        self._function, self.most = function, most or 1
        self.running: list[WorkerProcess] = []
        self._idle: list[WorkerProcess] = []

    def submit(self, number: int, step: Any) -> None:
        if self._idle:
            worker = self._idle.pop()  # the last one that answered, which has the chain's tables
        else:
            worker = WorkerProcess(partial(_computed, self._function))
        worker.number = number
        self.running.append(worker)
        try:
            worker.pipe.send(step)
        except OSError:
            if not worker.is_ready:
                return  # it ended while it started; `wait` notices
            self.running.remove(worker)  # it ended while it was idle: the step was never begun
            worker.stop()
            self.submit(number, step)

    def wait(self) -> list[tuple[int, Any, str]]:
        """(number, answer, why it was lost or "") of at least one step; raises the function's errors."""
        outcomes: list[tuple[int, Any, str]] = []
        while not outcomes:
            ready = wait([worker.pipe for worker in self.running])
            for worker in [worker for worker in self.running if worker.pipe in ready]:
                try:
                    answer, error = worker.pipe.recv()
                except (EOFError, OSError):
                    self.running.remove(worker)
                    outcomes.append((worker.number, None, _why_lost(worker)))
                    continue
                if error is not None:
                    raise error
                if worker.is_ready:
                    self.running.remove(worker)
                    self._idle.append(worker)
                    outcomes.append((worker.number, answer, ""))
                worker.is_ready = True
        return outcomes

    def close(self) -> None:
        for worker in (*self.running, *self._idle):
            worker.process.kill()
            worker.stop()


def _why_lost(worker: WorkerProcess) -> str:
    """Reason; raises PerfmodelError for a process that never started, since another would not either."""
    worker.process.join(_PATIENCE_S)
    code = worker.process.exitcode or 0
    worker.stop()
    how = f"status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    if how == "signal SIGKILL":
        how += ", as when memory runs out"
    if not worker.is_ready:
        raise PerfmodelError(
            f"a worker process ended at its start ({how}); a script needs `if __name__ == '__main__':` around what "
            f"starts workers, or workers=1."
        )
    return f"its worker process was lost ({how})"


_CLUSTER_PATIENCE_S = 10.0  # for a cluster to answer


class _OnRay:
    """Ray tasks, used as `_Processes`. Raises MissingExtraError without Ray, PerfmodelError if no cluster answers at
    `address` or its nodes run another perfmodel."""

    def __init__(self, function: Callable[[Any], Any], address: str | None, workers: int | None) -> None:
        self._function, self._version = function, installed_version()
        self.running: dict[Any, int] = {}
        with redirect_stdout(sys.stderr):  # where Ray reports problems of its nodes
            self._ray = _connected(address, workers)
            self._task = self._ray.remote(max_retries=0, num_cpus=1)(_attempt)
            # Twice as many as can run, so that none waits for this process; not all, which a scheduler would hold.
            self.most = 2 * (workers or max(int(self._ray.cluster_resources().get("CPU", 1)), 1))

    def submit(self, number: int, step: Any) -> None:
        with redirect_stdout(sys.stderr):
            self.running[self._task.remote(self._function, step, self._version)] = number

    def wait(self) -> list[tuple[int, Any, str]]:
        with redirect_stdout(sys.stderr):
            return [self._outcome(done) for done in self._ray.wait(list(self.running))[0]]

    def _outcome(self, done: Any) -> tuple[int, Any, str]:
        number = self.running.pop(done)
        try:
            answer, error = self._ray.get(done)
        except self._ray.exceptions.RayTaskError as failure:  # the function's own errors are answers
            reason = str(failure).strip().splitlines()[-1]
            raise PerfmodelError(
                f"--engine ray: a worker could not start ({reason}); its nodes need this perfmodel installed."
            ) from None
        except self._ray.exceptions.RayError as failure:
            return number, None, f"its Ray worker was lost ({type(failure).__name__})"
        if error is not None:
            raise error
        return number, answer, ""

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            for left in self.running:
                self._ray.cancel(left, force=True)


def _connected(address: str | None, workers: int | None) -> Any:
    """The connected module `ray`: an existing connection, `address`, or a new local cluster."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # else it prints some of its messages after the answer
    try:
        import ray
    except ImportError:
        raise MissingExtraError(
            "--engine ray needs Ray, which is missing: pip install '.[ray]' in the checkout, or use --engine local."
        ) from None
    if ray.is_initialized():
        return ray

    def first_line(error: Exception) -> str:
        return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")

    try:
        _knock(address)
    except (OSError, ValueError) as error:
        raise PerfmodelError(
            f"--engine ray: no Ray cluster answers at {address} ({first_line(error)}); start one with `ray start "
            f"--head`, or use --engine local."
        ) from None
    size = {"num_cpus": workers} if address is None and workers is not None else {}
    try:
        ray.init(address or "local", log_to_driver=False, include_dashboard=None, logging_level="ERROR", **size)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        if address is None:
            trouble, way_out = "Ray does not start on this machine", "use --engine local"
        elif address == "auto":
            trouble = "no usable Ray cluster here"
            way_out = "start one with `ray start --head`, or use --engine ray"
        else:
            trouble = f"the cluster at {address} refuses connections"
            way_out = "it must have the same versions of Ray and Python, and, with RAY_AUTH_MODE=token, the same token"
            if "RAY_AUTH_MODE" not in os.environ:  # a head started where there is a token asks for it
                way_out = "if it asks for tokens, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as it has them"
        raise PerfmodelError(f"--engine ray: {trouble} ({first_line(error)}); {way_out}.") from None
    return ray


def _knock(address: str | None) -> None:
    """Raise OSError or ValueError if nothing listens at `HOST:PORT`; Ray itself would wait for minutes."""
    if address is not None and ":" in address:  # else this machine's own, or `auto`
        host, _, port = address.removeprefix("ray://").rpartition(":")
        socket.create_connection((host, int(port)), timeout=_CLUSTER_PATIENCE_S).close()


def _attempt(function: Callable[[Any], Any], item: Any, version: str) -> tuple[Any, Exception | None]:
    """(answer, None) or (None, error), so that Ray does not wrap the error."""
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
    """The version, and a hash of the sources that answers depend on, engine descriptions included."""
    root = Path(__file__).resolve().parents[1]
    sources = [root / name for name in _SOURCES]
    files = [file for source in sources for file in ([source] if source.suffix else sorted(source.rglob("*.py")))]
    files += [file for kind in _NAMED for file in sorted(data_dir(kind).glob("*.yaml"))]
    return f"{RELEASE}+{_hash_of(files)}"


@lru_cache(maxsize=1)
def installed_version() -> str:
    """`program_version` with a hash of the installed hardware, calibrations, models and scenarios."""
    files = [file for kind in _DATA for file in sorted(data_dir(kind).rglob("*.yaml"))]
    return f"{program_version()}+{_hash_of(files)}"


def _hash_of(files: Sequence[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
