"""The serve loop: plan -> execute -> apply, in the order of vLLM's engine core, for both drivers.

Asynchronous scheduling plans the next step when a step starts, hiding host work: a request that arrives during step N
is first seen when N+1 starts and runs in N+2.

    plan = loop.start_step(now)           # the step that runs now (and, asynchronously, the next one is planned)
    outcome = backend.execute(plan)       # a driver lets `outcome.duration` pass on its clock
    finished, record = loop.finish_step(plan, started, now, outcome.num_accepted)

With speculation it does so only under `Speculation.is_ahead`, taking all drafts in flight as right. On p pipeline
stages up to p plans are in flight (vLLM's `step_with_batch_queue`): call `start_step` until it returns None (queue full
or no grants), then wait for the oldest plan, finish it, and repeat. Arrivals are seen then; nothing else is planned
ahead."""

from collections.abc import Callable, Iterable, Sequence
from operator import add

from perfmodel.engine.plan import StepPlan, StepRecord
from perfmodel.engine.request import Request
from perfmodel.engine.scheduler import Scheduler

_Counts = tuple[int, int, int]  # as of `Scheduler.counts`
_new = tuple.__new__  # named tuple constructors are Python functions, three times as slow


class ServeLoop:
    """Drives `scheduler`, at most one planned step ahead."""

    def __init__(self, scheduler: Scheduler, async_scheduling: bool = True) -> None:
        self.scheduler = scheduler
        config = scheduler.config
        self._most_under_way = config.pipeline_parallel_size
        self._num_under_way = 0
        can_plan_ahead = config.speculation is None or config.speculation.is_ahead
        self.async_scheduling = async_scheduling and can_plan_ahead and self._most_under_way == 1
        self._ahead: StepPlan | None = None
        self.on_load: Callable[[Request], None] | None = None  # called for each of `StepPlan.loads`
        # Of a leap whose plans are made: (index, context) of its first, and counts.
        self._leap: tuple[tuple[int, int], _Counts] | None = None

    @property
    def has_requests(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_requests

    def add(self, request: Request) -> None:
        """Queue `request`. Raises WorkloadError for one that could never run."""
        self.scheduler.add(request)

    def abort(self, request: Request) -> bool:
        """See `Scheduler.abort`; not within a leap whose plans are not made."""
        return self.scheduler.abort(request)

    def next_wakeup(self, now: int) -> int | None:
        """When to call `start_step` again after None without an arrival."""
        return self.scheduler.next_wakeup(now)

    def start_step(self, now: int, admits: bool = True) -> StepPlan | None:
        """Plan to run from `now` on; None without work or room for a plan. Without `admits`, none is admitted."""
        if self._num_under_way == self._most_under_way:
            return None
        plan = self._ahead
        if plan is None or not (plan.decodes or plan.chunks):
            if plan is not None:
                self._begin_loads(plan)
            plan = self.scheduler.plan(now, admits)
            while not plan and plan.preempted:  # freed blocks may admit others, and nothing else would wake them
                plan = self.scheduler.plan(now, admits)
            if not plan:
                self._ahead = None
                self._begin_loads(plan)
                return None
        if plan.loads:
            self._begin_loads(plan)
        self._ahead = self.scheduler.plan(now, admits) if self.async_scheduling else None
        self._num_under_way += 1
        return plan

    def _begin_loads(self, plan: StepPlan) -> None:
        for request in plan.loads:
            assert self.on_load is not None, f"nobody brings the KV of {request}"
            self.on_load(request)

    def finish_step(
        self, plan: StepPlan, started: int, now: int, num_accepted: Sequence[int] | None = None
    ) -> tuple[list[Request], StepRecord]:
        """Finish `plan`, run from `started` to `now` (ticks); return finished requests and the record.

        num_accepted: accepted drafts per decode, with speculation"""
        self._num_under_way -= 1
        counts = self.scheduler.counts()
        finished = self.scheduler.apply(plan, now, num_accepted)
        first = plan.index, plan.decode_context
        return finished, _record(plan, 1, started, now, now - started, counts, first)

    def max_leap(self, plan: StepPlan) -> int:
        """Equal steps from `plan` (just started) on before anything changes by itself."""
        if not plan.is_plain:
            return 1
        if self._ahead is None:
            # The last equal step may finish requests: a leap stops before it.
            return max(self.scheduler.max_repeats(plan), 1)
        # Identity, not equality: plans made request by request have lists of their own.
        if self._ahead.decodes is not plan.decodes:
            return 1
        if plan.decode_windowed:
            grown = tuple(map(add, plan.decode_windowed, self.leap_growth))
            if self._ahead.decode_windowed != grown:
                return 1
        return self.scheduler.max_repeats(self._ahead) + 1

    @property
    def leap_growth(self) -> tuple[int, ...]:
        """Growth per step of each sum in `decode_windowed`, in tokens."""
        return self.scheduler.num_growing

    def plan_leap(self, plan: StepPlan, num_steps: int) -> None:
        """Plan a leap of `num_steps`: scheduler state as during the last of them."""
        # A synchronous leap advances the plan itself.
        self._leap = (plan.index, plan.decode_context), self.scheduler.counts()
        if num_steps > 1:
            self.scheduler.repeat(self._ahead or plan, num_steps - 1)

    def finish_leap(
        self,
        plan: StepPlan,
        num_steps: int,
        started: int,
        now: int,
        first_duration: int,
        durations: Callable[[int], Iterable[int]] | None = None,
    ) -> StepRecord:
        """Finish a leap of `num_steps` equal steps from `plan` on (at most `max_leap`), run from `started` to `now`.

        first_duration: of the first step; all times in ticks
        durations: per-step times, needed with a token watch"""
        self._num_under_way -= 1
        if self._leap is None:
            self.plan_leap(plan, num_steps)
        assert self._leap is not None
        (first, counts), self._leap = self._leap, None
        if durations is not None and self.scheduler.watch is not None:
            self.scheduler.watch.begin_leap(started, durations(num_steps))
        self.scheduler.apply_repeated(plan, num_steps, now)
        return _record(plan, num_steps, started, now, first_duration, counts, first)


def _record(
    plan: StepPlan, num_steps: int, started: int, now: int, first_duration: int, counts: _Counts, first: tuple[int, int]
) -> StepRecord:
    """Step record; first: index and context of the first step, since a leap advances the plan's own."""
    (index, context), depths = first, plan.draft_depths
    times = index, num_steps, started, now, first_duration
    drafts = sum(map(bool, depths)) if depths else 0, plan.num_draft_tokens, plan.num_accepted_tokens
    sizes = plan.num_tokens, len(plan.decodes), context, len(plan.chunks)
    return _new(StepRecord, (*times, *sizes, *counts, plan.num_gaps, *drafts))
