"""`JobQueue`: slow requests in a bounded pool of worker processes, with progress and cancellation.

Workers keep their step caches between requests. A job stops where it reports progress; a worker that does not within a
few seconds is killed and replaced. Pages send heartbeats and a closing message; work stops when none of its pages is
open."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Literal

from perfmodel.commands.request import CommandRequest, Console
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.planning.workers import Pipe, WorkerProcess
from perfmodel.web.results import QueryResult, ResultCache

Lane = Literal["quick", "long"]
Work = Callable[[CommandRequest, Console], QueryResult]
_LANES: tuple[Lane, ...] = ("quick", "long")
_TELL_S = 0.1  # between progress messages
_POLL_S, _PATIENCE_S = 0.05, 3.0  # between looks for a message; with a worker asked to stop
_MAX_WAITING, _MAX_KEPT = 20, 100
_LEASE_S = 150.0  # without a request until a page counts as closed: browsers throttle hidden tabs to one a minute
_GRACE_S = 8.0  # from a closing request until the page counts as closed: a reloaded one is back by then
_SWEEP_S = 0.5  # between sweeps for closed pages
_log = logging.getLogger("perfmodel.web")


class _StoppedError(Exception):
    """Cancelled by the page."""


@dataclass(eq=False)
class BackgroundJob:
    """One job. state: waiting, running, done, stopped, refused (`message` says why), failed; readers: waiting parts,
    as `page/view/part`, if named"""

    number: int
    request: CommandRequest
    lane: Lane
    state: str = "waiting"
    what: str = ""
    done: int = 0
    total: int | None = None
    message: str = ""
    readers: set[str] = field(default_factory=set)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    is_stopping: bool = False
    is_left: bool = False  # no readers any more

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.state not in ("waiting", "running")

    def end(self, state: str, message: str = "") -> None:
        self.state, self.message = state, message
        self.ended.set()


class JobQueue:
    """Runs requests in the background, one at a time per lane; results are kept in `known`. work: picklable function
    (request, progress) -> answer"""

    def __init__(self, known: ResultCache, work: Work) -> None:
        self._known, self._answer = known, partial(_answer, work)
        self._numbers = count(1)
        self._jobs: OrderedDict[int, BackgroundJob] = OrderedDict()
        self._queues: dict[Lane, asyncio.Queue[BackgroundJob]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._workers: dict[Lane, WorkerProcess] = {}
        self._open_until: dict[str, float] = {}  # page -> when it counts as closed without another request

    async def start(self) -> None:
        """Start the workers."""
        for lane in _LANES:
            self._queues[lane] = asyncio.Queue()
            self._workers[lane] = WorkerProcess(self._answer)
            self._tasks.append(asyncio.create_task(self._turn(lane)))
        self._tasks.append(asyncio.create_task(self._sweep()))

    async def close(self) -> None:
        """End everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._workers.values():
            worker.process.kill()
            worker.stop()

    def last(self, request: CommandRequest) -> BackgroundJob | None:
        """Most recent job of a request, if any."""
        latest_first = reversed(self._jobs.values())
        return next((job for job in latest_first if job.request == request and not job.is_left), None)

    def begin(self, request: CommandRequest, lane: Lane, reader: str = "") -> BackgroundJob:
        """Running or new job of `request` in `lane`; `reader` waits for it. Raises SpecError if the queue is full."""
        job = self.last(request)
        if job is None or job.is_over or job.is_stopping:
            if sum(other.state == "waiting" and other.lane == lane for other in self._jobs.values()) >= _MAX_WAITING:
                raise SpecError(f"{_MAX_WAITING} requests wait already; stop some, or wait for them.")
            job = BackgroundJob(next(self._numbers), request, lane)
            self._jobs[job.number] = job
            over = [number for number, other in self._jobs.items() if other.is_over]
            for number in over[: max(len(self._jobs) - _MAX_KEPT, 0)]:
                del self._jobs[number]
            self._queues[lane].put_nowait(job)
        if reader:
            self.join(job, reader)
        return job

    def join(self, job: BackgroundJob, reader: str) -> None:
        """Add `reader`, whose page is open, to the job."""
        job.readers.add(reader)
        self.see(reader.partition("/")[0])

    def see(self, page: str) -> None:
        """Heartbeat of a page."""
        self._open_until[page] = time.monotonic() + _LEASE_S

    def depart(self, page: str) -> None:
        """A page closes or reloads."""
        self._open_until[page] = time.monotonic() + _GRACE_S

    def leave(self, reader: str, requests: Collection[CommandRequest]) -> None:
        """`reader` now waits for `requests` only: jobs without other readers stop, as when a slider has moved on."""
        for job in self._jobs.values():
            if job.request not in requests:
                self._take_out(job, {reader} & job.readers)

    def _take_out(self, job: BackgroundJob, readers: set[str]) -> None:
        """Remove `readers`; a job without readers stops."""
        if readers and not job.is_over:
            job.readers -= readers
            if not job.readers:
                job.is_left = True
                self.stop(job)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = time.monotonic()
            closed = {page for page, until in self._open_until.items() if until < now}
            for page in closed:
                del self._open_until[page]
            for job in self._jobs.values() if closed else ():
                self._take_out(job, {reader for reader in job.readers if reader.partition("/")[0] in closed})

    def stop(self, job: BackgroundJob) -> None:
        job.is_stopping = True
        if job.state == "waiting":
            job.end("stopped")

    async def _turn(self, lane: Lane) -> None:
        while True:
            job = await self._queues[lane].get()
            if job.is_over:
                continue
            try:
                await self._work(lane, job)
            except Exception:
                _log.exception("a request could not be answered: a bug of perfmodel")
                job.end("failed", "it could not be answered: a bug, which the log describes.")
            finally:
                if not job.is_over:
                    job.end("stopped")

    async def _work(self, lane: Lane, job: BackgroundJob) -> None:
        worker = self._workers[lane]
        if not worker.process.is_alive():
            worker = self._workers[lane] = WorkerProcess(self._answer)
        job.state = "running"
        with suppress(OSError):
            worker.pipe.send(job.request)
        give_up_at = None
        while not job.is_over:
            content = await asyncio.to_thread(_received, worker)
            if content is not None:
                self._receive(job, *content)
            elif not worker.process.is_alive():
                job.end("failed", "the process that worked on it ended; ask again.")
            if job.is_stopping and not job.is_over:
                if give_up_at is None:
                    with suppress(OSError):
                        worker.pipe.send(None)
                    give_up_at = time.monotonic() + _PATIENCE_S
                elif time.monotonic() > give_up_at:
                    worker.process.kill()
                    await asyncio.to_thread(worker.process.join)
                    job.end("stopped")

    def _receive(self, job: BackgroundJob, kind: str | None, content: Any) -> None:
        match kind:
            case None:
                pass  # the process has started, or nothing was left to stop
            case "progress":
                job.what, job.done, job.total = content
            case "done" | "refused":
                self._known.keep(job.request, content)
                job.end(kind, str(content) if kind == "refused" else "")
            case "stopped":
                job.end("stopped")
            case "short":
                job.end("failed", str(content))
            case _:
                _log.error("a request could not be answered: a bug of perfmodel\n%s", content)
                job.end("failed", "it could not be answered: a bug, which the log describes.")


def _received(worker: WorkerProcess) -> tuple[str, Any] | None:
    """The next message; None where there is none yet, or the process has died."""
    try:
        return worker.pipe.recv() if worker.pipe.poll(_POLL_S) else None
    except (EOFError, OSError):
        worker.process.join(1.0)
        return None


def _answer(work: Work, request: CommandRequest | None, pipe: Pipe) -> tuple[str | None, Any]:
    """What becomes of a request, in its worker; None stops one, and means nothing to the next."""
    import traceback

    try:
        if request is None:
            return None, None
        return "done", work(request, Console(lambda what: _progress(pipe, what)))
    except _StoppedError:
        return "stopped", None
    except PerfmodelError as error:
        return "refused", SpecError(str(error))
    except MemoryError:
        return "short", "there is not enough memory for this; ask for fewer requests."
    except (BrokenPipeError, EOFError):
        raise
    except Exception:
        return "failed", traceback.format_exc()


@contextmanager
def _progress(connection: Pipe, what: str) -> Iterator[Callable[[int, int | None], None]]:
    last = 0.0

    def report(done: int, total: int | None) -> None:
        nonlocal last
        if connection.poll() and connection.recv() is None:
            raise _StoppedError
        if (now := time.monotonic()) - last >= _TELL_S:
            last = now
            connection.send(("progress", (what, int(done), total)))

    report(0, None)
    yield report
