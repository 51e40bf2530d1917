"""Integer ticks of simulated time on SimPy's event queue.

One tick is a picosecond: integer sums do not depend on grouping, so leaps and single steps end at the same tick.
At equal ticks arrivals precede step ends, so a step that starts at a tick sees every arrival up to it."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from simpy import Environment
from simpy.events import NORMAL, Event, EventPriority

TICKS_PER_S = 10**12
ARRIVAL_PRIORITY = NORMAL
STEP_PRIORITY = EventPriority(NORMAL + 1)  # later than everything else at the same tick
_LAST = 2**62  # above the number of any event


def to_ticks(seconds: float) -> int:
    """Nearest whole number of ticks."""
    return round(seconds * TICKS_PER_S)


class TickEnvironment(Environment):
    """SimPy's environment with an integer clock that starts at 0."""

    def __init__(self) -> None:
        super().__init__(initial_time=0)

    @property
    def is_paced(self) -> bool:
        """Whether an outside clock advances this environment, possibly for ever."""
        return False

    @property
    def ticks(self) -> int:
        return self._now  # type: ignore[return-value]  # every delay put on this calendar is an integer

    def pass_undisturbed(self, delay: int, priority: EventPriority) -> bool:
        """Advance by `delay` ticks, bypassing the heap, if no other event comes first; return whether it did."""
        end, queue = self._now + delay, self._queue
        if queue and queue[0] < (end, priority, _LAST):
            return False
        self._now = end
        return True

    def run_until_idle(self) -> None:
        """`run` until the queue is empty, without a call per event."""
        queue = self._queue
        while queue:
            self._now, _, _, event = heappop(queue)
            callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]  # as SimPy marks it as over
            for callback in callbacks:
                callback(event)
            if not event._ok and not hasattr(event, "_defused"):
                raise event._value


class PacedEnvironment(TickEnvironment):
    """An environment whose clock is advanced from outside."""

    @property
    def is_paced(self) -> bool:
        return True

    def pass_undisturbed(self, delay: int, priority: EventPriority) -> bool:
        """Always False: paced time advances only through events."""
        return False

    @property
    def next_tick(self) -> int | None:
        """Tick of the next event; None if the queue is empty."""
        queue = self._queue
        return queue[0][0] if queue else None  # type: ignore[return-value]  # as of `ticks`

    def run_next(self) -> None:
        """Process the next event at its tick."""
        self.step()

    def pass_to(self, tick: int) -> None:
        """Advance the clock to `tick`; no event may be due before it."""
        due = self.next_tick
        assert due is None or tick <= due, f"an event is due at {due}, and it is to be {tick}"
        self._now = max(self._now, tick)


class Alarm(Event):
    """Calls `callback(self)` after `delay` ticks, so that the receiver can recognise a stale alarm.

    priority: order among events at the same tick"""

    def __init__(
        self, env: Environment, delay: int, callback: Callable[[Event], None], priority: EventPriority = STEP_PRIORITY
    ) -> None:
        self.env = env
        self.callbacks = [callback]
        self._value: Any = None
        self._ok = True
        heappush(env._queue, (env._now + delay, priority, next(env._eid), self))  # as `env.schedule` does
