"""One engine, three clocks: with equal outcomes, all drivers make identical plans.

The simulated driver steps here as the executed one must; that leaps change nothing is proved in `property/test_leaps`.
"""

import asyncio
from dataclasses import replace
from inspect import isfunction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import run

from perfmodel import engine, sim
from perfmodel.engine import Outcome, Request, ServeLoop, StepPlan
from perfmodel.serve import PacedClock
from perfmodel.sim.clock import PacedEnvironment, TickEnvironment
from perfmodel.sim.fleet.routing import ROUTERS
from perfmodel.sim.replica.lockstep import Lockstep
from perfmodel.sim.replica.replica import EngineRank
from perfmodel.sim.traffic.clients import ClosedLoopClient, OpenLoopClient
from perfmodel.sim.traffic.workload import ThinkTime, no_think_time, think_time_of
from perfmodel.specs.traffic import Arrivals
from perfmodel_executors import driver as executed
from workloads import Case, cases, judged, speculating_cases

Ends = list[tuple[int, int | None, int | None, int | None]]


class RecordingBackend:
    """Durations drawn by a seed, so that both drivers meet equal outcomes; keeps the plans' fingerprints."""

    def __init__(self, case: Case, seed: int, scale: int = 1) -> None:
        self.fingerprints: list[str] = []
        self._scale = scale
        self._case, self._seed = case, seed
        self._rng = Random(seed)

    def execute(self, plan: StepPlan) -> Outcome:
        self.fingerprints.append(plan.fingerprint())
        duration = self._rng.choice([1, 7, 40, 1000]) + plan.num_tokens
        return Outcome(duration * self._scale, None, judged(self._case, plan, self._seed))


def ends_of(finished: list[Request]) -> Ends:
    return [(r.request_id, r.first_scheduled_at, r.first_token_at, r.finished_at) for r in finished]


def run_simulated(
    case: Case, seed: int, concurrency: int | None, scale: int = 1, think_time: ThinkTime = no_think_time
) -> tuple[list[str], Ends]:
    env, backend, finished = TickEnvironment(), RecordingBackend(case, seed, scale), []
    client: OpenLoopClient | ClosedLoopClient

    def on_finished(_: EngineRank, request: Request) -> None:
        finished.append(request)
        client.on_finished(request)

    replica = EngineRank(Lockstep(env, backend), 0, case.loop(), on_finished, lambda _, record: None)
    route = ROUTERS["round_robin"]([replica])
    requests = iter(case.requests())
    if concurrency is None:
        client = OpenLoopClient(env, requests, route)
    else:
        client = ClosedLoopClient(env, requests, route, concurrency, think_time)
    env.run()
    return backend.fingerprints, ends_of(finished)


def run_executed(
    case: Case, seed: int, concurrency: int | None, think_time: ThinkTime = no_think_time
) -> tuple[list[str], Ends]:
    backend, finished = RecordingBackend(case, seed), []
    arrivals = executed.plain_arrivals(case.requests(), concurrency, think_time)
    executed.serve(case.loop(), backend, arrivals, finished.append, lambda record: None)
    return backend.fingerprints, ends_of(finished)


async def serve_paced(case: Case, seed: int, scale: int = 1) -> tuple[list[str], Ends]:
    """A tick is a millisecond of the event loop, and a request comes in the middle of the one it arrives in."""
    env, backend, finished, loop = (
        PacedEnvironment(),
        RecordingBackend(case, seed, scale),
        [],
        asyncio.get_running_loop(),
    )
    replica = EngineRank(
        Lockstep(env, backend), 0, case.loop(), lambda _, r: finished.append(r), lambda _, record: None
    )
    clock = PacedClock(env, speed=1e-9)
    clock.start()
    for request in case.requests():
        await asyncio.sleep((request.arrival + 0.5) / 1e3 - loop.time())
        assert clock.catch_up() == request.arrival
        replica.add(request)
        clock.reschedule()
    while env.next_tick is not None:
        await asyncio.sleep(1e6)
    return backend.fingerprints, ends_of(finished)


@given(st.one_of(cases(), speculating_cases()), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_so_does_the_wall_clock_where_arrivals_fall_in_the_same_steps(case: Case, seed: int) -> None:
    """No request arrives just as a step ends: on a wall clock neither would come first."""
    rows = tuple((1000 * row[0] + i, *row[1:]) for i, row in enumerate(case.rows))
    case = replace(case, rows=rows)
    assert run(serve_paced(case, seed, 1000)) == run_simulated(case, seed, None, scale=1000)


@given(
    st.one_of(cases(), cases(), speculating_cases()),
    st.integers(0, 10**6),
    st.sampled_from([None, None, None, 1, 4]),
    st.sampled_from([0, 40, 3000]),
)
@settings(max_examples=300, deadline=None)
def test_both_drivers_make_identical_plans(case: Case, seed: int, concurrency: int | None, pause: int) -> None:
    """pause: ticks of a closed loop's think time, spread as widely."""
    if concurrency is not None:  # users of a closed loop all start at once
        case = replace(case, rows=tuple((0, *row[1:]) for row in case.rows))
    mean = 1e-12 * pause
    loop = Arrivals(process="closed_loop", concurrency=1, think_time_s=mean, think_time_stddev_s=mean)
    think_time = think_time_of(loop, seed)
    simulated = run_simulated(case, seed, concurrency, think_time=think_time)
    assert simulated == run_executed(case, seed, concurrency, think_time)


def test_all_drivers_turn_the_same_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan of any driver is made by the one Scheduler, through the one ServeLoop."""
    seen = []
    original = ServeLoop.start_step

    def spy(self: ServeLoop, now: int, admits: bool = True) -> StepPlan | None:
        seen.append((type(self), type(self.scheduler), type(self.scheduler.blocks)))
        return original(self, now, admits)

    monkeypatch.setattr(ServeLoop, "start_step", spy)
    config = engine.SchedulerConfig()
    case = Case(config, 1000, False, True, ((0, 30, 5, (), 0),))
    drivers = (
        lambda: run_simulated(case, 0, None),
        lambda: run_executed(case, 0, None),
        lambda: run(serve_paced(case, 0)),
    )
    classes, found = {(engine.ServeLoop, engine.Scheduler, engine.KVBlockManager)}, []
    for drive in drivers:
        seen.clear()
        drive()
        found.append(set(seen))
    if isfunction(original):
        assert found == [classes] * len(drivers)
    else:  # drivers that are compiled call past the spy
        assert set.union(*found) == classes
    assert sim.build_serve_loop.__module__.startswith("perfmodel.sim")
