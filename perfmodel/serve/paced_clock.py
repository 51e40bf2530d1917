"""`PacedClock`: turns the simulated calendar in real time, on an asyncio event loop.

An event of tick t is due at `origin + t / speed` of the loop's clock. The schedule is absolute, so what comes late does
not make what follows late: there is no drift. Where the machine cannot keep up at all, and events come later than
`most_late_s`, the origin moves: the clock goes slower and says by how much, and what is measured against it stays true.

Timers of event loops go off late by up to a millisecond. The clock sees by how much on average, sets its own as much
earlier, and sleeps for what is left where one went off early."""

import asyncio
import time
from collections.abc import Callable

from perfmodel.errors import PerfmodelError
from perfmodel.sim.clock import TICKS_PER_S, PacedEnvironment

_MAX_AT_ONCE_S = 0.002  # of one turn, until the event loop can look at its sockets
_MAX_EARLY_S = 0.001  # event loops wait whole milliseconds, rounded up


class ClockStoppedError(PerfmodelError):
    """Nothing happens any more: the server ends, or something that happened has raised an error."""


class PacedClock:
    """The time of `env`, at `speed` simulated seconds a second.

    env:         whose events happen when they are due
    speed:       simulated seconds per second
    most_late_s: seconds by which an event may come late before the clock is slowed
    on_late:     called with the seconds by which each event came late
    on_slowed:   called with the seconds that the clock has lost, each time
    on_error:    called with what an event raised: the clock stands still then"""

    def __init__(
        self,
        env: PacedEnvironment,
        speed: float = 1.0,
        most_late_s: float = 0.25,
        on_late: Callable[[float], None] = lambda _: None,
        on_slowed: Callable[[float], None] = lambda _: None,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        self.env, self.speed = env, speed
        self.slowed_s = 0.0  # seconds lost in all
        self._most_late_s = most_late_s
        self._on_late, self._on_slowed, self._on_error = on_late, on_slowed, on_error
        self._ticks_per_s = TICKS_PER_S * speed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._origin = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._due: int | None = None  # what the timer waits for
        self._early_s = 0.0  # by which timers are set before what they wait for
        self._is_in_event = False

    def start(self) -> None:
        """Tick 0 is now, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._origin = self._loop.time()
        self.reschedule()

    def stop(self) -> None:
        """Nothing happens any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._due = self._loop = None

    @property
    def elapsed_s(self) -> float:
        """Simulated seconds since the start; something that is due and has not happened yet holds them back."""
        ticks, due = self.env.ticks, self.env.next_tick
        if self._loop is not None:
            now = int((self._loop.time() - self._origin) * self._ticks_per_s)
            ticks = max(ticks, now if due is None else min(now, due))
        return ticks / TICKS_PER_S

    def catch_up(self, at: float | None = None) -> int:
        """Let happen all that is due, so that something can arrive; the tick that it is then.

        at: when it arrived, in seconds of the loop's clock; by default now. What has happened since remains so

        Within an event it is the tick of that event. Raises ClockStoppedError where nothing happens any more."""
        if self._is_in_event:
            return self.env.ticks
        try:
            while self._run_due(at):
                pass
        except Exception as error:
            self._fail(error)
        if self._loop is None:
            raise ClockStoppedError("the clock stands still: the server ends; ask another")
        tick = int(((self._loop.time() if at is None else at) - self._origin) * self._ticks_per_s)
        due = self.env.next_tick  # perhaps since a moment ago, when it was looked at what is
        self.env.pass_to(tick if due is None else min(tick, due))
        return self.env.ticks

    def reschedule(self) -> None:
        """Something was put on the calendar: come back when the first of all is due."""
        due = self.env.next_tick
        if due == self._due or self._loop is None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = due
        if due is not None:
            self._timer = self._loop.call_at(self._time_of(due) - self._early_s, self._turn)

    def _turn(self) -> None:
        """The timer went off. What is due for longer than a moment's work waits until sockets were looked at."""
        if self._due is not None and self._loop is not None:
            left = self._time_of(self._due) - self._loop.time()  # of what the timer was set for
            late = min(max(self._early_s - left, 0.0), _MAX_EARLY_S)
            self._early_s += (late - self._early_s) / 16
            if left > 0:
                time.sleep(left)
        self._timer = self._due = None
        try:
            self._run_due()
        except Exception as error:
            self._fail(error)
        self.reschedule()

    def _fail(self, error: Exception) -> None:
        """What an event has raised is nobody's who happens to be there."""
        if self._on_error is None:
            raise error
        self.stop()
        self._on_error(error)

    def _time_of(self, tick: int) -> float:
        return self._origin + tick / self._ticks_per_s

    def _run_due(self, at: float | None = None) -> bool:
        """Let events happen that are due, or were at `at`, for a moment; whether some may be left."""
        loop, env = self._loop, self.env
        if loop is None:
            return False
        began = loop.time()
        while (due := env.next_tick) is not None:
            now = loop.time()
            late = now - self._time_of(due)
            if late < 0 or (at is not None and late < now - at):
                return False
            if now - began > _MAX_AT_ONCE_S:
                return True
            self._on_late(late)
            if late > self._most_late_s:
                self._origin += late
                self.slowed_s += late
                self._on_slowed(late)
            self._is_in_event = True
            try:
                env.run_next()
            finally:
                self._is_in_event = False
        return False
