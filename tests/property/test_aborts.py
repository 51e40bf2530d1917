"""Requests that give up: blocks and requests are conserved in whatever state they are, and leaps change nothing."""

from random import Random

from engine_integrity import check_integrity
from hypothesis import given, settings
from hypothesis import strategies as st
from test_leaps import ScriptedBackend

from perfmodel.cost import StageTicks
from perfmodel.engine import Request, RequestStatus, SchedulerConfig, StepPlan, StepRecord
from perfmodel.sim.clock import ARRIVAL_PRIORITY, Alarm, TickEnvironment
from perfmodel.sim.replica.lockstep import Lockstep
from perfmodel.sim.replica.pipeline import Pipeline
from perfmodel.sim.replica.replica import EngineRank
from perfmodel.sim.traffic.clients import OpenLoopClient
from workloads import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    Case,
    cases,
    duration_of,
    judged,
    pipelined_cases,
    speculating_cases,
    stages_of,
)


def serve_with_aborts(
    case: Case, seed: int, chance: float = 0.05
) -> tuple[list[Request], list[Request], set[RequestStatus]]:
    """Some give up before, during and after steps; who is done, who gave up, and the states that those were in."""
    loop, now, coming, rng = case.loop(), 0, case.requests(), Random(seed)
    here, done, gone, states = [], [], [], set()

    def some_give_up() -> None:
        for request in [r for r in here if rng.random() < chance]:
            here.remove(request)
            states.add(request.status)
            assert loop.abort(request)
            assert not loop.abort(request)
            gone.append(request)
            check_integrity(loop.scheduler)

    while coming or here:
        while coming and (coming[0].arrival <= now or not here):
            now = max(now, coming[0].arrival)
            here.append(coming[0])
            loop.add(coming.pop(0))
        some_give_up()
        plan = loop.start_step(now)
        if plan is None:
            now = loop.next_wakeup(now) or now + 1
            continue
        some_give_up()
        now += duration_of(plan)
        finished, _ = loop.finish_step(plan, now - 1, now, judged(case, plan))
        check_integrity(loop.scheduler)
        done += finished
        here = [request for request in here if request not in finished]
    while loop.start_step(now) is not None:  # what was planned for someone who has gone
        pass
    assert not loop.has_requests
    assert loop.scheduler.blocks.num_free == case.num_blocks
    return done, gone, states


@given(st.one_of(cases(), cases(), speculating_cases()), st.integers(0, 10**6))
@settings(max_examples=200, deadline=None)
def test_each_request_is_done_or_gave_up_and_no_block_is_lost(case: Case, seed: int) -> None:
    done, gone, _ = serve_with_aborts(case, seed)
    assert sorted(r.request_id for r in done + gone) == list(range(len(case.rows)))
    assert all(r.status is RequestStatus.FINISHED and r.num_output_tokens == r.max_output_tokens for r in done)
    assert all(r.status is RequestStatus.ABORTED and not r.block_ids and not r.buffer_ids for r in gone)


class ScriptedStages(ScriptedBackend):
    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages

    def pass_through(self, plan: StepPlan) -> StageTicks:
        return StageTicks(1, 3, tuple(stages_of(plan, self.num_stages)))


def run(
    case: Case, aborts: list[tuple[int, int]], can_leap: bool, has_stages: bool = False
) -> tuple[list[tuple[int | None, ...]], list[int]]:
    """(rows of those who are done, numbers of those who gave up) where request i gives up at a tick, for each pair."""
    env, rows, gone = TickEnvironment(), [], []
    requests = case.requests()

    def on_finished(_: EngineRank, r: Request) -> None:
        rows.append((r.request_id, r.first_scheduled_at, r.first_token_at, r.finished_at, r.num_preemptions))

    def on_step(replica: EngineRank, _: StepRecord) -> None:
        check_integrity(replica.loop.scheduler)

    def give_up(request: Request) -> None:
        if request.status is not RequestStatus.ABORTED and replica.abort(request):
            gone.append(request.request_id)

    backend = ScriptedBackend()
    clock = Lockstep(env, backend, backend if can_leap else None)
    if has_stages:
        clock = Pipeline(env, ScriptedStages(case.config.pipeline_parallel_size))
    replica = EngineRank(clock, 0, case.loop(), on_finished, on_step)
    for number, after in aborts:
        request = requests[number % len(requests)]
        Alarm(env, request.arrival + after, lambda _, r=request: give_up(r), ARRIVAL_PRIORITY)  # type: ignore[misc]
    OpenLoopClient(env, iter(requests), lambda _: replica)
    env.run()
    assert replica.num_outstanding == replica.num_prompt_blocks == 0
    assert replica.loop.scheduler.blocks.num_free == case.num_blocks
    return rows, gone


@given(cases(), st.lists(st.tuples(st.integers(0, 24), st.integers(1, 3000)), max_size=12))
@settings(max_examples=200, deadline=None)
def test_leaps_change_nothing_about_who_gives_up_and_when_the_others_are_done(
    case: Case, aborts: list[tuple[int, int]]
) -> None:
    stepped = run(case, aborts, False)
    assert run(case, aborts, True) == stepped
    assert len(stepped[0]) + len(stepped[1]) == len(case.rows)


@given(pipelined_cases(), st.lists(st.tuples(st.integers(0, 24), st.integers(1, 3000)), max_size=12))
@settings(max_examples=75, deadline=None)
def test_each_request_is_done_or_gave_up_with_plans_in_several_stages(
    case: Case, aborts: list[tuple[int, int]]
) -> None:
    rows, gone = run(case, aborts, False, has_stages=True)
    assert sorted([*(row[0] for row in rows), *gone]) == list(range(len(case.rows)))


def test_aborts_find_requests_that_wait_run_and_are_preempted() -> None:
    """Ten requests for eight slots and blocks for half of them."""
    config = SchedulerConfig(8, 64, MAX_MODEL_LEN, BLOCK_SIZE)
    case = Case(config, 60, False, True, tuple((0, 20, 70, (), 0) for _ in range(10)))
    met = set().union(*(serve_with_aborts(case, seed, 0.01)[2] for seed in range(10)))
    assert met == {RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED}
