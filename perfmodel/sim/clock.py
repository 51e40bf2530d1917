"""Ticks of the simulated clock, and how things are put on SimPy's calendar.

One tick is a picosecond, an integer: sums of durations do not depend on grouping, so leaps and single steps end at
the same tick. At one tick, arrivals come before steps end, so a step that starts at a tick has seen all that arrived
by then.
"""

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
    """Whole ticks nearest to `seconds`."""
    return round(seconds * TICKS_PER_S)


class TickEnvironment(Environment):
    """SimPy's environment with an integer clock that starts at 0."""

    def __init__(self) -> None:
        super().__init__(initial_time=0)

    @property
    def is_paced(self) -> bool:
        """Whether time passes by itself, and may pass for ever."""
        return False

    @property
    def ticks(self) -> int:
        """The current tick."""
        return self._now  # type: ignore[return-value]  # every delay put on this calendar is an integer

    def pass_undisturbed(self, delay: int, priority: EventPriority) -> bool:
        """Let `delay` ticks pass, unless something happens before an event of `priority` then; whether they have.

        It spares such an event its way over the calendar.
        """
        end, queue = self._now + delay, self._queue
        if queue and queue[0] < (end, priority, _LAST):
            return False
        self._now = end
        return True

    def run_dry(self) -> None:
        """`run` until nothing is left on the calendar: its loop without a call for each event."""
        queue = self._queue
        while queue:
            self._now, _, _, event = heappop(queue)
            callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]  # as SimPy marks it as over
            for callback in callbacks:
                callback(event)
            if not event._ok and not hasattr(event, "_defused"):
                raise event._value


class PacedEnvironment(TickEnvironment):
    """A calendar whose clock is turned from outside: nothing passes until someone says that it has."""

    @property
    def is_paced(self) -> bool:
        return True

    def pass_undisturbed(self, delay: int, priority: EventPriority) -> bool:
        """Never: an event is waited for."""
        return False

    @property
    def next_tick(self) -> int | None:
        """When the next event is due; None without one."""
        queue = self._queue
        return queue[0][0] if queue else None  # type: ignore[return-value]  # as of `ticks`

    def run_next(self) -> None:
        """Let the next event happen, at its tick."""
        self.step()

    def pass_to(self, tick: int) -> None:
        """It is `tick` now, if it was earlier; no event may be due before."""
        due = self.next_tick
        assert due is None or tick <= due, f"an event is due at {due}, and it is to be {tick}"
        self._now = max(self._now, tick)


class Alarm(Event):
    """An event that happens after `delay` ticks and calls `callback` with itself, so that a stale one is recognised.

    priority: its order among events at the same tick
    """

    def __init__(
        self,
        env: Environment,
        delay: int,
        callback: Callable[[Event], None],
        priority: EventPriority = STEP_PRIORITY,
    ) -> None:
        self.env = env
        self.callbacks = [callback]
        self._value: Any = None
        self._ok = True
        heappush(env._queue, (env._now + delay, priority, next(env._eid), self))  # as `env.schedule` does
