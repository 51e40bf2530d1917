"""`Replica`: one engine on the simulated clock. It turns the serve loop, a step or a leap at a time.

A leap runs until something in the engine changes by itself (a request finishes, a block runs out). An arrival cuts it:
the step in progress is completed, as it would have been had the steps been taken one by one.
"""

__all__ = ["LeapingBackend", "Replica", "SimulatedBackend"]

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from simpy.events import Event

from perfmodel.cost.decode_curve import DecodeRun
from perfmodel.cost.step_timer import StepTimer
from perfmodel.engine import Backend, Outcome, Request, ServeLoop, StepPlan, StepRecord
from perfmodel.sim.clock import ARRIVAL_PRIORITY, Alarm, TickEnvironment
from perfmodel.sim.front_end import FrontEnd


@runtime_checkable
class LeapingBackend(Backend, Protocol):
    """A backend that can tell what a run of equal, growing decode steps takes without executing them one by one."""

    def foresee(self, plan: StepPlan, growth: tuple[int, ...], num_steps: int) -> DecodeRun:
        """`num_steps` steps of which `plan` is the first; `growth` is what each adds to `plan.decode_windowed`."""
        ...

    def commit(self, run: DecodeRun, plan: StepPlan, num_steps: int) -> None:
        """The first `num_steps` of `run`, which began with `plan`, have taken place."""
        ...


class SimulatedBackend:
    """Asks the cost model how long a plan takes."""

    def __init__(self, timer: StepTimer) -> None:
        self.timer = timer

    def execute(self, plan: StepPlan) -> Outcome:
        num_decodes = len(plan.decodes)
        return Outcome(
            self.timer.step(
                num_decodes + plan.num_chunk_tokens,
                num_decodes + len(plan.samples),
                plan.chunk_lengths,
                num_decodes,
                plan.decode_context,
                plan.decode_windowed,
            )
        )

    def foresee(self, plan: StepPlan, growth: tuple[int, ...], num_steps: int) -> DecodeRun:
        return self.timer.decode_run(len(plan.decodes), plan.decode_context, plan.decode_windowed, growth, num_steps)

    def commit(self, run: DecodeRun, plan: StepPlan, num_steps: int) -> None:
        self.timer.commit(run, len(plan.decodes), num_steps)


class Replica:
    """An engine under simulated time.

    on_finished: called with (replica, request) for each request that is done, before the next step is planned; its
                 times are those of the client if there is a front end
    on_step:     called with (replica, record) for each step or leap that has ended
    """

    def __init__(
        self,
        env: TickEnvironment,
        index: int,
        loop: ServeLoop,
        backend: Backend,
        on_finished: "Callable[[Replica, Request], None]",
        on_step: "Callable[[Replica, StepRecord], None]",
        can_leap: bool = True,
        front_end: FrontEnd | None = None,
    ) -> None:
        self.env = env
        self.index = index
        self.loop = loop
        self.backend = backend
        self.num_outstanding = 0
        self._front_end = front_end
        self._on_finished = on_finished
        self._on_step = on_step
        self._leaper = backend if can_leap and isinstance(backend, LeapingBackend) else None
        self._pending: Alarm | None = None  # the end of the step in progress, or a start to come
        self._plan: StepPlan | None = None
        self._run: DecodeRun | None = None  # of the leap in progress
        self._num_steps = 1
        self._started = 0

    def add(self, request: Request) -> None:
        """`request` arrives now, at the front end if there is one."""
        self.num_outstanding += 1
        delay = self._front_end.delay(request, self.env.ticks) if self._front_end is not None else 0
        if delay:
            Alarm(self.env, delay, lambda _: self._enter(request), ARRIVAL_PRIORITY)
        else:
            self._enter(request)

    def release(self, request: Request) -> None:
        """The KV blocks that the finished `request` kept are free now: one that waits for them may be let in."""
        self.loop.scheduler.release(request)
        self._look_again()

    def _enter(self, request: Request) -> None:
        self.loop.add(request)
        self._look_again()

    def _look_again(self) -> None:
        """Something has changed from outside: an idle engine plans anew, a leap ends with the step in progress."""
        if self._plan is None:
            self._pending = Alarm(self.env, 0, self._start)
        elif self._run is not None:
            self._cut(self._run)

    def _cut(self, run: DecodeRun) -> None:
        """End the leap with the step that is in progress now."""
        num_steps = run.steps_to_reach(self.env.ticks - self._started)
        if num_steps < self._num_steps:
            self._num_steps = num_steps
            self._pending = Alarm(self.env, self._started + run.duration(num_steps) - self.env.ticks, self._end)

    def _start(self, event: Event) -> None:
        if event is self._pending:
            self._begin()

    def _begin(self) -> None:
        now, loop = self.env.ticks, self.loop
        self._plan = plan = loop.start_step(now)
        if plan is None:
            wakeup = loop.next_wakeup(now)
            self._pending = None if wakeup is None else Alarm(self.env, wakeup - now, self._start)
            return
        self._started = now
        self._run = None
        self._num_steps = 1
        if self._leaper is not None and (num_steps := loop.max_leap(plan)) > 1:
            self._num_steps = num_steps
            self._run = run = self._leaper.foresee(plan, loop.leap_growth, num_steps)
            duration = run.duration(num_steps)
        else:
            duration = self.backend.execute(plan).duration
        self._pending = Alarm(self.env, duration, self._end)

    def _end(self, event: Event) -> None:
        if event is not self._pending:
            return
        plan, now = self._plan, self.env.ticks
        assert plan is not None
        finished: list[Request] = []
        if self._run is None:
            finished, record = self.loop.finish_step(plan, self._started, now)
        else:
            run, num_steps = self._run, self._num_steps
            assert self._leaper is not None
            self._leaper.commit(run, plan, num_steps)
            record = self.loop.finish_leap(plan, num_steps, self._started, now, run.first_duration)
        self._on_step(self, record)
        if finished:
            self.num_outstanding -= len(finished)
            for request in finished:
                if self._front_end is not None:
                    self._front_end.deliver(request)
                self._on_finished(self, request)
        self._begin()
