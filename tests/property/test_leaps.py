"""Leaping and stepping give the same records to the last bit, under any engine and any cost."""

from dataclasses import dataclass, replace
from typing import Any

from engine_integrity import check_integrity
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.engine import Outcome, Request, SchedulerConfig, StepPlan, StepRecord
from perfmodel.sim.clock import TickEnvironment
from perfmodel.sim.fleet.routing import ROUTERS
from perfmodel.sim.replica.lockstep import Lockstep, PromptBalance
from perfmodel.sim.replica.replica import EngineRank
from perfmodel.sim.traffic.clients import ClosedLoopClient, OpenLoopClient
from perfmodel.sim.traffic.workload import ThinkTime, no_think_time, think_time_of
from perfmodel.specs.traffic import Arrivals
from workloads import Case, cases, duration_of, serve_stepwise, slotted_cases

Row = tuple[Any, ...]


def closed_loop(think_time_s: float) -> Arrivals:
    """Users whose pauses are spread as widely as they are long."""
    return Arrivals(process="closed_loop", concurrency=1, think_time_s=think_time_s, think_time_stddev_s=think_time_s)


@dataclass
class ScriptedRun:
    """Steps whose made-up durations are summed one by one."""

    durations: list[int]

    @property
    def first_duration(self) -> int:
        return self.durations[0]

    def duration(self, num_steps: int) -> int:
        return sum(self.durations[:num_steps])

    def step_durations(self, num_steps: int) -> list[int]:
        return self.durations[:num_steps]

    def steps_to_reach(self, elapsed: int) -> int:
        for count in range(1, len(self.durations) + 1):
            if self.duration(count) >= elapsed:
                return count
        return len(self.durations)


class ScriptedBackend:
    """`duration_of` the plan, foreseen by rolling the plan's sums forward."""

    def execute(self, plan: StepPlan) -> Outcome:
        return Outcome(duration_of(plan))

    def plan_leap(self, plan: StepPlan, growth: tuple[int, ...], num_steps: int) -> ScriptedRun:
        rolled = StepPlan(plan.index)
        rolled.decodes, rolled.group_tokens = plan.decodes, plan.group_tokens
        durations = []
        for i in range(num_steps):
            rolled.decode_context = plan.decode_context + i * len(plan.decodes)
            rolled.decode_windowed = tuple(w + i * g for w, g in zip(plan.decode_windowed, growth, strict=True))
            durations.append(duration_of(rolled))
        return ScriptedRun(durations)

    def apply_leap(self, run: ScriptedRun, plan: StepPlan, num_steps: int) -> None:
        pass


def run(
    case: Case,
    can_leap: bool,
    num_replicas: int = 1,
    concurrency: int | None = None,
    in_lockstep: bool = False,
    timeout: int = 0,
    think_time: ThinkTime = no_think_time,
) -> tuple[list[Row], int, int]:
    """(rows of the finished requests, steps, step records) of a simulated run."""
    env, rows, records = TickEnvironment(), [], []
    client: OpenLoopClient | ClosedLoopClient

    def on_finished(replica: EngineRank, r: Request) -> None:
        rows.append(
            (
                *(r.request_id, r.arrival, r.first_scheduled_at, r.first_token_at, r.finished_at),
                *(r.num_output_tokens, r.num_cached_tokens, r.num_preemptions, replica.index),
                *(() if (times := r.token_times) is None else (times.reader_wait, times.longest_gap)),
            )
        )
        client.on_finished(r)

    def on_step(replica: EngineRank, record: StepRecord) -> None:
        records.append(record)
        check_integrity(replica.loop.scheduler)

    backend = ScriptedBackend()
    leaper = backend if can_leap else None
    locksteps = [
        Lockstep(env, backend, leaper, PromptBalance(timeout) if timeout else None)  # type: ignore[arg-type]
        for _ in range(1 if in_lockstep else num_replicas)
    ]
    if in_lockstep:
        locksteps *= num_replicas
    replicas = [EngineRank(lockstep, i, case.loop(), on_finished, on_step) for i, lockstep in enumerate(locksteps)]
    route = ROUTERS["least_outstanding"](replicas)
    requests = iter(case.requests())
    if concurrency is None:
        client = OpenLoopClient(env, requests, route)
    else:
        client = ClosedLoopClient(env, requests, route, concurrency, think_time)
    env.run()
    return sorted(rows), sum(r.num_steps for r in records), len(records)


PAUSES = (no_think_time, *(think_time_of(closed_loop(1e-12 * mean), seed) for mean, seed in ((3, 1), (400, 2))))


@given(cases(), st.sampled_from([1, 1, 2, 3]), st.sampled_from([None, None, 1, 3]), st.sampled_from(PAUSES))
@settings(max_examples=200, deadline=None)
def test_leaps_change_nothing(case: Case, num_replicas: int, concurrency: int | None, think_time: ThinkTime) -> None:
    stepped, steps, _ = run(case, False, num_replicas, concurrency, think_time=think_time)
    leapt, leap_steps, num_records = run(case, True, num_replicas, concurrency, think_time=think_time)
    assert leapt == stepped
    assert leap_steps == steps
    assert num_records <= steps


@given(slotted_cases(), st.sampled_from([None, None, 1, 3]))
@settings(max_examples=150, deadline=None)
def test_leaps_of_engines_with_slots_change_nothing(case: Case, concurrency: int | None) -> None:
    stepped, steps, _ = run(case, False, 1, concurrency)
    leapt, leap_steps, _ = run(case, True, 1, concurrency)
    assert leapt == stepped
    assert leap_steps == steps


@given(cases(), st.sampled_from([2, 3]), st.sampled_from([None, None, 1, 3]), st.sampled_from([0, 1, 4]))
@settings(max_examples=150, deadline=None)
def test_leaps_of_ranks_in_lockstep_change_nothing(
    case: Case, num_ranks: int, concurrency: int | None, timeout: int
) -> None:
    stepped, steps, _ = run(case, False, num_ranks, concurrency, True, timeout)
    leapt, leap_steps, num_records = run(case, True, num_ranks, concurrency, True, timeout)
    assert leapt == stepped
    assert leap_steps == steps
    assert num_records <= steps
    assert [row[0] for row in leapt] == list(range(len(case.rows)))


@given(cases())
@settings(max_examples=100, deadline=None)
def test_the_simulated_clock_serves_as_the_plainest_driver_does(case: Case) -> None:
    plain = serve_stepwise(case)
    ends = sorted((r.request_id, r.first_token_at, r.finished_at) for r in plain.requests)
    assert [(row[0], row[3], row[4]) for row in run(case, True)[0]] == ends


def test_a_long_decode_is_one_leap() -> None:
    """One request of 1 prompt and 1000 output tokens on an idle engine: a handful of records, 1000 steps."""
    case = Case(
        replace(SMALL.config, max_model_len=2000, max_num_batched_tokens=64), 1000, False, True, ((0, 1, 1000, (), 0),)
    )
    rows, steps, records = run(case, True)
    assert steps == 1000
    assert records < 10
    assert rows[0][5] == 1000


SMALL = Case(SchedulerConfig(), num_blocks=1000, has_prefix_cache=False, is_async=True, rows=())
