"""The executed clock: turns the serve loop over a backend that does the work.

By default the clock is *virtual*: it advances by each step's measured duration and jumps over idle time. Queueing is
replayed exactly, a noisy machine disturbs only durations, and a run takes as long as its work. `WallClock` runs live:
arrivals are waited for, and the time is that of the wall.
"""

__all__ = ["Clock", "InStages", "VirtualClock", "WallClock", "serve"]

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from perfmodel.cost import StageTicks
from perfmodel.engine import Backend, Request, ServeLoop, StepPlan, StepRecord
from perfmodel.sim.replica.flow_line import FlowLine

_PS_PER_NS = 1000


class Clock(Protocol):
    """The clock of a run, in picoseconds since its start."""

    @property
    def now(self) -> int: ...

    def pass_step(self, duration: int) -> None:
        """A step that took `duration` has just been executed."""
        ...

    def wait_until(self, tick: int) -> None:
        """Nothing happens before `tick`."""
        ...


class VirtualClock:
    """Advances by the durations that it is given."""

    def __init__(self) -> None:
        self.now = 0

    def pass_step(self, duration: int) -> None:
        self.now += duration

    def wait_until(self, tick: int) -> None:
        self.now = max(self.now, tick)


class WallClock:
    """Follows the machine's monotonic clock, and sleeps when there is nothing to do."""

    def __init__(self) -> None:
        self._start_ns = time.monotonic_ns()

    @property
    def now(self) -> int:
        return (time.monotonic_ns() - self._start_ns) * _PS_PER_NS

    def pass_step(self, duration: int) -> None:
        """The wall has moved on by itself."""

    def wait_until(self, tick: int) -> None:
        time.sleep(max(0, tick - self.now) / 1e12)


class _Arrivals:
    """Requests by arrival; in a closed loop (`concurrency`), each finished request lets the next one in."""

    def __init__(self, requests: Iterator[Request], concurrency: int | None, think_time: int) -> None:
        self._source = requests
        self._think_time = think_time
        self._is_closed = concurrency is not None
        self._due: list[tuple[int, int, Request]] = []
        for _ in range(concurrency or 1):
            self._draw(0)

    def _draw(self, not_before: int) -> None:
        request = next(self._source, None)
        if request is not None:
            request.arrival = max(request.arrival, not_before)
            heapq.heappush(self._due, (request.arrival, request.request_id, request))

    @property
    def next_tick(self) -> int | None:
        return self._due[0][0] if self._due else None

    def pop_due(self, now: int) -> Iterator[Request]:
        while self._due and self._due[0][0] <= now:
            yield heapq.heappop(self._due)[2]
            if not self._is_closed:
                self._draw(0)

    def on_finished(self, now: int) -> None:
        if self._is_closed:
            self._draw(now + self._think_time)


class InStages(NamedTuple):
    """line: the stages; ticks: says what the plan that was executed last took on each"""

    line: FlowLine
    ticks: Callable[[], StageTicks]


class _UnderWay(NamedTuple):
    """A plan that has been executed, and when it would be back."""

    plan: StepPlan
    started: int
    end: int
    num_accepted: Sequence[int] | None


def serve(
    loop: ServeLoop,
    backend: Backend,
    requests: Iterator[Request],
    on_finished: Callable[[Request], None],
    on_step: Callable[[StepRecord], None],
    concurrency: int | None = None,
    think_time: int = 0,
    clock: Clock | None = None,
    stages: InStages | None = None,
) -> int:
    """Serves all `requests` (in order of arrival) and returns the tick at which the last step ended.

    Of several pipeline stages plans are executed when they are made, one after another, and end when they would be
    through: which tokens a plan has does not depend on those under way with it.

    loop, backend: plan steps, and run them; on_finished, on_step: called with what has ended
    concurrency, think_time: closed loop with so many requests in flight, and the pause before the next, in ticks
    clock:                   virtual unless given
    stages:                  several, on a virtual clock
    """
    clock = clock or VirtualClock()
    arrivals = _Arrivals(requests, concurrency, think_time)
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
            arrivals.on_finished(oldest.end)
        on_step(record)
