"""Ticks of the simulated clock, and how things are put on SimPy's calendar.

One tick is a picosecond, an integer: sums of durations do not depend on grouping, so leaps and single steps end at
the same tick. At one tick, arrivals come before steps end, so a step that starts at a tick has seen all that arrived
by then.
"""

__all__ = ["ARRIVAL_PRIORITY", "STEP_PRIORITY", "TICKS_PER_S", "Alarm", "TickEnvironment", "to_ticks"]

from collections.abc import Callable
from typing import Any

from simpy import Environment
from simpy.events import NORMAL, Event, EventPriority

TICKS_PER_S = 10**12
ARRIVAL_PRIORITY = NORMAL
STEP_PRIORITY = EventPriority(NORMAL + 1)  # later than everything else at the same tick


def to_ticks(seconds: float) -> int:
    """Whole ticks nearest to `seconds`."""
    return round(seconds * TICKS_PER_S)


class TickEnvironment(Environment):
    """SimPy's environment with an integer clock that starts at 0."""

    def __init__(self) -> None:
        super().__init__(initial_time=0)

    @property
    def ticks(self) -> int:
        """The current tick."""
        return self._now  # type: ignore[return-value]  # every delay put on this calendar is an integer


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
        env.schedule(self, priority, delay)
