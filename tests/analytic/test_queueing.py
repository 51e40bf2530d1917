"""The simulated clock against queueing theory: an engine that serves one request at a time is an M/G/1 queue.

Pollaczek and Khinchine: mean wait W = rho * (1 + cv^2) / (2 * (1 - rho)) * service time, so M/D/1 (cv 0) waits half as
long as M/M/1 (cv 1). Little: mean number in the system = arrival rate x mean time in it, exactly, over any run that
starts and ends empty.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from perfmodel.engine import (
    KVBlockManager,
    Outcome,
    Request,
    Scheduler,
    SchedulerConfig,
    ServeLoop,
    StepPlan,
    StepRecord,
)
from perfmodel.sim.clock import TICKS_PER_S, TickEnvironment
from perfmodel.sim.fleet.routing import ROUTERS
from perfmodel.sim.replica.lockstep import Lockstep
from perfmodel.sim.replica.replica import EngineRank
from perfmodel.sim.traffic.clients import OpenLoopClient

SERVICE = TICKS_PER_S // 100  # mean service time, 10 ms
NUM_REQUESTS = 100_000


class OneStepBackend:
    """Serves each step in a drawn time with the mean SERVICE."""

    def __init__(self, draws: Iterator[int]) -> None:
        self._draws = draws

    def execute(self, plan: StepPlan) -> Outcome:
        return Outcome(next(self._draws))


def poisson(rate_per_tick: float, count: int, seed: int) -> Iterator[Request]:
    """One-token prompts with one-token answers: each takes exactly one step."""
    rng = np.random.default_rng(seed)
    ticks = np.cumsum(rng.exponential(1 / rate_per_tick, count)).astype(np.int64).tolist()
    return (Request(i, tick, 1, 1) for i, tick in enumerate(ticks))


def serve(
    requests: Iterator[Request], draws: Iterator[int], is_async: bool = False
) -> tuple[list[Request], list[StepRecord]]:
    env, finished, records = TickEnvironment(), [], []
    config = SchedulerConfig(max_num_seqs=1)
    loop = ServeLoop(Scheduler(config, KVBlockManager(8, 16)), is_async)
    lockstep = Lockstep(env, OneStepBackend(draws))
    replica = EngineRank(lockstep, 0, loop, lambda _, r: finished.append(r), lambda _, s: records.append(s))
    OpenLoopClient(env, requests, ROUTERS["round_robin"]([replica]))
    env.run()
    return finished, records


def mean_wait(finished: list[Request]) -> float:
    return float(np.mean([(r.first_scheduled_at or 0) - r.arrival for r in finished])) / SERVICE


def constant() -> Iterator[int]:
    while True:
        yield SERVICE


def exponential(seed: int) -> Iterator[int]:
    rng = np.random.default_rng(seed)
    while True:
        yield from np.maximum(rng.exponential(SERVICE, 65_536), 1).astype(np.int64).tolist()


@pytest.mark.parametrize("rho", [0.3, pytest.param(0.5, marks=pytest.mark.release)])
def test_constant_service_waits_as_m_d_1(rho: float) -> None:
    finished, _ = serve(poisson(rho / SERVICE, NUM_REQUESTS, seed=1), constant())
    assert mean_wait(finished) == pytest.approx(rho / (2 * (1 - rho)), rel=0.04)


@pytest.mark.parametrize("rho", [0.3, pytest.param(0.5, marks=pytest.mark.release)])
def test_exponential_service_waits_as_m_m_1(rho: float) -> None:
    finished, _ = serve(poisson(rho / SERVICE, NUM_REQUESTS, seed=2), exponential(3))
    assert mean_wait(finished) == pytest.approx(rho / (1 - rho), rel=0.04)


def test_utilisation_is_the_offered_load() -> None:
    finished, records = serve(poisson(0.5 / SERVICE, 50_000, seed=4), constant())
    busy = sum(r.end - r.start for r in records)
    assert busy == len(finished) * SERVICE
    assert busy / records[-1].end == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize("is_async", [False, True])
def test_littles_law_holds_exactly(is_async: bool) -> None:
    """The integral of the number in the system over time equals the sum of the times in it: the same area twice."""
    finished, _ = serve(poisson(0.7 / SERVICE, 5_000, seed=5), exponential(6), is_async)
    events = sorted([(r.arrival, 1) for r in finished] + [(r.finished_at or 0, -1) for r in finished])
    area, level, last = 0, 0, 0
    for tick, change in events:
        area += level * (tick - last)
        level, last = level + change, tick
    assert level == 0
    assert area == sum((r.finished_at or 0) - r.arrival for r in finished)


def test_a_request_that_arrives_during_step_n_runs_in_n_plus_2_when_scheduled_asynchronously() -> None:
    """vLLM's asynchronous scheduling: step N+1 was planned when N started. Synchronously it runs in N+1."""
    starts = {}
    for is_async in (False, True):
        env, finished = TickEnvironment(), []
        loop = ServeLoop(Scheduler(SchedulerConfig(), KVBlockManager(100, 16)), is_async)
        replica = EngineRank(
            Lockstep(env, OneStepBackend(constant())),
            0,
            loop,
            lambda _, r, f=finished: f.append(r),
            lambda _, s: None,  # type: ignore[misc]
        )
        requests = iter([Request(0, 0, 4, 50), Request(1, SERVICE * 3 // 2, 4, 1)])  # arrives in the second step
        OpenLoopClient(env, requests, ROUTERS["round_robin"]([replica]))
        env.run()
        late = next(r for r in finished if r.request_id == 1)
        starts[is_async] = (late.finished_at or 0) // SERVICE - 1  # it takes one step: the one it ran in, from 0
    assert starts == {False: 2, True: 3}
