"""One engine, two clocks: with equal outcomes, both drivers make identical plans.

The simulated driver steps here as the executed one must; that leaps change nothing is proved in `property/test_leaps`.
"""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel import engine, sim
from perfmodel.engine import Outcome, Request, ServeLoop, StepPlan
from perfmodel.sim.clock import TickEnvironment
from perfmodel.sim.fleet.routing import ROUTERS
from perfmodel.sim.replica.lockstep import Lockstep
from perfmodel.sim.replica.replica import EngineRank
from perfmodel.sim.traffic.clients import ClosedLoopClient, OpenLoopClient
from perfmodel_executors import driver as executed
from workloads import Case, cases, judged, speculating_cases

Ends = list[tuple[int, int | None, int | None, int | None]]


class RecordingBackend:
    """Durations drawn by a seed, so that both drivers meet equal outcomes; keeps the plans' fingerprints."""

    def __init__(self, case: Case, seed: int) -> None:
        self.fingerprints: list[str] = []
        self._case, self._seed = case, seed
        self._rng = Random(seed)

    def execute(self, plan: StepPlan) -> Outcome:
        self.fingerprints.append(plan.fingerprint())
        duration = self._rng.choice([1, 7, 40, 1000]) + plan.num_tokens
        return Outcome(duration, None, judged(self._case, plan, self._seed))


def ends_of(finished: list[Request]) -> Ends:
    return [(r.request_id, r.first_scheduled_at, r.first_token_at, r.finished_at) for r in finished]


def run_simulated(case: Case, seed: int, concurrency: int | None) -> tuple[list[str], Ends]:
    env, backend, finished = TickEnvironment(), RecordingBackend(case, seed), []
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
        client = ClosedLoopClient(env, requests, route, concurrency)
    env.run()
    return backend.fingerprints, ends_of(finished)


def run_executed(case: Case, seed: int, concurrency: int | None) -> tuple[list[str], Ends]:
    backend, finished = RecordingBackend(case, seed), []
    requests = iter(case.requests())
    executed.serve(case.loop(), backend, requests, finished.append, lambda record: None, concurrency)
    return backend.fingerprints, ends_of(finished)


@given(
    st.one_of(cases(), cases(), speculating_cases()), st.integers(0, 10**6), st.sampled_from([None, None, None, 1, 4])
)
@settings(max_examples=600, deadline=None)
def test_both_drivers_make_identical_plans(case: Case, seed: int, concurrency: int | None) -> None:
    if concurrency is not None:  # users of a closed loop all start at once
        case = replace(case, rows=tuple((0, *row[1:]) for row in case.rows))
    assert run_simulated(case, seed, concurrency) == run_executed(case, seed, concurrency)


def test_both_drivers_turn_the_same_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan of either driver is made by the one Scheduler, through the one ServeLoop."""
    seen = []
    original = ServeLoop.start_step

    def spy(self: ServeLoop, now: int, admits: bool = True) -> StepPlan | None:
        seen.append((type(self), type(self.scheduler), type(self.scheduler.blocks)))
        return original(self, now, admits)

    monkeypatch.setattr(ServeLoop, "start_step", spy)
    config = engine.SchedulerConfig()
    case = Case(config, 1000, False, True, ((0, 30, 5, (), 0),))
    run_simulated(case, 0, None)
    run_executed(case, 0, None)
    assert set(seen) == {(engine.ServeLoop, engine.Scheduler, engine.KVBlockManager)}
    assert sim.build_serve_loop.__module__.startswith("perfmodel.sim")
