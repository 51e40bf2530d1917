"""The executed clock: turns the serve loop over a backend that does the work. By default it is *virtual*: it advances
by each step's measured duration and jumps over idle time, so that queueing is replayed exactly and a run takes as long
as its work. `WallClock` runs live."""

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from perfmodel.cost import StageTicks
from perfmodel.engine import Backend, Request, ServeLoop, StepPlan, StepRecord
from perfmodel.sim import Workload
from perfmodel.sim.replica.pipeline import FlowLine
from perfmodel.sim.traffic.workload import ThinkTime, no_think_time

_PS_PER_NS = 1000


class VirtualClock:
    def __init__(self) -> None:
        self._tick = 0

    @property
    def now(self) -> int:
        return self._tick

    def pass_step(self, duration: int) -> None:
        self._tick += duration

    def wait_until(self, tick: int) -> None:
        self._tick = max(self._tick, tick)


class WallClock(VirtualClock):
    def __init__(self) -> None:
        self._start_ns = time.monotonic_ns()

    @property
    def now(self) -> int:
        return (time.monotonic_ns() - self._start_ns) * _PS_PER_NS

    def pass_step(self, duration: int) -> None:
        """The wall has moved on by itself."""

    def wait_until(self, tick: int) -> None:
        time.sleep(max(0, tick - self.now) / 1e12)


class InStages(NamedTuple):
    """line: the stages; ticks: says what the plan that was executed last took on each"""

    line: FlowLine
    ticks: Callable[[], StageTicks]


class _UnderWay(NamedTuple):
    plan: StepPlan
    started: int
    end: int
    num_accepted: Sequence[int] | None


class RequestArrivals:
    """Turns of conversations, (pause, request) each, of which a plain request is one: the first at its own time, each
    other a pause after the answer before it; with `concurrency` so many conversations at a time, the next one a think
    time after the end of one."""

    def __init__(
        self, conversations: Iterator[list[tuple[int, Request]]], concurrency: int | None, think_time: ThinkTime
    ) -> None:
        self._source, self._think_time = conversations, think_time
        self._next = next(conversations, None)
        self._is_closed = concurrency is not None
        self._users = [0] * (concurrency or 0)  # when each begins another conversation
        self._due: list[tuple[int, int, Request]] = []
        self._later: dict[int, list[tuple[int, Request]]] = {}  # turns to come, last first, by the one before them

    @property
    def _next_begin(self) -> int | None:
        if self._next is None or (self._is_closed and not self._users):
            return None
        return self._users[0] if self._is_closed else self._next[0][1].arrival

    @property
    def next_tick(self) -> int | None:
        begin = self._next_begin
        ticks = [*([] if begin is None else [begin]), *(tick for tick, _, _ in self._due[:1])]
        return min(ticks, default=None)

    def pop_due(self, now: int) -> Iterator[Request]:
        while (begin := self._next_begin) is not None and begin <= now:
            assert self._next is not None
            if self._is_closed:
                heapq.heappop(self._users)
            (_, first), *others = self._next
            self._push(first, begin, others[::-1])
            self._next = next(self._source, None)
        while self._due and self._due[0][0] <= now:
            yield heapq.heappop(self._due)[2]

    def on_finished(self, request: Request, now: int) -> None:
        later = self._later.pop(request.request_id)
        if later:
            pause, turn = later.pop()
            self._push(turn, now + pause, later)
        elif self._is_closed:
            heapq.heappush(self._users, now + self._think_time(request.request_id))

    def _push(self, request: Request, arrival: int, later: list[tuple[int, Request]]) -> None:
        request.arrival = arrival
        self._later[request.request_id] = later
        heapq.heappush(self._due, (arrival, request.request_id, request))


def plain_arrivals(
    requests: Iterable[Request], concurrency: int | None = None, think_time: ThinkTime = no_think_time
) -> RequestArrivals:
    """Arrivals of requests of one turn each, in order."""
    return RequestArrivals(([(0, request)] for request in requests), concurrency, think_time)


def arrivals_of(workload: Workload) -> RequestArrivals:
    if workload.traffic.has_conversations:
        return RequestArrivals(workload.conversations(), workload.concurrency, workload.think_time)
    accepted = (request for request in workload.requests() if not workload.refuses(request))
    return plain_arrivals(accepted, workload.concurrency, workload.think_time)


def serve(
    loop: ServeLoop,
    backend: Backend,
    arrivals: RequestArrivals,
    on_finished: Callable[[Request], None],
    on_step: Callable[[StepRecord], None],
    clock: VirtualClock | None = None,
    stages: InStages | None = None,
) -> int:
    """Serves all that arrives and returns the tick at which the last step ended. on_finished, on_step: called with what
    has ended; clock: virtual unless given; stages: several, on a virtual clock: plans are executed when they are made,
    one after another, and end when they would be through: which tokens a plan has does not depend on those under way
    with it."""
    clock = clock or VirtualClock()
    under_way: deque[_UnderWay] = deque()
    while True:
        for request in arrivals.pop_due(clock.now):
            loop.add(request)
        now = clock.now
        while (plan := loop.start_step(now)) is not None:
            outcome = backend.execute(plan)
            if stages is None:
                clock.pass_step(outcome.duration)
                end = clock.now
            else:
                end = stages.line.end_of(stages.ticks(), now)
            under_way.append(_UnderWay(plan, now, end, outcome.num_accepted))
        if not under_way:
            ticks = [t for t in (arrivals.next_tick, loop.next_wakeup(now)) if t is not None]
            if not ticks:
                return now
            clock.wait_until(min(ticks))
            continue
        oldest = under_way.popleft()
        clock.wait_until(oldest.end)
        # As on the simulated clock: what arrives until the step's last tick has arrived before it ends.
        for request in arrivals.pop_due(oldest.end):
            loop.add(request)
        finished, record = loop.finish_step(oldest.plan, oldest.started, oldest.end, oldest.num_accepted)
        for request in finished:
            on_finished(request)
            arrivals.on_finished(request, oldest.end)
        on_step(record)
