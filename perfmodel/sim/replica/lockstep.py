"""`Lockstep`: the clock of engines that step together, one rank or several.

Data-parallel ranks that share experts exchange tokens in every layer: a step lasts as long as its slowest rank, idle
ranks run an empty step, and `StepPlan.group_tokens` has the whole group's tokens, with their padding.

A leap runs until an engine changes by itself (a request finishes, a block runs out). An arrival cuts it after the step
in progress, exactly as with single steps. Steps that end at one tick end in engine order, leaps or not."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

from simpy.events import Event, EventPriority

from perfmodel.engine import Backend, Outcome, Request, Scheduler, ServeLoop, StepPlan, StepRecord
from perfmodel.sim.clock import STEP_PRIORITY, Alarm, TickEnvironment
from perfmodel.sim.replica.host_cores import HostCores


class Run(Protocol):
    """Durations of consecutive, growing decode steps in ticks."""

    @property
    def first_duration(self) -> int: ...

    def duration(self, num_steps: int) -> int:
        """Total of the first `num_steps`."""

    def step_durations(self, num_steps: int) -> Iterable[int]:
        """Duration of each of the first `num_steps`."""

    def steps_to_reach(self, elapsed: int) -> int:
        """Fewest steps that take at least `elapsed`; all if they take less."""


class LeapingBackend(Protocol):
    """A backend that prices a run of equal, growing decode steps in closed form."""

    def plan_leap(self, plan: StepPlan, growth: tuple[int, ...], num_steps: int) -> Any:
        """`Run` of `num_steps` steps from `plan` on; `growth`: increment of each `plan.decode_windowed` per step."""

    def apply_leap(self, run: Any, plan: StepPlan, num_steps: int) -> None:
        """Account for the first `num_steps` of `run`, which began with `plan`."""


class GroupBackend(Protocol):
    """A backend that executes the plans of all ranks at once."""

    def execute_together(self, plans: Mapping[int, StepPlan]) -> Sequence[Outcome]:
        """Outcomes of one step of the ranks with work, whose plans come by index, in their order."""


class Rank(Protocol):
    """An engine that steps with others."""

    index: int
    loop: ServeLoop

    def end_step(self, record: StepRecord, finished: list[Request]) -> None:
        """Called after each step or leap of this rank."""


class PromptBalance:
    """Aligns the prompts of data-parallel ranks: decides before each step whether prompts may start.

    A prompt on one rank stretches the step of decoding ranks. TensorRT-LLM with attention data parallelism and
    `attention_dp_config.enable_balance` holds prompts until every rank has one, for up to `timeout_iters` steps
    (`timeout_steps`, at least 1). The counter also runs without waiting prompts, so a wait averages half of that.
    Source: `_balance_adp_requests` of its `py_executor.py` (1.1, 1.2), with `batching_wait_iters` 0."""

    def __init__(self, timeout_steps: int) -> None:
        self._timeout = timeout_steps
        self._num_waited = 0
        self._is_counting = False

    def admits(self, ranks: Sequence[Scheduler]) -> bool:
        """Whether the step about to be planned may start prompts. Call once per step."""
        have_prompts = all(rank.num_waiting and rank.has_free_slot for rank in ranks)
        have_decodes = all(rank.num_running for rank in ranks)
        self._is_counting = have_decodes and not have_prompts
        if not self._is_counting:
            self._num_waited = 0
            return True
        self.pass_steps(1)
        return self._num_waited == 0

    def pass_steps(self, num_steps: int) -> None:
        """Count `num_steps` steps like the last one, with no request waiting."""
        if self._is_counting:
            self._num_waited = (self._num_waited + num_steps) % self._timeout


class RankPadding(NamedTuple):
    """Tokens up to which ranks are padded to the largest one: in steps that only decode, and in those with prompts.

    CUDA graphs, and exchanges in them, have one size on all ranks; padding is routed to experts like other tokens.

    sizes:        of CUDA graphs
    cut_from:     tokens from which steps of both kinds are cut in two; halves_alike: see `EngineDescription`"""

    decodes: int = 0
    prompts: int = 0
    sizes: Sequence[int] = ()
    cut_from: tuple[int, int] | None = None
    halves_alike: bool = False

    def group_tokens(self, plans: Sequence[StepPlan], num_ranks: int, num_like_these: int) -> int:
        """Tokens of a group of `num_ranks`, of which `num_like_these` are simulated, in the step of `plans`."""
        tokens = [plan.num_tokens for plan in plans]
        most = max(tokens, default=0)
        is_padded = most <= (self.prompts if any(plan.chunks for plan in plans) else self.decodes)
        if is_padded or self.first_half(plans, num_like_these) > 0:
            return most * num_ranks
        return sum(tokens) * num_ranks // num_like_these

    def first_half(self, plans: Sequence[StepPlan], num_ranks: int) -> int:
        """`BatchShape.first_half` of each of `num_ranks` in the step of `plans`; those without one idle.

        Source: vLLM 0.30.0, v1/worker/dp_utils.py (`_post_process_ubatch`) and ubatch_utils.py; SGLang 0.5.23,
        batch_overlap/two_batch_overlap.py (`TboDPAttentionPreparer`)."""
        if self.cut_from is None or not plans:
            return 0
        kinds = [bool(plan.chunks) for plan in plans]
        if any(plan.num_tokens < self.cut_from[kind] for plan, kind in zip(plans, kinds, strict=True)):
            return -1
        if not self.halves_alike:
            return 0 if len(set(kinds)) == 1 else -1
        half = max(map(self._padded, plans)) // 2
        return half if len(plans) == num_ranks and min(plan.num_tokens for plan in plans) > half else -1

    def _padded(self, plan: StepPlan) -> int:
        """Tokens of `plan` with those that fill up its CUDA graph."""
        tokens, place = plan.num_tokens, bisect_left(self.sizes, plan.num_tokens)
        is_captured = tokens <= (self.prompts if plan.chunks else self.decodes) and place < len(self.sizes)
        return self.sizes[place] if is_captured else tokens


UNPADDED = RankPadding()


class Lockstep:
    """Drives the serve loops of its ranks over `backend`, a step or leap at a time.

    leaper:  `backend`, if it can price leaps
    group:   stands in for `backend` where plans of all ranks are executed at once
    balance: aligns prompts over ranks
    size:    ranks of the whole group where a slice is simulated; the others behave alike
    padding: of the tokens of its ranks"""

    def __init__(
        self,
        env: TickEnvironment,
        backend: Backend,
        leaper: LeapingBackend | None = None,
        balance: PromptBalance | None = None,
        size: int | None = None,
        group: GroupBackend | None = None,
        padding: RankPadding = UNPADDED,
    ) -> None:
        self.env, self.backend, self._balance, self._size, self._group = env, backend, balance, size, group
        self._padding = padding
        self._ranks: list[Rank] = []
        self._leaper = leaper
        self._pending: Alarm | None = None  # end of the running step, or a later start
        self._active: list[tuple[Rank, StepPlan]] = []  # ranks with work in the running step
        self._outcomes: list[Outcome] = []  # theirs, of a single step
        self._runs: list[Run] = []  # of the active ranks, in a leap
        self._run: Run | None = None  # the slowest, in a leap
        self._is_settled = False  # plans of the leap are made up to the running step
        self._num_steps = 1
        self._started = 0
        self._priority = STEP_PRIORITY
        self.slowdown = 1.0  # factor on the duration of steps that begin from now on
        self._cores: HostCores | None = None

    def join(self, rank: Rank) -> None:
        """Add `rank` before the first step."""
        self._ranks.append(rank)
        self._priority = EventPriority(STEP_PRIORITY + self._ranks[0].index)

    def share(self, cores: HostCores) -> None:
        """Take host time from `cores`, which others take it from as well: no steps are alike."""
        self._cores, self._leaper = cores, None

    def enter(self, rank: Rank, request: Request) -> None:
        """`request` has arrived at `rank`'s engine."""
        host = rank.loop.scheduler.blocks.host
        if host is not None and host.prefetches:
            self.finalize()  # it is looked up in the caches as they are by now
        rank.loop.add(request)
        self.reschedule()

    def abort(self, rank: Rank, request: Request) -> bool:
        """Abort `request` in `rank`'s engine; False if it is not there any more."""
        self.finalize()
        is_gone = rank.loop.abort(request)
        self.reschedule()
        return is_gone

    def plan_of(self, rank: Rank) -> StepPlan:
        """Plan of `rank` in the running step, or in the step being reported."""
        return next(plan for one, plan in self._active if one is rank)

    def finalize(self) -> None:
        """Bring engine state up to date as if stepped one by one; a leap ends with the running step."""
        if self._run is None:
            return
        self._cut(self._run)
        if not self._is_settled:
            self._is_settled = True
            for rank, plan in self._active:
                rank.loop.plan_leap(plan, self._num_steps)

    def reschedule(self) -> None:
        """External change: idle engines plan again, a leap ends with the running step."""
        if not self._active:
            self._pending = self._alarm(0, self._start)
        elif self._run is not None:
            self._cut(self._run)

    def slow_down(self, factor: float) -> None:
        """Multiply step durations by `factor` from the next step on."""
        self.slowdown = factor
        self.reschedule()

    def _cut(self, run: Run) -> None:
        num_steps = run.steps_to_reach(self.env.ticks - self._started)
        if num_steps < self._num_steps:
            self._num_steps = num_steps
            self._pending = self._alarm(self._started + run.duration(num_steps) - self.env.ticks, self._end)

    def _alarm(self, delay: int, callback: Callable[[Event], None]) -> Alarm:
        return Alarm(self.env, delay, callback, self._priority)

    def _start(self, event: Event) -> None:
        if event is self._pending:
            self._begin()

    def _begin(self) -> None:
        """Run steps and leaps until another event comes first or nothing can run."""
        env, priority = self.env, self._priority
        while True:
            now = env.ticks
            self._active = active = self._plans(now)
            if self._cores is not None:
                self._cores.begin(self, len(self._ranks) if active else 0, now)
            if not active:
                self._wait(now)
                return
            self._started = now
            self._run, self._is_settled = None, False
            self._num_steps = num_steps = self._max_leap()
            duration = self._plan_leap(active, num_steps) if num_steps > 1 else self._execute(active)
            if not env.pass_undisturbed(duration, priority):
                self._pending = Alarm(env, duration, self._end, priority)
                return
            self._finish()

    def _execute(self, active: list[tuple[Rank, StepPlan]]) -> int:
        if self._group is not None:
            self._outcomes = list(self._group.execute_together({rank.index: plan for rank, plan in active}))
        else:
            self._outcomes = [self.backend.execute(plan) for _, plan in active]
        duration = max([outcome.duration for outcome in self._outcomes])
        return duration if self.slowdown == 1 else round(duration * self.slowdown)

    def _plan_leap(self, active: list[tuple[Rank, StepPlan]], num_steps: int) -> int:
        assert self._leaper is not None
        self._runs = runs = [self._leaper.plan_leap(plan, rank.loop.leap_growth, num_steps) for rank, plan in active]
        run: Run = runs[0]
        if len(active) > 1 or self.slowdown != 1:
            run = _SlowestRun(runs, num_steps, self.slowdown)
        self._run = run
        return run.duration(num_steps)

    def _wait(self, now: int) -> None:
        wakeups = [tick for rank in self._ranks if (tick := rank.loop.next_wakeup(now)) is not None]
        self._pending = self._alarm(min(wakeups) - now, self._start) if wakeups else None

    def _plans(self, now: int) -> list[tuple[Rank, StepPlan]]:
        """Ranks with work in the step that begins, with their plans."""
        ranks = self._ranks
        if len(ranks) == 1 and self._balance is None:  # nearly always; a lone engine need not know of groups
            plan = ranks[0].loop.start_step(now)
            return [] if plan is None else [(ranks[0], plan)]
        admits = self._balance is None or self._balance.admits([rank.loop.scheduler for rank in ranks])
        plans = [rank.loop.start_step(now, admits) for rank in ranks]
        active = [(rank, plan) for rank, plan in zip(ranks, plans, strict=True) if plan is not None]
        if len(ranks) > 1:
            size = self._size or len(ranks)
            working = [plan for _, plan in active]
            group_tokens = self._padding.group_tokens(working, size, len(ranks))
            first_half = self._padding.first_half(working, len(ranks))
            for plan in working:
                plan.group_tokens, plan.first_half = group_tokens, first_half
        return active

    def _max_leap(self) -> int:
        """Steps until anything changes by itself on any rank."""
        if self._leaper is None:
            return 1
        if len(self._ranks) == 1:
            rank, plan = self._active[0]
            return rank.loop.max_leap(plan)
        if len(self._active) < len(self._ranks):
            busy = {id(rank) for rank, _ in self._active}
            if any(rank.loop.has_requests for rank in self._ranks if id(rank) not in busy):
                return 1  # it waits for something other than an arrival
        return min([rank.loop.max_leap(plan) for rank, plan in self._active])

    def _end(self, event: Event) -> None:
        if event is self._pending:
            self._finish()
            self._begin()

    def _finish(self) -> None:
        """End the step or leap on all ranks before reporting any of them."""
        active, started, now, num_steps = self._active, self._started, self.env.ticks, self._num_steps
        ended: list[tuple[Rank, StepRecord, list[Request]]] = []
        if self._run is None:
            for (rank, plan), outcome in zip(active, self._outcomes, strict=True):
                finished, record = rank.loop.finish_step(plan, started, now, outcome.num_accepted)
                ended.append((rank, record, finished))
        else:
            assert self._leaper is not None
            for (rank, plan), run in zip(active, self._runs, strict=True):
                self._leaper.apply_leap(run, plan, num_steps)
                first_duration, durations = run.first_duration, run.step_durations
                record = rank.loop.finish_leap(plan, num_steps, started, now, first_duration, durations)
                ended.append((rank, record, []))
            if self._balance is not None:
                self._balance.pass_steps(num_steps - 1)
            self._run = None  # nothing is left to cut
        for rank, record, finished in ended:
            rank.end_step(record, finished)


class _SlowestRun:
    """Parallel runs; each step lasts as long as the slowest rank, times `slowdown`."""

    def __init__(self, runs: Sequence[Run], num_steps: int, slowdown: float) -> None:
        durations = [run.step_durations(num_steps) for run in runs]
        slowest = map(max, *durations) if len(durations) > 1 else durations[0]
        if slowdown != 1:
            slowest = (round(duration * slowdown) for duration in slowest)
        self._ends: list[int] = list(accumulate(slowest, initial=0))

    @property
    def first_duration(self) -> int:
        return self._ends[1]

    def duration(self, num_steps: int) -> int:
        return self._ends[num_steps]

    def step_durations(self, num_steps: int) -> Iterable[int]:
        return (end - start for start, end in pairwise(self._ends[: num_steps + 1]))

    def steps_to_reach(self, elapsed: int) -> int:
        return min(bisect_left(self._ends, elapsed, 1), len(self._ends) - 1)
