"""The executed clock is the simulated calendar, on which steps take what was measured. It jumps to what is due, so that
queueing is replayed exactly and a run takes as long as its work; live, it waits as the wall does."""

import time
from collections.abc import Callable, Iterable

from perfmodel.engine import Backend, Outcome, Request, ServeLoop, StepPlan, StepRecord
from perfmodel.sim.clock import TICKS_PER_S, PacedEnvironment, TickEnvironment
from perfmodel.sim.replica.lockstep import Lockstep
from perfmodel.sim.replica.replica import EngineRank
from perfmodel.sim.traffic.clients import OpenLoopClient

PS_PER_NS = 1000


class WallClock:
    """Turns a calendar in the wall's time. Its tick 0 is when it was made, or begins to run."""

    def __init__(self) -> None:
        self.env = PacedEnvironment()
        self.begin()

    def begin(self) -> None:
        """Tick 0 is now."""
        self._start_ns = time.monotonic_ns()

    @property
    def ticks(self) -> int:
        return (time.monotonic_ns() - self._start_ns) * PS_PER_NS

    def catch_up(self) -> None:
        """Let events happen that are due."""
        while (due := self.env.next_tick) is not None and due <= self.ticks:
            self.env.run_next()

    def run(self) -> None:
        """Let events happen when they are due, until there are none."""
        while (due := self.env.next_tick) is not None:
            time.sleep(max(0, due - self.ticks) / TICKS_PER_S)
            self.env.run_next()


class LiveBackend:
    """`backend`; its steps take the wall's time since the calendar's."""

    def __init__(self, backend: Backend, clock: WallClock) -> None:
        self._backend, self._clock = backend, clock

    def execute(self, plan: StepPlan) -> Outcome:
        outcome = self._backend.execute(plan)
        return outcome._replace(duration=max(1, self._clock.ticks - self._clock.env.ticks))


def serve(
    loop: ServeLoop,
    backend: Backend,
    requests: Iterable[Request],
    on_finished: Callable[[Request], None],
    on_step: Callable[[StepRecord], None] = lambda _: None,
) -> int:
    """Serves `requests`, in order of arrival, with one engine; returns the tick at which the last step ended."""
    env, ends = TickEnvironment(), [0]

    def step(_: EngineRank, record: StepRecord) -> None:
        ends[0] = record.end
        on_step(record)

    rank = EngineRank(Lockstep(env, backend), 0, loop, lambda _, request: on_finished(request), step)
    OpenLoopClient(env, iter(requests), lambda _: rank)
    env.run_until_idle()
    return ends[0]
