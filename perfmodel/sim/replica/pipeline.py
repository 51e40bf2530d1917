"""`Pipeline`: the clock of engines whose devices are stages, with several plans on their way at once.

A plan begins stage s once it is through the stage before, and the plan in front of it is through s (`FlowLine`):

    begin_s(n) = max( end_{s-1}(n), end_s(n-1) )

The host is the first server of this flow line: what it does before a plan starts takes its time once a plan, what it
does beside the devices keeps it from the next one, and the plan from its end (`perfmodel.cost.steps.stages`).

As in vLLM's engine core, plans are made while the queue has room and a request can be granted tokens, then the oldest
plan is waited for, and what arrives meanwhile is looked at then. So two things are decided at the end of a plan only:
requests that arrive while the queue has room wait for it, too, and join those that have come back in one plan.

Steps are taken one by one: no leaps.
"""

from collections import deque
from typing import NamedTuple, Protocol

from simpy.events import Event

from perfmodel.cost import StageTicks
from perfmodel.engine import Outcome, Request, StepPlan, StepRecord
from perfmodel.sim.clock import TickEnvironment
from perfmodel.sim.replica.lockstep import Lockstep, PromptBalance, Rank


class FlowLine:
    """Stages that plans pass in the order in which they are made."""

    def __init__(self, num_stages: int) -> None:
        self._ends = [0] * num_stages  # when each stage is through with all that was given to it
        self._host_end = 0

    @property
    def num_stages(self) -> int:
        return len(self._ends)

    def end_of(self, times: StageTicks, now: int) -> int:
        """Send a plan that takes `times` on its way: when it is back, in ticks."""
        start = max(now, self._host_end)
        end, ends = start + times.serial, self._ends
        self._host_end = end + times.hidden
        for stage, duration in enumerate(times.stages):
            free = ends[stage]
            end = ends[stage] = (free if free > end else end) + duration
        return max(end, self._host_end)


class StagedBackend(Protocol):
    """A backend that knows what a plan takes in each of its stages."""

    @property
    def num_stages(self) -> int: ...

    def execute(self, plan: StepPlan) -> Outcome:
        """A plan that meets no other."""

    def pass_through(self, plan: StepPlan) -> StageTicks:
        """What `plan` takes, in ticks."""


class _Wave(NamedTuple):
    """Plans of one step that are under way together, one of each rank with work."""

    active: list[tuple[Rank, StepPlan]]
    started: int
    end: int


class Pipeline(Lockstep):
    """Turns the serve loops of its ranks over `backend`, up to a step per stage at a time.

    ticks_under_way: how long some step was
    balance, size: as of a `Lockstep`
    """

    def __init__(
        self,
        env: TickEnvironment,
        backend: StagedBackend,
        balance: PromptBalance | None = None,
        size: int | None = None,
    ) -> None:
        super().__init__(env, backend, balance=balance, size=size)
        self.staged = backend
        self.ticks_under_way = 0
        self._waves: deque[_Wave] = deque()
        self._line = FlowLine(backend.num_stages)
        self._seen = 0  # up to when `ticks_under_way` has counted

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    def _begin(self) -> None:
        now, waves = self.env.ticks, self._waves
        while len(waves) < self._line.num_stages:
            active = self._plans(now)
            if not active:
                break
            # Of ranks in lockstep, each stage is as long as the slowest of them needs.
            serial, hidden, stages = zip(*(self.staged.pass_through(plan) for _, plan in active), strict=True)
            times = StageTicks(max(serial), max(hidden), tuple(map(max, zip(*stages, strict=True))))
            if (factor := self.slowdown) != 1:
                slowed = tuple(round(stage * factor) for stage in times.stages)
                times = StageTicks(round(times.serial * factor), round(times.hidden * factor), slowed)
            waves.append(_Wave(active, now, self._line.end_of(times, now)))
        self._active = waves[0].active if waves else []
        if waves:
            self._pending = self._alarm(waves[0].end - now, self._end)
        else:
            self._wait(now)

    def _end(self, event: Event) -> None:
        if event is not self._pending:
            return
        now = self.env.ticks
        active, started, _ = self._waves.popleft()
        self.ticks_under_way += now - max(started, self._seen)
        self._seen = now
        ended: list[tuple[Rank, StepRecord, list[Request]]] = []
        for rank, plan in active:
            finished, record = rank.loop.finish_step(plan, started, now)
            ended.append((rank, record, finished))
        for rank, record, finished in ended:
            rank.end_step(record, finished)
        self._begin()
