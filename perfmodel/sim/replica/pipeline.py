"""`Pipeline`: the clock of engines with pipeline stages and several plans in flight.

A flow line (`FlowLine`): plan n begins stage s after its own stage s-1 and after plan n-1 leaves s:

    begin_s(n) = max( end_{s-1}(n), end_s(n-1) )

The host is the first server: its work before a plan starts is paid once per plan; its work beside the devices delays
its next plan and this plan's end (`perfmodel.cost.steps.stages`).

As in vLLM's engine core, plans are made while the queue has room and a request can be granted tokens; then the oldest
plan is awaited and arrivals are looked at. So requests that arrive while the queue has room wait for that plan, too,
and join those that have come back in one plan. Steps are single: no leaps."""

from collections import deque
from typing import NamedTuple, Protocol

from simpy.events import Event

from perfmodel.cost import StageTicks
from perfmodel.engine import Outcome, Request, StepPlan, StepRecord
from perfmodel.sim.clock import TickEnvironment
from perfmodel.sim.replica.lockstep import UNPADDED, Lockstep, PromptBalance, Rank, RankPadding


class FlowLine:
    """Stages that plans pass in FIFO order."""

    def __init__(self, num_stages: int) -> None:
        self._ends = [0] * num_stages  # tick at which each stage becomes free
        self._host_end = 0

    @property
    def num_stages(self) -> int:
        return len(self._ends)

    def end_of(self, times: StageTicks, now: int) -> int:
        """Enqueue a plan of stage `times`; return the tick at which it leaves the last stage."""
        start = max(now, self._host_end)
        end, ends = start + times.serial, self._ends
        self._host_end = end + times.hidden
        for stage, duration in enumerate(times.stages):
            free = ends[stage]
            end = ends[stage] = (free if free > end else end) + duration
        return max(end, self._host_end)


class StagedBackend(Protocol):
    """A backend that times each stage of a plan."""

    @property
    def num_stages(self) -> int: ...

    def execute(self, plan: StepPlan) -> Outcome:
        """Execute a plan alone in the pipeline."""

    def pass_through(self, plan: StepPlan) -> StageTicks:
        """Ticks of `plan` in each stage."""


class _Wave(NamedTuple):
    active: list[tuple[Rank, StepPlan]]
    started: int
    end: int


class Pipeline(Lockstep):
    """Drives the serve loops of its ranks over `backend`, with up to one step per stage in flight.

    ticks_under_way: ticks with a step in flight; balance, size, padding: see `Lockstep`"""

    def __init__(
        self,
        env: TickEnvironment,
        backend: StagedBackend,
        balance: PromptBalance | None = None,
        size: int | None = None,
        padding: RankPadding = UNPADDED,
    ) -> None:
        super().__init__(env, backend, balance=balance, size=size, padding=padding)
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
            # In lockstep, each stage lasts as long as its slowest rank.
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
