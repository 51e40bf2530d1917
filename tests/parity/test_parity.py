"""One engine, three clocks: with equal outcomes, all make the plans of the plainest driver there is.

The simulated clock takes single steps here, as the executed one must; `property/test_leaps` proves that leaps change
nothing."""

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
from perfmodel.sim.traffic.clients import OpenLoopClient
from perfmodel_executors.clocks import serve
from workloads import Case, cases, judged, serve_stepwise, speculating_cases

Ends = list[tuple[int, int | None, int | None, int | None]]


class RecordingBackend:
    """Durations drawn by a seed, so that all drivers meet equal outcomes; keeps the plans' fingerprints."""

    def __init__(self, case: Case, seed: int, scale: int = 1) -> None:
        self.fingerprints: list[str] = []
        self._scale = scale
        self._case = case
        self._rng = Random(seed)

    def execute(self, plan: StepPlan) -> Outcome:
        self.fingerprints.append(plan.fingerprint())
        duration = self._rng.choice([1, 7, 40, 1000]) + plan.num_tokens
        return Outcome(duration * self._scale, None, judged(self._case, plan))


def ends_of(finished: list[Request]) -> Ends:
    return [(r.request_id, r.first_scheduled_at, r.first_token_at, r.finished_at) for r in finished]


def run_simulated(case: Case, seed: int, scale: int = 1) -> tuple[list[str], Ends]:
    env, backend, finished = TickEnvironment(), RecordingBackend(case, seed, scale), []
    lockstep = Lockstep(env, backend)
    replica = EngineRank(lockstep, 0, case.loop(), lambda _, r: finished.append(r), lambda _, record: None)
    OpenLoopClient(env, iter(case.requests()), ROUTERS["round_robin"]([replica]))
    env.run()
    return backend.fingerprints, ends_of(finished)


def run_executed(case: Case, seed: int) -> tuple[list[str], Ends]:
    backend, finished = RecordingBackend(case, seed), []
    serve(case.loop(), backend, case.requests(), finished.append)
    return backend.fingerprints, ends_of(finished)


def run_plainly(case: Case, seed: int) -> tuple[list[str], Ends]:
    backend = RecordingBackend(case, seed)
    served = serve_stepwise(case, duration=lambda plan: backend.execute(plan).duration)
    return served.fingerprints, ends_of(served.requests)


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
    assert run(serve_paced(case, seed, 1000)) == run_simulated(case, seed, scale=1000)


@given(st.one_of(cases(), cases(), speculating_cases()), st.integers(0, 10**6))
@settings(max_examples=300, deadline=None)
def test_all_drivers_make_identical_plans(case: Case, seed: int) -> None:
    expected = run_plainly(case, seed)
    assert run_simulated(case, seed) == expected
    assert run_executed(case, seed) == expected


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
        lambda: run_simulated(case, 0),
        lambda: run_executed(case, 0),
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
